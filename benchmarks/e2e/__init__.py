"""End to end: real SGLang servers with the plugin beside SGLang alone, ``python -m benchmarks.e2e --help``."""
