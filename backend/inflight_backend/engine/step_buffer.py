"""One packed copy per step: the whole plan as int32 words, in one piece to the device.

Floats travel as their bits and seeds as two words. The buffers have fixed addresses and the size
of the largest plan. What the decoder reads stands at the head, in sections whose sizes alone
(`StepSizes`) say where each lies: so a captured graph finds them there in every step of its sizes.
First come the slots of generations, padded with the padding slot. The tokens of a step with chunks
are packed as generations, then chunks, then padding, without gaps; so one size says what its
products cost, however many of its tokens generate. A step of generations alone needs no words of
them: the device knows their tokens and positions. Behind the head lies what changes beside it.

On a GPU there are two page-locked host buffers: one is filled while the copy of the other may still
be under way. On a CPU host and device side are the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
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
        self.pinned_bytes = sum(host.nbytes for host in self._hosts if host.is_pinned())
        """Page-locked host memory."""
        self._words = [host.numpy() for host in self._hosts]
        self._copied = [new_event() for _ in self._hosts] if is_cuda else []
        self._turn = 0
        self.device = self._hosts[0].to(device)  # the same memory on a CPU

    def __len__(self) -> int:
        return len(self.device)

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
class StepSizes:
    """How much of each a step has, or a recording has room for; chunks are all runs of a plan: of
    contexts, and of drafts to verify. Without chunks the tokens and draws are not counted."""

    num_generations: int
    num_tokens: int = 0
    num_chunks: int = 0
    num_draws: int = 0

    @classmethod
    def of(cls, batch: ScheduledBatch) -> StepSizes:
        """What the step of ``batch`` needs."""
        num_generations = len(batch.generation_slots)
        if not batch.runs:
            return cls(num_generations)
        return cls(num_generations, batch.num_tokens, len(batch.runs), batch.num_drawn)

    def hold(self, other: StepSizes) -> bool:
        """Whether a step of other sizes fits."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_chunks <= self.num_chunks
            and other.num_generations <= self.num_generations
            and other.num_draws <= self.num_draws
        )

    @property
    def sections(self) -> list[int]:
        """Words of the fields of `RunWords` after the first."""
        tokens, chunks = self.num_tokens, self.num_chunks
        return [tokens, tokens, tokens, chunks, chunks, chunks + 1, self.num_draws]


@dataclass(frozen=True, slots=True)
class RunWords:
    """What the decoder reads of a plan, on the device, int32.

    ``tokens`` are -1 for generations, whose position is not given either. ``token_slots`` say whose
    each token is; padding chunks are the padding slot's and have no tokens, behind all others.
    ``query_starts`` begins with the number of generations. ``sample_rows`` are the packed rows of
    all that draw a token, in plan order (last chunks: their last token and drafts; then
    generations), then any.
    """

    generation_slots: Tensor  # [num_generations], the first words of the buffer
    tokens: Tensor  # [num_tokens]
    token_slots: Tensor
    positions: Tensor
    chunk_slots: Tensor  # [num_chunks]
    chunk_ends: Tensor
    query_starts: Tensor  # [num_chunks + 1]
    sample_rows: Tensor  # [num_draws]


@dataclass(frozen=True, slots=True)
class StepWords:
    """The words of a plan on the device, int32, in sections.

    ``sample_slots`` are the slots of `RunWords.sample_rows`. ``sample_lags`` says how many tokens
    of its run follow each of those rows; it is empty if none does.
    """

    runs: RunWords
    setup_slots: Tensor  # [num_setups]
    setup_rows: Tensor  # [num_setups, NUM_COLUMNS]
    block_slots: Tensor  # [num_new_blocks]
    block_indices: Tensor
    block_ids: Tensor
    block_groups: Tensor
    copy_sources: Tensor  # [num_block_copies]
    copy_destinations: Tensor
    move_slots: Tensor  # [num_beam_moves]
    move_parents: Tensor
    move_tokens: Tensor
    move_blocks: Tensor
    sample_slots: Tensor  # [num_samples]
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
        self._steady: dict[tuple[int, int], StepWords] = {}  # by room and generations

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._buffer.pinned_bytes

    def run_words(self, sizes: StepSizes) -> RunWords:
        """Where the decoder finds the words of every step of ``sizes``."""
        end = self._num_slots + sum(sizes.sections)
        views = torch.split(self._buffer.device[self._num_slots : end], sizes.sections)
        return RunWords(self._buffer.device[: sizes.num_generations], *views)

    def _steady_words(self, room: int, num_generations: int) -> StepWords:
        """Of a plan of generations alone that changes nothing else, with ``room`` for so many."""
        if (found := self._steady.get((room, num_generations))) is not None:
            return found
        nothing = self._buffer.device[:0]
        words = dict.fromkeys((each.name for each in fields(StepWords)[1:]), nothing)
        words["setup_rows"] = nothing.view(0, NUM_COLUMNS)
        words["sample_slots"] = self._buffer.device[:num_generations]
        found = StepWords(self.run_words(StepSizes(room)), **words)
        self._steady[room, num_generations] = found
        return found

    def send(self, batch: ScheduledBatch, sizes: StepSizes) -> StepWords:
        """Pack ``batch``, which fits ``sizes``, and start its copy; the views are valid until the
        next call. Without anything to run all of ``sizes`` is padding."""
        num_generations, num_slots = len(batch.generation_slots), self._num_slots
        words = self._buffer.open()
        words[:num_generations] = batch.generation_slots
        words[num_generations:num_slots] = num_slots
        if batch.is_steady and not sizes.num_tokens:  # most steps
            self._buffer.send(num_slots)
            return self._steady_words(sizes.num_generations, num_generations)
        sections = _sections(batch)
        lengths = sizes.sections
        end = num_slots + sum(lengths)
        changes = [len(section) for section in sections]
        total = end + sum(changes)
        assert total <= len(self._buffer), f"plan of {total} words, room for {len(self._buffer)}"
        if sizes.num_tokens:
            starts = accumulate(lengths, initial=num_slots)
            views = [
                words[start : start + size] for start, size in zip(starts, lengths, strict=False)
            ]
            _pack_runs(views, batch, num_slots)
        np.concatenate(sections, out=words[end:total])
        self._buffer.send(total)
        device = self._buffer.device
        parts = torch.split(device[num_slots:total], [*lengths, *changes])
        first, rest = len(lengths), list(parts[len(lengths) :])
        rest[1] = rest[1].view(-1, NUM_COLUMNS)
        runs = RunWords(device[: sizes.num_generations], *parts[:first])
        return StepWords(runs, *rest)


def _pack_runs(sections: Sequence[_Words], batch: ScheduledBatch, padding_slot: int) -> None:
    """Fill the fields of `RunWords` after the first."""
    tokens, slots, positions, chunk_slots, chunk_ends, query_starts, rows = sections
    chunks = batch.runs
    num_chunks, num_generations = len(chunks), len(batch.generation_slots)
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
    own_starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    own_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
    query_starts[0] = num_generations
    query_starts[1 : num_chunks + 1] = num_generations + lengths.cumsum(dtype=np.int32)
    end = int(query_starts[num_chunks])
    query_starts[num_chunks + 1 :] = end
    chunk_slots[:num_chunks], chunk_ends[:num_chunks] = own_slots, own_starts + lengths
    chunk_slots[num_chunks:], chunk_ends[num_chunks:] = padding_slot, 0

    tokens[:num_generations], tokens[end:], positions[end:] = -1, 0, 0
    slots[:num_generations], slots[end:] = batch.generation_slots, padding_slot
    if chunks:
        texts = [np.array(chunk.tokens + chunk.drafts, dtype=np.int32) for chunk in chunks]
        np.concatenate(texts, out=tokens[num_generations:end])
    slots[num_generations:end] = np.repeat(own_slots, lengths)
    first_positions = own_starts - query_starts[:num_chunks]  # of the batch's first token
    positions[num_generations:end] = np.arange(num_generations, end, dtype=np.int32)
    positions[num_generations:end] += np.repeat(first_positions, lengths)

    num_drawn = np.array([chunk.num_drawn for chunk in chunks], dtype=np.int32)
    of_chunks = np.repeat(query_starts[1 : num_chunks + 1] - 1, num_drawn) - _count_lags(num_drawn)
    end = len(of_chunks) + num_generations
    rows[: len(of_chunks)], rows[len(of_chunks) : end] = of_chunks, np.arange(num_generations)
    rows[end:] = 0


def _sections(batch: ScheduledBatch) -> list[_Words]:
    """The fields of `StepWords` after the first, in order, as flat arrays."""
    chunks = batch.runs
    slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
    num_drawn = np.array([chunk.num_drawn for chunk in chunks], dtype=np.int32)
    lags = _count_lags(num_drawn)
    generation_slots = np.array(batch.generation_slots, dtype=np.int32)
    return [
        np.array([setup.slot for setup in batch.setups], dtype=np.int32),
        _setup_rows(batch.setups).reshape(-1),
        *_fields(batch.new_blocks, "slot", "index", "block_id", "group"),
        *_fields(batch.block_copies, "source", "destination"),
        *_fields(batch.beam_moves, "slot", "parent", "token", "own_block"),
        np.concatenate((np.repeat(slots, num_drawn), generation_slots)),
        np.concatenate((lags, np.zeros_like(generation_slots))) if lags.any() else _NO_WORDS,
        *_fields(batch.verified, "slot", "num_cached", "token"),
    ]


def _fields(items: Sequence[object], *names: str) -> list[_Words]:
    """An array of each of these fields of ``items``."""
    if not items:
        return [_NO_WORDS] * len(names)
    rows = [*map(attrgetter(*names), items)]
    return list(np.array(rows, dtype=np.int32).T)


def _count_lags(num_drawn: _Words) -> _Words:
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
