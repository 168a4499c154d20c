"""A CPU's ops and attention, compiled from Python (`inflight_kernels.cpu`); importing its modules
needs numba."""
