"""The packed copy of a plan: a step of larger sizes is the step of its own sizes, and padding."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from inflight_backend.engine.cuda_graphs import mixed_sizes
from inflight_backend.engine.memory_plan import max_words
from inflight_backend.engine.slot_table import SlotTable, StepInputs
from inflight_backend.engine.step_buffer import StepBuffer, StepSizes
from inflight_scheduler import BlockAssignment, ContextChunk, ScheduledBatch, VerifiedSlot

NUM_SLOTS, MAX_BLOCKS, BLOCK, MOST, VOCAB_SIZE = 10, 16, 4, 80, 50
SIZES = mixed_sizes(MOST, NUM_SLOTS)


def test_a_step_must_fit_all_of_a_size() -> None:
    sizes = StepSizes(num_generations=3, num_tokens=8, num_chunks=2, num_draws=5)
    assert sizes.hold(sizes)
    for name in ("num_tokens", "num_chunks", "num_generations", "num_draws"):
        assert not sizes.hold(replace(sizes, **{name: getattr(sizes, name) + 1})), name
    batch = ScheduledBatch(
        1,
        context_chunks=(ContextChunk(0, 0, (1, 2), is_last=False),),
        generation_slots=(1, 2),
        draft_runs=(ContextChunk(3, 5, (1,), True, (4, 5)),),
    )
    assert StepSizes.of(batch) == StepSizes(2, 7, 2, 5)
    assert StepSizes.of(replace(batch, context_chunks=(), draft_runs=())) == StepSizes(2)


def plans(count: int) -> list[ScheduledBatch]:
    """Chunks of one token and more, drafts, and generations, in every mixture, in used slots."""
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


def check(batch: ScheduledBatch, found: StepInputs, expected: StepInputs) -> None:
    """The same step at the head of every part, then padding without context that keeps nothing."""
    generations, chunks, tokens = (
        len(batch.generation_slots), len(batch.runs), batch.num_tokens,
    )  # fmt: skip
    attention, own = found.attention, expected.attention
    for values, own_values, padding in (
        (found.tokens, expected.tokens, 0),
        (attention.positions, own.positions, 0),
        (attention.slot_mapping[0], own.slot_mapping[0], -1),
    ):
        assert values[:tokens].equal(own_values)
        assert (values[tokens:] == padding).all()
    starts, size = attention.query_starts, attention.num_generations
    assert starts[: chunks + 1].equal(own.query_starts)
    assert (starts[chunks:] == tokens).all()
    for values, own_values in (
        (attention.context_lengths, own.context_lengths),
        (attention.block_tables[0], own.block_tables[0]),
    ):
        assert values[:generations].equal(own_values[:generations])
        assert values[size : size + chunks].equal(own_values[generations:])
        assert not values[generations:size].any()
        assert not values[size + chunks :].any()
    assert expected.sample_rows is not None
    assert found.sample_rows is not None
    assert found.sample_rows[: batch.num_drawn].equal(expected.sample_rows)
    assert not found.sample_rows[batch.num_drawn :].any()


def test_padding_changes_no_step() -> None:
    words = max_words(NUM_SLOTS, MOST, MAX_BLOCKS)
    sides = [
        (SlotTable(NUM_SLOTS, MAX_BLOCKS, BLOCK, "cpu"), StepBuffer(words, NUM_SLOTS, "cpu"))
        for _ in range(2)
    ]
    recorded = {sizes: sides[1][1].run_words(sizes) for sizes in SIZES}  # before anything is sent
    seen = set()
    for batch in plans(200):
        own_sizes = StepSizes.of(batch)
        larger = SIZES[batch.iteration % len(SIZES) :]
        sizes = next(each for each in larger if each.hold(own_sizes)) if batch.runs else own_sizes
        steps = []
        for (slots, buffer), used in zip(sides, (own_sizes, sizes), strict=True):
            packed = buffer.send(batch, used)
            slots.set_up(batch, packed)
            slots.book(batch)
            steps.append(slots.begin(recorded.get(used, packed.runs)))
            slots.store(packed.sample_slots.long(), torch.arange(batch.num_drawn) + batch.iteration)
        if batch.runs:
            check(batch, steps[1], steps[0])
            seen.add(sizes)
        state, expected = (slots.lengths(torch.arange(NUM_SLOTS + 1)) for slots, _ in sides)
        assert state.equal(expected)
        assert state[NUM_SLOTS] == 0, "the padding slot has nothing"
    assert seen == set(SIZES)
