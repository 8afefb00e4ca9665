"""A vendor's backend that was written for vllm-plugin-FL: nothing in it names sglang_fl."""
