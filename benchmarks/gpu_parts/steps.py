"""E1 and O1: the time of one generation step of the 8B, and what the host spends on it.

256 prompts are computed for real, then steps of the first 256, 128, ... 1 slots are timed: all of
them queued behind one another (the time of the device, unless the host is slower), and one by one
with the tokens read in between (the plain loop). The difference is time the device idles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from gpu_parts.common import (
    LLAMA_8B,
    TINY,
    Row,
    Setting,
    context_floor_ms,
    make_engine,
    start_row,
    step_floor_ms,
)

from inflight_backend.engine import Engine, EngineConfig
from inflight_scheduler import (
    BlockAssignment,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)

_NUM_STEPS = 20
_BLOCK = 64


def rows(setting: Setting) -> Iterator[Row]:
    """bf16, then FP8 weights and cache, which a quick run leaves out."""
    for quantization in ("none",) if setting.is_quick else ("none", "fp8"):
        yield from _precision(setting, quantization)


def _precision(setting: Setting, quantization: str) -> Iterator[Row]:
    is_fp8 = quantization == "fp8"
    model = TINY if setting.is_dry else LLAMA_8B
    batches = [2, 1] if setting.is_dry else [256, 128, 64, 32, 8, 1]
    context = 20 if setting.is_dry else 1024
    length = context + 3 * _NUM_STEPS  # room for everything that is timed between two rewinds
    num_blocks = -(-length // _BLOCK)
    config = EngineConfig(
        max_batch_size=batches[0],
        max_num_tokens=64 if setting.is_dry else 16_384,
        max_seq_len=TINY.max_position_embeddings if setting.is_dry else 8192,
        tokens_per_block=_BLOCK,
        max_tokens_in_paged_kv_cache=batches[0] * num_blocks * _BLOCK,
        quantization=quantization,
        kv_cache_dtype="fp8" if is_fp8 and not setting.is_dry else "auto",
    )
    start = time.monotonic()
    engine = make_engine(setting, model, config)
    labels = {"model": "8B", "precision": quantization if is_fp8 else "bf16"}
    yield {**labels, **start_row(setting, "8B", engine, time.monotonic() - start)}
    yield {**labels, **_prompt(setting, engine, 40 if setting.is_dry else 2048, is_fp8)}
    tokens_per_second = _fill(setting, engine, batches[0], context, num_blocks)
    yield {**labels, "what": "fill", **setting.figures(tokens_per_s=tokens_per_second)}
    for batch_size in batches:
        yield {**labels, **_steps(setting, engine, batch_size, context, is_fp8)}


def _prompt(setting: Setting, engine: Engine, length: int, is_fp8: bool) -> Row:
    """Time to the token of one prompt, in the last slot: median of three after a warm-up."""
    slot = engine.config.max_batch_size - 1
    times = []
    for _ in range(4):
        setting.synchronize()
        start = time.perf_counter()
        engine.execute(_context_batch(engine, [slot], length, _blocks([slot], length)))
        times.append(1e3 * (time.perf_counter() - start))
    floor = context_floor_ms(setting, engine.model_config, is_fp8, length)
    measured = sorted(times[1:])[1]
    figures = setting.figures(ms=measured, floor_ms=floor, of_floor=floor / measured)
    return {"what": "prompt", "tokens": length, **figures}


def _fill(setting: Setting, engine: Engine, num_slots: int, length: int, num_blocks: int) -> float:
    """Compute a prompt in every slot, the first ones once more before; tokens per second."""
    per_step = max(1, engine.max_num_tokens // length)
    start = 0.0
    for first in (0, *range(0, num_slots, per_step)):
        slots = list(range(first, min(first + per_step, num_slots)))
        blocks = tuple(
            BlockAssignment(slot, index, slot * num_blocks + index)
            for slot in slots
            for index in range(num_blocks)
        )
        engine.enqueue(_context_batch(engine, slots, length, blocks))
        if not start:
            setting.synchronize()
            start = time.perf_counter()
    setting.synchronize()
    return num_slots * length / (time.perf_counter() - start)


def _blocks(slots: list[int], length: int) -> tuple[BlockAssignment, ...]:
    """The first blocks of the pool; whoever comes next computes them anew."""
    return tuple(
        BlockAssignment(slot, index, index)
        for slot in slots
        for index in range(-(-length // _BLOCK))
    )


def _context_batch(
    engine: Engine, slots: list[int], length: int, blocks: tuple[BlockAssignment, ...]
) -> ScheduledBatch:
    generator = torch.Generator().manual_seed(slots[0])
    prompts = torch.randint(engine.vocab_size, (len(slots), length), generator=generator).tolist()
    return ScheduledBatch(
        iteration=1,
        setups=tuple(SlotSetup(slot, slot + 1, SamplingParams()) for slot in slots),
        new_blocks=blocks,
        context_chunks=tuple(
            ContextChunk(slot, 0, tuple(prompt), is_last=True)
            for slot, prompt in zip(slots, prompts, strict=True)
        ),
    )


def _rewind(num_slots: int, context: int) -> ScheduledBatch:
    """Compute the last token of the context again: all slots are back at its end."""
    chunks = (ContextChunk(slot, context - 1, (1,), is_last=True) for slot in range(num_slots))
    return ScheduledBatch(iteration=1, context_chunks=tuple(chunks))


def _steps(setting: Setting, engine: Engine, batch_size: int, context: int, is_fp8: bool) -> Row:
    batch = ScheduledBatch(iteration=2, generation_slots=tuple(range(batch_size)))
    num_steps = 2 if setting.is_dry else _NUM_STEPS
    engine.execute(_rewind(batch_size, context))
    for _ in range(3):
        engine.execute(batch)
    setting.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.enqueue(batch)
    setting.synchronize()
    queued = (time.perf_counter() - start) / num_steps
    start = time.perf_counter()
    host = 0.0  # taken while the device is idle: with steps queued, the host waits for buffers
    for _ in range(num_steps):
        begin = time.perf_counter()
        pending = engine.submit(batch)
        host += time.perf_counter() - begin
        pending.read()
    plain = (time.perf_counter() - start) / num_steps
    floor = step_floor_ms(setting, engine.model_config, is_fp8, batch_size, context)
    return {
        "what": "step",
        "batch": batch_size,
        "context": context,
        **setting.figures(
            ms=1e3 * queued,
            floor_ms=floor,
            of_floor=floor / (1e3 * queued),
            plain_ms=1e3 * plain,
            host_us=1e6 * host / num_steps,
            idle_percent=100 * max(0.0, 1 - queued / plain),
            tokens_per_s=batch_size / queued,
        ),
    }
