"""Adapters over linears that are compiled: kept in panels, added by one kernel for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight_backend.models.blocks.lora import (
    AdaptedLinear,
    Adapter,
    AdapterPart,
    Multiply,
    StepAdapters,
    TorchAdapters,
)
from inflight_backend.models.compiled.linears import CompiledHead, StagedLinear
from inflight_backend.models.layers import Quantized
from inflight_kernels.cpu.routed.lora import (
    NUMBERS_OF_PART,
    PackedPart,
    StepRows,
    add_lora_stage,
    kernel,
    pack_part,
    takes,
)
from inflight_kernels.cpu.threads import Stage


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter as it is kept: parts that the kernel takes, by their linears, and all others."""

    packed: tuple[tuple[str, PackedPart], ...]
    others: Adapter
    rank: int

    @property
    def digest(self) -> bytes:
        """See `Adapter`."""
        return self.others.digest

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return self.others.num_bytes + sum(part.num_bytes for _, part in self.packed)


class CompiledAdapters(TorchAdapters):
    """An `AdapterTable` of linears that read numbers of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        kernel(dtype)  # no request is to wait for the compiler
        self._dtype = dtype
        self._numbers: dict[str, int] = {}  # of linears in the table
        self._table = np.zeros((0, 0, 0, NUMBERS_OF_PART), np.int64)
        self._loaded: dict[int, PackedAdapter] = {}  # what the table has addresses of
        self._max_rank = 0
        self.tokens: StepRows | None = None
        self.draws: StepRows | None = None
        """Of the step that runs; None: none of its rows has an adapter."""

    def wrap(self, name: str, linear: Multiply, bias: Tensor | None, *, of_draws: bool) -> Multiply:
        """See `AdapterTable`."""
        is_taken = isinstance(linear, StagedLinear) and linear.reads(self._dtype)
        if not is_taken or isinstance(linear, CompiledHead):
            return super().wrap(name, linear, bias, of_draws=of_draws)
        number = self._numbers[name] = len(self._numbers)
        runs = self._of_draws if of_draws else self._of_tokens
        adapted = CompiledAdaptedLinear(linear, bias, runs, self, number, of_draws=of_draws)
        self._linears[name] = adapted
        return adapted

    def prepare(self, adapter: Adapter) -> PackedAdapter:
        """See `AdapterTable`. Parts of the same rows are added one after another, so that the
        kernel has the first of them only."""
        packed, others, ends = list[tuple[str, PackedPart]](), list[AdapterPart](), dict[str, int]()
        for part in sorted(adapter.parts, key=lambda part: (part.linear, part.start)):
            is_first = part.start >= ends.get(part.linear, 0)
            if is_first and part.linear in self._numbers and takes(part.start, part.a, part.b):
                a, b = part.a.to(self._dtype), part.b.to(self._dtype)
                packed.append((part.linear, pack_part(part.start, a, b, part.scales)))
                ends[part.linear] = part.end
            else:
                others.append(part)
        return PackedAdapter(tuple(packed), Adapter(tuple(others), adapter.digest), adapter.rank)

    def load(self, place: int, adapter: PackedAdapter) -> None:
        """See `AdapterTable`."""
        super().load(place, adapter.others)
        parts: dict[int, list[PackedPart]] = {}
        for name, part in adapter.packed:
            parts.setdefault(self._numbers[name], []).append(part)
            self._max_rank = max(self._max_rank, part.padded_rank)
        self._make_room(place, max(map(len, parts.values()), default=0))
        for number, mine in parts.items():
            self._table[place, number, : len(mine)] = [each.numbers for each in mine]
        self._loaded[place] = adapter

    def _make_room(self, place: int, num_parts: int) -> None:
        places, _, parts, _ = self._table.shape
        if place < places and num_parts <= parts:
            return
        old = self._table
        places = max(places, 1 << place.bit_length())
        sizes = places, len(self._numbers), max(parts, num_parts), NUMBERS_OF_PART
        self._table = np.zeros(sizes, np.int64)
        self._table[: old.shape[0], : old.shape[1], : old.shape[2]] = old

    def unload(self, place: int) -> None:
        """See `AdapterTable`."""
        super().unload(place)
        if self._loaded.pop(place, None) is not None:
            self._table[place] = 0

    def begin(self, step: StepAdapters | None) -> None:
        """See `TorchAdapters`."""
        super().begin(step)
        self.tokens = self._rows(self._of_tokens)
        self.draws = self.tokens
        if step is not None and step.of_draws is not step.of_tokens:
            self.draws = self._rows(self._of_draws)

    def _rows(self, runs: Sequence[tuple[int, slice]]) -> StepRows | None:
        found = [each for each in runs if each[0] in self._loaded]
        if not found or not self._table.size:
            return None
        return StepRows(found, self._table, self._max_rank, self._dtype)


class CompiledAdaptedLinear(AdaptedLinear):
    """A linear of the table."""

    __slots__ = ("_float_bias", "_number", "_of_draws", "table")

    def __init__(
        self,
        linear: Multiply,
        bias: Tensor | None,
        runs: Sequence[tuple[int, slice]],
        table: CompiledAdapters,
        number: int,
        *,
        of_draws: bool,
    ) -> None:
        """``number``: in the table. All others as `AdaptedLinear` has them."""
        super().__init__(linear, bias, runs)
        self.table, self._number, self._of_draws = table, number, of_draws
        self._float_bias = None if bias is None else bias.float()

    @property
    def has_others(self) -> bool:
        """Whether adapters of the step have parts for it that the kernel does not take."""
        return bool(self.parts) and any(place in self.parts for place, _ in self._rows)

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """See `AdaptedLinear`."""
        answer = super().__call__(x)
        rows = self.table.draws if self._of_draws else self.table.tokens
        if rows is not None and len(answer):
            assert isinstance(x, Tensor), "the linears of this table read plain numbers"
            self.stage(x.contiguous(), answer, rows.address).run()
        return answer

    def stage(self, x: Tensor, out: Tensor, step: int = 0) -> Stage:
        """What the adapters of a step add to ``out``; see `add_lora_stage`."""
        return add_lora_stage(x, self._number, self._float_bias, out, step)
