"""Adapters in pages of the device's memory, multiplied by kernels; needs triton.

A page holds a share of rank ``page_rank`` of all linears, side by side, so that an adapter is
copied there in one piece for each of its pages, whatever it changes. It is packed so when it is
read (`PageLayout.pack`), not when a step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_backend.models.blocks.lora import Adapter, Multiply, MultiplyRows, plain_input
from inflight_backend.models.layers import Quantized
from inflight_kernels.ops.linear.add_lora import RowGroups, add_lora, column_tiles, group_rows

_ALIGNMENT = 16  # numbers


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear of the decoder, or those of ``experts`` alike: its columns, and the rows of each of
    its parts."""

    columns: int
    slices: tuple[int, ...]
    experts: int = 1

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(self.slices)

    @property
    def a_size(self) -> int:
        """Numbers of all ``A`` of rank 1, of one expert."""
        return len(self.slices) * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """``pages`` [n, page_size] and ``scales`` [scales_size] (None: all are 1), on the host."""

    pages: Tensor
    scales: Tensor | None
    digest: bytes
    rank: int

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return self.pages.nbytes + (0 if self.scales is None else self.scales.nbytes)


class PageLayout:
    """Where ``A`` and ``B`` of each linear lie in a page, and its scales in the row of a place."""

    def __init__(self, linears: dict[str, LinearShape], page_rank: int) -> None:
        self.linears, self.page_rank = linears, page_rank
        self._places: dict[str, tuple[int, int, int, int]] = {}
        self.page_size = self.scales_size = 0
        for name, shape in linears.items():
            a = self.page_size
            b = a + _aligned(page_rank * shape.a_size)
            size = b + _aligned(page_rank * shape.rows) - a  # of each expert
            self._places[name] = a, b - a, size, self.scales_size
            self.page_size += shape.experts * size
            self.scales_size += shape.rows

    def views(self, name: str, pages: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a linear in memory [num_pages, page_size] and [num_places, scales_size]: ``A``
        [num_pages, experts, slices, rank, columns], ``B`` [num_pages, experts, rows, rank], scales
        [.., rows]."""
        shape, (start, b, size, scale) = self.linears[name], self._places[name]
        rank, a_size = self.page_rank, self.page_rank * shape.a_size
        mine = torch.unflatten(
            pages[:, start : start + shape.experts * size], 1, (shape.experts, size)
        )
        return (
            torch.unflatten(mine[..., :a_size], 2, (len(shape.slices), rank, shape.columns)),
            torch.unflatten(mine[..., b : b + shape.rows * rank], 2, (shape.rows, rank)),
            scales[:, scale : scale + shape.rows],
        )

    def pack(self, adapter: Adapter, dtype: torch.dtype, *, is_pinned: bool) -> PackedAdapter:
        """``adapter`` as it lies on the device."""
        num_pages = -(-adapter.rank // self.page_rank)
        pages = torch.zeros(num_pages, self.page_size, dtype=dtype, pin_memory=is_pinned)
        scales = torch.ones(1, self.scales_size, dtype=dtype, pin_memory=is_pinned)
        for part in adapter.parts:
            a, b, factors = self.views(part.linear, pages, scales)
            number = self._slice_at(part.linear, part.start, part.end)
            part_a, part_b = part.a, part.b
            if not part.is_of_experts:
                part_a, part_b = part_a[None], part_b[None]
            for page in range(-(-part.rank // self.page_rank)):
                ranks = slice(page * self.page_rank, min((page + 1) * self.page_rank, part.rank))
                count = ranks.stop - ranks.start
                for each in number:
                    a[page, :, each, :count] = part_a[:, ranks]
                b[page, :, part.start : part.end, :count] = part_b[..., ranks]
            if part.scales is not None:
                factors[0, part.start : part.end] = part.scales
        has_scales = any(part.scales is not None for part in adapter.parts)
        return PackedAdapter(pages, scales[0] if has_scales else None, adapter.digest, adapter.rank)

    def _slice_at(self, name: str, start: int, end: int) -> list[int]:
        """The slices of rows ``start`` to ``end``: one, or all that a fused module changes."""
        found, first = [], 0
        for number, size in enumerate(self.linears[name].slices):
            if start < first + size and first < end:
                found.append(number)
            first += size
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class TritonAdapters:
    """An `AdapterTable` whose rows are told on the device (`begin_rows`)."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        max_rank: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.layout, self._device, self._dtype = layout, device, dtype
        self.num_places = num_pages
        most = -(-max_rank // layout.page_rank)
        # Zeros: what no adapter has written is read, too.
        self._memory = torch.zeros(num_pages, layout.page_size, dtype=dtype, device=device)
        self._scales = torch.ones(num_pages, layout.scales_size, dtype=dtype, device=device)
        self._pages = torch.full((num_pages, most), -1, dtype=torch.int32, device=device)
        self._pages_of: dict[int, list[int]] = {}
        self._free = list(range(num_pages))
        self._hot_places: set[int] = set()  # of the step that was begun last, which may run
        self._hot_pages: set[int] = set()
        self._stream = _new_stream() if device == "cuda" else None
        self.groups: list[tuple[RowGroups, RowGroups]] = []
        self.places: list[tuple[Tensor, Tensor]] = []  # of the same rows, before they were grouped

    def wrap(self, name: str, linear: Multiply, bias: Tensor | None, *, of_draws: bool) -> Multiply:
        """See `AdapterTable`."""
        shape = self.layout.linears[name]
        views = self.layout.views(name, self._memory, self._scales)
        tiles = column_tiles(list(shape.slices), self._memory.device)
        return _PagedLinear(self, linear, bias, views, self._pages, tiles, of_draws)

    def wrap_experts(self, name: str, linear: MultiplyRows, *, of_draws: bool) -> MultiplyRows:
        """See `AdapterTable`."""
        if name not in self.layout.linears:  # there is no memory for adapters of experts
            return linear
        shape = self.layout.linears[name]
        views = self.layout.views(name, self._memory, self._scales)
        tiles = column_tiles(list(shape.slices), self._memory.device)
        return _PagedExperts(self, linear, views, self._pages, tiles, of_draws)

    def wrap_heads(self, name: str, multiply: Multiply) -> Multiply:
        """See `AdapterTable`: heads are experts whose rows all steps have."""

        def linear(x: Tensor, starts: Tensor, tokens: Tensor) -> Tensor:
            return torch.zeros(len(x), rows, dtype=x.dtype, device=x.device)

        if name not in self.layout.linears:
            return multiply
        shape = self.layout.linears[name]
        heads, rows = shape.experts, shape.rows
        adapted = self.wrap_experts(name, linear, of_draws=False)

        def adapted_heads(x: Tensor) -> Tensor:
            answer = multiply(x)
            if self.groups:
                num_rows, device = len(x), x.device
                starts = torch.arange(heads + 1, dtype=torch.int32, device=device) * num_rows
                tokens = torch.arange(num_rows, device=device).repeat(heads)
                added = adapted(x.transpose(0, 1).reshape(heads * num_rows, -1), starts, tokens)
                answer = answer + added.view(heads, num_rows, rows).transpose(0, 1)
            return answer

        return adapted_heads

    def prepare(self, adapter: Adapter) -> PackedAdapter:
        """What `load` takes; any thread may call it."""
        return self.layout.pack(adapter, self._dtype, is_pinned=self._device == "cuda")

    def load(self, place: int, adapter: PackedAdapter) -> None:
        """Copy it beside the running step, or behind it if that reads those pages. The next step
        waits for the copy."""
        self.unload(place)
        assert len(adapter.pages) <= len(self._free), "the caller counts pages"
        pages = [self._free.pop(0) for _ in range(len(adapter.pages))]
        self._pages_of[place] = pages
        row = torch.full((self._pages.shape[1],), -1, dtype=torch.int32)
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if self._stream is None:
            self._copy(place, pages, row, adapter)
            return
        current = torch.cuda.current_stream()
        if place in self._hot_places or not self._hot_pages.isdisjoint(pages):
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._copy(place, pages, row.pin_memory(), adapter)
        current.wait_stream(self._stream)

    def _copy(self, place: int, pages: list[int], row: Tensor, adapter: PackedAdapter) -> None:
        for number, page in enumerate(pages):
            self._memory[page].copy_(adapter.pages[number], non_blocking=True)
        if adapter.scales is None:
            self._scales[place].fill_(1)
        else:
            self._scales[place].copy_(adapter.scales, non_blocking=True)
        self._pages[place].copy_(row, non_blocking=True)

    def mark_used(self, places: set[int]) -> None:
        """By the step that begins: a copy must not overtake it there."""
        self._hot_places = places
        self._hot_pages = {page for place in places for page in self._pages_of.get(place, ())}

    def unload(self, place: int) -> None:
        """Its pages may be taken by others."""
        self._free += self._pages_of.pop(place, [])

    def begin_rows(self, places: Tensor | None, draws: Tensor | None = None) -> None:
        """Before a step runs: the place of each row's adapter [T] int32, -1 for none; None if none
        has one. ``draws`` [n]: the rows that draw; None: all, in order."""
        if places is None:
            self.groups, self.places = [], []
            return
        of_tokens = group_rows(places, self.num_places)
        of_draws, drawing = of_tokens, places
        if draws is not None:
            drawing = places[draws]
            of_draws = group_rows(drawing, self.num_places)
        self.groups, self.places = [(of_tokens, of_draws)], [(places, drawing)]


class _PagedLinear:
    """A linear, and what adapters do to some rows of its answer."""

    __slots__ = ("_bias", "_linear", "_of_draws", "_pages", "_table", "_tiles", "_views")

    def __init__(
        self,
        table: TritonAdapters,
        linear: Multiply,
        bias: Tensor | None,
        views: tuple[Tensor, Tensor, Tensor],
        pages: Tensor,
        tiles: Tensor,
        of_draws: bool,
    ) -> None:
        self._table, self._linear, self._bias = table, linear, bias
        self._views, self._pages, self._tiles, self._of_draws = views, pages, tiles, of_draws

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        answer = self._linear(x)
        for groups in self._table.groups:
            a, b, scales = self._views
            plain = plain_input(x, answer.dtype)
            where = groups[self._of_draws]
            added = answer
            if answer.dtype != a.dtype:  # a router's: what is added is rounded, its own part is not
                added, plain = torch.zeros_like(answer, dtype=a.dtype), plain.to(a.dtype)
            add_lora(added, plain, a, b, scales, self._bias, self._pages, where, self._tiles)
            if added is not answer:
                answer += added
        return answer


class _PagedExperts:
    """The linears of a layer's experts, and what adapters do to some rows of their answers."""

    __slots__ = ("_linear", "_of_draws", "_pages", "_table", "_tiles", "_views")

    def __init__(
        self,
        table: TritonAdapters,
        linear: MultiplyRows,
        views: tuple[Tensor, Tensor, Tensor],
        pages: Tensor,
        tiles: Tensor,
        of_draws: bool,
    ) -> None:
        self._table, self._linear, self._views = table, linear, views
        self._pages, self._tiles, self._of_draws = pages, tiles, of_draws

    def __call__(self, x: Tensor, starts: Tensor, tokens: Tensor) -> Tensor:
        """See `MultiplyRows`."""
        answer = self._linear(x, starts, tokens)
        for places in self._table.places:
            a, b, scales = self._views
            count = a.shape[1]
            numbers = torch.arange(len(x), dtype=starts.dtype, device=x.device)
            experts = torch.searchsorted(starts[1:], numbers, right=True)
            mine = places[self._of_draws][tokens]
            where = torch.where(mine < 0, -1, mine * count + experts)
            groups = group_rows(where, self._table.num_places * count)
            add_lora(answer, x, a, b, scales, None, self._pages, groups, self._tiles)
        return answer
