"""Attention over the paged cache, and what reads and writes it: see `inflight_kernels.ops`."""
