"""Drives an engine with plans made by hand, to reach corners that a scheduler seldom visits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from inflight_backend.engine import Engine
from inflight_scheduler import (
    NO_OUTPUTS,
    AdapterAssignment,
    BlockAssignment,
    ContextChunk,
    OutputParams,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
    VerifiedSlot,
)
from inflight_scheduler.planning.verification import num_confirmed


@dataclass(eq=False)
class Job:
    """One request: its prompt, what was generated, and what it holds."""

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_id: int = -1
    min_end_position: int = 0
    slot: int | None = None
    num_cached: int = 0
    blocks: list[list[int]] = field(default_factory=list)  # of each group, -1 for those given back
    generated: list[int] = field(default_factory=list)
    has_drawn: bool = False  # since it got its slot
    outputs: OutputParams = NO_OUTPUTS
    is_verified: bool = True  # the engine knows how far it has come
    adapter: int = -1  # its place

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def is_generating(self) -> bool:
        """True when all but the last token is cached."""
        return self.has_drawn and self.num_cached == len(self.tokens) - 1

    def setup(self, slot: int) -> SlotSetup:
        """What the engine is given of it at its first chunk in ``slot``."""
        return SlotSetup(
            slot,
            1,
            self.sampling,
            self.end_id,
            self.min_end_position,
            len(self.prompt),
            tuple(self.tokens) if self.sampling.looks_back else (),
            self.outputs,
        )


class EngineDriver:
    """Owns slots and blocks of an engine; blocks are handed out in a shuffled order."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.free_slots = list(range(engine.config.max_batch_size))
        self.free_blocks = list(range(engine.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.num_steps = 0

    def step(
        self,
        chunks: Mapping[Job, int],
        generations: Sequence[Job] = (),
        drafts: Mapping[Job, Sequence[int]] = MappingProxyType({}),
    ) -> list[int]:
        """Run ``chunks`` (job -> prompt tokens, 0 for all that are left) and one token of each
        of ``generations``; tokens go to their jobs and are returned in plan order.

        Jobs with ``drafts`` (of all these) verify them, and get the tokens that count."""
        runs = [job for job in generations if drafts.get(job)]
        generations = [job for job in generations if job not in runs]
        assert all(job.is_generating for job in (*runs, *generations))
        setups: list[SlotSetup] = []
        adapters: list[AdapterAssignment] = []
        new_blocks: list[BlockAssignment] = []
        plan, takers = [], []
        for job, length in chunks.items():
            if job.slot is None:
                job.slot = self.free_slots.pop()
                setups.append(job.setup(job.slot))
                adapters.append(AdapterAssignment(job.slot, job.adapter))
            end = job.num_cached + length if length else len(job.tokens)
            is_last = end == len(job.tokens)
            text = tuple(job.tokens[job.num_cached : end])
            guesses = tuple(drafts.get(job, ())) if is_last else ()
            plan.append(ContextChunk(job.slot, job.num_cached, text, is_last, guesses))
            self._grow(job, end + len(guesses), new_blocks)
            if is_last:
                takers.append(job)
        slots = [self._grow(job, len(job.tokens), new_blocks) for job in generations]
        verified = [
            VerifiedSlot(slot, len(job.tokens) - 1, job.tokens[-1])
            for slot, job in zip(slots, generations, strict=True)
            if not job.is_verified
        ]
        draft_runs = []
        for job in runs:
            slot = self._grow(job, len(job.tokens) + len(drafts[job]), new_blocks)
            start, token = len(job.tokens) - 1, job.tokens[-1]
            draft_runs.append(ContextChunk(slot, start, (token,), True, tuple(drafts[job])))
        self.num_steps += 1
        batch = ScheduledBatch(
            self.num_steps,
            tuple(setups),
            tuple(new_blocks),
            tuple(plan),
            tuple(slots),
            draft_runs=tuple(draft_runs),
            verified=tuple(verified),
            adapters=tuple(adapters),
        )
        tokens = self.engine.execute(batch)
        self._take([*takers, *runs, *generations], batch, tokens)
        return tokens

    def _take(self, takers: Sequence[Job], batch: ScheduledBatch, tokens: Sequence[int]) -> None:
        """Give ``takers`` what counts of ``tokens``."""
        drafts = [run.drafts for run in batch.runs if run.is_last]
        drafts += [()] * len(batch.generation_slots)
        rest = iter(tokens)
        for job, guesses in zip(takers, drafts, strict=True):
            drawn = list(islice(rest, len(guesses) + 1))
            num_right = num_confirmed(guesses, drawn)
            job.generated += drawn[: num_right + 1]
            job.num_cached = len(job.tokens) - 1
            job.has_drawn, job.is_verified = True, not guesses
        assert next(rest, None) is None

    def release(self, job: Job) -> None:
        """Take slot and blocks away: the end of a job, or a pause."""
        assert job.slot is not None
        self.free_slots.append(job.slot)
        held = [block for table in job.blocks for block in table if block >= 0]
        self.free_blocks = held + self.free_blocks
        job.slot, job.num_cached, job.blocks, job.has_drawn = None, 0, [], False
        job.is_verified = True

    def generate(
        self, jobs: Sequence[Job], num_tokens: int, chunk_size: int = 0
    ) -> list[list[int]]:
        """All together until each has ``num_tokens`` more; prompts ``chunk_size`` at a time."""
        goals = {job: len(job.generated) + num_tokens for job in jobs}
        while waiting := [job for job in jobs if len(job.generated) < goals[job]]:
            running = [job for job in waiting if job.is_generating]
            chunks = {
                job: min(chunk_size, len(job.tokens) - job.num_cached)
                for job in waiting
                if not job.is_generating
            }
            self.step(chunks, running)
        return [job.generated for job in jobs]

    def _grow(self, job: Job, num_tokens: int, new_blocks: list[BlockAssignment]) -> int:
        """Blocks for ``num_tokens`` tokens, which are cached then; returns the slot.

        Those behind windows are given back before, and taken again first.
        """
        assert job.slot is not None
        size = self.engine.tokens_per_block
        job.blocks = job.blocks or [[] for _ in self.engine.windows]
        for group, (window, table) in enumerate(zip(self.engine.windows, job.blocks, strict=True)):
            num_behind = 0 if window is None else max(job.num_cached - window + 1, 0) // size
            self.free_blocks[:0] = [block for block in table[:num_behind] if block >= 0]
            table[:num_behind] = [-1] * min(num_behind, len(table))
            while len(table) * size < num_tokens:
                block = self.free_blocks.pop(0)
                new_blocks.append(BlockAssignment(job.slot, len(table), block, group))
                table.append(block)
        job.num_cached = num_tokens
        return job.slot
