"""What a mixed step of fixed sizes is to the decoder, beside the same step packed to fit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from inflight_backend.engine.memory_plan import max_words
from inflight_backend.engine.mixed_step import (
    MixedBuffer,
    MixedInputs,
    MixedSizes,
    mixed_sizes,
    sizes_of,
)
from inflight_backend.engine.slot_table import SlotTable, StepInputs
from inflight_backend.engine.step_buffer import StepBuffer
from inflight_scheduler import BlockAssignment, ContextChunk, ScheduledBatch, VerifiedSlot

NUM_SLOTS, MAX_BLOCKS, BLOCK, MOST, VOCAB_SIZE = 10, 16, 4, 80, 50
SIZES = mixed_sizes(MOST, NUM_SLOTS)


@dataclass
class Side:
    """The slots of one of two engines."""

    slots: SlotTable = field(default_factory=lambda: SlotTable(NUM_SLOTS, MAX_BLOCKS, BLOCK, "cpu"))
    buffer: StepBuffer = field(
        default_factory=lambda: StepBuffer(max_words(NUM_SLOTS, MOST, MAX_BLOCKS), NUM_SLOTS, "cpu")
    )

    @property
    def state(self) -> list[list[int]]:
        slots = self.slots
        lengths = slots.lengths(torch.arange(NUM_SLOTS + 1))
        return [lengths.tolist(), slots._host_lengths.tolist()]


def plans(count: int) -> list[ScheduledBatch]:
    """Chunks of one token and more, drafts, and generations, in every mixture; slots start anew."""
    choose = random.Random(4)
    ends = [0] * NUM_SLOTS
    drafted: list[int] = []

    def text(length: int) -> tuple[int, ...]:
        return tuple(choose.randrange(VOCAB_SIZE) for _ in range(length))

    made = []
    for number in range(count):
        chunks, runs = list[ContextChunk](), list[ContextChunk]()
        generations, room = list[int](), MOST
        kinds = choose.choice(("c", "cg", "cdg", "cdg", "dg", "d"))
        verified = [VerifiedSlot(slot, ends[slot], choose.randrange(9)) for slot in drafted]
        drafted = []
        for slot in choose.sample(range(NUM_SLOTS), choose.randint(1, NUM_SLOTS)):
            kind, start = choose.choice(kinds), ends[slot]
            if kind == "c" and choose.random() < 0.5:
                start = choose.choice((0, BLOCK))  # a new request, of whose text some was cached
            length = 1 if kind == "g" else choose.choice((1, 2, 5, 14))
            drafts = text(choose.randint(1, 3)) if kind == "d" or choose.random() < 0.2 else ()
            if kind == "g":
                drafts = ()
            taken = length + len(drafts)
            if taken > room or start + taken > MAX_BLOCKS * BLOCK:
                continue
            room -= taken
            if kind == "g":
                generations.append(slot)
            else:
                is_last = bool(drafts) or choose.random() < 0.6
                chunk = ContextChunk(slot, start, text(length), is_last, drafts)
                (runs if kind == "d" else chunks).append(chunk)
            ends[slot] = start + taken
            if drafts:
                ends[slot] -= choose.randint(0, len(drafts))
                drafted.append(slot)
        blocks = tuple(
            BlockAssignment(slot, index, slot * MAX_BLOCKS + index)
            for slot in range(NUM_SLOTS if number == 0 else 0)
            for index in range(MAX_BLOCKS)
        )
        batch = ScheduledBatch(
            number, (), blocks, tuple(chunks), tuple(generations),
            draft_runs=tuple(runs), verified=tuple(verified),
        )  # fmt: skip
        made.append(batch)
    return made


def check(batch: ScheduledBatch, found: MixedInputs, expected: StepInputs) -> None:
    """The same step; generations come first in one and last in the other."""
    generations, chunks = len(batch.generation_slots), len(batch.runs)
    order = torch.arange(batch.num_tokens).roll(-generations)  # where eager tokens lie
    attention, eager = found.attention, expected.attention
    assert found.tokens[order].equal(expected.tokens)
    assert attention.positions[order].equal(eager.positions)
    assert attention.slot_mapping[order].equal(eager.slot_mapping)
    for values, padding in (
        (found.tokens, 0),
        (attention.positions, 0),
        (attention.slot_mapping, -1),
    ):
        assert (values[batch.num_tokens :] == padding).all()

    starts = attention.query_starts
    assert (starts[: chunks + 1] - generations).equal(eager.query_starts)
    assert (starts[chunks:] == batch.num_tokens).all()
    assert attention.chunk_lengths[:chunks].equal(eager.context_lengths[:chunks])
    assert attention.generation_lengths[:generations].equal(eager.context_lengths[chunks:])
    assert not attention.chunk_lengths[chunks:].any()
    assert not attention.generation_lengths[generations:].any()
    tables = torch.cat((attention.chunk_tables[:chunks], attention.generation_tables[:generations]))
    assert tables[:, : eager.block_tables.shape[1]].equal(eager.block_tables)

    assert expected.sample_rows is not None
    assert found.sample_rows[: batch.num_drawn].equal(order[expected.sample_rows])
    assert not found.sample_rows[batch.num_drawn :].any()


def fits(batch: ScheduledBatch, sizes: MixedSizes) -> bool:
    return sizes.hold(sizes_of(batch))


def test_a_step_of_fixed_sizes_is_the_step_that_fits() -> None:
    eager, mixed = Side(), Side()
    buffer = MixedBuffer(SIZES[-1], mixed.buffer.padded_slots, "cpu")
    words = {sizes: buffer.words(sizes) for sizes in SIZES}  # before anything is sent, once
    seen = set()
    for batch in plans(200):
        packed, other = eager.buffer.send(batch), mixed.buffer.send(batch)
        eager.slots.set_up(batch, packed)
        mixed.slots.set_up(batch, other)
        if batch.is_empty:
            continue
        expected = eager.slots.begin(batch, packed)
        if batch.runs:
            sizes = next(
                sizes for sizes in SIZES[batch.iteration % len(SIZES) :] if fits(batch, sizes)
            )
            buffer.send(batch, sizes)
            check(batch, mixed.slots.begin_mixed(words[sizes]), expected)
            mixed.slots.book(batch)
            seen.add(sizes)
        else:
            mixed.slots.begin(batch, other)
        assert mixed.state == eager.state
        drawn = torch.arange(batch.num_drawn) + batch.iteration
        for side in (eager, mixed):
            side.slots.store(packed.sample_slots.long(), drawn)
    assert seen == set(SIZES)
    assert mixed.state[0][NUM_SLOTS] == 0, "the padding slot has nothing"
