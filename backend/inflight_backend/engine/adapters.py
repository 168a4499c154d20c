"""The adapters of slots: which one the rows of each have, step by step, and the memory for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.interface import AdapterPages
from inflight_backend.engine.memory_plan import adapted_linears
from inflight_backend.engine.slot_table import sampling_slots_of
from inflight_backend.engine.step_buffer import RunWords, to_device
from inflight_backend.models.blocks.lora import NO_ADAPTER, StepAdapters, TorchAdapters
from inflight_backend.models.config import ModelConfig
from inflight_scheduler import AdapterAssignment, ScheduledBatch

if TYPE_CHECKING:
    from inflight_backend.models.blocks.triton_lora import TritonAdapters


class SlotAdapters:
    """Which adapter each slot has; the padding slot, which comes last, has none."""

    def __init__(self, table: TorchAdapters | TritonAdapters, pages: AdapterPages, num_slots: int):
        self.pages, self.table = pages, table
        self._places = np.full(num_slots + 1, NO_ADAPTER, dtype=np.int32)

    def set_up(self, assignments: Sequence[AdapterAssignment]) -> None:
        """Take over those of a plan."""
        for each in assignments:
            self._places[each.slot] = each.place

    def has_any(self, batch: ScheduledBatch) -> bool:
        """Whether a row of ``batch`` has an adapter."""
        return bool((self._places[_slots_of(batch)] != NO_ADAPTER).any())

    def note_used(self, batch: ScheduledBatch) -> None:
        """``batch`` runs next: what its adapters lie in must not be overwritten meanwhile."""

    def begin(self, batch: ScheduledBatch, words: RunWords, *, draws_all: bool) -> None:
        """Tell the table whose rows the decoder gets. ``draws_all``: all pass its last layer."""
        assert isinstance(self.table, TorchAdapters)
        self.table.begin(self._step_of(batch, draws_all))

    def begin_recorded(self, words: RunWords | None) -> None:
        """The same for a step that is recorded; None: no row has an adapter."""
        raise AssertionError("this table is told on the host")

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """All slots have the adapter at place 0, as far as there is one."""
        self._set_all(0)
        yield
        self._set_all(NO_ADAPTER)

    def _set_all(self, place: int) -> None:
        self._places[:-1] = place

    def _step_of(self, batch: ScheduledBatch, draws_all: bool) -> StepAdapters | None:
        slots, num_generations = _slots_of(batch), len(batch.generation_slots)
        places = self._places[slots]
        if (places == NO_ADAPTER).all():
            return None
        lengths = np.ones(len(slots), dtype=np.int64)
        lengths[num_generations:] = [run.num_tokens for run in batch.runs]
        of_tokens: npt.NDArray[np.int32] = np.repeat(places, lengths)
        if draws_all or not batch.runs:
            return StepAdapters(of_tokens, of_tokens)
        return StepAdapters(of_tokens, self._places[list(sampling_slots_of(batch))])


def _slots_of(batch: ScheduledBatch) -> list[int]:
    """Of the sequences of a plan: generations, then chunks."""
    return [*batch.generation_slots, *(run.slot for run in batch.runs)]


class DeviceSlotAdapters(SlotAdapters):
    """The same for the kernels, which look on the device: a recorded step has no host."""

    def __init__(self, config: EngineConfig, model: ModelConfig, pages: AdapterPages) -> None:
        from inflight_backend.models.blocks.triton_lora import (  # needs triton
            LinearShape,
            PageLayout,
            TritonAdapters,
        )

        linears = {
            each.name: LinearShape(each.columns, each.slices, each.experts)
            for each in adapted_linears(model, with_experts=config.lora_experts)
        }
        layout = PageLayout(linears, pages.page_rank)
        self._table = TritonAdapters(
            layout, pages.num_pages, pages.max_rank, config.torch_dtype, config.device
        )
        super().__init__(self._table, pages, config.num_slots)
        self._device = config.device
        self._on_device = torch.from_numpy(self._places.copy()).to(config.device)

    def set_up(self, assignments: Sequence[AdapterAssignment]) -> None:
        """Take over those of a plan."""
        super().set_up(assignments)
        if assignments:
            pairs = torch.tensor([[each.slot, each.place] for each in assignments])
            pairs = to_device(pairs, self._device)
            self._on_device[pairs[:, 0]] = pairs[:, 1].int()

    def note_used(self, batch: ScheduledBatch) -> None:
        """``batch`` runs next: what its adapters lie in must not be overwritten meanwhile."""
        places = self._places[_slots_of(batch)]
        self._table.mark_used(set(places[places != NO_ADAPTER].tolist()))

    def begin(self, batch: ScheduledBatch, words: RunWords, *, draws_all: bool) -> None:
        """Tell the table whose rows the decoder gets. ``draws_all``: all pass its last layer."""
        if self.has_any(batch):
            self._begin(words, draws_all)
        else:
            self._table.begin_rows(None)

    def begin_recorded(self, words: RunWords | None) -> None:
        """The same for a step that is recorded; None: no row has an adapter."""
        if words is None:
            self._table.begin_rows(None)
        else:
            self._begin(words, False)

    def _begin(self, words: RunWords, draws_all: bool) -> None:
        is_mixed = len(words.tokens) > 0
        slots = words.token_slots if is_mixed else words.generation_slots
        draws = words.sample_rows.long() if is_mixed and not draws_all else None
        self._table.begin_rows(self._on_device[slots.long()], draws)

    def _set_all(self, place: int) -> None:
        super()._set_all(place)
        self._on_device[:-1] = place
