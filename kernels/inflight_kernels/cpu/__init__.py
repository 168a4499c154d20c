"""Ops compiled for the CPU by LLVM, from Python (numba): the counterpart of `inflight_kernels.ops`.

Optional: needs numba, x86-64 and a torch whose threads are GNU OpenMP's. `threads.is_available`
says whether they can be used here; torch's own ops are right without them.
"""
