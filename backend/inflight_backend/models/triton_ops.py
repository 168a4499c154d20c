"""The table of ops in the Triton language, and its linears; needs triton.

Deterministic mode makes these independent of the batch: every product of a layer, of its experts
and of the head (tiles are picked by the number of rows), the splits of the generation attention
(they follow from a row's own length) and the tile of the context attention. Norms, activations, the
rotary embedding and sampling work row by row in any mode.

What remains: a prompt that is cut into chunks, continued after a cached prefix, or computed again
after a pause goes through other tiles, or another kernel, than in one piece. So answers repeat bit
by bit with chunked context and block reuse off and a policy that pauses no request.
"""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor
from triton import knobs

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.blocks.triton_linears import (
    make_triton_heads,
    make_triton_packed_experts,
    make_triton_packed_linear,
)
from inflight_backend.models.layers import Fp8Linear, Fp8Weight, Linear, Quantized
from inflight_backend.models.ops import TORCH_OPS, Ops, experts_by
from inflight_backend.models.quantization.forms import PackedWeight
from inflight_backend.models.quantization.linears import RowTable
from inflight_kernels.ops import rms_norm as norms
from inflight_kernels.ops import silu_mul as activation
from inflight_kernels.ops.attention import delta_step as recurring
from inflight_kernels.ops.linear import grouped_linear as grouping
from inflight_kernels.ops.linear import quantize_fp8 as quantize_module
from inflight_kernels.ops.linear.invariant_linear import few_tokens, invariant_linear
from inflight_kernels.ops.sampling import adjust_logits as adjusting
from inflight_kernels.ops.sampling import ban_tokens as banning
from inflight_kernels.ops.sampling import mask_logits as masking
from inflight_kernels.ops.sampling import sample as sampling

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_kernel_cache() -> None:
    """Make the folder private where it is not there yet; `ConfigurationError` if others may write
    to it, or another user owns it. The interpreter compiles nothing."""
    if knobs.runtime.interpret:
        return
    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(
            f"the folder of compiled kernels {folder} cannot be used ({error.strerror}); name "
            "another one in TRITON_CACHE_DIR"
        ) from None
    if status.st_mode & _OTHERS_WRITE or status.st_uid not in (os.getuid(), 0):
        raise ConfigurationError(
            f"others can write to the folder of compiled kernels {folder}, and what lies there is "
            "run: make it private (chmod 700), or name another one in TRITON_CACHE_DIR"
        )


TRITON_OPS = replace(
    TORCH_OPS,
    rms_norm=norms.rms_norm,
    add_rms_norm=norms.add_rms_norm,
    final_norm=norms.add_rms_norm,
    silu_mul=activation.silu_mul,
    plain_rms_norm=norms.rms_norm,
    plain_silu_mul=activation.silu_mul,
    make_experts=experts_by(grouping.grouped_linear),
    delta_step=recurring.delta_step,
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
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Quantized, Tensor]:
    values, scales, residual = norms.add_rms_norm_fp8(x, residual, weight, eps)
    return Quantized(values, scales), residual


def _silu_mul_fp8(gate_up: Tensor) -> Quantized:
    return Quantized(*activation.silu_mul_fp8(gate_up))


def _quantize(x: Tensor) -> Quantized:
    return Quantized(*quantize_module.quantize_fp8(x))


class TritonLinear(Linear):
    """`Linear`, by `invariant_linear` for few tokens, or in deterministic mode for all."""

    __slots__ = ("_most_tokens", "_plain_weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, is_deterministic: bool
    ) -> None:
        super().__init__(weight, bias)
        self._plain_weight = weight.contiguous()
        self._most_tokens = sys.maxsize if is_deterministic else few_tokens(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        if len(x) > self._most_tokens:
            return super().__call__(x)
        return invariant_linear(x.contiguous(), self._plain_weight, self._bias)


class TritonFp8Linear(Fp8Linear):
    """`Fp8Linear`, by `invariant_linear` for few tokens and where the library has no product, or in
    deterministic mode for all."""

    __slots__ = ("_most_tokens",)

    def __init__(
        self, weight: Tensor | Fp8Weight, bias: Tensor | None = None, *, is_deterministic: bool
    ) -> None:
        super().__init__(weight, bias)
        most = few_tokens(self._weight.values.dtype)
        self._most_tokens = sys.maxsize if is_deterministic else most

    def __call__(self, x: Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows] in the dtype of the first weight."""
        few = len(x.values) <= self._most_tokens
        return self._without_library(x) if few else super().__call__(x)

    def _without_library(self, x: Quantized) -> Tensor:
        weight, scales = self._weight
        return invariant_linear(
            x.values,
            weight,
            self._bias,
            x_scales=x.scales,
            weight_scales=scales,
            out_dtype=self._dtype,
        )


class Fp8PackedLinear:
    """`TritonFp8Linear` of a weight that comes in FP8 with a scale per row; it reads plain numbers,
    to which it gives a scale per token."""

    __slots__ = ("_multiply", "_rows")

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None, *, is_deterministic: bool
    ) -> None:
        values = Quantized(weight.values, weight.scales.contiguous())
        fp8 = Fp8Weight(values, weight.dtype)
        self._multiply = TritonFp8Linear(fp8, bias, is_deterministic=is_deterministic)
        self._rows = RowTable(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return self._multiply(_quantize(x.contiguous()))

    def look_up(self, numbers: Tensor) -> Tensor:
        """Rows of the weight: numbers [T] -> [T, columns]."""
        return self._rows(numbers)


def make_triton_ops(quantization: str, *, is_deterministic: bool) -> Ops:
    """The table for a quantization ("none", "fp8"); neither the head nor experts are ever FP8.

    `ConfigurationError` if compiled kernels would lie where others can write.
    """
    make_linear = partial(TritonLinear, is_deterministic=is_deterministic)
    ops = replace(TRITON_OPS, make_linear=make_linear)
    if is_deterministic:
        grouped_linear = partial(grouping.grouped_linear, tile_rows=grouping.MIN_TILE_ROWS)
        ops = replace(ops, make_head=make_linear, make_experts=experts_by(grouped_linear))
    ops = with_packed_products(ops, is_deterministic=is_deterministic)
    if quantization == "fp8":
        ops = replace(
            ops,
            rms_norm=_rms_norm_fp8,
            add_rms_norm=_add_rms_norm_fp8,
            silu_mul=_silu_mul_fp8,
            to_activation=_quantize,
            make_linear=partial(TritonFp8Linear, is_deterministic=is_deterministic),
        )
    return ops


def with_packed_products(ops: Ops, *, is_deterministic: bool = False) -> Ops:
    """``ops`` with the kernels' products of quantised weights; its own are those of others.

    `ConfigurationError` as `make_triton_ops`.
    """
    check_kernel_cache()
    make_fp8 = partial(Fp8PackedLinear, is_deterministic=is_deterministic)
    return replace(
        ops,
        make_packed_linear=partial(
            make_triton_packed_linear, make_fp8=make_fp8, is_deterministic=is_deterministic
        ),
        make_packed_experts=partial(
            make_triton_packed_experts,
            make_experts=ops.make_experts,
            is_deterministic=is_deterministic,
        ),
        make_heads=partial(make_triton_heads, is_deterministic=is_deterministic),
    )
