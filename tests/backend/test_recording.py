"""`GptManager` records what it does: to a file if asked, and always in memory."""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running
from support.recorder_worlds import TextSink, read
from support.triton_stub import CountingEngine

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.text.tokenizer import TextCodec
from inflight_recorder.cost_model import fit_cost_model
from inflight_recorder.replay import ReplayResult, replay
from inflight_recorder.settings import Lists
from inflight_recorder.storage import RecordingReader, open_recording
from inflight_recorder.whatif import predict
from inflight_recorder.workload import read_workload
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    InvalidDecision,
    LlmRequest,
    RequestScheduler,
    ScheduledBatch,
)
from inflight_server.serve.settings import DEMO_MODEL


def replay_file(path: Path) -> ReplayResult:
    with open_recording(path) as reader:
        return replay(reader)


def test_stops_errors_and_failed_steps_replay_identically(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    rng = random.Random(4)

    def fail_sometimes(batch: ScheduledBatch) -> None:
        if rng.random() < 0.02:
            raise InvalidDecision("the engine is tired")

    recorder = Recorder([request(i, [i], rng.randint(1, 60)) for i in range(1, 81)])
    # Every seventh client stops its request after some tokens.
    recorder.on_response = lambda i, is_final: (
        recorder.stops.add(i) if i % 7 == 0 and len(recorder.responses[i]) > 5 else None
    )
    engine = CountingEngine(num_blocks=20, before_step=fail_sometimes)
    params = TrtGptModelOptionalParams(max_batch_size=8, record_file=str(path))
    with running(recorder, engine, MAX_UTILIZATION, params=params):
        recorder.wait_for_finals(*range(1, 81))
    result = replay_file(path)
    assert result.divergence is None, str(result)
    assert result.num_requests == 80
    assert result.num_pauses > 0
    content = path.read_text()
    assert '"error"' in content
    assert '"cancelled"' in content


@pytest.mark.case(114)
def test_no_token_of_a_prompt_or_an_answer_is_in_a_recording(tmp_path: Path) -> None:
    """Texts that others share, that pause and begin anew are told apart, but not told."""
    path = tmp_path / "recording.jsonl"
    tokens_of = {i: range(10**8 * (i % 9 + 1), 10**8 * (i % 9 + 1) + 70) for i in range(1, 31)}
    requests = [
        request(i, list(tokens[:20]), 50, stop_words_list=[[tokens[-1] + 9], [1]])
        for i, tokens in tokens_of.items()
    ]
    engine = CountingEngine(num_blocks=40, vocab_size=2**31 - 1)
    params = TrtGptModelOptionalParams(
        KvCacheConfig(enable_block_reuse=True), max_batch_size=8, record_file=str(path)
    )
    recorder = Recorder(requests)
    with running(recorder, engine, MAX_UTILIZATION, params=params) as manager:
        recorder.wait_for_finals(*tokens_of)
        ring = "".join(manager.recording().result())
    for i, tokens in tokens_of.items():
        assert recorder.tokens(i) == list(tokens[20:]), "they were served"
    result = replay_file(path)
    assert result.num_pauses > 0
    numbers = {int(number) for number in re.findall(r"\d+", path.read_text() + ring)}
    assert numbers
    assert numbers.isdisjoint(token for tokens in tokens_of.values() for token in tokens)


def test_what_if_follows_the_priorities_of_the_server(tmp_path: Path) -> None:
    """Those that came last, and are urgent, start first: measured and predicted."""
    path = tmp_path / "recording.jsonl"
    requests = [request(i, [i] * 8, 20, priority=float(i > 30)) for i in range(1, 41)]
    params = TrtGptModelOptionalParams(max_batch_size=40, priority_span=50.0, record_file=str(path))
    recorder = Recorder(requests)
    with running(recorder, CountingEngine(num_blocks=40), params=params):
        recorder.wait_for_finals(*range(1, 41))
    with open_recording(path) as reader:
        settings, measured = reader.settings, _order_of_starts(reader)
    assert settings.priority_span == 50.0
    assert set(measured[:10]) == set(range(31, 41))
    with open_recording(path) as reader:
        workload = read_workload(reader)
    sink = TextSink()
    predict(settings, workload.jobs, fit_cost_model(workload.samples), sink=sink)
    assert _order_of_starts(read(sink.text)) == measured


def _order_of_starts(reader: RecordingReader) -> list[int]:
    decisions = [iteration.decision for iteration in reader if iteration.decision is not None]
    ids = [chunk.request_id for decision in decisions for chunk in decision.context]
    return list(dict.fromkeys(ids))


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
def test_chunks_and_reuse_replay_identically(
    tmp_path: Path, policy: CapacitySchedulerPolicy
) -> None:
    """Prompts and answers that begin alike; a fifth is stopped."""
    path = tmp_path / "recording.jsonl"
    rng = random.Random(4)
    recorder = Recorder(
        [request(i, range(1, rng.randint(20, 60)), rng.randint(1, 40)) for i in range(1, 61)]
    )
    recorder.on_response = lambda i, is_final: (
        recorder.stops.add(i) if i % 5 == 0 and len(recorder.responses[i]) > 5 else None
    )
    params = TrtGptModelOptionalParams(
        max_batch_size=8,
        record_file=str(path),
        enable_chunked_context=True,
        context_chunk_unit=8,
        kv_cache_config=KvCacheConfig(enable_block_reuse=True),
    )
    engine = CountingEngine(num_blocks=50, max_num_tokens=48)
    with running(recorder, engine, policy, params=params) as manager:
        recorder.wait_for_finals(*range(1, 61))
        stats = json.loads(manager.stats_json)
    result = replay_file(path)
    assert result.divergence is None, str(result)
    assert result.num_requests == 60
    assert stats["Reused KV cache blocks"] > 100


@pytest.mark.case(78, 113)
def test_the_real_engine_oversubscribed_four_times_replays_identically(tmp_path: Path) -> None:
    """Counts come out gapless although requests are paused, and the recording tells it all."""
    path = tmp_path / "recording.jsonl"
    codec = TextCodec.load(DEMO_MODEL, None)
    assert codec is not None
    prompts = {i: codec.encode(f"{10 * i} {10 * i + 1}", 100) for i in range(1, 17)}
    recorder = Recorder(
        [request(i, prompt, 40, exclude_input_in_output=True) for i, prompt in prompts.items()]
    )
    params = TrtGptModelOptionalParams(
        max_batch_size=16,
        record_file=str(path),
        kv_cache_config=KvCacheConfig(max_tokens=192, tokens_per_block=4),
        device="cpu",
    )
    with running(recorder, DEMO_MODEL, MAX_UTILIZATION, params=params):
        recorder.wait_for_finals(*prompts)
    for i, prompt in prompts.items():
        words = codec.decode(prompt + recorder.tokens(i)).split()[:-1]  # the last may be cut
        assert [int(word) for word in words] == list(range(10 * i, 10 * i + len(words)))
        assert len(words) > 8
    result = replay_file(path)
    assert result.divergence is None, str(result)
    assert result.num_pauses > 4


def test_whoever_starts_again_keeps_what_was_recorded_before(tmp_path: Path) -> None:
    """Also a model process that was started again behind the launcher's back."""
    path = tmp_path / "recording.jsonl"
    params = TrtGptModelOptionalParams(max_batch_size=8, record_file=str(path))
    for number in (3, 5):
        recorder = Recorder([request(i, [i], 4) for i in range(number)])
        with running(recorder, params=params):
            recorder.wait_for_finals(*range(number))
    with running(Recorder(), params=params):
        pass
    kept = [replay_file(tmp_path / f"recording.jsonl.{number}") for number in (1, 2)]
    assert [result.num_requests for result in kept] == [5, 3]
    assert [result.divergence for result in kept] == [None, None]


def test_a_file_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    params = TrtGptModelOptionalParams(record_file=str(tmp_path / "no" / "file"))
    with (
        pytest.raises(ConfigurationError, match=r"record_file = '.*' cannot be written: No such"),
        running(Recorder(), params=params),
    ):
        pass


def test_what_is_no_file_fails_the_start(tmp_path: Path) -> None:
    """A FIFO that nobody reads held the load up for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for each in (path, tmp_path):
        params = TrtGptModelOptionalParams(record_file=str(each))
        with (
            pytest.raises(ConfigurationError, match=r"record_file = '.*' is no regular file"),
            running(Recorder(), params=params),
        ):
            pass


class BrokenOnce(RequestScheduler):
    """Raises, and then decides as ``scheduler`` does."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._is_broken = True

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Lists:
        if self._is_broken:
            self._is_broken = False
            raise RuntimeError("broken once")
        return self._scheduler.schedule_request(active_requests, inflight_request_ids)


def test_a_failing_scheduler_is_recorded_as_no_decision(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    recorder = Recorder([request(1, [1], 5), request(2, [1], 5)])

    params = TrtGptModelOptionalParams(max_batch_size=8, record_file=str(path))
    with running(recorder, params=params) as manager:
        recorder.wait_for_finals(1, 2)
        manager._batcher._scheduler = BrokenOnce(manager._batcher._scheduler)
        recorder.pending = [request(3, [1], 5)]
        recorder.wait_for_finals(3)
        recorder.pending = [request(4, [1], 5)]
        recorder.wait_for_finals(4)
    assert recorder.responses[3][-1][2]
    result = replay_file(path)
    assert result.divergence is None, str(result)
    assert result.num_requests == 4
    with open_recording(path) as reader:
        assert any(iteration.decision is None for iteration in reader)


def test_questions_are_answered_during_and_after_the_run() -> None:
    recorder = Recorder([request(1, [1], 5)])
    with running(recorder) as manager:
        recorder.wait_for_finals(1)
        assert manager.why(1).result(5)["state"] == "not in flight"
    assert manager.why(1).result(5)["state"] == "not in flight"
    lines = "".join(manager.recording().result(5))
    reader = RecordingReader(io.BytesIO(lines.encode()), "ring")
    assert str(replay(reader)) == "identical, 5 iterations (1 request, 0 pauses)"


def test_a_question_that_fails_fails_alone() -> None:
    recorder = Recorder([request(1, [1], 200)])
    with running(recorder) as manager:
        answer = manager._questions.ask(lambda: 1 // 0)
        assert isinstance(answer.exception(5), ZeroDivisionError)
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == list(range(2, 202))
