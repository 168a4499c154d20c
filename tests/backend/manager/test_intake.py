"""A request whose intake fails ends alone, and leaves nothing behind."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.manager_harness import BOTH_LOOPS, WAIT, Recorder, request, running
from support.triton_harness import wait_until

from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.health import DeadlineWatch
from inflight_backend.manager.logits_processors import LogitsHooks
from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.manager.parameters import OverlapScheduler, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.stop_words import StopWordWatch
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import ActiveRequests

NOT_TAKEN = "the request could not be taken"


VICTIM = 3


# Where a request is handled on its way in: class and method; its first argument is the request.
PLACES: dict[str, tuple[type, str]] = {
    "validate": (LogitsHooks, "check"),
    "processors": (LogitsHooks, "add"),
    "active": (ActiveRequests, "add"),
    "deadlines": (DeadlineWatch, "add"),
    "stop words": (StopWordWatch, "add"),
    "gatherer": (OutputGatherer, "add"),
    "recorder": (FlightRecorder, "arrived"),
}


class Panic(BaseException):
    """As those of Rust libraries: not an `Exception`."""


class Spoiler:
    """Makes one method raise for one request: before it does its work, or after."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, is_after: bool
    ) -> None:
        self.num_left = 1
        cls, name = PLACES[place]
        real: Callable[..., Any] = getattr(cls, name)

        def spoilt(owner: Any, subject: Any, *more: Any) -> Any:
            is_spoilt = subject.request_id == VICTIM and self.num_left > 0
            self.num_left -= is_spoilt
            if is_spoilt and not is_after:
                raise error
            result = real(owner, subject, *more)
            if is_spoilt:
                raise error
            return result

        monkeypatch.setattr(cls, name, spoilt)


def demanding(request_id: int, num_new: int = 6, **values: Any) -> InferenceRequest:
    """A request for which every part of the manager has something to do."""
    return request(
        request_id,
        [100 * request_id],
        num_new,
        return_perf_metrics=True,
        allotted_time_ms=600_000,
        stop_words_list=[[999], [1]],
        logits_post_processor_name="mine",
        **values,
    )


def params_with(path: Path, **changes: Any) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(
        max_batch_size=8,
        record_file=str(path),
        logits_processors={"mine": lambda *_: None},
        **changes,
    )


def what_stays(manager: GptManager) -> dict[str, Collection[int]]:
    """The ids that the parts know."""
    flight_recorder = manager._batcher.recorder
    return {
        "active": [each.request_id for each in manager._active],
        "gatherer": manager._gatherer._gathered,
        "stop words": manager._stop_words._watched,
        "processors": manager._rules._hooks,
        "recorder": [each.request_id for each in flight_recorder._arrivals],
        "arrival times": flight_recorder._came_ns,
        "searches": flight_recorder._searches,
    }


def assert_nothing_stays(manager: GptManager) -> None:
    """Checked on the manager's thread, between two iterations."""

    def check() -> None:
        assert manager.get_num_active_requests() == 0
        assert manager._batcher.is_idle_and_intact()
        assert not any(what_stays(manager).values())

    manager._calls.call_soon(check).result(WAIT)


@pytest.mark.case(89, 117, 118)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [ValueError("ours"), Panic("not ours")])
def test_request_whose_intake_fails_ends_alone(
    error: BaseException,
    place: str,
    is_after: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One runs and three arrive at once; the intake of the second one fails the first time."""
    spoiler = Spoiler(monkeypatch, place, error, is_after)
    recorder = Recorder([demanding(1, 40)])
    victim = demanding(VICTIM)

    def on_response(request_id: int, is_final: bool) -> None:
        if request_id == 1 and len(recorder.tokens(1)) == 5:
            recorder.pending += [demanding(2), victim, demanding(4)]
        if request_id == VICTIM and is_final and spoiler.num_left == 0:
            spoiler.num_left = -1
            known = what_stays(managers.get(timeout=WAIT))
            left.extend(name for name, ids in known.items() if VICTIM in ids)
            recorder.pending.append(victim)

    left: list[str] = []
    managers: queue.SimpleQueue[GptManager] = queue.SimpleQueue()
    recorder.on_response = on_response
    path = tmp_path / "recording.jsonl"
    with running(recorder, params=params_with(path)) as manager:
        managers.put(manager)
        wait_until(lambda: len(recorder.responses.get(VICTIM, ())) > 1)
        recorder.wait_for_finals(1, 2, VICTIM, 4)
        assert recorder.final_errors(VICTIM) == [NOT_TAKEN, ""]
        assert recorder.tokens(VICTIM) == list(range(301, 307))
        for other, num_new in ((1, 40), (2, 6), (4, 6)):
            assert recorder.final_errors(other) == [""]
            assert recorder.tokens(other) == list(range(100 * other + 1, 100 * other + num_new + 1))
        assert left == [], "before it is sent again, which repairs much"
        assert manager.health.is_healthy
        assert_nothing_stays(manager)
    with open_recording(path) as reader:
        result = replay(reader)
    assert result.divergence is None, str(result)
    assert result.num_requests == 4, "the failure left no trace"


@BOTH_LOOPS
def test_valid_requests_of_a_bad_list_are_taken(
    overlap: OverlapScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Invalid requests, other objects and valid ones; also where the callback ends in an error."""
    Spoiler(monkeypatch, "active", MemoryError(), is_after=True)
    bad = InferenceRequest(2)
    recorder = Recorder()
    fetched: list[Any] = [request(1, [1], 9), bad, "rubbish", demanding(VICTIM), request(4, [4], 9)]

    def get(room: int) -> Iterator[Any]:
        while fetched:
            yield fetched.pop(0)
        if recorder.responses:
            return
        raise OSError("the connection is lost")

    recorder.get = get  # type: ignore[assignment]
    params = params_with(tmp_path / "recording.jsonl", overlap_scheduler=overlap)
    with running(recorder, params=params) as manager:
        recorder.wait_for_finals(1, 2, VICTIM, 4)
        assert "the prompt is missing" in recorder.final_errors(2)[0]
        assert recorder.final_errors(VICTIM) == [NOT_TAKEN]
        assert recorder.tokens(1) == list(range(2, 11))
        assert recorder.tokens(4) == list(range(5, 14))
        assert_nothing_stays(manager)
