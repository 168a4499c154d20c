"""The callback contract of `GptManager` in both loops, with an engine that counts."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.manager_harness import (
    GUARANTEED,
    MAX_UTILIZATION,
    WAIT,
    Once,
    Recorder,
    assert_serves,
    request,
    running,
    serve,
)
from support.triton_stub import CountingEngine

from inflight_backend.manager.logits_processors import NO_TOKEN
from inflight_backend.requests.validation import PROCESSOR_FIELD
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch


@pytest.fixture(autouse=True, params=["plain loop", "overlapped loop"])
def _both_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingEngine, "is_asynchronous", request.param == "overlapped loop")


def test_streaming_sends_one_token_per_response_and_one_final() -> None:
    recorder = serve([request(1, [5, 6], 3)])
    assert recorder.responses[1] == [([7], False, ""), ([8], False, ""), ([9], True, "")]


@pytest.mark.contract("tensorrt_llm input", "exclude_input_in_output")
@pytest.mark.parametrize(
    ("default", "values", "expected"),
    [
        (False, {}, [5, 6, 7, 8]),
        (True, {}, [7, 8]),
        (False, {"exclude_input_in_output": True}, [7, 8]),
    ],
)
def test_whole_answer_is_one_response_with_or_without_the_prompt(
    default: bool, values: dict[str, Any], expected: list[int]
) -> None:
    recorder = serve(
        [request(1, [5, 6], 2, streaming=False, **values)], exclude_input_in_output=default
    )
    assert recorder.responses[1] == [(expected, True, "")]


@pytest.mark.case(87)
@pytest.mark.parametrize("streaming", [True, False])
def test_logits_that_are_not_finite_end_the_request_with_an_error(streaming: bool) -> None:
    class BrokenEngine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            return [-1 if token == 104 else token for token in super().execute(batch)]

    requests = [request(i, [100 * i], 9, streaming=streaming, end_id=7) for i in (1, 2)]
    recorder = serve(requests, BrokenEngine())
    assert recorder.responses[1][-1] == ([], True, NO_TOKEN)
    assert len(recorder.responses[1]) == (4 if streaming else 1)
    assert recorder.tokens(2)[-9:] == list(range(201, 210))


@pytest.mark.contract("tensorrt_llm input", "end_id")
def test_end_id_ends_the_request_and_is_not_part_of_the_answer() -> None:
    recorder = serve([request(1, [5], 50, end_id=8)])
    assert recorder.tokens(1) == [6, 7]


def test_get_callback_is_told_how_many_more_requests_fit() -> None:
    recorder = serve([request(i, [i], 20) for i in range(1, 6)], max_batch_size=2)
    assert recorder.rooms[:2] == [2, 0]
    assert min(recorder.rooms) == 0
    assert all(recorder.tokens(i) == list(range(i + 1, i + 21)) for i in range(1, 6))


def test_callbacks_of_an_iteration_come_in_their_order() -> None:
    recorder = serve([request(1, [1], 2)])
    first_send = recorder.events.index("send")
    assert recorder.events[first_send - 1 : first_send + 3] == ["get", "send", "poll", "stats"]


@pytest.mark.case(118)
def test_blocks_and_id_are_free_before_the_final_response() -> None:
    recorder = Recorder()
    seen: list[tuple[int, int]] = []
    with running(recorder) as manager:

        def look(request_id: int, is_final: bool) -> None:
            if is_final:
                blocks = manager._batcher.block_manager
                seen.append((blocks.num_used_blocks, manager.get_num_active_requests()))

        recorder.on_response = look
        recorder.pending.append(request(1, [1, 2, 3], 9))
        recorder.wait_for_finals(1)
    assert seen == [(0, 0)]


@pytest.mark.case(60)
def test_stop_gives_an_ordinary_final_with_the_tokens_so_far() -> None:
    recorder = Recorder([request(1, [1], 200), request(2, [50], 30)])
    recorder.when(1, 5, lambda: recorder.stops.update({1, 999}))  # every poll returns both
    serve(recorder)
    assert recorder.tokens(1) == [2, 3, 4, 5, 6]
    assert recorder.responses[1][-1] == ([], True, "")
    assert recorder.tokens(2) == list(range(51, 81))
    assert 999 not in recorder.responses


@pytest.mark.case(61)
def test_stop_before_its_request_has_no_effect() -> None:
    recorder = Recorder()
    polled = threading.Event()
    with running(recorder) as manager:

        def poll() -> set[int]:
            polled.set()
            return {1} if not recorder.pending and not recorder.responses else set()

        manager._poll_cb = poll
        assert polled.wait(WAIT)
        polled.clear()
        assert polled.wait(WAIT)
        manager._poll_cb = lambda: set()
        recorder.pending.append(request(1, [1], 3))
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [2, 3, 4]


@pytest.mark.case(57, 91)
@pytest.mark.case(66)
def test_stopped_request_that_is_paused_ends_in_the_next_iteration() -> None:
    engine, recorder = CountingEngine(num_blocks=8), Recorder()
    at: dict[str, int] = {}
    is_held: list[bool] = []
    with running(recorder, engine, MAX_UTILIZATION) as manager:

        def poll() -> set[int]:
            paused = [r for r in manager._active if r.num_pauses > 0 and r.seq_slot is None]
            if not paused or "stop" in at:
                return set()
            at["stop"], at["id"] = manager._iteration, paused[0].request_id
            at["batches"] = len(engine.batches)
            return {paused[0].request_id}

        def on_response(request_id: int, is_final: bool) -> None:
            if is_final and request_id == at.get("id"):
                at["final"] = manager._iteration
                is_held.append(manager._active.get(request_id) is not None)
                num_blocks = manager._batcher.block_manager.num_distinct_blocks_of(request_id)
                is_held.append(num_blocks > 0)

        manager._poll_cb, recorder.on_response = poll, on_response
        recorder.pending += [request(i, [100 * i], 25) for i in (1, 2)]
        recorder.wait_for_finals(1, 2)
    assert at["final"] - at["stop"] <= 1
    assert is_held == [False, False]
    [(_, _, error)] = recorder.responses[at["id"]][-1:]
    assert error == "", "an ordinary end"
    later = [
        setup.request_id for batch in engine.batches[at["batches"] :] for setup in batch.setups
    ]
    assert at["id"] not in later
    other = 3 - at["id"]
    assert recorder.tokens(other) == list(range(100 * other + 1, 100 * other + 26))


@pytest.mark.case(57, 91)
def test_id_in_flight_is_ignored_and_free_after_its_final_response() -> None:
    """Also where the callback returns the very same object again."""
    mine = [request(1, [1], 30), request(2, [50], 30)]
    calls = iter([[*mine, *mine], mine, [request(1, [100], 5)]])
    recorder = Recorder()
    real_get = recorder.get
    recorder.get = lambda room: next(calls, None) or real_get(room)  # type: ignore[method-assign]
    with running(recorder) as manager:
        for _ in range(2):
            recorder.wait_for_finals(1, 2)
            assert recorder.tokens(1) == list(range(2, 32))
            assert recorder.tokens(2) == list(range(51, 81))
            assert recorder.final_errors(1) == recorder.final_errors(2) == [""]
            recorder.responses.clear()
            recorder.pending += mine
            manager.wake()
        recorder.wait_for_finals(1, 2)
        assert manager._batcher.is_idle_and_intact()


@pytest.mark.parametrize("end", ["length", "stop", "error"])
def test_request_that_ended_leaves_nothing_behind(end: str) -> None:
    """The next request with its id is another one. Requests with an error have no lengths."""

    class Engine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            if (end, len(self.batches)) == ("error", 5):
                raise RuntimeError
            return super().execute(batch)

    values: dict[str, Any] = {PROCESSOR_FIELD: "mine", "stop_words_list": [[900], [1]]}
    values["return_perf_metrics"] = True
    recorder = Recorder([request(1, [100], 20, **values)])
    if end == "stop":
        recorder.when(1, 5, lambda: recorder.stops.add(1))
    with running(
        recorder,
        Engine(),
        max_batch_size=4,
        max_run_seconds=60,
        logits_processors={"mine": lambda *_: None},
    ) as manager:
        recorder.wait_for_finals(1)
        assert (recorder.responses[1][-1][2] == "") == (end != "error"), recorder.responses
        assert not manager._rules
        assert not manager._stop_words._watched
        assert not manager._gatherer._gathered
        lengths = {"length": [(1, 20)], "stop": [(1, 5)], "error": []}
        assert manager.lengths.take() == lengths[end]


@pytest.mark.case(76)
def test_request_larger_than_the_pool_is_refused() -> None:
    recorder = serve([request(1, [1] * 10, 30)], CountingEngine(num_blocks=4, tokens_per_block=4))
    assert "KV blocks" in recorder.responses[1][0][2]


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.case(78)
def test_all_answers_are_whole_with_a_quarter_of_the_blocks(
    policy: CapacitySchedulerPolicy,
) -> None:
    requests = [request(i, [i * 10, i * 10 + 1], 40) for i in range(1, 17)]
    engine = CountingEngine(num_blocks=44, tokens_per_block=4)  # 16 need 11 each
    recorder = serve(requests, engine, policy, max_batch_size=16)
    for i in range(1, 17):
        assert recorder.tokens(i) == list(range(i * 10 + 2, i * 10 + 42))
        assert [final for _, final, _ in recorder.responses[i]].count(True) == 1
    num_pauses = sum(stats["Paused Requests"] for stats in recorder.stats)
    assert (num_pauses > 0) == (policy == MAX_UTILIZATION)
    assert recorder.stats[-1]["Free KV cache blocks"] == 44


@pytest.mark.case(91, 92, 93, 94)
@pytest.mark.parametrize("error", [RuntimeError("a callback"), SystemExit("a callback")])
@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
def test_callback_that_raises_does_not_stop_the_loop(name: str, error: BaseException) -> None:
    recorder = Recorder([request(i, [100 * i], 50) for i in (1, 2)])
    once = Once(getattr(recorder, name), error)
    setattr(recorder, name, once)
    recorder.when(1, 5, once.arm)
    with running(recorder) as manager:
        recorder.wait_for_finals(1, 2)
        assert recorder.final_errors(1) == recorder.final_errors(2) == [""]
        assert recorder.tokens(1) == list(range(101, 151))
        num_lost = 50 - len(recorder.tokens(2))
        assert num_lost == (name == "send"), "only the response of the failed call is lost"
        assert_serves(recorder, manager)


@pytest.mark.case(91, 92)
@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
def test_callback_that_blocks_delays_and_loses_nothing(name: str) -> None:
    recorder = Recorder([request(i, [10 * i], 20) for i in (1, 2)])
    real = getattr(recorder, name)
    is_blocked, release = threading.Event(), threading.Event()

    def block(*args: Any) -> Any:
        if not release.is_set():
            is_blocked.set()
            assert release.wait(WAIT)
        return real(*args)

    setattr(recorder, name, block)
    with running(recorder) as manager:
        assert is_blocked.wait(WAIT)
        moves = manager.health.num_moves
        time.sleep(0.05)
        assert manager.health.num_moves == moves, "the watchdog sees no progress"
        release.set()
        recorder.wait_for_finals(1, 2)
    for i in (1, 2):
        assert recorder.tokens(i) == list(range(10 * i + 1, 10 * i + 21))


@pytest.mark.case(94)
@pytest.mark.parametrize(
    ("stops", "is_stopped"),
    [
        ([np.int64(1)], True),
        ({np.uint64(1)}, True),
        (np.array([1, 7], dtype=np.int32), True),
        (5, False),
        ([[1]], False),
        ("1", False),
        ([None, 1.5], False),
    ],
)
def test_stop_ids_are_integers_also_of_numpy_and_nothing_else(stops: Any, is_stopped: bool) -> None:
    recorder = Recorder([request(1, [1], 200), request(2, [2], 5)])
    recorder.when(1, 3, lambda: setattr(recorder, "stops", stops))
    serve(recorder)
    assert recorder.final_errors(1) == [""]
    assert (len(recorder.tokens(1)) < 200) == is_stopped


@pytest.mark.parametrize("terminates", [False, True])
def test_loop_ends_after_all_requests(terminates: bool) -> None:
    recorder = Recorder([request(1, [1], 20), *([request(77, [1], 1)] if terminates else [])])
    started = threading.Event()
    recorder.when(1, 1, started.set)
    with running(recorder, terminate_req_id=77) as manager:
        assert started.wait(WAIT)
        if terminates:
            manager.wait_until_terminate()
    assert recorder.tokens(1) == list(range(2, 22))
    assert 77 not in recorder.responses


@pytest.mark.case(91)
def test_room_is_never_negative_after_too_many_requests() -> None:
    recorder = Recorder()
    requests = [request(i, [i], 20) for i in range(1, 13)]
    real_get = recorder.get
    recorder.get = lambda room: (real_get(room), requests[:], requests.clear())[1]  # type: ignore[method-assign,func-returns-value]
    with running(recorder, max_batch_size=4):
        recorder.wait_for_finals(*range(1, 13))
    assert min(recorder.rooms) == 0


@pytest.mark.case(45)
def test_deadlines_count_from_arrival_not_from_acceptance() -> None:
    """A request that waited too long before it was fetched ends in that iteration."""
    late = [
        request(1, [1], 30, max_queue_time_ms=1),
        request(2, [1], 30, allotted_time_ms=1),
        request(3, [1], 3),
    ]
    time.sleep(0.002)
    recorder = serve(late)
    for request_id in (1, 2):
        [(ids, is_final, error)] = recorder.responses[request_id]
        assert (ids, is_final) == ([], True)
        assert error.startswith("not started before its deadline: ")
    assert recorder.tokens(3) == [2, 3, 4]
