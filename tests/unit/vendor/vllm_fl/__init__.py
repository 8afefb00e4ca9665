"""A stand-in for vllm-plugin-FL: the classes that a vendor's backend takes from it, by their public description."""
