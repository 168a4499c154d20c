"""Linears of the deterministic mode, whose rows do not depend on the batch; needs triton.

What the mode makes independent of the batch: every product of a layer and of the head (libraries
pick tiles by the number of rows), the splits of the generation attention (they follow from a row's
own length) and the tile of the context attention. Norms, activations, the rotary embedding and the
draw work row by row in any mode.

What stays: a prompt that is cut into chunks, continued after a cached prefix, or computed again
after a pause goes through other tiles, or another kernel, than in one piece. So answers repeat bit
by bit with chunked context and block reuse off and a policy that pauses nobody.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight_backend.models.layers import Fp8Weight, Parameter, Quantized, quantize
from inflight_backend.models.ops import Ops
from inflight_kernels.invariant_linear import invariant_linear


class InvariantLinear:
    """See `layers.Linear`."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        return invariant_linear(x.contiguous(), self._weight, self._bias)


class InvariantFp8Linear:
    """See `layers.Fp8Linear`."""

    __slots__ = ("_bias", "_dtype", "_weight")

    def __init__(self, weight: Parameter, bias: Tensor | None = None) -> None:
        if isinstance(weight, Tensor):
            weight = Fp8Weight(quantize(weight), weight.dtype)
        self._weight: Quantized = weight.rows
        self._dtype: torch.dtype = weight.dtype
        self._bias = bias

    def __call__(self, x: Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows] in the dtype of the first weight."""
        return invariant_linear(
            x.values,
            self._weight.values,
            self._bias,
            x_scales=x.scales,
            weight_scales=self._weight.scales,
            out_dtype=self._dtype,
        )


def with_invariant_linears(ops: Ops, *, is_fp8: bool) -> Ops:
    """``ops`` with these linears; the head is never FP8."""
    make_linear = InvariantFp8Linear if is_fp8 else InvariantLinear
    return replace(ops, make_linear=make_linear, make_head=InvariantLinear)
