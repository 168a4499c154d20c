"""One packed copy per step: the whole plan as int32 words, in one piece to the device.

Floats travel as their bits and seeds as two words. The buffers have fixed addresses and the size
of the largest plan. The slots of generations stand at the head, padded with the padding slot, so
that a captured graph finds them there in every step.

On a GPU there are two page-locked host buffers: one is filled while the copy of the other may still
be under way. On a CPU host and device side are the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.engine.memory_plan import COLUMNS, NUM_COLUMNS
from inflight_scheduler import ScheduledBatch, SlotSetup
from inflight_scheduler.sampling import SETTINGS


def to_device(values: Tensor, device: str) -> Tensor:
    """``values``, which are on the host, copied to ``device`` asynchronously.

    On CUDA they go through page-locked memory: a copy of other memory waits for everything that was
    asked of the device before. On a CPU they are the tensor itself.
    """
    if device == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def new_event() -> torch.cuda.Event:
    """An event of the current CUDA device."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class WordBuffer:
    """Owner of both sides, ``fill`` everywhere until something is sent."""

    def __init__(self, num_words: int, fill: int, device: str) -> None:
        is_cuda = device != "cpu"
        self._hosts = [
            torch.full((num_words,), fill, dtype=torch.int32, pin_memory=is_cuda)
            for _ in range(2 if is_cuda else 1)
        ]
        self._words = [host.numpy() for host in self._hosts]
        self._copied = [new_event() for _ in self._hosts] if is_cuda else []
        self._turn = 0
        self.device = self._hosts[0].to(device)  # the same memory on a CPU

    def __len__(self) -> int:
        return len(self.device)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(host.nbytes for host in self._hosts if host.is_pinned())

    def open(self) -> npt.NDArray[np.int32]:
        """The words to be sent next, once the plan before the last one has been copied."""
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._words[self._turn]

    def send(self, num_words: int) -> None:
        """Start the copy of the first ``num_words`` of what `open` gave."""
        if self._copied:
            self.device[:num_words].copy_(self._hosts[self._turn][:num_words], non_blocking=True)
            self._copied[self._turn].record()
            self._turn = 1 - self._turn


_Words = npt.NDArray[np.int32]
_NO_WORDS: _Words = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepWords:
    """The words of a plan on the device, int32, in sections; chunks are all runs of the plan.

    ``generation_slots`` are the first words of the buffer. ``sample_rows`` are the packed rows of
    all that draw a token, ``sample_slots`` their slots: last chunks (the last token and drafts),
    then generations. ``sample_lags`` says how many tokens of its run follow each of those rows; it
    is empty if none does.
    """

    generation_slots: Tensor  # [num_generations]
    setup_slots: Tensor  # [num_setups]
    setup_rows: Tensor  # [num_setups, NUM_COLUMNS]
    block_slots: Tensor  # [num_new_blocks]
    block_indices: Tensor
    block_ids: Tensor
    copy_sources: Tensor  # [num_block_copies]
    copy_destinations: Tensor
    move_slots: Tensor  # [num_beam_moves]
    move_parents: Tensor
    move_tokens: Tensor
    move_blocks: Tensor
    tokens: Tensor  # [num_context_tokens]
    chunk_slots: Tensor  # [num_chunks]
    chunk_starts: Tensor
    chunk_ends: Tensor
    query_starts: Tensor  # [num_chunks + 1]
    sample_rows: Tensor  # [num_samples]
    sample_slots: Tensor
    sample_lags: Tensor  # [num_samples] or [0]
    verified_slots: Tensor  # [num_verified]
    verified_lengths: Tensor
    verified_tokens: Tensor


class StepBuffer:
    """Packs plans; the copy is a `WordBuffer`'s."""

    def __init__(self, max_words: int, num_slots: int, device: str) -> None:
        """Plans of up to ``max_words`` words (`max_words`); the padding slot is ``num_slots``."""
        self._num_slots = num_slots
        self._buffer = WordBuffer(max_words, num_slots, device)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._buffer.pinned_bytes

    @property
    def padded_slots(self) -> Tensor:
        """The head of the device side, [num_slots] int32: slots of generations, then padding."""
        return self._buffer.device[: self._num_slots]

    def send(self, batch: ScheduledBatch) -> StepWords:
        """Pack ``batch`` and start its copy; the views are valid until the next call."""
        sections = _sections(batch)
        num_generations = len(batch.generation_slots)
        sizes = [len(section) for section in sections]
        total = self._num_slots + sum(sizes)
        assert total <= len(self._buffer), f"plan of {total} words, room for {len(self._buffer)}"
        words = self._buffer.open()
        words[:num_generations] = batch.generation_slots
        words[num_generations : self._num_slots] = self._num_slots
        np.concatenate(sections, out=words[self._num_slots : total])
        self._buffer.send(total)
        device = self._buffer.device
        views = list(torch.split(device[self._num_slots : total], sizes))
        views[1] = views[1].view(-1, NUM_COLUMNS)
        return StepWords(device[:num_generations], *views)


def _sections(batch: ScheduledBatch) -> list[_Words]:
    """The fields of `StepWords` after the first, in order, as flat arrays."""
    chunks, verified = batch.runs, batch.verified
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    query_starts = np.concatenate((np.zeros(1, dtype=np.int32), lengths.cumsum(dtype=np.int32)))
    slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
    num_drawn = np.array([chunk.num_drawn for chunk in chunks], dtype=np.int32)
    lags = count_lags(num_drawn)
    generation_slots = np.array(batch.generation_slots, dtype=np.int32)
    first_generation = int(query_starts[-1])
    generation_rows = np.arange(
        first_generation, first_generation + len(generation_slots), dtype=np.int32
    )
    new_blocks = batch.new_blocks
    tokens = [np.array(chunk.tokens + chunk.drafts, dtype=np.int32) for chunk in chunks]
    return [
        np.array([setup.slot for setup in batch.setups], dtype=np.int32),
        _setup_rows(batch.setups).reshape(-1),
        np.array([block.slot for block in new_blocks], dtype=np.int32),
        np.array([block.index for block in new_blocks], dtype=np.int32),
        np.array([block.block_id for block in new_blocks], dtype=np.int32),
        np.array([copy.source for copy in batch.block_copies], dtype=np.int32),
        np.array([copy.destination for copy in batch.block_copies], dtype=np.int32),
        *_move_columns(batch),
        np.concatenate(tokens) if tokens else _NO_WORDS,
        slots,
        starts,
        starts + lengths,
        query_starts,
        np.concatenate((np.repeat(query_starts[1:] - 1, num_drawn) - lags, generation_rows)),
        np.concatenate((np.repeat(slots, num_drawn), generation_slots)),
        np.concatenate((lags, np.zeros_like(generation_slots))) if lags.any() else _NO_WORDS,
        np.array([each.slot for each in verified], dtype=np.int32),
        np.array([each.num_cached for each in verified], dtype=np.int32),
        np.array([each.token for each in verified], dtype=np.int32),
    ]


def _move_columns(batch: ScheduledBatch) -> list[_Words]:
    """Slot, parent, token and block of every move."""
    moves = [(move.slot, move.parent, move.token, move.own_block) for move in batch.beam_moves]
    return list(np.array(moves, dtype=np.int32).reshape(-1, 4).T)


def count_lags(num_drawn: _Words) -> _Words:
    """For runs that draw so many tokens: how many drafts follow each row that draws."""
    ends = num_drawn.cumsum(dtype=np.int32)
    rows = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    return np.repeat(ends, num_drawn) - rows - 1


def _setup_rows(setups: tuple[SlotSetup, ...]) -> _Words:
    rows = np.zeros((len(setups), NUM_COLUMNS), dtype=np.int32)
    if not setups:
        return rows
    samplings = [setup.sampling for setup in setups]
    floats = rows.view(np.float32)
    rows.view(np.uint64)[:, COLUMNS["seed"]] = [sampling.seed % 2**64 for sampling in samplings]
    rows[:, COLUMNS["end_id"]] = [setup.end_id for setup in setups]
    rows[:, COLUMNS["min_end_position"]] = [setup.min_end_position for setup in setups]
    rows[:, _columns(_INTEGERS)] = [*map(attrgetter(*_INTEGERS), samplings)]
    floats[:, _columns(_FLOATS)] = [*map(attrgetter(*_FLOATS), samplings)]
    floats[:, COLUMNS["initial_top_p"]] = floats[:, COLUMNS["top_p"]]
    floats[:, COLUMNS["top_p"]] = [current_top_p(setup) for setup in setups]
    # All rows of a step decay if one does: the others by nothing, and never up to a minimum.
    is_constant = [not sampling.has_decay for sampling in samplings]
    floats[is_constant, COLUMNS["top_p_decay"]] = 1.0
    floats[is_constant, COLUMNS["top_p_min"]] = 0.0
    return rows


def _columns(names: Sequence[str]) -> list[int]:
    return [COLUMNS[name] for name in names]


_ON_DEVICE = [(name, each.dtype) for name, each in SETTINGS.items() if each.on_device]
_INTEGERS = [name for name, dtype in _ON_DEVICE if dtype == "INT32"]
_FLOATS = [name for name, dtype in _ON_DEVICE if dtype == "FP32"]


def current_top_p(setup: SlotSetup) -> float:
    """top_p for the token that comes after the text of ``setup``, rounded as on the device."""
    sampling = setup.sampling
    if not sampling.has_decay:
        return sampling.top_p
    top_p = initial = np.float32(sampling.top_p)
    decay, least = np.float32(sampling.top_p_decay), np.float32(sampling.top_p_min)
    for token in setup.tokens[setup.prompt_len :]:
        top_p = initial if token == sampling.top_p_reset_id else max(top_p * decay, least)
    return float(top_p)
