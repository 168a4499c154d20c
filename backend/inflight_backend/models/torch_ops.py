"""The table of ops in plain torch: the CPU's, and what other devices do not bring."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from inflight_backend.models.layers import Fp8Linear, Linear, Quantized, quantize
from inflight_backend.models.ops import Ops
from inflight_kernels import reference


def _identity(x: Tensor) -> Tensor:
    return x


TORCH_OPS = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    final_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    to_activation=_identity,
    make_linear=Linear,
    make_head=Linear,
    greedy=reference.greedy,
    sample=reference.sample,
    sample_with_log_probs=reference.sample_with_log_probs,
    adjust_logits=reference.adjust_logits,
    ban_repeated_ngrams=reference.ban_repeated_ngrams,
    ban_words=reference.ban_words,
    mask_logits=reference.mask_logits,
)


def _rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    return quantize(reference.rms_norm(x, weight, eps))


def _add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Quantized, Tensor]:
    normed, residual = reference.add_rms_norm(x, residual, weight, eps)
    return quantize(normed), residual


def _silu_mul_fp8(gate_up: Tensor) -> Quantized:
    return quantize(reference.silu_mul(gate_up))


FP8_TORCH_OPS = replace(
    TORCH_OPS,
    rms_norm=_rms_norm_fp8,
    add_rms_norm=_add_rms_norm_fp8,
    silu_mul=_silu_mul_fp8,
    to_activation=quantize,
    make_linear=Fp8Linear,
)
