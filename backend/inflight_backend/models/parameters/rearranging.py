"""What becomes of a tensor between the checkpoint and its parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from inflight_backend.models.config import RelativeBias
from inflight_backend.models.parameters.sources import Convert

if TYPE_CHECKING:  # ``inflight plan`` reads this page without torch
    from torch import Tensor


# Conversions of tensors on their way.


@dataclass(frozen=True, slots=True)
class Picking:
    """A conversion that only picks: row ``i`` of its result is row ``order[i]`` of the matrix
    (None: ``i``), or column where ``is_transposed``; ``is_stacked``: of each matrix of a stack."""

    order: Sequence[int] | None
    is_transposed: bool = False
    is_stacked: bool = False


def picking(convert: Convert) -> Picking | None:
    """What ``convert`` picks; None if it does more."""
    if not isinstance(convert, partial):
        return None
    options = convert.keywords
    if convert.func is _picked:
        return Picking(options["rows"])
    if convert.func is transposed:
        return Picking(options["rows"], is_transposed=True)
    if convert.func is flat:
        return Picking(options["order"], options["is_transposed"], is_stacked=True)
    return None


def pick(rows: Sequence[int] | None) -> Convert | None:
    """Takes ``rows`` in this order; None for none."""
    return None if rows is None else partial(_picked, rows=rows)


def _picked(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor[list(rows)]


def columns_in_order(order: Sequence[int] | None, is_row: bool = False) -> Convert | None:
    """Takes the last dimension in this ``order``, as one row if asked; None for nothing to do."""
    return None if order is None and not is_row else partial(_in_order, order=order, is_row=is_row)


def _in_order(tensor: Tensor, order: Sequence[int] | None, is_row: bool) -> Tensor:
    tensor = tensor if order is None else tensor[..., list(order)]
    return tensor[None] if is_row else tensor


def added(tensor: Tensor, amount: float, then: Convert | None) -> Tensor:
    """``tensor + amount`` in float32, then rearranged."""
    tensor = tensor.float() + amount
    return tensor if then is None else then(tensor)


def multiplied(tensor: Tensor, factor: float) -> Tensor:
    """``tensor * factor`` in float32."""
    return tensor.float() * factor


def log_of_negative(tensor: Tensor) -> Tensor:
    """log(-tensor)"""
    return tensor.float().neg().log()


def transposed(tensor: Tensor, rows: Sequence[int] | None) -> Tensor:
    """[n, m] -> [m, n], or ``rows`` of that."""
    return tensor.t() if rows is None else tensor.t()[list(rows)]


def one_row(tensor: Tensor) -> Tensor:
    """A number alone -> [1]."""
    return tensor.reshape(1)


def as_row(tensor: Tensor) -> Tensor:
    """[n] -> [1, n]."""
    return tensor[None]


def flat(tensor: Tensor, is_transposed: bool = False, order: Sequence[int] | None = None) -> Tensor:
    """[E, rows, columns], or the transposed, to [E * rows, columns], the rows of each in order."""
    tensor = tensor.transpose(1, 2) if is_transposed else tensor
    return (tensor if order is None else tensor[:, list(order)]).flatten(0, 1)


def by_distance(tensor: Tensor, bias: RelativeBias) -> Tensor:
    """[buckets, H] to [H, 2 * max_distance + 1], by the distance from query to key (arXiv
    1910.10683): half of the buckets are for a distance each, the others grow with its logarithm."""
    import torch

    most, num_buckets = bias.max_distance, bias.num_buckets
    offset = torch.arange(-most, most + 1)
    first = torch.zeros_like(offset)
    if bias.is_bidirectional:
        num_buckets //= 2
        first = (offset > 0) * num_buckets
    else:
        offset = offset.clamp(max=0)
    distance, exact = offset.abs(), num_buckets // 2
    share = torch.log(distance.float() / exact) / math.log(most / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return tensor[first + torch.where(distance < exact, distance, far)].t()
