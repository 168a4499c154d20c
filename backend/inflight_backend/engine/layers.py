"""The linear layer of the decoder, packed for the CPU where that is faster."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

_MANY_TOKENS = 512


class Linear:
    """``x @ weight.T + bias`` for x [num_tokens, columns] and weight [rows, columns].

    On a CPU in float32 the weight is kept in oneDNN's blocked layout: products with few tokens are
    1.1 to 1.6 times as fast, since nothing has to be rearranged first. With many tokens the plain
    product is faster by a tenth or two, which more than pays for a plain copy made on the fly.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        is_float32_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._is_packed = is_float32_on_cpu and _can_pack()
        self._weight = _pack(weight) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        if self._is_packed:
            if len(x) < _MANY_TOKENS:
                return _packed_linear(x, self._weight, self._bias)
            return functional.linear(x, self._weight.to_dense(), self._bias)
        return functional.linear(x, self._weight, self._bias)


@lru_cache(maxsize=1)
def _can_pack() -> bool:
    """True if this torch has the operators of its own compiler for packed weights.

    They are not public, so they must prove that they still do what they did.
    """
    x, weight = torch.ones(2, 3), torch.arange(12.0).view(4, 3)
    try:
        answer = _packed_linear(x, _pack(weight), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(answer, functional.linear(x, weight))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    answer: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return answer
