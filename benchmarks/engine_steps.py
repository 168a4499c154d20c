"""Requests through scheduler, planner and engine on a CPU, step by step and without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from inflight_backend.engine import Engine, EngineConfig
from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    make_scheduler,
)

_BLOCK_SIZE = 32
Guess = Callable[[ActiveRequests], None]


def load_engine(
    folder: Path,
    num_requests: int,
    num_tokens: int,
    dtype: str = "float32",
    *,
    enable_lora: bool = False,
    quantization: str = "none",
) -> Engine:
    """With room for so many requests of ``num_tokens`` each."""
    num_blocks = num_requests * -(-num_tokens // _BLOCK_SIZE)
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        max_batch_size=num_requests,
        tokens_per_block=_BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=num_blocks * _BLOCK_SIZE,
        enable_lora=enable_lora,
        quantization=quantization,
    )
    return Engine.load(folder, config)


def run_steps(
    engine: Engine,
    requests: Sequence[LlmRequest],
    make_guess: Callable[[BlockManager], Guess] | None = None,
) -> Iterator[float]:
    """The seconds of the engine in each step, until all requests have ended; the first step begins
    when it is asked for. ``make_guess``: what drafts before each step."""
    blocks = BlockManager(engine.num_blocks, engine.tokens_per_block)
    active = ActiveRequests(blocks)
    planner = BatchPlanner(blocks, engine.config.max_batch_size, active)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
    )
    guess = make_guess(blocks) if make_guess else None
    for request in requests:
        active.add(request)
    while active:
        if guess is not None:
            guess(active)
        batch = planner.plan(*scheduler.schedule_request(active, ()))
        start = time.perf_counter()
        tokens = engine.execute(batch)
        seconds = time.perf_counter() - start
        for request in planner.update(batch, tokens):
            if request.is_finished:
                planner.release(request)
                active.remove(request)
        yield seconds
