"""Mixed steps that are recorded for a few sizes and replayed (kernels interpreted): who fits which,
and that they draw what eager ones draw."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.checkpoints import VOCAB_SIZE
from support.engine_driver import EngineDriver, Job
from support.graph_replay import Rerun
from torch import Tensor

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.mixed_step import MixedBuffer, MixedSizes, mixed_sizes, sizes_of
from inflight_backend.engine.slot_table import SlotTable
from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunk,
    ContextChunking,
    ContextChunkingPolicy,
    LlmRequest,
    OutputParams,
    SamplingParams,
    ScheduledBatch,
    make_scheduler,
)

pytestmark = pytest.mark.slow

Folder = Callable[..., Path]
MOST = 16
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    max_batch_size=3,
    max_num_tokens=40,
    tokens_per_block=4,
    max_tokens_in_paged_kv_cache=512,
    attention_backend="triton",
    cuda_graph_mixed_tokens=MOST,
)
NUM_STEPS_SIZES = 3  # 1, 2 and 3 generations, each a decoder and a draw


@pytest.fixture
def folder(checkpoint: Folder) -> Path:
    """A window in one layer only; heads that the kernels take."""
    return checkpoint("qwen2-window", head_dim=16, intermediate_size=64)


@pytest.fixture
def small(checkpoint: Folder) -> Path:
    """One layer."""
    return checkpoint("qwen3", head_dim=16, intermediate_size=64, num_hidden_layers=1)


def load(folder: Path, **settings: object) -> tuple[Engine, Rerun]:
    """An engine that replays what stands for CUDA graphs."""
    capture = Rerun()
    return Engine.load(folder, replace(CONFIG, **settings), capture=capture), capture  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "slots", "expected"),
    [
        (0, 9, []),
        (16, 2, [(16, 2, 2)]),
        (16, 9, [(16, 8, 8), (16, 8, 9)]),
        (
            100,
            64,
            [(64, 16, 8), (64, 16, 32), (64, 16, 64), (100, 25, 8), (100, 25, 32), (100, 25, 64)],
        ),
    ],
)
def test_sizes(most: int, slots: int, expected: list[tuple[int, int, int]]) -> None:
    sizes = mixed_sizes(most, slots)
    assert [(each.num_tokens, each.num_chunks, each.num_generations) for each in sizes] == expected
    assert all(each.num_draws == each.num_tokens for each in sizes)
    assert {each.num_draws for each in mixed_sizes(512, 2)} == {64, 128, 192, 256}
    assert mixed_sizes(512, 300)[-1].num_draws == 300


def test_sizes_are_few_and_waste_little() -> None:
    assert len(mixed_sizes(512, 256)) == 24
    tokens = [0, *sorted({each.num_tokens for each in mixed_sizes(8192, 256)})]
    assert tokens[-1] == 8192
    assert len(tokens) < 45
    for below, size in pairwise(tokens):
        assert size - below <= max(64, below / 8)


def test_a_step_must_fit_all_of_a_size() -> None:
    sizes = MixedSizes(num_tokens=8, num_chunks=2, num_generations=3, num_draws=5)
    assert sizes.hold(sizes)
    for name in ("num_tokens", "num_chunks", "num_generations", "num_draws"):
        assert not sizes.hold(replace(sizes, **{name: getattr(sizes, name) + 1})), name
    batch = ScheduledBatch(
        1,
        context_chunks=(ContextChunk(0, 0, (1, 2), is_last=False),),
        generation_slots=(1, 2),
        draft_runs=(ContextChunk(3, 5, (1,), True, (4, 5)),),
    )
    assert sizes_of(batch) == MixedSizes(7, 2, 2, 5)


def test_padding_has_no_context_and_keeps_nothing() -> None:
    (sizes,) = mixed_sizes(9, 3)
    slots = SlotTable(3, 4, tokens_per_block=4, device="cpu")
    buffer = MixedBuffer(sizes, torch.full((3,), 3, dtype=torch.int32), "cpu")
    buffer.send(ScheduledBatch(0), sizes)
    attention = slots.begin_mixed(buffer.words(sizes)).attention
    assert attention.generation_lengths.tolist() == attention.chunk_lengths.tolist() == [0] * 3
    assert attention.query_starts.tolist() == [0] * 4
    assert attention.slot_mapping.tolist() == [-1] * 9
    assert slots.lengths(torch.arange(4)).tolist() == [0] * 4


KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.3, top_p=0.9, seed=-5),
    SamplingParams(temperature=0.8, top_k=7, seed=11),
    SamplingParams(temperature=1.1, min_p=0.02, seed=4, repetition_penalty=1.5, bias=((3, 1.5),)),
    SamplingParams(frequency_penalty=0.7, no_repeat_ngram_size=2, bad_words=((5,), (3, 9))),
)


def requests() -> Iterator[LlmRequest]:
    """Ragged texts, some of which begin alike, drawn in all kinds of ways."""
    generator = torch.Generator().manual_seed(8)

    def text(length: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = text(11)
    prompts = [text(1), shared + text(2), text(17), shared + text(6), text(4)]
    for number, prompt in enumerate(prompts):
        yield LlmRequest(number + 1, prompt, 2 + number % 3, sampling=KINDS[number % len(KINDS)])


def serve(engine: Engine) -> tuple[list[list[int]], set[tuple[bool, bool]]]:
    """Answers to all of them, two arriving at a time, with chunked prompts and block reuse; and
    which kinds of steps there were: with chunks, with generations."""
    blocks = BlockManager(engine.num_blocks, engine.tokens_per_block, enable_reuse=True)
    planner = BatchPlanner(blocks, engine.config.max_batch_size)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=MOST,
        chunking=ContextChunking(ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, 4),
    )
    everybody, active, kinds, num_chunks = list(requests()), list[LlmRequest](), set(), 0
    waiting = list(everybody)
    while waiting or active:
        active += waiting[:2]
        del waiting[:2]
        batch = planner.plan(*scheduler.schedule_request(active, ()))
        kinds.add((bool(batch.context_chunks), bool(batch.generation_slots)))
        num_chunks += sum(not chunk.is_last for chunk in batch.context_chunks)
        pending = engine.submit(batch)
        planner.assume_step(batch)
        for request in planner.apply_tokens(batch, pending.read()):
            if request.is_finished:
                planner.release(request)
        active = [request for request in active if not request.is_finished]
    assert blocks.reuse_stats.num_reused_blocks
    assert num_chunks
    answers = [list(request.tokens[request.orig_prompt_len :]) for request in everybody]
    return answers, kinds


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}])
def test_replayed_mixed_steps_draw_what_eager_ones_draw(
    folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, kinds = serve(Engine.load(folder, replace(CONFIG, **settings)))  # type: ignore[arg-type]
    assert kinds == {(True, False), (True, True), (False, True)}
    engine, capture = load(folder, **settings)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (NUM_STEPS_SIZES, 1)
    assert capture.sizes == [3, 3, 2, 2, 1, 1, MOST]

    def refuse(*_: object) -> None:
        raise AssertionError("an eager step")

    monkeypatch.setattr(SlotTable, "_advance", refuse)
    assert serve(engine) == (expected, kinds)


def num_replays(capture: Rerun, run: Callable[[], object]) -> int:
    """GraphCache that ``run`` replays: one of a mixed step, up to two of generations alone."""
    before = capture.num_replays
    run()
    return capture.num_replays - before


def prompts(*lengths: int) -> list[Job]:
    return [Job([(7 * row + place) % VOCAB_SIZE for place in range(length)])
            for row, length in enumerate(lengths)]  # fmt: skip


def test_eager_and_replayed_steps_hand_over_to_each_other(small: Path) -> None:
    """Of too many tokens, or with logits of the context: eagerly. Drafts are replayed, with more
    draws than there are slots, too."""

    def story(driver: EngineDriver, count: Callable[[Callable[[], object]], object]) -> list[Job]:
        jobs = long, short, late, watched, again = prompts(24, 5, 8, 6, 7)
        watched.outputs = OutputParams(context_logits=True)
        count(lambda: driver.step({long: MOST + 1}))
        count(lambda: driver.step({long: 0, short: 0}))
        count(lambda: driver.step({late: 0}, [long, short], {late: [5] * MOST}))
        driver.release(long)
        count(lambda: driver.step({}, [short, late], {short: [1], late: [4]}))
        count(lambda: driver.step({}, [short, late], {short: [2]}))
        driver.release(short)
        count(lambda: driver.step({watched: 0}, [late]))
        driver.engine.take_outputs()
        driver.release(watched)
        count(lambda: driver.step({again: 4}, [late]))
        count(lambda: driver.step({again: 0}, [late]))
        return list(jobs)

    eager = story(EngineDriver(Engine.load(small, CONFIG)), lambda run: run())
    engine, capture = load(small)
    replays: list[int] = []
    replayed = story(EngineDriver(engine), lambda run: replays.append(num_replays(capture, run)))
    assert replays == [0, 1, 0, 1, 1, 0, 1, 1]
    assert [job.generated for job in replayed] == [job.generated for job in eager]


def test_an_end_must_wait_whoever_had_the_slot_before(small: Path) -> None:
    """Whether it may have to is the host's to say, by how far the slot has come in this step."""
    engine, capture = load(small, max_batch_size=1)
    driver = EngineDriver(engine)

    def draw(job: Job) -> int:
        assert num_replays(capture, lambda: driver.step({job: 0})) == 1
        driver.release(job)
        return job.generated[0]

    long, plain = prompts(12, 3)
    end_id = draw(plain)
    draw(long)
    assert draw(Job(plain.prompt, end_id=end_id, min_end_position=5)) != end_id


def test_nothing_of_it_where_it_is_turned_off(small: Path) -> None:
    engine, capture = load(small, cuda_graph_mixed_tokens=0)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (NUM_STEPS_SIZES, 0)
    assert len(capture.sizes) == 2 * NUM_STEPS_SIZES


def test_what_cannot_be_recorded_leaves_the_eager_path_and_the_other_recordings(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Rerun()

    def fail(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if len(capture.sizes) == 2 * NUM_STEPS_SIZES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore of it")
        return capture(call)

    engine = Engine.load(small, CONFIG, capture=fail)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (NUM_STEPS_SIZES, 0)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage() == (
        "mixed steps cannot be recorded and run eagerly, which is slower: "
        "CUDA out of memory. Tried to allocate"
    )
    jobs = prompts(3, 6)
    assert EngineDriver(engine).generate(jobs, 3, chunk_size=2) == generate(small, jobs)


def generate(small: Path, jobs: Sequence[Job]) -> list[list[int]]:
    """The same of an engine without recordings."""
    eager = Engine.load(small, CONFIG)
    return EngineDriver(eager).generate([Job(job.prompt) for job in jobs], 3, chunk_size=2)
