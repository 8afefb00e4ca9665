"""Benchmarks: ``python -m benchmarks [names]``; each figure is paired with a reference of the same run."""
