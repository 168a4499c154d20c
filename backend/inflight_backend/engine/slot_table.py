"""Per-slot state on the device, and the little of it that the host must know as well.

Every running request owns a slot. What changes in a step arrives as `StepWords`; positions, cache
slots and lengths are then computed on the device for all rows at once, and the last token of a
slot never leaves it. The host mirrors the lengths (they follow from the plans alone) and two
facts about sampling, so that it never has to wait for the device.

One slot more than requests can own pads the rows of a captured step: it has no tokens and keeps
none, whatever runs in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inflight_backend.engine.memory_plan import COLUMNS, slot_table_shapes
from inflight_backend.engine.step_buffer import RunWords, StepWords, to_device
from inflight_backend.models.attention import AttentionInputs, HostLengths
from inflight_scheduler import AnswerAssignment, BlockAssignment, ScheduledBatch


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What drawing the next tokens needs, on the device.

    ``slots`` [num_samples] int64; ``rows`` [num_samples, NUM_COLUMNS] int32 is all that the table
    of slots holds of them; ``positions`` [num_samples] int64 are those the drawn tokens will take.
    The two flags come from the host's mirror.
    """

    slots: Tensor
    rows: Tensor
    positions: Tensor
    is_all_greedy: bool
    may_forbid_end: bool

    def integers(self, name: str) -> Tensor:
        """A column of the table of slots, [num_samples] int32."""
        return self.rows[:, COLUMNS[name]]

    def floats(self, name: str) -> Tensor:
        """A column of the table of slots, [num_samples] float32."""
        return self.rows.view(torch.float32)[:, COLUMNS[name]]

    def filters(
        self, *, has_min_p: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What `Ops.sample` takes beside logits."""
        return (
            self.floats("temperature"),
            self.integers("top_k"),
            self.floats("top_p"),
            self.rows.view(torch.int64)[:, COLUMNS["seed"]],
            self.positions,
            self.floats("min_p") if has_min_p else None,
        )

    def part(self, rows: slice) -> SamplingInputs:
        """These rows."""
        slots, table, positions = self.slots[rows], self.rows[rows], self.positions[rows]
        return replace(self, slots=slots, rows=table, positions=positions)

    @classmethod
    def joined(cls, parts: Sequence[SamplingInputs]) -> SamplingInputs:
        """Those of all ``parts``, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([each.slots for each in parts]),
            torch.cat([each.rows for each in parts]),
            torch.cat([each.positions for each in parts]),
            all(each.is_all_greedy for each in parts),
            any(each.may_forbid_end for each in parts),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the decoder sees it: packed tokens [num_tokens] int64.

    ``sample_rows`` [num_draws] int64 are the rows that draw a token, None for all in order.
    """

    tokens: Tensor
    sample_rows: Tensor | None
    attention: AttentionInputs


class SlotTable:
    """Owner of the state of ``num_slots`` slots and of the padding slot, whose number is
    ``num_slots``; its tensors keep their addresses for life."""

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        tokens_per_block: int,
        device: str,
        num_groups: int = 1,
        max_cross_blocks: int = 0,
    ) -> None:
        """``max_blocks``: of a slot, in each of ``num_groups`` groups of layers;
        ``max_cross_blocks``: of an encoder's answer, 0 without an encoder."""
        shapes = slot_table_shapes(num_slots, max_blocks, num_groups, max_cross_blocks)
        self._tokens_per_block = tokens_per_block
        self.padding_slot = num_slots
        integers = {4: torch.int32, 8: torch.int64}
        tables = {
            name: torch.zeros(shape, dtype=integers[size], device=device)
            for name, (shape, size) in shapes.items()
        }
        self.parameters = tables["parameters"]  # [num_slots + 1, NUM_COLUMNS] int32: `COLUMNS`
        self._block_tables = tables["block_tables"]  # [num_slots + 1, num_groups, max_blocks]
        self._first_columns = tables["first_columns"]  # of each group, in a row of all
        self._first_columns += torch.arange(num_groups, device=device)[:, None] * max_blocks
        self._cross_tables = tables["cross_tables"]  # [num_slots + 1, 1, max_cross_blocks]
        self._answer_lengths = tables["answer_lengths"].fill_(1)  # none is empty
        self._host_answer_lengths = np.ones(num_slots, dtype=np.int64)
        self._has_cross = max_cross_blocks > 0
        self._cached_lengths = tables["cached_lengths"]
        self._last_tokens = tables["last_tokens"]
        self._host_lengths = np.zeros(num_slots, dtype=np.int64)
        self._host_is_greedy = np.zeros(num_slots, dtype=np.bool_)
        self._host_min_end = np.zeros(num_slots, dtype=np.int64)
        self._has_min_end = False

    def set_up(self, batch: ScheduledBatch, words: StepWords) -> None:
        """Take over the setups, the new blocks and the verified slots of a plan."""
        if batch.setups:
            self.parameters[words.setup_slots.long()] = words.setup_rows
        for setup in batch.setups:
            self._host_is_greedy[setup.slot] = setup.sampling.is_greedy
            self._host_min_end[setup.slot] = setup.min_end_position if setup.end_id >= 0 else 0
        if batch.setups:
            self._has_min_end = bool(self._host_min_end.any())
        if batch.new_blocks:
            places = words.block_slots, words.block_groups, words.block_indices
            self._block_tables[tuple(place.long() for place in places)] = words.block_ids
        if batch.verified:
            verified = words.verified_slots.long()
            self._cached_lengths[verified] = words.verified_lengths.long()
            self._last_tokens[verified] = words.verified_tokens.long()
        for each in batch.verified:
            self._host_lengths[each.slot] = each.num_cached

    def assign_answers(self, answers: Sequence[AnswerAssignment]) -> None:
        """Take over where the answers of an encoder lie."""
        for answer in answers:
            slots, device = list(answer.slots), str(self._cross_tables.device)
            blocks = to_device(torch.tensor(answer.block_ids, dtype=torch.int32), device)
            self._cross_tables[slots, 0, : len(blocks)] = blocks
            self._answer_lengths[slots] = answer.num_tokens
            self._host_answer_lengths[slots] = answer.num_tokens

    def move(self, batch: ScheduledBatch, words: StepWords) -> None:
        """Carry out the moves of beams; comes before `set_up`, which adds new blocks."""
        slots, parents = words.move_slots.long(), words.move_parents.long()
        lengths = self._cached_lengths[parents]
        assert self._block_tables.shape[1] == 1, "beams share the blocks of one group"
        tables = self._block_tables[parents, 0]  # a copy: all parents are read first
        places = (lengths // self._tokens_per_block)[:, None].clamp(max=tables.shape[1] - 1)
        blocks = words.move_blocks[:, None]
        tables.scatter_(1, places, torch.where(blocks < 0, tables.gather(1, places), blocks))
        self._block_tables[slots, 0] = tables
        self._cached_lengths[slots] = lengths
        self._last_tokens[slots] = words.move_tokens.long()
        moved = np.array([move.slot for move in batch.beam_moves], dtype=np.int64)
        origins = np.array([move.parent for move in batch.beam_moves], dtype=np.int64)
        self._host_lengths[moved] = self._host_lengths[origins]

    def lengths(self, slots: Tensor) -> Tensor:
        """Tokens cached of ``slots`` [N]: where their next token comes, [N] int64."""
        return self._cached_lengths[slots]

    def begin(self, words: RunWords, host: HostLengths | None = None) -> StepInputs:
        """The inputs of a step, made of ``words`` and of what the device knows; its tokens count as
        cached from here on (`book` does the same on the host).

        ``host`` (`host_lengths`) is None where the step is recorded. Rows of the padding slot have
        no context, write no cache and sample an unused token.
        """
        if len(words.tokens) == 0:
            return self._begin_generations(words, host)
        token_slots, tokens = words.token_slots.long(), words.tokens.long()
        is_generation = tokens < 0
        positions = words.positions.long()
        positions = torch.where(is_generation, self._cached_lengths[token_slots], positions)
        tokens = torch.where(is_generation, self._last_tokens[token_slots], tokens)
        slots = torch.cat((words.generation_slots, words.chunk_slots)).long()
        generations = slots[: len(words.generation_slots)]
        lengths = self._cached_lengths[generations] + 1
        lengths.masked_fill_(generations == self.padding_slot, 0)
        lengths = torch.cat((lengths, words.chunk_ends.long()))
        is_padding = token_slots == self.padding_slot
        attention = self._advance(words, slots, lengths, token_slots, positions, is_padding, host)
        return StepInputs(tokens, words.sample_rows.long(), attention)

    def _begin_generations(self, words: RunWords, host: HostLengths | None) -> StepInputs:
        """A step of generations alone: a token of each of its slots."""
        slots = words.generation_slots.long()
        positions = self._cached_lengths[slots]
        lengths, is_padding = positions + 1, None
        if host is None:  # only recordings have rows of the padding slot
            is_padding = slots == self.padding_slot
            lengths.masked_fill_(is_padding, 0)
        attention = self._advance(words, slots, lengths, slots, positions, is_padding, host)
        return StepInputs(self._last_tokens[slots], None, attention)

    def _advance(
        self,
        words: RunWords,
        slots: Tensor,
        lengths: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        is_padding: Tensor | None,
        host: HostLengths | None,
    ) -> AttentionInputs:
        """Book ``lengths`` of ``slots``, both [num_sequences]; what attention needs of them and of
        their tokens [num_tokens]."""
        self._cached_lengths[slots] = lengths
        tables = self._block_tables
        if host is not None:
            tables = tables[:, :, : -(-int(host.context.max()) // self._tokens_per_block)]
        slot_mapping = self._cache_slots(token_slots, positions)
        if is_padding is not None:
            slot_mapping.masked_fill_(is_padding, -1)
        inputs = AttentionInputs(
            num_generations=len(words.generation_slots),
            block_tables=tables[slots].transpose(0, 1),
            context_lengths=lengths.int(),
            query_starts=words.query_starts,
            positions=positions,
            slot_mapping=slot_mapping,
            slots=slots,
            host=host,
        )
        return replace(inputs, cross=self._across(inputs)) if self._has_cross else inputs

    def _across(self, inputs: AttentionInputs) -> AttentionInputs:
        """The same sequences over the answers of the encoder."""
        host, slots = inputs.host, inputs.slots
        assert host is not None, "attention over an encoder's answers is not recorded"
        assert host.answers is not None
        num_blocks = -(-int(host.answers.max()) // self._tokens_per_block)
        return replace(
            inputs,
            block_tables=self._cross_tables[:, :, :num_blocks][slots].transpose(0, 1),
            context_lengths=self._answer_lengths[slots].int(),
            host=HostLengths(host.query, host.answers),
        )

    def begin_sampling(self, batch: ScheduledBatch, words: StepWords) -> SamplingInputs:
        """What the draw of the step that was begun last needs."""
        slots = sampling_slots_of(batch)
        most_drafts = max((len(run.drafts) for run in batch.runs), default=0)
        return self.sampling(
            words.sample_slots.long(),
            is_all_greedy=bool(self._host_is_greedy[list(slots)].all()),
            may_forbid_end=self.may_forbid_end(slots, most_drafts),
            lags=words.sample_lags,
        )

    def longest(self, slots: Sequence[int]) -> int:
        """Tokens cached of the longest of ``slots``, after the step that was begun last."""
        return int(self._host_lengths[list(slots)].max(initial=0))

    def book(self, batch: ScheduledBatch) -> None:
        """Book the tokens of a plan on the host, as a step does on the device."""
        for run in batch.runs:
            self._host_lengths[run.slot] = run.start + run.num_tokens
        self._host_lengths[np.array(batch.generation_slots, dtype=np.int64)] += 1

    def host_lengths(self, batch: ScheduledBatch) -> HostLengths:
        """Of the sequences of a plan that is booked: generations, then chunks."""
        runs = batch.runs
        slots = [*batch.generation_slots, *(run.slot for run in runs)]
        query = np.ones(len(slots), dtype=np.int64)
        query[len(batch.generation_slots) :] = [run.num_tokens for run in runs]
        return HostLengths(query, self._host_lengths[slots], self._host_answer_lengths[slots])

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember the drawn tokens [num_samples]; the next step of their slots starts with them.

        A row that failed (-1) keeps a valid id, since a step may already be on its way.
        """
        self._last_tokens[slots] = tokens.clamp(min=0)

    def _cache_slots(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where tokens at ``positions`` of ``slots`` lie in the cache, [num_groups, T] int64."""
        size = self._tokens_per_block
        columns = (positions // size)[None]
        if len(self._first_columns) > 1:
            columns = columns + self._first_columns
        blocks = self._block_tables.flatten(1)[slots[None], columns]
        return torch.add(positions % size, blocks, alpha=size)  # int64, as the positions are

    def may_forbid_end(self, slots: Sequence[int], most_drafts: int = 0) -> bool:
        """Whether the end of some of ``slots`` may have to wait, in the draw of the step that was
        begun last; ``most_drafts`` are the most tokens that a row may lag behind."""
        if not self._has_min_end:
            return False
        rows = list(slots)
        return bool((self._host_min_end[rows] > self._host_lengths[rows] - most_drafts).any())

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
        rows = self.parameters[slots]
        return SamplingInputs(slots, rows, positions, is_all_greedy, may_forbid_end)


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


def sampling_slots_of(batch: ScheduledBatch) -> Sequence[int]:
    """The slots of the rows that draw a token in ``batch``, in plan order."""
    if not batch.runs:
        return batch.generation_slots
    slots = [run.slot for run in batch.runs for _ in range(run.num_drawn)]
    return [*slots, *batch.generation_slots]
