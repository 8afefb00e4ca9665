"""A stand-in for the dispatch package of vllm-plugin-FL."""
