"""Everything on one machine of several accelerators in one run, ``python -m benchmarks.cluster --help``."""
