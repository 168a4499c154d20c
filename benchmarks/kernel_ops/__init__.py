"""Benchmarks of the kernels: ``python -m kernel_ops.run_all sample``, for instance."""
