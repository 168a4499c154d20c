"""The table of ops whose linears, those of quantised weights too, norms and activations are
compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inflight_backend.models.compiled.layers import join_layers, softmax_options
from inflight_backend.models.compiled.linears import (
    CompiledExperts,
    CompiledHead,
    CompiledIntegerLinear,
    CompiledJoinedLinear,
    CompiledLinear,
    CompiledPackedLinear,
    StagedLinear,
)
from inflight_backend.models.config import RoutingConfig
from inflight_backend.models.layers import Linear, Parameter
from inflight_backend.models.ops import TORCH_OPS
from inflight_backend.models.quantization.cpu_products import (
    CPU_PRODUCTS,
    CpuProduct,
    IntegerLinear,
)
from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import (
    JoinedLinear,
    MultiplyGroups,
    dequantize,
    make_packed_experts,
    make_packed_linear,
)
from inflight_kernels.cpu import linear
from inflight_kernels.cpu.elementwise import (
    activate,
    add_rms_norm,
    layer_norm,
    rms_norm,
    silu_mul,
)
from inflight_kernels.cpu.routed.experts import choose_experts


def _make_head(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Of a vocabulary of any size."""
    is_whole = linear.takes(weight) or not linear.takes(linear.padded(weight))
    return _make_linear(weight) if is_whole else CompiledHead(weight)


def _make_linear(weight: Parameter, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight, Tensor), "of others the decoder makes its own"
    return CompiledLinear(weight, bias) if linear.takes(weight) else Linear(_plain(weight), bias)


def _plain(weight: Tensor) -> Tensor:
    """As torch multiplies by it: no model here is float16."""
    return weight.float() if weight.dtype == torch.float16 else weight


def _make_experts(weight: Tensor, bias: Tensor | None) -> MultiplyGroups:
    if CompiledExperts.takes(weight):
        return CompiledExperts(weight, bias)
    return TORCH_OPS.make_experts(_plain(weight), bias)


def _choose_experts(
    routing: RoutingConfig, top_k: int, logits: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not routing.is_plain:
        return TORCH_OPS.choose_experts(routing, top_k, logits, correction)
    return choose_experts(logits, top_k, **softmax_options(routing))


def _join(parts: list[Any]) -> Callable[[Tensor], Tensor]:
    are_staged = all(isinstance(each, StagedLinear) for each in parts)
    return CompiledJoinedLinear(parts) if are_staged else JoinedLinear(parts)


class _WidenedLinear(Linear):
    """FP8 of odd sizes, widened once: nothing here multiplies by it as it is."""

    __slots__ = ()

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__(dequantize(weight), bias)

    @staticmethod
    def takes(weight: PackedWeight) -> bool:
        """Whether it is FP8."""
        return weight.values.dtype == torch.float8_e4m3fn


_PRODUCTS: tuple[type[CpuProduct], ...] = (
    CompiledIntegerLinear,
    IntegerLinear,
    CompiledPackedLinear,
    _WidenedLinear,
    *CPU_PRODUCTS,
)

COMPILED_OPS = replace(
    TORCH_OPS,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    final_norm=add_rms_norm,
    silu_mul=silu_mul,
    plain_rms_norm=rms_norm,
    layer_norm=layer_norm,
    plain_silu_mul=silu_mul,
    make_experts=_make_experts,
    choose_experts=_choose_experts,
    activate=activate,
    make_linear=_make_linear,
    make_packed_linear=partial(make_packed_linear, products=_PRODUCTS, join=_join),
    make_packed_experts=partial(make_packed_experts, products=_PRODUCTS),
    make_head=_make_head,
    join_layers=join_layers,
)
