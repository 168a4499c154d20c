"""Per-slot state on the device, and the little of it that the host must know as well.

Every running request owns a slot. What changes in a step arrives as `StepWords`; positions, cache
slots and lengths are then computed on the device for all rows at once, and the last token of a
slot never leaves it. The host mirrors the lengths (they follow from the plans alone) and two
facts about sampling, so that it never has to wait for the device.

One slot more than requests can own pads the rows of a captured step: it has no tokens and keeps
none, whatever runs in it.

A row of a beam search samples nothing. The engine sends the most likely next tokens with their log
probabilities: log softmax of the logits divided by the temperature, after everything else that the
request wants done to them. The host decides which of them are followed (`BeamSearch`), and
`BeamMove` brings that back with the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight_backend.engine.memory_plan import COLUMNS, slot_table_shapes
from inflight_backend.engine.mixed_step import MixedInputs, MixedWords
from inflight_backend.engine.outputs import OutputRecorder
from inflight_backend.engine.step_buffer import StepWords, to_device
from inflight_backend.models.attention import AttentionInputs, HostLengths, MixedAttention
from inflight_scheduler import BlockAssignment, ScheduledBatch, SlotSetup


class BeamRows:
    """Knows which slots search, and how many candidates each wants."""

    def __init__(self, num_slots: int, device: str) -> None:
        self._device = device
        self._num_candidates = np.zeros(num_slots, dtype=np.int64)
        self._is_used = False

    def set_up(self, setups: Sequence[SlotSetup]) -> None:
        """Take over the setups of a plan."""
        for setup in setups:
            self._num_candidates[setup.slot] = setup.num_candidates
        if setups:
            self._is_used = bool(self._num_candidates.any())

    def are_in(self, slots: Sequence[int]) -> bool:
        """Whether any of ``slots`` searches."""
        return self._is_used and bool(self._num_candidates[list(slots)].any())

    def keep(
        self, slots: Sequence[int], logits: Tensor, temperature: Tensor, observer: OutputRecorder
    ) -> None:
        """Send the candidates of the rows of ``slots`` that search.

        logits [N, vocab] float32 and temperature [N], of all rows; 0 counts as 1, since there is no
        draw it could make greedy.
        """
        rows = [row for row, slot in enumerate(slots) if self._num_candidates[slot]]
        numbers = [int(self._num_candidates[slots[row]]) for row in rows]
        index = observer.index(rows, len(slots))
        scale = temperature[index]
        chosen = logits[index] / torch.where(scale > 0, scale, 1.0)[:, None]
        log_probs = torch.log_softmax(chosen, dim=-1)
        values, tokens = log_probs.topk(min(max(numbers), logits.shape[1]), dim=-1)
        observer.record_candidates([slots[row] for row in rows], numbers, tokens, values)

    def without(self, sampling_slots: Tensor, slots: Sequence[int], padding_slot: int) -> Tensor:
        """``sampling_slots`` [N] with the padding slot for rows that search: what was drawn there
        is unused."""
        searches = to_device(torch.from_numpy(self._num_candidates[list(slots)] > 0), self._device)
        return torch.where(searches, padding_slot, sampling_slots)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What drawing the next tokens needs; all [num_samples] on the device.

    ``positions`` are those the drawn tokens will take; ``rows`` [num_samples, NUM_COLUMNS] int32
    is all the table of slots holds of them. The two flags come from the host's mirror.
    """

    slots: Tensor
    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    end_ids: Tensor
    min_end_positions: Tensor
    is_all_greedy: bool
    may_forbid_end: bool

    def filters(
        self, *, has_min_p: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What `Ops.sample` takes beside logits."""
        min_p = self.min_p if has_min_p else None
        return self.temperature, self.top_k, self.top_p, self.seeds, self.positions, min_p

    def part(self, start: int, end: int) -> SamplingInputs:
        """The rows from ``start`` to ``end``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: value[start:end] for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the decoder sees it: packed tokens [num_tokens] int64.

    ``sample_rows`` are the rows that draw a token, None for all of them in order.
    """

    tokens: Tensor
    sample_rows: Tensor | None
    attention: AttentionInputs


class SlotTable:
    """Owner of the state of ``num_slots`` slots and of the padding slot, whose number is
    ``num_slots``; its tensors keep their addresses for life."""

    def __init__(self, num_slots: int, max_blocks: int, tokens_per_block: int, device: str) -> None:
        self._tokens_per_block = tokens_per_block
        self._padding_slot = num_slots
        integers = {4: torch.int32, 8: torch.int64}
        tables = {
            name: torch.zeros(shape, dtype=integers[size], device=device)
            for name, (shape, size) in slot_table_shapes(num_slots, max_blocks).items()
        }
        self._parameters = tables["parameters"]
        self._block_tables = tables["block_tables"]
        self._cached_lengths = tables["cached_lengths"]
        self._last_tokens = tables["last_tokens"]
        self._host_lengths = np.zeros(num_slots, dtype=np.int64)
        self._host_is_greedy = np.zeros(num_slots, dtype=np.bool_)
        self._host_min_end = np.zeros(num_slots, dtype=np.int64)
        self._has_min_end = False

    def set_up(self, batch: ScheduledBatch, words: StepWords) -> None:
        """Take over the setups, the new blocks and the verified slots of a plan."""
        if batch.setups:
            self._parameters[words.setup_slots.long()] = words.setup_rows
        for setup in batch.setups:
            self._host_is_greedy[setup.slot] = setup.sampling.is_greedy
            self._host_min_end[setup.slot] = setup.min_end_position if setup.end_id >= 0 else 0
        if batch.setups:
            self._has_min_end = bool(self._host_min_end.any())
        if batch.new_blocks:
            self._block_tables[words.block_slots.long(), words.block_indices.long()] = (
                words.block_ids
            )
        if batch.verified:
            verified = words.verified_slots.long()
            self._cached_lengths[verified] = words.verified_lengths.long()
            self._last_tokens[verified] = words.verified_tokens.long()
        for each in batch.verified:
            self._host_lengths[each.slot] = each.num_cached

    def move(self, batch: ScheduledBatch, words: StepWords) -> None:
        """Carry out the moves of beams; comes before `set_up`, which adds new blocks."""
        if not batch.beam_moves:
            return
        slots, parents = words.move_slots.long(), words.move_parents.long()
        lengths = self._cached_lengths[parents]
        tables = self._block_tables[parents]  # a copy: all parents are read first
        places = (lengths // self._tokens_per_block)[:, None].clamp(max=tables.shape[1] - 1)
        blocks = words.move_blocks[:, None]
        tables.scatter_(1, places, torch.where(blocks < 0, tables.gather(1, places), blocks))
        self._block_tables[slots] = tables
        self._cached_lengths[slots] = lengths
        self._last_tokens[slots] = words.move_tokens.long()
        moved = np.array([move.slot for move in batch.beam_moves], dtype=np.int64)
        origins = np.array([move.parent for move in batch.beam_moves], dtype=np.int64)
        self._host_lengths[moved] = self._host_lengths[origins]

    def lengths(self, slots: Tensor) -> Tensor:
        """Tokens cached of ``slots`` [N]: where their next token comes, [N] int64."""
        return self._cached_lengths[slots]

    @property
    def padding_slot(self) -> int:
        """The slot of padding rows."""
        return self._padding_slot

    def begin(self, batch: ScheduledBatch, words: StepWords) -> StepInputs:
        """Book the progress of a plan that is not empty; returns the inputs of its step."""
        slots = torch.cat((words.chunk_slots, words.generation_slots)).long()  # of all sequences
        token_slots, tokens, positions = self._pack(batch, words)
        attention = self._advance(batch, words, slots, token_slots, positions)
        return StepInputs(
            tokens=tokens,
            sample_rows=words.sample_rows.long() if batch.runs else None,
            attention=attention,
        )

    def begin_sampling(self, batch: ScheduledBatch, words: StepWords) -> SamplingInputs:
        """What the draw of the step that was begun last needs."""
        return self.sampling(
            words.sample_slots.long(), *self._sampling_flags(batch), words.sample_lags
        )

    def begin_generation(self, generation_slots: Tensor) -> StepInputs:
        """A step of generations in ``generation_slots`` [B] int32, made of what the device knows.

        Rows of the padding slot have no context, write no cache and sample an unused token.
        `book` keeps the host's side for it.
        """
        slots = generation_slots.long()
        positions = self._cached_lengths[slots]
        is_padding = slots == self._padding_slot
        contexts = (positions + 1).masked_fill_(is_padding, 0)
        self._cached_lengths[slots] = contexts
        slot_mapping = self._cache_slots(slots, positions).masked_fill_(is_padding, -1)
        attention = AttentionInputs(
            num_context_sequences=0,
            num_context_tokens=0,
            block_tables=self._block_tables[slots],
            context_lengths=contexts.int(),
            query_starts=generation_slots[:0],
            positions=positions,
            slot_mapping=slot_mapping,
            host=None,
        )
        return StepInputs(self._last_tokens[slots], None, attention)

    def begin_mixed(self, words: MixedWords) -> MixedInputs:
        """A mixed step of fixed sizes, made of ``words`` and of what the device knows.

        Padding has no context, writes no cache and samples unused tokens. `book` keeps the
        host's side for it.
        """
        slots, tokens = words.token_slots.long(), words.tokens.long()
        is_generation = tokens < 0
        positions = torch.where(is_generation, self._cached_lengths[slots], words.positions.long())
        tokens = torch.where(is_generation, self._last_tokens[slots], tokens)
        generations, chunks = words.generation_slots.long(), words.chunk_slots.long()
        lengths = self._cached_lengths[generations] + 1
        lengths.masked_fill_(generations == self._padding_slot, 0)
        self._cached_lengths[generations] = lengths
        self._cached_lengths[chunks] = words.chunk_ends.long()
        slot_mapping = self._cache_slots(slots, positions)
        attention = MixedAttention(
            generation_tables=self._block_tables[generations],
            generation_lengths=lengths.int(),
            chunk_tables=self._block_tables[chunks],
            chunk_lengths=words.chunk_ends,
            query_starts=words.query_starts,
            positions=positions,
            slot_mapping=slot_mapping.masked_fill_(slots == self._padding_slot, -1),
        )
        return MixedInputs(tokens, words.sample_rows.long(), attention)

    @property
    def parameters(self) -> Tensor:
        """The table of slots [num_slots + 1, NUM_COLUMNS] int32; see `step_buffer`."""
        return self._parameters

    def longest(self, slots: Sequence[int]) -> int:
        """Tokens cached of the longest of ``slots``, after the step that was begun last."""
        return int(self._host_lengths[list(slots)].max(initial=0))

    def book(self, batch: ScheduledBatch) -> None:
        """Book the tokens of a plan on the host, as a step does on the device."""
        for run in batch.runs:
            self._host_lengths[run.slot] = run.start + run.num_tokens
        self._host_lengths[np.array(batch.generation_slots, dtype=np.int64)] += 1

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember the drawn tokens [num_samples]; the next step of their slots starts with them.

        A row that failed (-1) keeps a valid id, since a step may already be on its way.
        """
        self._last_tokens[slots] = tokens.clamp(min=0)

    def _pack(self, batch: ScheduledBatch, words: StepWords) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, id and position of every token: context chunks, then generations."""
        slots = words.generation_slots.long()
        tokens, positions = self._last_tokens[slots], self._cached_lengths[slots]
        if not batch.runs:
            return slots, tokens, positions
        starts = words.query_starts.long()
        num_tokens = len(words.tokens)
        device = words.tokens.device
        chunks = torch.repeat_interleave(
            torch.arange(len(words.chunk_slots), device=device),
            starts.diff(),
            output_size=num_tokens,
        )  # [num_context_tokens]: the chunk of each token
        offsets = (words.chunk_starts - starts[:-1])[chunks]
        context_positions = torch.arange(num_tokens, device=device) + offsets
        return (
            torch.cat((words.chunk_slots.long()[chunks], slots)),
            torch.cat((words.tokens.long(), tokens)),
            torch.cat((context_positions, positions)),
        )

    def _advance(
        self,
        batch: ScheduledBatch,
        words: StepWords,
        slots: Tensor,
        token_slots: Tensor,
        positions: Tensor,
    ) -> AttentionInputs:
        """Book the tokens of this step as cached, on both sides."""
        runs = batch.runs
        num_chunks = len(runs)
        generations = np.array(batch.generation_slots, dtype=np.int64)
        lengths = np.ones(num_chunks + len(generations), dtype=np.int64)
        lengths[:num_chunks] = [run.num_tokens for run in runs]
        self.book(batch)
        chunk_slots = np.array([run.slot for run in runs], dtype=np.int64)
        host_contexts = self._host_lengths[np.concatenate((chunk_slots, generations))]

        num_context_tokens = len(words.tokens)
        contexts = torch.cat((words.chunk_ends.long(), positions[num_context_tokens:] + 1))
        self._cached_lengths[slots] = contexts
        size = self._tokens_per_block
        num_blocks = -(-int(host_contexts.max()) // size)
        return AttentionInputs(
            num_context_sequences=num_chunks,
            num_context_tokens=num_context_tokens,
            block_tables=self._block_tables[:, :num_blocks][slots],
            context_lengths=contexts.int(),
            query_starts=words.query_starts,
            positions=positions,
            slot_mapping=self._cache_slots(token_slots, positions),
            host=HostLengths(lengths, host_contexts),
        )

    def _cache_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where tokens at ``positions`` of ``slots`` lie in the cache, [T] int64."""
        size = self._tokens_per_block
        blocks = self._block_tables[slots, positions // size]
        return torch.add(positions % size, blocks, alpha=size)  # int64, as the positions are

    def may_forbid_end(self, slots: Sequence[int], most_drafts: int = 0) -> bool:
        """Whether the end of some of ``slots`` may have to wait, in the draw of the step that was
        begun last; ``most_drafts`` are the most tokens that a row may lag behind."""
        if not self._has_min_end:
            return False
        rows = list(slots)
        return bool((self._host_min_end[rows] > self._host_lengths[rows] - most_drafts).any())

    def _sampling_flags(self, batch: ScheduledBatch) -> tuple[bool, bool]:
        """Whether all rows are greedy, and whether some row's end may have to wait."""
        slots = sampling_slots_of(batch)
        most_drafts = max((len(run.drafts) for run in batch.runs), default=0)
        is_all_greedy = bool(self._host_is_greedy[slots].all())
        return is_all_greedy, self.may_forbid_end(slots, most_drafts)

    def sampling(
        self,
        slots: Tensor,
        is_all_greedy: bool = False,
        may_forbid_end: bool = True,
        lags: Tensor | None = None,
    ) -> SamplingInputs:
        """What the next draw of ``slots`` [N] needs; the flags are on the safe side by default.

        ``lags`` [N], or [0] for none: see `StepWords`.
        """
        positions = self._cached_lengths[slots]
        if lags is not None and len(lags):
            positions = positions - lags
        rows = self._parameters[slots]
        floats = rows.view(torch.float32)
        return SamplingInputs(
            slots=slots,
            rows=rows,
            temperature=floats[:, COLUMNS["temperature"]],
            top_k=rows[:, COLUMNS["top_k"]],
            top_p=floats[:, COLUMNS["top_p"]],
            min_p=floats[:, COLUMNS["min_p"]],
            seeds=rows.view(torch.int64)[:, COLUMNS["seed"]],
            positions=positions,
            end_ids=rows[:, COLUMNS["end_id"]],
            min_end_positions=rows[:, COLUMNS["min_end_position"]],
            is_all_greedy=is_all_greedy,
            may_forbid_end=may_forbid_end,
        )


def partly_filled_blocks(batch: ScheduledBatch, tokens_per_block: int) -> list[int]:
    """The new blocks of ``batch`` in which something may be left of what they held before: all but
    those that a context chunk fills from end to end."""
    chunks = {chunk.slot: chunk for chunk in batch.context_chunks}

    def is_filled(block: BlockAssignment) -> bool:
        if (chunk := chunks.get(block.slot)) is None:
            return False
        first = block.index * tokens_per_block
        return chunk.start <= first and first + tokens_per_block <= chunk.start + chunk.num_tokens

    return [block.block_id for block in batch.new_blocks if not is_filled(block)]


def sampling_slots_of(batch: ScheduledBatch) -> list[int]:
    """The slots of the rows that draw a token in ``batch``, in plan order."""
    slots = [run.slot for run in batch.runs for _ in range(run.num_drawn)]
    slots += batch.generation_slots
    return slots
