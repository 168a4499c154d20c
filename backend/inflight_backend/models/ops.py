"""The small operations of a step as a table, so that a device can bring its own; the torch one.

What a linear layer reads is an `Activation`: a tensor, or with FP8 linears its `Quantized` twin.
The decoder hands it from the op that made it to the layer and never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from inflight_backend.models.layers import Activation, Fp8Linear, Linear, Quantized, quantize
from inflight_kernels import reference


@dataclass(frozen=True, slots=True)
class Ops:
    """Signatures and meaning are those of `inflight_kernels.reference`, except as said here.

    ``rms_norm``, ``add_rms_norm`` and ``silu_mul`` feed linears; ``to_activation`` makes of plain
    numbers what a linear reads, ``final_norm`` is ``add_rms_norm`` in plain numbers, for the head.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Activation]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Activation, Tensor]]
    final_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Activation]
    to_activation: Callable[[Tensor], Activation]
    make_linear: Callable[[Any, Tensor | None], Callable[[Any], Tensor]]
    make_head: Callable[[Tensor], Callable[[Tensor], Tensor]]
    greedy: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    sample_with_log_probs: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
    ]
    adjust_logits: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]
    ban_repeated_ngrams: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
    ban_words: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    mask_logits: Callable[[Tensor, Tensor], None]


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
