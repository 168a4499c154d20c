"""Reads the part of a tensor that a rank holds, and as little else as the file allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inflight_backend.models.parameters import Cut, Picking, Ranges, Source, picking

_MAX_RUNS = 4096
"""Of neighbouring rows: where there are more, all between the first and the last are read."""


def cut_rows(tensor: Tensor, cut: Cut) -> Tensor:
    """What ``cut`` leaves of a whole parameter."""
    if cut.rows is not None:
        tensor = torch.cat([tensor[start:end] for start, end in cut.rows])
    if cut.columns is not None:
        tensor = torch.cat([tensor[:, start:end] for start, end in cut.columns], 1)
    return tensor


def read_cut(opened: Any, source: Source) -> Tensor:
    """The part of ``source`` that its ``cut`` says, of an opened slice of a safetensors file.

    Rows that are picked, matrices that are turned and experts that are stacked are read part by
    part. What else becomes of a tensor on its way needs the whole of it.
    """
    cut, convert = source.cut, source.convert
    first, end = source.part or (0, source.shape[0])
    found = Picking(range(end - first)) if convert is None else picking(convert)
    if found is None:
        tensor: Tensor = opened[first:end]
        assert convert is not None
        return cut_rows(convert(tensor), cut)
    if found.is_stacked:
        return _read_stack(opened, found, source, range(first, end))

    def read(rows: slice, *columns: slice) -> Tensor:
        place = (slice(first + rows.start, first + rows.stop), *columns)
        part: Tensor = opened[place]
        return part

    return _read_matrix(read, found, cut, (end - first, *source.shape[1:]))


def _read_matrix(
    read: Callable[..., Tensor], found: Picking, cut: Cut, shape: tuple[int, ...]
) -> Tensor:
    """Rows [n] or a matrix [n, m] in the order of the parameter; ``read`` takes slices."""
    order = found.order
    if order is None:
        order = range(shape[1] if found.is_transposed else shape[0])
    rows = cut.rows or ((0, len(order)),)
    wanted = [order[row] for start, end in rows for row in range(start, end)]
    if len(shape) == 1:
        return _pick(read, wanted, 0)
    columns = cut.columns or ((0, shape[0] if found.is_transposed else shape[1]),)
    parts = []
    for start, end in columns:
        part = slice(start, end)
        if found.is_transposed:
            parts.append(_pick(partial(read, part), wanted, 1).t())
        else:
            parts.append(_pick(partial(_read_columns, read, part), wanted, 0))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _read_columns(read: Callable[..., Tensor], columns: slice, rows: slice) -> Tensor:
    return read(rows, columns)


def _read_of(opened: Any, matrix: slice, *places: slice) -> Tensor:
    """What lies there in one matrix of a stack."""
    place = (matrix, *places)
    found: Tensor = opened[place]
    return found[0]


def _read_stack(opened: Any, found: Picking, source: Source, matrices: range) -> Tensor:
    """``matrices`` of [E, rows, columns], or the transposed: the rows of one after the other."""
    shape = source.shape[1:]
    size = shape[1] if found.is_transposed else shape[0]
    parts = []
    for place, index in enumerate(matrices):
        rows = _within(source.cut.rows or ((0, len(matrices) * size),), place * size, size)
        if rows:
            cut = Cut(rows, source.cut.columns)
            read = partial(_read_of, opened, slice(index, index + 1))
            parts.append(_read_matrix(read, found, cut, shape))
    return torch.cat(parts)


def _within(ranges: Ranges, first: int, size: int) -> Ranges:
    kept = ((max(start - first, 0), min(end - first, size)) for start, end in ranges)
    return tuple((start, end) for start, end in kept if start < end)


def _pick(read: Callable[[slice], Tensor], wanted: Sequence[int], dimension: int) -> Tensor:
    """``wanted`` rows (columns, with ``dimension`` 1): neighbours are read at once."""
    ordered = sorted(set(wanted))
    runs = [[ordered[0], ordered[0] + 1]]
    for row in ordered[1:]:
        if row == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([row, row + 1])
    if len(runs) > _MAX_RUNS:
        runs = [[ordered[0], ordered[-1] + 1]]
        ordered = list(range(*runs[0]))
    parts = [read(slice(start, end)) for start, end in runs]
    found = parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
    if ordered == list(wanted):
        return found
    place_of = {row: place for place, row in enumerate(ordered)}
    return found.index_select(dimension, torch.tensor([place_of[row] for row in wanted]))
