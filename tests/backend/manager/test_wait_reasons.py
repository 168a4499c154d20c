"""What a request is reported to do and why it waits, and calls to the thread of the loop."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from itertools import dropwhile, groupby
from typing import Any

import pytest
from support.manager_harness import (
    GUARANTEED,
    MAX_UTILIZATION,
    WAIT,
    GatedEngine,
    Recorder,
    request,
    running,
)
from support.scheduler_world import make_request
from support.triton_stub import CountingEngine

from inflight_backend.calls import LoopCalls
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.wait_reasons import describe_wait, state_of
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_scheduler import (
    CapacitySchedulerPolicy,
)


class Curious(Recorder):
    """Asks after every iteration, on the thread of the loop."""

    manager: GptManager | None = None

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, list[dict[str, Any]]] = {}

    def poll(self) -> set[int]:
        if self.manager is not None:
            for request_id, answers in self.answers.items():
                answers.append(describe_wait(self.manager._batcher, request_id))
        return super().poll()


def ask_all(
    requests: list[InferenceRequest],
    policy: CapacitySchedulerPolicy = GUARANTEED,
    params: TrtGptModelOptionalParams | None = None,
    **engine: Any,
) -> dict[int, list[dict[str, Any]]]:
    """The answers to every question from when a request is taken, by request."""
    recorder = Curious()
    options = params or TrtGptModelOptionalParams(max_batch_size=8)
    with running(recorder, CountingEngine(**engine), policy, params=options) as manager:
        recorder.manager = manager
        recorder.answers = {each.request_id: [] for each in requests}
        recorder.pending += requests
        recorder.wait_for_finals(*recorder.answers)
    return {
        number: list(dropwhile(lambda answer: answer["state"] == "not in flight", answers))
        for number, answers in recorder.answers.items()
    }


def states(answers: list[dict[str, Any]]) -> list[str]:
    """Successive states, without repetitions."""
    return [state for state, _ in groupby(answer["state"] for answer in answers)]


def test_prompt_in_chunks_is_in_its_context() -> None:
    params = TrtGptModelOptionalParams(
        max_batch_size=8, enable_chunked_context=True, context_chunk_unit=8
    )
    answers = ask_all([request(1, range(40), 3)], params=params, max_num_tokens=16)[1]
    assert states(answers) == ["context", "generation", "not in flight"]
    in_context = [answer for answer in answers if answer["state"] == "context"]
    assert len(in_context) == 2, "of three chunks the last brings a token"
    assert all(answer["reason"] == "runs in the coming iteration" for answer in in_context)
    assert all(answer["generated_tokens"] == 0 for answer in in_context)
    assert all(answer["held_blocks"] == 10 for answer in in_context)


def test_victim_is_paused_until_its_context_is_computed_again() -> None:
    requests = [request(1, range(8), 24), request(2, range(100, 108), 24)]
    answers = ask_all(requests, MAX_UTILIZATION, num_blocks=10, tokens_per_block=4)
    assert states(answers[1]) == ["generation", "not in flight"]
    assert states(answers[2]) == [
        "generation",
        "waiting",  # it will be paused
        "paused",
        "context",  # the prompt, and what it had generated
        "generation",
        "not in flight",
    ]
    [victim] = [answer for answer in answers[2] if answer["state"] == "waiting"]
    assert victim["reason"] == "paused as victim of request 1, which needs 1 KV blocks, free 0"
    assert (victim["behind_request"], victim["num_pauses"]) == (1, 0)
    assert victim["held_blocks"] == 5
    for answer in (answer for answer in answers[2] if answer["state"] == "paused"):
        assert answer["reason"].startswith("waiting for KV blocks: needs 6, free ")
        assert (answer["num_pauses"], answer["held_blocks"]) == (1, 0)
        assert (answer["place"], answer["num_waiting"]) == (1, 1)
        assert answer["generated_tokens"] == 13
    [again] = [answer for answer in answers[2] if answer["state"] == "context"]
    assert (again["num_pauses"], again["generated_tokens"]) == (1, 13)


def test_an_encoder_runs_before_the_context() -> None:
    running = make_request(1, encoder_length=4)
    assert state_of(running, is_running=False) == "waiting"
    assert state_of(running, is_running=True) == "encoder"
    running.finish_encoder()
    assert state_of(running, is_running=True) == "context"


def test_why_of_several_requests_is_about_the_first_active_one() -> None:
    recorder = Recorder()
    asked: list[Future[dict[str, Any]]] = []
    with running(recorder) as manager:
        recorder.on_response = lambda i, is_final: (
            asked.append(manager.why(9, 1, 2, 3)) if is_final else None
        )
        recorder.pending += [request(i, [100 * i], 50 * i) for i in (1, 2, 3)]
        recorder.wait_for_finals(1, 2, 3)
    answers = [future.result(WAIT) for future in asked]
    assert [answer.get("request") for answer in answers] == [2, 3, None]
    assert answers[-1]["state"] == "not in flight"


def test_calls_wait_for_the_loop_until_it_is_closed_and_are_answered_in_order() -> None:
    calls = LoopCalls(wake=lambda: None)
    seen: list[int] = []
    futures = [calls.call_soon(partial(seen.append, number)) for number in range(3)]
    assert not any(future.done() for future in futures)
    calls.run_pending()
    assert all(future.done() for future in futures)
    assert seen == [0, 1, 2]
    last = calls.call_soon(threading.get_ident)
    calls.close()
    assert last.result(0) == calls.call_soon(threading.get_ident).result(0)


@pytest.mark.parametrize("error", [ValueError(), SystemExit()])
def test_call_that_raises_fails_alone(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with running(Recorder()) as manager:
        assert manager._calls.call_soon(fail).exception(WAIT) is error
        assert manager._calls.call_soon(lambda: 1).result(WAIT) == 1


def test_cancelled_call_is_skipped() -> None:
    engine = GatedEngine()
    recorder = Recorder([request(1, [100], 5)])
    with running(recorder, engine) as manager:
        assert engine.has_begun.wait(WAIT)
        assert manager.why(1).cancel()
        last = manager.why(1)
        engine.go_on.set()
        assert last.result(WAIT)["request"] == 1
        recorder.wait_for_finals(1)


@pytest.mark.parametrize("attempt", range(5))
def test_calls_during_the_shutdown_are_answered(attempt: int) -> None:
    futures: list[Future[int]] = []
    is_over = threading.Event()
    with running(Recorder()) as manager:

        def ask() -> None:
            while not is_over.wait(0.0001):
                futures.append(manager._calls.call_soon(lambda: 1))

        thread = threading.Thread(target=ask)
        thread.start()
        manager.shutdown()
        is_over.set()
        thread.join()
    assert all(future.result(WAIT) == 1 for future in futures)
