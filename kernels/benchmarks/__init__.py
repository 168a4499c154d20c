"""Benchmarks of the kernels, each on its own: ``python -m benchmarks.bench_sample``."""
