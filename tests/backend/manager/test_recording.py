"""`GptManager` records what it does: to a file if asked, and always in memory."""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manager_harness import MAX_UTILIZATION, Recorder, fail_once, request, running, serve
from support.triton_stub import CountedStep, CountingEngine

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_recorder.replay import ReplayResult, replay
from inflight_recorder.storage import RecordingReader, open_recording
from inflight_recorder.timeline import build_timeline
from inflight_recorder.workload import read_workload
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    InvalidDecision,
    ScheduledBatch,
)


def replay_file(path: Path) -> ReplayResult:
    """Replay a recording, which must come to the same decisions."""
    with open_recording(path) as reader:
        return same(replay(reader))


def ring_of(text: str) -> RecordingReader:
    """The recording that `GptManager.recording` returned."""
    return RecordingReader(io.BytesIO(text.encode()), "ring")


def same(result: ReplayResult) -> ReplayResult:
    assert result.divergence is None, str(result)
    return result


@pytest.mark.case(113)
@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
def test_chunks_stops_and_failed_steps_replay_identically(
    tmp_path: Path, policy: CapacitySchedulerPolicy
) -> None:
    """Prompts and answers that begin alike; every seventh client stops its request."""
    path = tmp_path / "recording.jsonl"
    rng = random.Random(4)

    def fail_sometimes(batch: ScheduledBatch) -> None:
        if rng.random() < 0.02:
            raise InvalidDecision("the engine is tired")

    recorder = Recorder(
        [request(i, range(1, rng.randint(20, 60)), rng.randint(1, 40)) for i in range(1, 81)]
    )
    recorder.on_response = lambda i, is_final: (
        recorder.stops.add(i) if i % 7 == 0 and len(recorder.responses[i]) > 5 else None
    )
    serve(
        recorder,
        CountingEngine(num_blocks=50, max_num_tokens=48, before_step=fail_sometimes),
        policy,
        record_file=str(path),
        enable_chunked_context=True,
        context_chunk_unit=8,
    )
    result = replay_file(path)
    assert result.num_requests == 80
    assert (result.num_pauses > 0) == (policy is MAX_UTILIZATION)
    assert recorder.stats[-1]["Reused KV cache blocks"] > 100
    content = path.read_text()
    assert '"error"' in content
    assert '"cancelled"' in content


@pytest.mark.case(114)
def test_no_token_of_a_prompt_or_an_answer_is_in_a_recording(tmp_path: Path) -> None:
    """Shared prefixes are recorded, their tokens are not."""
    path = tmp_path / "recording.jsonl"
    tokens_of = {i: range(10**8 * (i % 9 + 1), 10**8 * (i % 9 + 1) + 70) for i in range(1, 31)}
    requests = [
        request(i, list(tokens[:20]), 50, stop_words_list=[[tokens[-1] + 9], [1]])
        for i, tokens in tokens_of.items()
    ]
    engine = CountingEngine(num_blocks=40, vocab_size=2**31 - 1)
    recorder = Recorder(requests)
    with running(recorder, engine, MAX_UTILIZATION, record_file=str(path)) as manager:
        recorder.wait_for_finals(*tokens_of)
        ring = "".join(manager.recording().result())
    for i, tokens in tokens_of.items():
        assert recorder.tokens(i) == list(tokens[20:]), "they were served"
    result = replay_file(path)
    assert result.num_pauses > 0
    numbers = {int(number) for number in re.findall(r"\d+", path.read_text() + ring)}
    assert numbers
    assert numbers.isdisjoint(token for tokens in tokens_of.values() for token in tokens)


def test_restart_keeps_earlier_recordings(tmp_path: Path) -> None:
    """A model process may also be restarted without its launcher."""
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


def test_record_file_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    """A FIFO without a reader would hold the load up for ever."""
    os.mkfifo(tmp_path / "pipe")
    no_file = "is no regular file"
    for name, reason in (
        ("no/file", "cannot be written: No such"),
        ("pipe", no_file),
        ("", no_file),
    ):
        params = TrtGptModelOptionalParams(record_file=str(tmp_path / name))
        with (
            pytest.raises(ConfigurationError, match=f"record_file = '.*' {reason}"),
            running(Recorder(), params=params),
        ):
            pass


def test_failing_scheduler_is_recorded_as_no_decision(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    recorder = Recorder([request(1, [1], 5), request(2, [1], 5)])

    with running(recorder, record_file=str(path)) as manager:
        recorder.wait_for_finals(1, 2)
        fail_once(manager._batcher._scheduler, "schedule_request", RuntimeError("once")).arm()
        recorder.pending = [request(3, [1], 5)]
        recorder.wait_for_finals(3)
        recorder.pending = [request(4, [1], 5)]
        recorder.wait_for_finals(4)
    assert recorder.responses[3][-1][2]
    result = replay_file(path)
    assert result.num_requests == 4
    with open_recording(path) as reader:
        assert any(iteration.decision is None for iteration in reader)


def test_why_and_recording_are_answered_during_and_after_the_run() -> None:
    recorder = Recorder([request(1, [1], 5)])
    with running(recorder) as manager:
        recorder.wait_for_finals(1)
        assert manager.why(1).result(5)["state"] == "not in flight"
    assert manager.why(1).result(5)["state"] == "not in flight"
    lines = "".join(manager.recording().result(5))
    assert str(replay(ring_of(lines))) == "identical, 5 iterations (1 request, 0 pauses)"


class EngineThatFailsOnce(CountingEngine):
    """Overlapped; the step with the number ``bad_step`` goes wrong."""

    is_asynchronous = True

    def __init__(self, bad_step: int, fault: str) -> None:
        super().__init__()
        self._bad_step, self._fault = bad_step, fault

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        """Count on; the answer is read later."""
        step = super().submit(batch)
        if len(self.batches) != self._bad_step or not self._fault:
            return step
        if self._fault == "lost":
            return replace(step, error=RuntimeError("the step is lost"))
        return replace(step, tokens=[-1] * len(step.tokens))


class Pausing(Recorder):
    """Returns the other requests after some turns in which nothing happened."""

    def __init__(self, first: InferenceRequest, others: Sequence[InferenceRequest]) -> None:
        super().__init__([first])
        self._others = list(others)
        self._num_quiet_turns = 0

    def get(self, room: int) -> list[InferenceRequest]:
        self._num_quiet_turns += self.finals() == {1}
        if self._num_quiet_turns == 4:
            self.pending += self._others
        return super().get(room)


@pytest.mark.parametrize("fault", ["", "lost", "not finite"])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_step_whose_requests_have_all_ended_replays(fault: str, has_drafts: bool) -> None:
    """The only request is stopped after its third token while its next step runs."""
    prompt = list(range(1, 21))
    drafts: dict[str, Any] = {"draft_input_ids": [21, 22]} if has_drafts else {}
    recorder = Pausing(
        request(1, prompt, 20), [request(2, prompt, 6, **drafts), request(3, prompt, 6)]
    )
    recorder.when(1, 3, lambda: recorder.stops.add(1))
    engine = EngineThatFailsOnce(4, fault)
    with running(recorder, engine, MAX_UTILIZATION, max_batch_size=4) as manager:
        recorder.wait_for_finals(1, 2, 3)
        text = "".join(manager.recording().result())
    assert recorder.tokens(1) == [21, 22, 23]
    assert len(engine.batches[3].generation_slots) == 1, "no step ran on"
    assert same(replay(ring_of(text))).num_requests == 3
    assert len(build_timeline(ring_of(text)).lanes) == len(read_workload(ring_of(text)).jobs) == 3


class EngineThatLeavesOnce(CountingEngine):
    """Its first step ends the thread, as a panic of a library would."""

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """Count on, from the second step on."""
        tokens = super().execute(batch)
        if len(self.batches) == 1:
            raise SystemExit("a panic")
        return tokens


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_prompt_of_a_step_that_ended_the_thread_is_not_cached(is_overlapped: bool) -> None:
    """The first prompt was never computed: the second request computes it, and the third waits."""
    prompt = list(range(1, 21))
    recorder = Recorder([request(1, prompt, 6)])
    later = [request(2, prompt, 6), request(3, range(40, 50), 6)]

    def send_later(request_id: int, _: bool) -> None:
        if request_id == 1:
            recorder.pending += later

    recorder.on_response = send_later
    engine = EngineThatLeavesOnce(max_num_tokens=24)
    engine.is_asynchronous = is_overlapped
    with running(recorder, engine, max_batch_size=4, enable_chunked_context=False) as manager:
        recorder.wait_for_finals(1, 2, 3)
        text = "".join(manager.recording().result())
    assert recorder.tokens(2) == list(range(21, 27))
    assert [len(batch.context_chunks) for batch in engine.batches[1:3]] == [1, 1]
    same(replay(ring_of(text)))
