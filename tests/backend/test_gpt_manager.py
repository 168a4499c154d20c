"""The callback contract of `GptManager`, rule by rule, with an engine that counts."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, WAIT, Recorder, request, running
from support.triton_harness import wait_until
from support.triton_stub import CountingEngine

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.logits_processors import NO_TOKEN
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_protocol import METRICS
from inflight_scheduler import CapacitySchedulerPolicy, LlmRequest, ScheduledBatch, TrtGptModelType


@pytest.fixture(autouse=True, params=["plain loop", "overlapped loop"])
def _both_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingEngine, "is_asynchronous", request.param == "overlapped loop")


def test_streaming_sends_one_token_per_response_and_one_final() -> None:
    recorder = Recorder([request(1, [5, 6], 3)])
    with running(recorder):
        recorder.wait_for_finals(1)
    assert recorder.responses[1] == [([7], False, ""), ([8], False, ""), ([9], True, "")]


@pytest.mark.parametrize(("exclude", "expected"), [(False, [5, 6, 7, 8]), (True, [7, 8])])
def test_whole_answer_is_one_response(exclude: bool, expected: list[int]) -> None:
    recorder = Recorder([request(1, [5, 6], 2, streaming=False)])
    with running(recorder, exclude_input_in_output=exclude):
        recorder.wait_for_finals(1)
    assert recorder.responses[1] == [(expected, True, "")]


def test_nobody_looks_at_who_waits_for_a_whole_answer_before_that_is_there() -> None:
    """Thousands may wait for one, and each look costs as much as to schedule it."""
    recorder, applied = Recorder(), []
    with running(recorder) as manager:
        apply = manager._apply

        def note(request: LlmRequest) -> None:
            applied.append((request.request_id, request.num_generated_tokens))
            apply(request)

        manager._apply = note  # type: ignore[method-assign]
        recorder.pending += [request(i, [100 * i], 9 + i, streaming=False) for i in (1, 2)]
        recorder.wait_for_finals(1, 2)
    assert [recorder.tokens(i)[1:] for i in (1, 2)] == [[*range(101, 111)], [*range(201, 212)]]
    assert applied == [(1, 10), (2, 11)]


def test_a_whole_answer_for_which_nothing_can_be_drawn_ends_with_an_error_amid_it() -> None:
    class Engine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            return [-1 if token == 104 else token for token in super().execute(batch)]

    requests = [request(i, [100 * i], 9, streaming=False, end_id=7) for i in (1, 2)]
    recorder = Recorder(requests)
    with running(recorder, Engine()):
        recorder.wait_for_finals(1, 2)
    assert recorder.responses[1] == [([], True, NO_TOKEN)]
    assert recorder.tokens(2)[1:] == list(range(201, 210))


@pytest.mark.contract("tensorrt_llm input", "exclude_input_in_output")
def test_request_tensor_overrides_exclude_input_in_output() -> None:
    recorder = Recorder([request(1, [5], 1, streaming=False, exclude_input_in_output=True)])
    with running(recorder):
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [6]


@pytest.mark.contract("tensorrt_llm input", "end_id")
def test_end_id_ends_the_request_and_is_not_part_of_the_answer() -> None:
    recorder = Recorder([request(1, [5], 50, end_id=8)])
    with running(recorder):
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [6, 7]


def test_get_is_asked_at_every_iteration_for_as_many_as_fit() -> None:
    recorder = Recorder([request(i, [i], 20) for i in range(1, 6)])
    with running(recorder, params=TrtGptModelOptionalParams(max_batch_size=2)):
        recorder.wait_for_finals(*range(1, 6))
    assert recorder.rooms[:2] == [2, 0]
    assert min(recorder.rooms) == 0
    assert all(recorder.tokens(i) == list(range(i + 1, i + 21)) for i in range(1, 6))


def test_a_loop_without_work_rests_also_after_it_was_woken() -> None:
    recorder = Recorder()
    with running(recorder) as manager:
        manager.wake()
        wait_until(lambda: len(recorder.rooms) > 1)
        begin, num_looks = time.monotonic(), len(recorder.rooms)
        wait_until(lambda: len(recorder.rooms) >= num_looks + 20)
    assert time.monotonic() - begin > 0.09, "it looks after 5 ms and more"


def test_order_of_callbacks_within_an_iteration() -> None:
    recorder = Recorder([request(1, [1], 2)])
    with running(recorder):
        recorder.wait_for_finals(1)
    first_send = recorder.events.index("send")
    assert recorder.events[first_send - 1 : first_send + 3] == ["get", "send", "poll", "stats"]


@pytest.mark.case(118)
def test_everything_is_free_before_the_final_response() -> None:
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

    def stop_after_five(request_id: int, is_final: bool) -> None:
        if request_id == 1 and len(recorder.tokens(1)) == 5:
            recorder.stops = {1, 999}  # 999 was never seen; both are named in every poll

    recorder.on_response = stop_after_five
    with running(recorder):
        recorder.wait_for_finals(1, 2)
    assert recorder.tokens(1) == [2, 3, 4, 5, 6]
    assert recorder.responses[1][-1] == ([], True, "")
    assert recorder.tokens(2) == list(range(51, 81))
    assert 999 not in recorder.responses


@pytest.mark.case(57, 91)
@pytest.mark.case(66)
def test_a_paused_request_that_is_stopped_ends_in_the_next_iteration_and_never_runs_again() -> None:
    engine = CountingEngine(num_blocks=8)
    recorder = Recorder([request(i, [100 * i], 25) for i in (1, 2)])
    managers: queue.SimpleQueue[GptManager] = queue.SimpleQueue()
    at: dict[str, int] = {}
    is_held: list[bool] = []

    def poll() -> set[int]:
        if "manager" not in found:
            found["manager"] = managers.get(timeout=WAIT)
        manager = found["manager"]
        paused = [r for r in manager._active if r.num_pauses > 0 and r.seq_slot is None]
        if not paused or "stop" in at:
            return set()
        at["stop"], at["id"] = manager._iteration, paused[0].request_id
        at["batches"] = len(engine.batches)
        return {paused[0].request_id}

    def on_response(request_id: int, is_final: bool) -> None:
        if is_final and request_id == at.get("id"):
            manager = found["manager"]
            at["final"] = manager._iteration
            is_held.append(manager._active.get(request_id) is not None)
            is_held.append(manager._batcher.block_manager.num_distinct_blocks_of(request_id) > 0)

    found: dict[str, GptManager] = {}
    recorder.poll, recorder.on_response = poll, on_response  # type: ignore[method-assign]
    with running(recorder, engine, MAX_UTILIZATION) as manager:
        managers.put(manager)
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


def test_an_id_in_flight_is_not_accepted_again_but_later_it_is() -> None:
    recorder = Recorder([request(1, [1], 5), request(1, [100], 5)])
    with running(recorder):
        recorder.wait_for_finals(1)
        assert recorder.tokens(1) == [2, 3, 4, 5, 6]
        recorder.responses.clear()
        recorder.pending.append(request(1, [100], 2))
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == [101, 102]


def test_a_bad_request_gets_its_own_error_and_disturbs_nobody() -> None:
    recorder = Recorder([request(1, [1], 5), request(2, [-4], 5), request(3, [7], 5)])
    with running(recorder):
        recorder.wait_for_finals(1, 2, 3)
    assert recorder.responses[2] == [
        ([], True, "'input_ids' holds -4, outside the vocabulary 0..999")
    ]
    assert recorder.tokens(1) == [2, 3, 4, 5, 6]
    assert recorder.tokens(3) == [8, 9, 10, 11, 12]


@pytest.mark.case(76)
def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    recorder = Recorder([request(1, [1] * 10, 30)])
    with running(recorder, CountingEngine(num_blocks=4, tokens_per_block=4)):
        recorder.wait_for_finals(1)
    assert "KV blocks" in recorder.responses[1][0][2]


@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
@pytest.mark.case(78)
def test_all_count_without_a_gap_with_a_quarter_of_the_blocks(
    policy: CapacitySchedulerPolicy,
) -> None:
    requests = [request(i, [i * 10, i * 10 + 1], 40) for i in range(1, 17)]
    recorder = Recorder(requests)
    engine = CountingEngine(num_blocks=44, tokens_per_block=4)  # 16 need 11 each
    with running(recorder, engine, policy, params=TrtGptModelOptionalParams(max_batch_size=16)):
        recorder.wait_for_finals(*range(1, 17))
    for i in range(1, 17):
        assert recorder.tokens(i) == list(range(i * 10 + 2, i * 10 + 42))
        assert [final for _, final, _ in recorder.responses[i]].count(True) == 1
    num_pauses = sum(stats["Paused Requests"] for stats in recorder.stats)
    assert (num_pauses > 0) == (policy == MAX_UTILIZATION)
    assert recorder.stats[-1]["Free KV cache blocks"] == 44


def test_statistics_have_exactly_the_documented_keys_and_stop_when_idle() -> None:
    recorder = Recorder([request(1, [1, 2, 3], 3)])
    with running(recorder):
        recorder.wait_for_finals(1)
    keys = sorted(recorder.stats[0])
    assert keys == [
        "Active Request Count",
        "Context Requests",
        "Fraction used KV cache blocks",
        "Free KV cache blocks",
        "Generation Requests",
        "Iteration Counter",
        "KV cache hit rate",
        "KV cache transfer time",
        "Max KV cache blocks",
        "Max Request Count",
        "MicroBatch ID",
        "Paused Requests",
        "Request count",
        "Reused KV cache blocks",
        "Runtime CPU Memory Usage",
        "Runtime GPU Memory Usage",
        "Runtime Pinned Memory Usage",
        "Scheduled Requests",
        "Timestamp",
        "Tokens per KV cache block",
        "Total Context Tokens",
        "Used KV cache blocks",
        "Waiting Requests",
    ]
    # The peer's CI wants a key for each line of its families; the hit rate is in one of ours.
    gauges = [family for family in METRICS if family.name.startswith("nv_trt_llm")]
    assert len(keys) - 1 == sum(len(family.values) for family in gauges) == 22
    first, last = recorder.stats[0], recorder.stats[-1]
    assert (first["Context Requests"], first["Total Context Tokens"]) == (1, 3)
    assert (first["Active Request Count"], last["Active Request Count"]) == (1, 0)
    counters = [stats["Iteration Counter"] for stats in recorder.stats]
    assert list(dict.fromkeys(counters)) == [1, 2, 3]


def test_statistics_count_who_runs_and_who_waits() -> None:
    """Room for one of three until its last token: five blocks of eight."""
    recorder = Recorder([request(i, [100 * i, 1, 2], 17) for i in range(1, 4)])
    with running(recorder, CountingEngine(num_blocks=8)):
        recorder.wait_for_finals(1, 2, 3)
    # The overlapped loop tells of turns, too, in which it only awaits the last token of one.
    turns = [stats for stats in recorder.stats if stats["Scheduled Requests"] > 0]
    assert [stats["Waiting Requests"] for stats in turns] == [2] * 17 + [1] * 17 + [0] * 17
    for stats in turns:
        kinds = (stats["Context Requests"], stats["Generation Requests"])
        assert kinds in ((1, 0), (0, 1))
        assert stats["Scheduled Requests"] == 1


@pytest.mark.case(86)
def test_a_failing_step_ends_only_its_requests() -> None:
    def fail_once(batch: ScheduledBatch) -> None:
        if batch.iteration == 3:
            raise RuntimeError("secret detail")

    recorder = Recorder([request(1, [1], 10)])
    with running(recorder, CountingEngine(before_step=fail_once)) as manager:
        recorder.wait_for_finals(1)
        recorder.pending.append(request(2, [20], 3))
        recorder.wait_for_finals(2)
        assert manager._batcher.block_manager.num_used_blocks == 0
    assert recorder.responses[1][-1] == ([], True, "the engine failed while it ran this request")
    assert recorder.tokens(2) == [21, 22, 23]


@pytest.mark.case(87)
def test_logits_that_are_not_numbers_end_the_request_by_name() -> None:
    class BrokenEngine(CountingEngine):
        def execute(self, batch: ScheduledBatch) -> list[int]:
            tokens = super().execute(batch)
            return [-1 if token == 5 else token for token in tokens]

    recorder = Recorder([request(1, [2], 10), request(2, [100], 10)])
    with running(recorder, BrokenEngine()):
        recorder.wait_for_finals(1, 2)
    ids, is_final, error = recorder.responses[1][-1]
    assert (ids, is_final) == ([], True)
    assert "the model's logits are not finite numbers" in error
    assert recorder.tokens(2) == list(range(101, 111))


@pytest.mark.parametrize("name", ["get", "send", "poll", "return_stats"])
@pytest.mark.case(91, 92, 93, 94)
def test_a_callback_that_raises_does_not_stop_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder([request(1, [1], 3), request(2, [5], 3)])
    real = getattr(recorder, name)
    num_calls = 0

    def fail_first(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise RuntimeError("callback")
        return real(*args)

    monkeypatch.setattr(recorder, name, fail_first)
    with running(recorder):
        recorder.wait_for_finals(1, 2)
    assert recorder.tokens(2) == [6, 7, 8]


@pytest.mark.case(91)
def test_rubbish_from_the_get_callback_is_passed_over() -> None:  # case 91
    rubbish: list[Any] = ["not a request", None]
    recorder = Recorder([request(1, [1], 30), *rubbish, request(2, [5], 3)])
    with running(recorder):
        recorder.wait_for_finals(1, 2)
    assert recorder.tokens(1) == list(range(2, 32))
    assert recorder.tokens(2) == [6, 7, 8]


@pytest.mark.parametrize("rubbish", [5, [[1]], "1", [None, 1.5]])
@pytest.mark.case(94)
def test_rubbish_from_the_stop_callback_is_passed_over(rubbish: Any) -> None:  # case 94
    recorder = Recorder([request(1, [1], 30)])
    recorder.stops = rubbish
    with running(recorder):
        recorder.wait_for_finals(1)
    assert recorder.tokens(1) == list(range(2, 32))


def test_the_loop_survives_a_failure_of_its_own_rescue(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with running(recorder) as manager:
        planner = manager._batcher.planner
        real_plan, real_release = type(planner).plan, type(planner).release
        broken = [True]

        def plan(self: Any, *args: Any) -> Any:
            if broken[0] and args[0]:
                raise AssertionError("the plan")
            return real_plan(self, *args)

        def release(self: Any, request: Any) -> None:
            if broken[0]:
                raise AssertionError("the release")
            real_release(self, request)

        monkeypatch.setattr(type(planner), "plan", plan)
        monkeypatch.setattr(type(planner), "release", release)
        recorder.pending.append(request(1, [1], 5))
        recorder.wait_for_finals(1)
        broken[0] = False
        recorder.pending.append(request(2, [1], 5))
        recorder.wait_for_finals(2)
    assert "batch manager failed" in recorder.responses[1][-1][2]
    assert recorder.tokens(2) == [2, 3, 4, 5, 6]


@pytest.mark.case(91)
def test_a_get_callback_that_returns_too_many_is_not_told_unbounded() -> None:
    recorder = Recorder()
    requests = [request(i, [i], 20) for i in range(1, 13)]
    real_get = recorder.get
    recorder.get = lambda room: (real_get(room), requests[:], requests.clear())[1]  # type: ignore[method-assign,func-returns-value]
    with running(recorder, params=TrtGptModelOptionalParams(max_batch_size=4)):
        recorder.wait_for_finals(*range(1, 13))
    assert min(recorder.rooms) == 0


def test_shutdown_drains() -> None:
    recorder = Recorder([request(1, [1], 100)])
    started = threading.Event()
    recorder.on_response = lambda request_id, is_final: started.set()
    with running(recorder):
        assert started.wait(WAIT)
    assert recorder.tokens(1) == list(range(2, 102))


def test_the_terminate_request_ends_the_loop_after_the_others() -> None:
    recorder = Recorder([request(1, [1], 20), request(77, [1], 1)])
    with running(recorder, terminate_req_id=77) as manager:
        manager.wait_until_terminate()
    assert recorder.tokens(1) == list(range(2, 22))
    assert 77 not in recorder.responses


def test_unsupported_settings_are_refused_by_name() -> None:
    recorder = Recorder()
    callbacks = (recorder.get, recorder.send)
    with pytest.raises(ConfigurationError, match="max_beam_width"):
        GptManager(CountingEngine(), TrtGptModelType.InflightBatching, 2, GUARANTEED, *callbacks)
