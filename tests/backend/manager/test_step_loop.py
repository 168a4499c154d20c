"""The plain and the overlapped loop: lost steps, and the same answers from both."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manager_harness import (
    BOTH_LOOPS,
    GUARANTEED,
    LOOP_FAILED,
    MAX_UTILIZATION,
    STEP_FAILED,
    Recorder,
    request,
    running,
    serve,
    small_engine,
)
from support.triton_stub import CountedStep, CountingEngine

from inflight_backend.manager.parameters import (
    KvCacheConfig,
    OverlapScheduler,
)
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import PROCESSOR_FIELD
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    ScheduledBatch,
    TrtGptModelType,
)


class LosingEngine(CountingEngine):
    """Overlapped; one step is lost when its tokens are read. Counts the steps with logits edits."""

    is_asynchronous = True
    num_edited = 0

    def __init__(self, lost_step: int, **options: Any) -> None:
        super().__init__(**options)
        self._lost_step = lost_step

    def edit_next(self, source: object) -> None:
        """Count; there are no logits."""
        self.num_edited += 1

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """Count on; the answer is read later."""
        step = super().submit(batch)
        error = RuntimeError("the step is lost")
        return replace(step, error=error) if len(self.batches) == self._lost_step else step


@pytest.mark.case(86)
def test_step_behind_a_lost_one_fails_too() -> None:
    """The second prompt shares blocks with the first, which the lost step should have written."""
    shared = list(range(100, 164))
    recorder = Recorder([request(1, shared, 20)])
    late = [request(2, [*shared, 7], 20)]

    def arrive(batch: ScheduledBatch) -> None:
        recorder.pending += late
        late.clear()

    engine = LosingEngine(1, before_step=arrive)
    with running(recorder, engine, max_batch_size=4) as manager:
        recorder.wait_for_finals(1, 2)
        assert engine.batches[1].context_chunks, "the second ran beside the first"
        for number in (1, 2):
            assert recorder.responses[number][-1] == ([], True, STEP_FAILED)
        assert manager._batcher.is_idle_and_intact()


def test_lost_step_of_an_ended_request_does_not_end_the_next_with_its_id() -> None:
    """Request 1 ends while that step runs; a second one with its id waits for blocks."""
    values: dict[str, Any] = {PROCESSOR_FIELD: "mine"}
    later = request(1, range(289, 301), 4, **values)
    recorder = Recorder([request(1, [20], 9, end_id=23), request(2, range(97, 101), 12)])
    recorder.when(1, 3, lambda: recorder.pending.append(later))  # its final response
    engine = LosingEngine(4, num_blocks=4)
    with running(
        recorder,
        engine,
        MAX_UTILIZATION,
        max_batch_size=4,
        logits_processors={"mine": lambda *_: None},
    ) as manager:
        recorder.wait_for_finals(2)
        with recorder.done:
            recorder.done.wait_for(lambda: len(recorder.tokens(1)) == 6, 30)
        text = "".join(manager.recording().result())
    assert recorder.responses[2][-1][2] != "", "no step was lost"
    assert recorder.tokens(1) == [21, 22, 301, 302, 303, 304]
    assert len(engine.batches[3].generation_slots) == 2, "no step ran on for the first one"
    assert engine.num_edited == 4
    result = replay(RecordingReader(io.BytesIO(text.encode()), "ring"))
    assert (result.divergence, result.num_requests) == (None, 3)


class WatchedStep:
    """A step that its engine counts as unread until its tokens are read; it may be lost then."""

    def __init__(self, engine: WatchedEngine, tokens: list[int]) -> None:
        self._engine = engine
        self._tokens = tokens
        self.is_lost = False
        engine.unread.append(self)

    def read(self) -> list[int]:
        self._engine.unread.remove(self)
        if self.is_lost:
            raise RuntimeError("the step is lost")
        return self._tokens

    def read_outputs(self) -> None:
        """None came."""


class WatchedEngine(CountingEngine):
    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[WatchedStep] = []

    def submit(self, batch: ScheduledBatch) -> Any:
        return WatchedStep(self, self.execute(batch))


@pytest.mark.parametrize("is_lost", [False, True])
def test_failing_loop_waits_for_the_running_step(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write blocks that other requests get next."""
    recorder, engine = Recorder(), WatchedEngine()
    with running(recorder, engine) as manager:
        schedule = manager._batcher.schedule

        def fail(**options: bool) -> ScheduledBatch:
            for step in engine.unread:
                step.is_lost = is_lost
                raise RuntimeError("ours")
            return schedule(**options)

        monkeypatch.setattr(manager._batcher, "schedule", fail)
        recorder.pending.append(request(1, [1], 20))
        recorder.wait_for_finals(1)
        assert recorder.responses[1] == [([], True, LOOP_FAILED)]
        recorder.pending.append(request(2, [5], 3))
        recorder.wait_for_finals(2)
        assert recorder.tokens(2) == [6, 7, 8]
        assert not engine.unread
        assert manager._batcher.is_idle_and_intact()


NUM_NEW = 14


SAMPLED: dict[str, Any] = {"temperature": 1.2, "runtime_top_p": 0.95}


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {**SAMPLED, "frequency_penalty": 0.5, "prompt_ignore_length": 4, "min_p": 0.01},
    {**SAMPLED, "runtime_top_p_decay": 0.8, "runtime_top_p_reset_ids": 7, "presence_penalty": 0.4},
    {**SAMPLED, "bad_words_list": [[3, 5, 9, 2], [1, 2, 4, -1]], "runtime_top_k": 30},
    {"embedding_bias": [0.25 * (i % 7) for i in range(199)]},
)


def make_requests() -> list[InferenceRequest]:
    """One of each kind; the prompts share a prefix, and so blocks."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    return [
        request(i, [*prompt, i, 7], NUM_NEW, seed=100 + i, **kind) for i, kind in enumerate(KINDS)
    ]


def answers(
    folder: Path,
    policy: CapacitySchedulerPolicy = GUARANTEED,
    num_tokens: int = 1024,
    reuse: bool = False,
    **options: Any,
) -> tuple[list[list[int]], Recorder]:
    """The answer to each kind."""
    recorder = serve(
        make_requests(),
        small_engine(folder, num_tokens, max_num_tokens=48, max_seq_len=48),
        policy,
        kv_cache_config=KvCacheConfig(enable_block_reuse=reuse),
        exclude_input_in_output=True,
        **options,
    )
    assert (recorder.stats[-1].get("Reused KV cache blocks", 0) > 0) == reuse
    return [recorder.tokens(i) for i in range(len(KINDS))], recorder


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Without reuse, chunks, pauses and overlap."""
    found, recorder = answers(folder, overlap_scheduler=OverlapScheduler.OFF)
    assert len({tuple(answer) for answer in found}) == len(KINDS)
    assert all(len(answer) == NUM_NEW for answer in found)
    assert recorder.total("Total Context Tokens") == len(KINDS) * 13
    return found


@pytest.mark.fast(4)
@BOTH_LOOPS
@pytest.mark.parametrize("chunking", [*ContextChunkingPolicy, None])
@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda each: each.name)
def test_no_answer_depends_on_how_it_is_scheduled(
    policy: CapacitySchedulerPolicy,
    chunking: ContextChunkingPolicy | None,
    overlap: OverlapScheduler,
    folder: Path,
    plain: list[list[int]],
) -> None:
    """With shared blocks, chunks, and a pool that holds some of the requests."""
    options: dict[str, Any] = {"overlap_scheduler": overlap}
    if chunking is not None:
        options |= {"enable_chunked_context": True, "context_chunking_policy": chunking}
        options["context_chunk_unit"] = 3
    found, recorder = answers(folder, policy, 72, reuse=True, **options)
    assert found == plain
    assert (recorder.total("Paused Requests") > 0) == (policy is MAX_UTILIZATION)


@pytest.mark.parametrize("reuse", [False, True])
def test_v1_answers_as_in_flight_batching_does(
    folder: Path, plain: list[list[int]], reuse: bool
) -> None:
    found, recorder = answers(folder, reuse=reuse, model_type=TrtGptModelType.V1)
    assert found == plain
    assert not any(
        each["Total Context Tokens"] and each["Total Generation Tokens"] for each in recorder.stats
    )
