"""Drives an engine with plans made by hand, to reach corners that a scheduler seldom visits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inflight_backend.engine import Engine
from inflight_scheduler import (
    BlockAssignment,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)


@dataclass(eq=False)
class Job:
    """One request: its prompt, what was generated, and what it holds."""

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_id: int = -1
    min_end_position: int = 0
    slot: int | None = None
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    has_drawn: bool = False  # since it got its slot

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def is_generating(self) -> bool:
        """True when all but the last token is cached."""
        return self.has_drawn and self.num_cached == len(self.tokens) - 1


class EngineDriver:
    """Owns slots and blocks of an engine; blocks are handed out in a shuffled order."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.free_slots = list(range(engine.config.max_batch_size))
        self.free_blocks = list(range(engine.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.num_steps = 0

    def step(self, chunks: Mapping[Job, int], generations: Sequence[Job] = ()) -> list[int]:
        """Run ``chunks`` (job -> prompt tokens, 0 for all that are left) and one token of each
        of ``generations``; tokens go to their jobs and are returned in plan order."""
        setups: list[SlotSetup] = []
        new_blocks: list[BlockAssignment] = []
        plan, takers = [], []
        for job, length in chunks.items():
            if job.slot is None:
                job.slot = self.free_slots.pop()
                setups.append(
                    SlotSetup(
                        job.slot,
                        1,
                        job.sampling,
                        job.end_id,
                        job.min_end_position,
                        len(job.prompt),
                        tuple(job.tokens) if job.sampling.looks_back else (),
                    )
                )
            end = job.num_cached + length if length else len(job.tokens)
            plan.append(
                ContextChunk(
                    job.slot,
                    job.num_cached,
                    tuple(job.tokens[job.num_cached : end]),
                    end == len(job.tokens),
                )
            )
            self._grow(job, end, new_blocks)
            if end == len(job.tokens):
                takers.append(job)
        for job in generations:
            assert job.is_generating
            self._grow(job, len(job.tokens), new_blocks)
        takers += generations
        self.num_steps += 1
        tokens = self.engine.execute(
            ScheduledBatch(
                self.num_steps,
                tuple(setups),
                tuple(new_blocks),
                tuple(plan),
                tuple(job.slot for job in generations if job.slot is not None),
            )
        )
        assert len(tokens) == len(takers)
        for job, token in zip(takers, tokens, strict=True):
            job.generated.append(token)
            job.has_drawn = True
        return tokens

    def release(self, job: Job) -> None:
        """Take slot and blocks away: the end of a job, or a pause."""
        assert job.slot is not None
        self.free_slots.append(job.slot)
        self.free_blocks = job.blocks + self.free_blocks
        job.slot, job.num_cached, job.blocks, job.has_drawn = None, 0, [], False

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

    def _grow(self, job: Job, num_tokens: int, new_blocks: list[BlockAssignment]) -> None:
        assert job.slot is not None
        while len(job.blocks) * self.engine.tokens_per_block < num_tokens:
            block = self.free_blocks.pop(0)
            new_blocks.append(BlockAssignment(job.slot, len(job.blocks), block))
            job.blocks.append(block)
        job.num_cached = num_tokens
