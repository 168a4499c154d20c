"""E1 and O1: the time of one generation step of the 8B, and how much of it the device idles.

256 prompts are computed for real, then steps of the first 256, 128, ... 1 slots are timed in three
ways, each from the same context on: recordings replayed behind one another with nothing of the host
in between (the device alone); one step submitted while the one before it runs, as the server does;
and one by one. The device idles for the difference of the first two. Then a prompt beside
generations, and prompts, are timed as recordings, where they fit one, and eagerly. Last, because it
asks the profiler: which kernels a step of generations is made of.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

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
from gpu_parts.offline import DEFAULTS, engines
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.step_buffer import StepSizes
from inflight_scheduler import (
    BlockAssignment,
    ContextChunk,
    SamplingParams,
    ScheduledBatch,
    SlotSetup,
)

_NUM_STEPS = 20
_BLOCK = 64
_PROFILED, _NUM_PROFILED, _NUM_TOLD = (256, 64, 1), 3, 8
"""Batches whose step is taken apart, steps of each, and kernels told of it."""
_DRAWN = 64
"""Slots of the step that draws with filters, beside the greedy one."""
_MIXED, _MIXED_DRY = ((16, 64), (64, 128), (256, 256), (64, 900)), ((2, 6),)
"""Slots of a mixed step, the last of which has a prompt, and its tokens."""
_PROFILER_SECONDS = 10  # with less left it is not begun


def bf16(setting: Setting) -> Iterator[Row]:
    """Weights and cache in bf16."""
    yield from _precision(setting, "none")


def fp8(setting: Setting) -> Iterator[Row]:
    """Weights and cache in FP8."""
    yield from _precision(setting, "fp8")


def defaults(setting: Setting) -> Iterator[Row]:
    """Steps of the 8B in bf16 as served without a setting: requests of up to 131,072 tokens, blocks
    of 32, steps of 8,192 tokens, and all the memory that is left."""
    batches, context = ([2, 1], 20) if setting.is_dry else ([256, 64], 1024)
    start = time.monotonic()
    engine = make_engine(setting, *engines(setting)[DEFAULTS])
    labels = {"model": "8B", "precision": "bf16", "settings": "defaults"}
    yield {**labels, **start_row(setting, "8B", engine, time.monotonic() - start)}
    num_blocks = -(-(context + 2 * _NUM_STEPS) // engine.tokens_per_block)
    _fill(setting, engine, batches[0], context, num_blocks)
    with without_mixed(engine):
        for batch_size in batches:
            yield {**labels, **_steps(setting, engine, batch_size, context, is_fp8=False)}


def _precision(setting: Setting, quantization: str) -> Iterator[Row]:
    is_fp8 = quantization == "fp8"
    model = TINY if setting.is_dry else LLAMA_8B
    batches = [2, 1] if setting.is_dry else [256, 128, 64, 32, 8, 1]
    context = 20 if setting.is_dry else 1024
    length = context + 2 * _NUM_STEPS  # room for what is timed between two rewinds
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
    tokens_per_second = _fill(setting, engine, batches[0], context, num_blocks)
    yield {**labels, "what": "fill", **setting.figures(tokens_per_s=tokens_per_second)}
    with without_mixed(engine):  # the rewind would be one: a fault there must not cost these rows
        for batch_size in batches:
            yield {**labels, **_steps(setting, engine, batch_size, context, is_fp8)}
        drawn = min(_DRAWN, batches[0])
        with _filters(engine, drawn, context):
            row = _steps(setting, engine, drawn, context, is_fp8)
        yield {**labels, **row, "what": "draw", "kind": "top-k 50, top-p 0.9"}
    for num_slots, length in _MIXED_DRY if setting.is_dry else _MIXED:
        mixed = partial(_mixed, setting, engine, num_slots, length, context)
        for row in _recorded_and_eager(engine, num_slots - 1 + length, mixed):
            yield {**labels, **row}
    for length in (40, 8) if setting.is_dry else (2048, 1024, 128):
        prompt = partial(_prompt, setting, engine, length, is_fp8)
        for row in _recorded_and_eager(engine, length, prompt):
            yield {**labels, **row}
    for batch_size in (2,) if setting.is_dry else _PROFILED:
        has_time = setting.is_dry or setting.seconds_left > _PROFILER_SECONDS
        if has_time and engine._attention.can_be_captured:
            for row in _parts(setting, engine, batch_size, context):
                yield {**labels, **row}


def _prompt(setting: Setting, engine: Engine, length: int, is_fp8: bool) -> Row:
    """Time to the token of one prompt, in the last slot, and what of it the host took to submit the
    step: medians of three after a warm-up."""
    slot = engine.config.max_batch_size - 1
    batch = _context_batch(engine, [slot], length, _blocks([slot], length))
    times, submits = [], []
    for _ in range(4):
        setting.synchronize()
        start = time.perf_counter()
        pending = engine.submit(batch)
        submits.append(1e6 * (time.perf_counter() - start))
        pending.read()
        times.append(1e3 * (time.perf_counter() - start))
    floor = context_floor_ms(setting, engine.model_config, is_fp8, length)
    measured, submit = sorted(times[1:])[1], sorted(submits[1:])[1]
    figures = setting.figures(
        ms=measured, floor_ms=floor, of_floor=floor / measured, host_us=submit
    )
    return {"what": "prompt", "tokens": length, **figures}


def _recorded_and_eager(
    engine: Engine, num_tokens: int, measure: Callable[[], Row]
) -> Iterator[Row]:
    """What ``measure`` says of steps of ``num_tokens`` tokens where they are replayed, if they can
    be, and where they run eagerly."""
    if engine.num_mixed_graphs and num_tokens <= engine.config.cuda_graph_mixed_tokens:
        yield {"mixed_steps": "recorded", **measure()}
    with without_mixed(engine):
        yield {"mixed_steps": "eager", **measure()}


@contextmanager
def without_mixed(engine: Engine) -> Iterator[None]:
    """Meanwhile ``engine`` replays no mixed step."""
    recordings = engine._graphs
    engine._graphs = replace(recordings, mixed=())
    try:
        yield
    finally:
        engine._graphs = recordings


def _mixed(setting: Setting, engine: Engine, num_slots: int, length: int, context: int) -> Row:
    """A prompt of ``length`` tokens in the last slot beside a generation in each of the others of
    ``num_slots``, at ``context`` tokens: one submitted while the one before it runs, as the server
    does, and what of one the host took to submit it while the device was idle."""
    others = tuple(range(num_slots - 1))
    batch = ScheduledBatch(iteration=2, generation_slots=others)
    prompt = _context_batch(engine, [num_slots - 1], length, ())
    batch = replace(batch, context_chunks=prompt.context_chunks)
    num_steps = 2 if setting.is_dry else _NUM_STEPS
    engine.execute(_rewind(batch, context))
    for _ in range(3):
        engine.execute(batch)
    submits = []
    for _ in range(3):
        start = time.perf_counter()
        pending = engine.submit(batch)
        submits.append(1e6 * (time.perf_counter() - start))
        pending.read()
    start = time.perf_counter()
    _overlap(engine, batch, num_steps)
    overlapped = (time.perf_counter() - start) / num_steps
    figures = setting.figures(overlapped_ms=1e3 * overlapped, host_us=sorted(submits)[1])
    sizes = {"generations": num_slots - 1, "prompt": length, "context": context}
    return {"what": "mixed step", **sizes, **figures}


@contextmanager
def _filters(engine: Engine, num_slots: int, context: int) -> Iterator[None]:
    """Meanwhile the first slots draw by top-k and top-p; they are greedy before and after."""
    slots = tuple(range(num_slots))
    batch = _rewind(ScheduledBatch(iteration=1, generation_slots=slots), context)

    def draw_by(sampling: SamplingParams) -> None:
        setups = tuple(SlotSetup(slot, slot + 1, sampling) for slot in slots)
        engine.execute(replace(batch, setups=setups))

    draw_by(SamplingParams(temperature=0.8, top_k=50, top_p=0.9))
    try:
        yield
    finally:
        draw_by(SamplingParams())


def _overlap(engine: Engine, batch: ScheduledBatch, num_steps: int) -> None:
    """The loop of a server: each step is submitted before the one in front of it is read."""
    before = engine.submit(batch)
    for _ in range(num_steps - 1):
        running = engine.submit(batch)
        before.read()
        before = running
    before.read()


def _fill(setting: Setting, engine: Engine, num_slots: int, length: int, num_blocks: int) -> float:
    """Compute a prompt in every slot, the first ones once more before; tokens per second."""
    per_step = max(1, engine.max_num_tokens // length)
    batches = []
    for first in range(0, num_slots, per_step):
        slots = list(range(first, min(first + per_step, num_slots)))
        blocks = tuple(
            BlockAssignment(slot, index, slot * num_blocks + index)
            for slot in slots
            for index in range(num_blocks)
        )
        batches.append(_context_batch(engine, slots, length, blocks))
    engine.enqueue(batches[0])
    setting.synchronize()
    start = time.perf_counter()
    for batch in batches:
        engine.enqueue(batch)
    setting.synchronize()
    return num_slots * length / (time.perf_counter() - start)


def _blocks(slots: list[int], length: int) -> tuple[BlockAssignment, ...]:
    """The first blocks of the pool; the next batch computes them again."""
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


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step; ``device`` is None for an engine without recordings."""

    device: float | None
    overlapped: float
    plain: float
    host: float
    """To submit a step while the device is idle: with steps queued, the host waits for buffers."""

    @property
    def idle_percent(self) -> float:
        """Of the time of the overlapped loop, which is the server's; 100 if nothing is known."""
        return 100 * max(0.0, 1 - (self.device or 0.0) / self.overlapped)


def time_steps(
    setting: Setting, engine: Engine, batch: ScheduledBatch, context: int, num_steps: int
) -> StepTimes:
    """The three times of a step of generations alone, all from ``context`` on."""
    graph, waited = engine._graphs.find(batch), 0.0

    def timed(run: Callable[[], None]) -> float:
        engine.execute(_rewind(batch, context))
        for _ in range(3):
            engine.execute(batch)
        setting.synchronize()
        start = time.perf_counter()
        run()
        setting.synchronize()
        return (time.perf_counter() - start) / num_steps

    @torch.inference_mode()
    def replay() -> None:
        """The slots of ``batch`` lie where recordings read them: `timed` has just run its step."""
        assert graph is not None
        assert graph.replay_draw is not None
        for _ in range(num_steps):
            graph.replay()
            graph.replay_draw()

    def one_by_one() -> None:
        nonlocal waited
        for _ in range(num_steps):
            pending = engine.submit(batch)
            start = time.perf_counter()
            pending.read()
            waited += time.perf_counter() - start

    device = timed(replay) if graph is not None else None
    overlapped, plain = timed(partial(_overlap, engine, batch, num_steps)), timed(one_by_one)
    return StepTimes(device, overlapped, plain, plain - waited / num_steps)


def _rewind(batch: ScheduledBatch, context: int) -> ScheduledBatch:
    """Compute the last token of the context again: all slots are back at its end."""
    slots = batch.generation_slots
    chunks = (ContextChunk(slot, context - 1, (1,), is_last=True) for slot in slots)
    return ScheduledBatch(iteration=1, context_chunks=tuple(chunks))


def _steps(setting: Setting, engine: Engine, batch_size: int, context: int, is_fp8: bool) -> Row:
    batch = ScheduledBatch(iteration=2, generation_slots=tuple(range(batch_size)))
    times = time_steps(setting, engine, batch, context, 2 if setting.is_dry else _NUM_STEPS)
    row: Row = {"what": "step", "batch": batch_size, "context": context}
    if times.device is not None:
        floor = step_floor_ms(setting, engine.model_config, is_fp8, batch_size, context)
        row |= setting.figures(
            ms=1e3 * times.device,
            floor_ms=floor,
            of_floor=floor / (1e3 * times.device),
            idle_percent=times.idle_percent,
        )
    return row | setting.figures(
        overlapped_ms=1e3 * times.overlapped,
        plain_ms=1e3 * times.plain,
        host_us=1e6 * times.host,
        tokens_per_s=batch_size / times.overlapped,
    )


def _parts(setting: Setting, engine: Engine, batch_size: int, context: int) -> Iterator[Row]:
    """The kernels that take most of a step of generations, then all of them. What would be recorded
    runs eagerly, since profilers are known to misread recordings (pytorch/kineto issue 1165): its
    kernels are the same. What a recorded step takes beyond them are gaps."""
    batch = ScheduledBatch(iteration=2, generation_slots=tuple(range(batch_size)))
    engine.execute(_rewind(batch, context))
    engine.execute(batch)
    recorder = engine._graph_capturer
    words = engine._buffer.run_words(StepSizes(batch_size))  # of ``batch``, which has just run

    @torch.inference_mode()
    def run() -> None:
        for _ in range(_NUM_PROFILED):
            recorder.draw(words, recorder.forward(words, engine._attention))

    run()
    setting.synchronize()
    where = setting.device.type.upper()  # by this name the profiler knows it
    activity = getattr(torch.profiler.ProfilerActivity, where)
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        setting.synchronize()
    ran = (
        (event.name, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type.name == where
    )
    for row in told_kernels(ran, _NUM_PROFILED):
        figures = {name: row.pop(name) for name in ("us", "launches")}
        yield {"batch": batch_size, "context": context, **row, **setting.figures(**figures)}


def told_kernels(ran: Iterable[tuple[str, float]], num_steps: int) -> Iterator[Row]:
    """Of kernels that ran in so many steps, (name, microseconds) each: launches and time per step
    of those that took longest, then of all."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in ran:
        times[name].append(microseconds)
    longest = sorted(times, key=lambda name: -sum(times[name]))
    for name in longest[:_NUM_TOLD]:
        mine = times[name]
        yield {
            "what": "kernel",
            "name": name[:80],
            "us": sum(mine) / num_steps,
            "launches": len(mine) / num_steps,
        }
    everything = [microseconds for mine in times.values() for microseconds in mine]
    yield {
        "what": "all kernels",
        "us": sum(everything) / num_steps,
        "launches": len(everything) / num_steps,
    }
