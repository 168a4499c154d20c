"""E2 and E3: whole requests through scheduler, planner and engine, all arriving at once.

A row for which too little time is left is left out and says so. One that does not end in time
says which share of its tokens it made: its figure is then that of the beginning, not to be
compared with others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_parts.common import LLAMA_8B, LLAMA_13B, TINY, Row, Setting, make_engine

from inflight_backend.engine import Engine, EngineConfig, ModelConfig
from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    LlmRequest,
    make_scheduler,
)

_BLOCK = 64


@dataclass(frozen=True)
class _Work:
    """Requests of one size and the published figure to beat (out tokens/s), if there is one."""

    num_requests: int
    input: int
    output: int
    published: int

    @property
    def label(self) -> str:
        """Requests x input tokens / output tokens."""
        return f"{self.num_requests} x {self.input}/{self.output}"

    @property
    def expected_seconds(self) -> float:
        """What it takes at two thirds of the published speed."""
        return 1.5 * self.num_requests * self.output / self.published


# NVIDIA/TensorRT-LLM docs/source/blogs/H200launch.md: Llama-2-13B, FP8, one H200.
_STATIC = (_Work(1024, 128, 128, 11_819), _Work(64, 2048, 128, 1_349), _Work(128, 128, 2048, 4_750))
# docs/source/performance/perf-overview.md v1.0: Llama-3.1-8B, FP8, one H200.
_INFLIGHT = (
    _Work(2048, 128, 128, 27_911),
    _Work(256, 2048, 128, 3_538),
    _Work(640, 1000, 1000, 17_744),
    _Work(1024, 128, 2048, 26_221),
    _Work(512, 2048, 2048, 12_194),
    _Work(768, 500, 2000, 20_770),
)
_DRY = (_Work(3, 9, 4, 1),)


def static(setting: Setting) -> Iterator[Row]:
    """E2: the headline rows of Llama-2-13B in FP8, the batch as large as the number of requests."""
    works = _DRY if setting.is_dry else _STATIC
    yield from _rows(setting, "13B", LLAMA_13B, works, max_batch_size=1024)


def inflight(setting: Setting) -> Iterator[Row]:
    """E3: Llama-3.1-8B in FP8."""
    works = _DRY if setting.is_dry else _INFLIGHT
    yield from _rows(setting, "8B", LLAMA_8B, works, max_batch_size=2048)


def _rows(
    setting: Setting,
    name: str,
    model: ModelConfig,
    works: tuple[_Work, ...],
    max_batch_size: int,
) -> Iterator[Row]:
    config = EngineConfig(
        max_batch_size=2 if setting.is_dry else max_batch_size,
        max_num_tokens=32 if setting.is_dry else 16_384,
        max_seq_len=64 if setting.is_dry else 4096,
        tokens_per_block=_BLOCK,
        max_tokens_in_paged_kv_cache=256 if setting.is_dry else None,
        quantization="fp8",
        kv_cache_dtype="auto" if setting.is_dry else "fp8",
    )
    start = time.monotonic()
    engine = make_engine(setting, TINY if setting.is_dry else model, config)
    started = setting.figures(seconds=time.monotonic() - start)
    yield {"model": name, "what": "start", "kv_blocks": engine.num_blocks, **started}
    for work in works:
        needed = work.expected_seconds
        if setting.is_dry or needed < setting.seconds_left:
            yield {"model": name, **_row(setting, engine, work)}
        else:
            left = f"{setting.seconds_left:.0f} s were left, it needs about {needed:.0f}"
            yield {"model": name, "what": work.label, "left_out": left}


def _row(setting: Setting, engine: Engine, work: _Work) -> Row:
    start = time.perf_counter()
    made, num_steps, host = _generate(setting, engine, work)
    seconds = time.perf_counter() - start
    wanted = work.num_requests * work.output
    speed = made / seconds
    return {
        "what": work.label if made == wanted else f"{work.label} (only {made / wanted:.0%} of it)",
        "steps": num_steps,
        **setting.figures(
            seconds=seconds,
            tokens_per_s=speed,
            published=work.published,
            of_published=speed / work.published,
            host_ms_per_step=1e3 * host / num_steps,
        ),
    }


def _generate(setting: Setting, engine: Engine, work: _Work) -> tuple[int, int, float]:
    """(tokens made, steps, seconds spent scheduling and planning)."""
    blocks = BlockManager(engine.num_blocks, engine.tokens_per_block)
    planner = BatchPlanner(blocks, engine.config.max_batch_size)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
    )
    generator = torch.Generator().manual_seed(work.input)
    size = (work.num_requests, work.input)
    prompts = torch.randint(engine.vocab_size, size, generator=generator).tolist()
    requests = [LlmRequest(i, prompt, work.output) for i, prompt in enumerate(prompts, 1)]
    active, num_steps, host = list(requests), 0, 0.0
    while active and (setting.is_dry or setting.seconds_left > 0):
        begin = time.perf_counter()
        batch = planner.plan(*scheduler.schedule_request(active, ()))
        host += time.perf_counter() - begin
        tokens = engine.execute(batch)
        begin = time.perf_counter()
        finished = False
        for request in planner.update(batch, tokens):
            if request.is_finished:
                planner.release(request)
                finished = True
        if finished:
            active = [request for request in active if not request.is_finished]
        num_steps += 1
        host += time.perf_counter() - begin
    for request in active:
        planner.release(request)
    return sum(request.num_generated_tokens for request in requests), num_steps, host
