"""Which table of ops a step is made of."""

from __future__ import annotations

from inflight_backend.models.ops import Ops
from inflight_backend.models.torch_ops import FP8_TORCH_OPS, TORCH_OPS


def make_ops(backend: str, quantization: str, *, is_deterministic: bool = False) -> Ops:
    """The table for an attention backend ("torch", "triton") and quantization ("none", "fp8");
    ``is_deterministic`` (triton only): with linears whose rows do not depend on the batch.

    `ConfigurationError` if compiled kernels would lie where others can write.
    """
    if backend == "triton":  # only then is it needed
        from inflight_backend.models.kernel_cache import check_kernel_cache
        from inflight_backend.models.triton_ops import FP8_TRITON_OPS, TRITON_OPS

        check_kernel_cache()
        ops = FP8_TRITON_OPS if quantization == "fp8" else TRITON_OPS
        if is_deterministic:
            from inflight_backend.models.deterministic import with_invariant_linears

            ops = with_invariant_linears(ops, is_fp8=quantization == "fp8")
        return ops
    return FP8_TORCH_OPS if quantization == "fp8" else TORCH_OPS
