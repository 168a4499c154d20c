"""The small operations of a step as a table, so that a device can bring its own; the torch one.

What a linear layer reads is an `Activation`: a tensor, or with FP8 linears its `Quantized` twin.
The decoder hands it from the op that made it to the layer and never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from inflight_backend.models.config import RoutingConfig
from inflight_backend.models.layers import Activation, Fp8Linear, Linear, Quantized, quantize
from inflight_backend.models.quantization.linears import (
    MakeHeads,
    MakePackedExperts,
    MakePackedLinear,
    MultiplyGroups,
    make_heads,
    make_packed_experts,
    make_packed_linear,
)
from inflight_backend.models.routing import choose_experts
from inflight_kernels import reference


class LayerParts(NamedTuple):
    """What a layer is made of: blocks, and the norms that it has."""

    attention: Any
    mlp: Any
    input_norm: Any
    attention_output_norm: Any
    mlp_norm: Any
    mlp_output_norm: Any


class DecoderParts(NamedTuple):
    """Layers without any other part, and what comes behind them. ``is_parallel``: both branches of
    a layer read what comes in; else `decoder` says which norms stand where. ``scale``: of a
    branch's answer, before it is added."""

    layers: Sequence[LayerParts]
    final_norm: Any
    is_parallel: bool
    scale: float


RunLayers: TypeAlias = Callable[[Tensor, Any, Tensor | None], Tensor | None]
"""What the layers and the norm behind them make of x [T, hidden] in an attention step, of the rows
that are named (None: of all); None if it cannot do this step, and nothing is done then."""


MakeExperts: TypeAlias = Callable[[Tensor, Tensor | None], MultiplyGroups]
"""Of weights [E, rows, columns] and biases [E, rows] of as many experts."""


@dataclass(frozen=True, slots=True)
class Ops:
    """Signatures and meaning are those of `inflight_kernels.reference`, except as said here.

    ``rms_norm``, ``add_rms_norm`` and ``silu_mul`` feed linears; ``to_activation`` makes of plain
    numbers what a linear reads, ``final_norm`` is ``add_rms_norm`` in plain numbers, for the head.
    Linears of quantised checkpoints read plain numbers. ``choose_experts``: see `routing`.
    ``join_layers``, of a model's parts, gives what runs them all at once, None if nothing does.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Activation]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Activation, Tensor]]
    final_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Activation]
    plain_rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    plain_silu_mul: Callable[[Tensor], Tensor]
    activate: Callable[[Tensor, str, bool], Tensor]
    make_experts: MakeExperts
    choose_experts: Callable[[RoutingConfig, int, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    delta_step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    to_activation: Callable[[Tensor], Activation]
    make_linear: Callable[[Any, Tensor | None], Callable[[Any], Tensor]]
    make_packed_linear: MakePackedLinear
    make_packed_experts: MakePackedExperts
    make_head: Callable[[Tensor], Callable[[Tensor], Tensor]]
    make_heads: MakeHeads
    join_layers: Callable[[DecoderParts], RunLayers | None]
    greedy: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    sample_with_log_probs: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
    ]
    adjust_logits: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]
    ban_repeated_ngrams: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
    ban_words: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    mask_logits: Callable[[Tensor, Tensor], None]


def experts_by(multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]) -> MakeExperts:
    """Experts whose linears are one product, of the meaning of `reference.grouped_linear`."""

    def make(weight: Tensor, bias: Tensor | None) -> MultiplyGroups:
        return lambda x, starts: multiply(x, weight, starts, bias)

    return make


def _identity(x: Tensor) -> Tensor:
    return x


TORCH_OPS = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    final_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    plain_rms_norm=reference.rms_norm,
    layer_norm=reference.layer_norm,
    plain_silu_mul=reference.silu_mul,
    activate=reference.activate,
    make_experts=experts_by(reference.grouped_linear),
    choose_experts=choose_experts,
    delta_step=reference.delta_step,
    to_activation=_identity,
    make_linear=Linear,
    make_packed_linear=make_packed_linear,
    make_packed_experts=make_packed_experts,
    make_head=Linear,
    make_heads=make_heads,
    join_layers=lambda parts: None,
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
