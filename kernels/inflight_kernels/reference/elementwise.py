"""Norms, activation, rotary embedding and linears of experts on packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    x: [..., dim], weight: [dim]; the answer has the dtype of x. The product with ``weight`` is
    taken after rounding to that dtype, as the checkpoints' own code does.
    """
    # On a CPU torch's own takes up to five times as long: it writes the squares to memory.
    wide = x.float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``new = x + residual``; returns ``(rms_norm(new), new)``, all [..., dim]."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    x: [..., dim], weight and bias: [dim], of the dtype of x or wider; the answer has that of x, to
    which it is rounded once.
    """
    if weight is None or weight.dtype == x.dtype:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _squared_relu,
}
"""Activation functions by the names that ops have for them."""


def activate(x: Tensor, kind: str, is_gated: bool) -> Tensor:
    """``act(gate) * up`` where x [num_tokens, 2 * dim] holds gate, then up; without a gate
    ``act(x)``. ``kind``: one of `ACTIVATIONS`."""
    function = ACTIVATIONS[kind]
    if not is_gated:
        return function(x)
    gate, up = x.chunk(2, dim=-1)
    return function(gate).mul_(up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` where gate_up [num_tokens, 2 * dim] holds gate, then up; -> [.., dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def grouped_linear(x: Tensor, weight: Tensor, starts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows ``starts[g] .. starts[g + 1]`` of x [T, columns] times weight[g] [rows, columns]:
    [T, rows].

    weight: [G, rows, columns], starts: [G + 1] int32 from 0 to T, bias: [G, rows]. Groups without
    rows cost nothing.
    """
    out = x.new_empty(len(x), weight.shape[1])
    bounds = starts.tolist()
    for group, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            each = None if bias is None else bias[group]
            out[start:end] = functional.linear(x[start:end], weight[group], each)
    return out


def apply_rope(
    query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate query [T, H, D] and key [T, KVH, D] to their positions [T] (half-split pairs).

    cos_sin: [max_positions, D] float32, the cosines of the D/2 frequencies and then their sines.
    Dimension ``i`` turns together with ``i + D/2``. Products are taken in the dtype of the query,
    as the checkpoints' own code does.
    """
    angles = rope_angles(cos_sin, positions, query.dtype)
    return rotate(query, angles), rotate(key, angles)


def rope_angles(cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `rotate` needs of ``positions`` [T], the same for all layers of a step.

    The cosines [T, 1, D] that the dimensions are multiplied by, and the sines [T, 1, D], with their
    signs, of the dimensions that these turn together with.
    """
    cos, sin = cos_sin[positions].to(dtype)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads x [T, H, D] turned by the angles of `rope_angles`."""
    cos, sin = angles
    turned, half = x * cos, x.shape[-1] // 2
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned
