"""The table of ops in the Triton language; importing this needs triton."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from inflight_backend.models.layers import Fp8Linear, Quantized, Unscaled
from inflight_backend.models.torch_ops import TORCH_OPS
from inflight_kernels import adjust_logits as adjusting
from inflight_kernels import ban_tokens as banning
from inflight_kernels import mask_logits as masking
from inflight_kernels import quantize_fp8 as quantize_module
from inflight_kernels import rms_norm as norms
from inflight_kernels import sample as sampling
from inflight_kernels import silu_mul as activation

TRITON_OPS = replace(
    TORCH_OPS,
    rms_norm=norms.rms_norm,
    add_rms_norm=norms.add_rms_norm,
    final_norm=norms.add_rms_norm,
    silu_mul=activation.silu_mul,
    sample=sampling.sample,
    sample_with_log_probs=sampling.sample_with_log_probs,
    adjust_logits=adjusting.adjust_logits,
    ban_repeated_ngrams=banning.ban_repeated_ngrams,
    ban_words=banning.ban_words,
    mask_logits=masking.mask_logits,
)


def _rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    return Quantized(*norms.rms_norm_fp8(x, weight, eps))


def _add_rms_norm_fp8(
    x: Tensor | Unscaled, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Quantized, Tensor]:
    x, x_scales = (x.values, x[1:]) if isinstance(x, Unscaled) else (x, None)
    values, scales, residual = norms.add_rms_norm_fp8(x, residual, weight, eps, x_scales)
    return Quantized(values, scales), residual


def _final_norm(
    x: Tensor | Unscaled, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x, x_scales = (x.values, x[1:]) if isinstance(x, Unscaled) else (x, None)
    return norms.add_rms_norm(x, residual, weight, eps, x_scales)


def _silu_mul_fp8(gate_up: Tensor) -> Quantized:
    return Quantized(*activation.silu_mul_fp8(gate_up))


def _quantize(x: Tensor) -> Quantized:
    return Quantized(*quantize_module.quantize_fp8(x))


FP8_TRITON_OPS = replace(
    TRITON_OPS,
    rms_norm=_rms_norm_fp8,
    add_rms_norm=_add_rms_norm_fp8,
    final_norm=_final_norm,
    norms_scale=True,
    silu_mul=_silu_mul_fp8,
    to_activation=_quantize,
    make_linear=Fp8Linear,
)
