"""Whole requests through scheduler, planner and engine, all arriving at once.

The loop is the server's overlapped one without the server: a step is decided and submitted while
the one before it runs, whose tokens are read after. Only what a request costs is in it, no wire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from inflight_backend.engine import Engine
from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    make_scheduler,
)


@dataclass(frozen=True)
class Finished:
    """What one run made; ``host_seconds`` were spent scheduling, planning and booking."""

    tokens: list[list[int]]
    num_steps: int
    seconds: float
    host_seconds: float
    num_reused_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(map(len, self.tokens))


def warm_up(engine: Engine, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> None:
    """The beginning of the work, two full steps of prompts, with answers of at most 16 tokens: its
    steps of prompts alone, of both kinds and of generations alone have then run once."""
    room = 2 * engine.max_num_tokens
    few = 1 + sum(total <= room for total in accumulate(map(len, prompts)))
    run_requests(engine, prompts[:few], [min(length, 16) for length in output_lens[:few]])


def run_requests(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_lens: Sequence[int],
    stop_at: float = float("inf"),
    *,
    enable_reuse: bool = False,
) -> Finished:
    """Greedy answers of exactly ``output_lens`` tokens, as far as the clock of `time.monotonic`
    allows: at ``stop_at`` what runs is given up, and its tokens so far are returned."""
    blocks = BlockManager(engine.num_blocks, engine.tokens_per_block, enable_reuse=enable_reuse)
    planner = BatchPlanner(blocks, engine.config.max_batch_size)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
    )
    requests = [
        LlmRequest(number, list(prompt), length)
        for number, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True), 1)
    ]
    active, before, num_steps, host = list(requests), None, 0, 0.0
    start = time.perf_counter()
    while (active or before) and time.monotonic() < stop_at:
        begin = time.perf_counter()
        batch = planner.plan(*scheduler.schedule_request(active, ()))
        running = None
        if not batch.is_empty:
            running = batch, engine.submit(batch)
            planner.assume_step(batch)
            num_steps += 1
        host += time.perf_counter() - begin
        if before is not None:
            tokens = before[1].read()
            begin = time.perf_counter()
            finished = [r for r in planner.apply_tokens(before[0], tokens) if r.is_finished]
            for request in finished:
                planner.release(request)
            if finished:
                active = [request for request in active if not request.is_finished]
            host += time.perf_counter() - begin
        before = running
    if before is not None:
        before[1].read()
    seconds = time.perf_counter() - start
    for request in active:
        planner.release(request)
    answers = [list(request.tokens[request.orig_prompt_len :]) for request in requests]
    return Finished(answers, num_steps, seconds, host, blocks.reuse_stats.num_reused_blocks)
