"""Steps that are recorded once per size and replayed (kernels interpreted, `Rerun` for graphs):
which step fits which recording, and that replays draw what eager steps draw."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend.engine.test_memory_plan import FREE_BYTES, STEP_BYTES, CountedMemory, make_engine
from support.checkpoints import VOCAB_SIZE, oracle_tokens
from support.engine_driver import EngineDriver, Job
from support.families import write_family
from support.graph_replay import Rerun
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine import engine as engine_module
from inflight_backend.engine.cuda_graphs import CudaCapture, bucket_sizes, mixed_sizes
from inflight_backend.engine.slot_table import SlotTable
from inflight_backend.engine.step_buffer import StepSizes
from inflight_scheduler import (
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    LlmRequest,
    OutputParams,
    SamplingParams,
    make_scheduler,
)

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


def load(folder: Path, **settings: Any) -> tuple[Engine, Rerun]:
    """An engine that replays what stands for CUDA graphs."""
    capture = Rerun()
    return Engine.load(folder, replace(CONFIG, **settings), capture=capture), capture


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (200, [*bucket_sizes(64), 80, 96, 112, 128, 192, 200]),
    ],
)
def test_bucket_sizes(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


def test_buckets_waste_little() -> None:
    sizes = bucket_sizes(1024)
    padded = {rows: min(size for size in sizes if size >= rows) for rows in range(1, 1025)}
    assert max(size - rows for rows, size in padded.items()) <= 63
    assert max(size / rows for rows, size in padded.items() if rows > 64) < 1.5


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
    assert (len(mixed_sizes(512, 256)), len(mixed_sizes(1024, 256))) == (24, 32)
    tokens = [0, *sorted({each.num_tokens for each in mixed_sizes(8192, 256)})]
    assert tokens[-1] == 8192
    assert len(tokens) < 45
    for below, size in pairwise(tokens):
        assert size - below <= max(64, below / 8)


class Recorder:
    """The part of torch that recording CUDA graphs needs, by the rules of its own allocator."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream: object = "default"
        self.is_open = self.is_refused = False
        self.num_users = 0  # of the pool's memory
        self.order: list[str] = []
        self.on_record: Callable[[], None] = lambda: None
        stream = SimpleNamespace(wait_stream=lambda other: self.order.append(f"behind {other}"))
        calls = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda: stream,
            "stream": partial(Inside, self),
            "current_stream": lambda: self.stream,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "empty_cache": self.empty_cache,
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self._begin, capture_end=self._end, replay=lambda: None
            ),
        }
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_pool, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self._release, raising=False)

    def empty_cache(self) -> None:
        assert not self.is_open, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def call(self) -> Tensor:
        self.order.append("recorded" if self.is_open else "run")
        if self.is_open:
            self.on_record()
        return torch.zeros(1)

    def _begin(self, pool: tuple[int, int], **_: object) -> None:
        self.is_open = True
        self.num_users += 1

    def _end(self) -> None:
        if self.is_refused:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        self.is_open = False

    def _end_pool(self, device: int, pool: tuple[int, int]) -> None:
        if not self.is_open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_open = False

    def _release(self, device: int, pool: tuple[int, int]) -> None:
        self.num_users -= 1


class Inside:
    """A stream is the current one until it is left, as in torch."""

    def __init__(self, recorder: Recorder, stream: object) -> None:
        self._recorder, self._stream = recorder, stream
        self._before: object = None

    def __enter__(self) -> None:
        self._before, self._recorder.stream = self._recorder.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._recorder.stream = self._before


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_a_call_runs_before_it_is_recorded(recorder: Recorder) -> None:
    CudaCapture()(recorder.call)
    assert recorder.order == ["behind default", "run", "recorded"]
    assert (recorder.stream, recorder.is_open, recorder.num_users) == ("default", False, 1)


@pytest.mark.parametrize(("is_refused", "num_users"), [(True, 0), (False, 1)])
def test_a_recording_that_fails_leaves_torch_as_it_was(
    recorder: Recorder, is_refused: bool, num_users: int
) -> None:
    """Memory of a recording that has ended (``is_refused`` False) is released by its graph: done
    twice, others would lose what they share."""

    def fail() -> None:
        recorder.is_refused = is_refused
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.on_record = fail
    with pytest.raises(RuntimeError, match="previous error" if is_refused else "not permitted"):
        CudaCapture()(recorder.call)
    recorder.empty_cache()
    assert (recorder.stream, recorder.num_users) == ("default", num_users)


class RecordedMemory(CountedMemory):
    """Recordings, too, keep some of it, as long as they are referenced; a `Capture` that fails
    beyond ``num_good``."""

    num_bytes = 1000

    def __init__(self, num_good: int = 1000) -> None:
        super().__init__()
        self.num_made = self.num_kept = self.num_failed = 0
        self._num_good = num_good

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self.num_kept >= self._num_good:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore of it")
        answer = call()
        self.num_made += 1
        self.num_kept += 1

        def replay() -> None:
            raise AssertionError("nothing is replayed here")

        weakref.finalize(replay, self._forget)
        return replay, answer

    def _forget(self) -> None:
        self.num_kept -= 1

    def free_bytes(self) -> int:
        return super().free_bytes() - self.num_bytes * self.num_kept


RECORDED = replace(
    CONFIG, max_batch_size=2, max_num_tokens=8, max_seq_len=8, max_tokens_in_paged_kv_cache=None
)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("num_good", "num_graphs", "num_mixed"), [(9, 2, 1), (4, 2, 0), (0, 0, 0)])
def test_what_recordings_keep_is_not_the_pools(
    checkpoint: Folder,
    num_good: int,
    num_graphs: int,
    num_mixed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are made beside a tiny pool first, and forgotten again; what failed there is not tried
    a second time."""
    monkeypatch.setattr(engine_module, "warm_up", Engine.enqueue)  # interpreted
    memory = RecordedMemory(num_good)
    engine = make_engine(
        checkpoint(head_dim=16, num_hidden_layers=1), memory, RECORDED, capture=memory
    )
    assert (engine.num_graphs, engine.num_mixed_graphs) == (num_graphs, num_mixed)
    num_kept = 2 * num_graphs + num_mixed
    assert (memory.num_made, memory.num_kept) == (2 * num_kept, num_kept)
    block_bytes = 2 * engine.model_config.kv_size * 4 * RECORDED.tokens_per_block
    expected = int((FREE_BYTES - STEP_BYTES - num_kept * memory.num_bytes) * 0.9) // block_bytes
    assert engine.num_blocks == expected
    assert memory.num_failed == caplog.text.count("cannot be recorded") == (num_mixed == 0)
    if num_mixed == 0:
        (record,) = [each for each in caplog.records if "recorded and" in each.getMessage()]
        assert record.levelno == logging.WARNING
        assert record.getMessage() == (
            f"{'mixed' if num_graphs else 'generation'} steps cannot be recorded and run eagerly, "
            "which is slower: CUDA out of memory. Tried to allocate"
        )


KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.3, top_p=0.9, seed=-5),
    SamplingParams(temperature=0.8, top_k=7, seed=11),
    SamplingParams(temperature=1.1, min_p=0.02, seed=4, repetition_penalty=1.5, bias=((3, 1.5),)),
    SamplingParams(frequency_penalty=0.7, no_repeat_ngram_size=2, bad_words=((5,), (3, 9))),
)


def requests(num_rounds: int = 1) -> Iterator[LlmRequest]:
    """Ragged texts, some of which begin alike, drawn in all kinds of ways, round after round."""
    generator = torch.Generator().manual_seed(8)

    def text(length: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = text(11)
    prompts = [text(1), shared + text(2), text(17), shared + text(6), text(4)] * num_rounds
    for number, prompt in enumerate(prompts):
        yield LlmRequest(number + 1, prompt, 2 + number % 3, sampling=KINDS[number % len(KINDS)])


def serve(engine: Engine, num_rounds: int = 1) -> tuple[list[list[int]], set[tuple[bool, bool]]]:
    """Answers to all of them, two arriving at a time, with chunked prompts and block reuse; and
    which kinds of steps there were: with chunks, with generations."""
    blocks = BlockManager(
        engine.num_blocks,
        engine.tokens_per_block,
        enable_reuse=True,
        num_snapshots=engine.num_snapshots,
    )
    planner = BatchPlanner(blocks, engine.config.max_batch_size)
    scheduler = make_scheduler(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        blocks,
        max_batch_size=engine.config.max_batch_size,
        max_num_tokens=MOST,
        chunking=ContextChunking(ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, 4),
    )
    everything, active, kinds, num_chunks = list(requests(num_rounds)), list[LlmRequest](), set(), 0
    waiting = list(everything)
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
    answers = [list(request.tokens[request.orig_prompt_len :]) for request in everything]
    return answers, kinds


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}])
def test_replayed_steps_draw_what_eager_ones_draw(
    folder: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, kinds = serve(Engine.load(folder, replace(CONFIG, **settings)))  # type: ignore[arg-type]
    assert kinds == {(True, False), (True, True), (False, True)}
    engine, capture = load(folder, **settings)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (NUM_STEPS_SIZES, 1)
    assert capture.sizes == [3, 3, 2, 2, 1, 1, MOST]

    def refuse(*_: object) -> None:
        raise AssertionError("an eager step, or one that reads what only the host knows")

    monkeypatch.setattr(SlotTable, "host_lengths", refuse)
    assert serve(engine) == (expected, kinds)


@pytest.mark.slow
def test_recurrences_are_replayed_in_generations(tmp_path: Path) -> None:
    """Steps with chunks run eagerly; prompts go on where snapshots are."""
    write_family(tmp_path, "qwen3_5", vocab_size=VOCAB_SIZE)
    eager = Engine.load(tmp_path, CONFIG)
    engine, capture = load(tmp_path)
    assert (engine.num_graphs, engine.num_mixed_graphs) == (NUM_STEPS_SIZES, 0)
    expected, _ = serve(eager, num_rounds=2)
    before = capture.num_replays
    assert serve(engine, num_rounds=2)[0] == expected
    assert capture.num_replays > before


def num_replays(capture: Rerun, run: Callable[[], object]) -> int:
    """Recordings that ``run`` replays: one of a mixed step, up to two of generations alone."""
    before = capture.num_replays
    run()
    return capture.num_replays - before


def prompts(*lengths: int) -> list[Job]:
    texts = [
        [(7 * row + place) % VOCAB_SIZE for place in range(length)]
        for row, length in enumerate(lengths)
    ]
    return [Job(text) for text in texts]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_step_with_features_replays_the_decoder_alone(small: Path) -> None:
    """Draws of requests with penalties, bans, min-p or an end that must wait are not recorded."""
    engine, capture = load(small, cuda_graph_mixed_tokens=0)
    assert engine.num_mixed_graphs == 0
    driver = EngineDriver(engine)
    plain, special = prompts(3, 4)
    special.sampling = SamplingParams(min_p=0.02, repetition_penalty=1.5, bad_words=((5,),))
    driver.step({plain: 0, special: 0})
    free = oracle_tokens(small, plain.prompt, 3)
    waiting = Job(plain.prompt, end_id=free[1], min_end_position=5)
    assert num_replays(capture, lambda: driver.step({waiting: 0})) == 0
    assert num_replays(capture, lambda: driver.step({}, [plain])) == 2
    assert num_replays(capture, lambda: driver.step({}, [plain, special])) == 1
    assert num_replays(capture, lambda: driver.step({}, [waiting])) == 1
    assert num_replays(capture, lambda: driver.step({}, [waiting])) == 2, "it waits no more"
    assert plain.generated == free
    assert waiting.generated[1] != free[1]


@pytest.mark.slow
def test_an_end_waits_for_its_own_minimum_in_a_slot_used_before(small: Path) -> None:
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


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what a GPU would launch: every operation but views and new memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_few_small_launches_prepare_a_recorded_step(small: Path) -> None:
    """Each takes a microsecond or two of every step, whose floor at batch 1 is two milliseconds."""
    engine = Engine.load(small, CONFIG)
    words = engine._buffer.run_words(StepSizes(3))
    with torch.inference_mode(), Launches() as before:
        engine._slots.begin(words)
    assert len(before.names) <= 14, before.names
    with torch.inference_mode(), Launches() as behind:
        engine._slots.sampling(words.generation_slots.long(), may_forbid_end=False)
    assert len(behind.names) <= 3, behind.names
