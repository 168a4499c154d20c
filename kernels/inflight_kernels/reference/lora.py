"""Low-rank products of many adapters in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    pages: Tensor,
    places: Tensor,
    slices: Sequence[int],
) -> Tensor:
    """What the kernel of this name makes of y [T, rows], in y's dtype.

    x [T, columns], a [num_pages, experts, slices, rank, columns], b [num_pages, experts, rows,
    rank], scales [num_places, rows], pages [num_places, max_pages] (-1: none), places [T] (-1:
    none): place of the adapter times experts, plus the number of the expert. ``slices``: rows of
    each.
    """
    answer = y.float().clone()
    plain = torch.zeros(y.shape[1], device=y.device) if bias is None else bias.float()
    owner = torch.repeat_interleave(torch.arange(len(slices)), torch.tensor(slices))
    for row, number in enumerate(places.tolist()):
        if number < 0:
            continue
        place, expert = divmod(number, a.shape[1])
        answer[row] = (answer[row] - plain) * scales[place].float() + plain
        for page in (each for each in pages[place].tolist() if each >= 0):
            inner = a[page, expert].float() @ x[row].float()  # [slices, rank]
            inner = inner.to(y.dtype).float()[owner.to(y.device)]  # [rows, rank]
            answer[row] += (b[page, expert].float() * inner).sum(-1)
    return answer.to(y.dtype)
