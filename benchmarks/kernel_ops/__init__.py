"""Benchmarks of the kernels, each on its own: ``python -m kernel_ops.bench_sample``."""
