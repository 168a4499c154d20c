"""What a request in flight is said to do, asked between all iterations of its life."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import groupby
from typing import Any

from support.manager_harness import GUARANTEED, MAX_UTILIZATION, WAIT, Recorder, request, running
from support.triton_stub import CountingEngine

from inflight_backend.engine.interface import MemoryUsage
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.statistics import IterationStats
from inflight_backend.manager.wait_reasons import describe_load, describe_wait
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_scheduler import CapacitySchedulerPolicy


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
    """The answers to every question, by request."""
    recorder = Curious()
    options = params or TrtGptModelOptionalParams(max_batch_size=8)
    with running(recorder, CountingEngine(**engine), policy, params=options) as manager:
        recorder.manager = manager
        recorder.answers = {each.request_id: [] for each in requests}
        recorder.pending += requests
        recorder.wait_for_finals(*recorder.answers)
    return recorder.answers


def states(answers: list[dict[str, Any]]) -> list[str]:
    """One after another, each once."""
    return [state for state, _ in groupby(answer["state"] for answer in answers)]


def test_a_prompt_in_chunks_is_in_its_context() -> None:
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


def test_a_victim_is_paused_until_its_context_is_computed_again() -> None:
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


def test_a_refusal_says_how_full_it_is() -> None:
    stats = IterationStats(
        iteration=7,
        num_active_requests=5,
        max_num_requests=8,
        num_scheduled_requests=3,
        num_context_requests=1,
        num_generation_requests=2,
        num_paused_requests=0,
        num_waiting_requests=2,
        num_repairs=0,
        num_context_tokens=20,
        max_num_blocks=40,
        num_free_blocks=1,
        tokens_per_block=16,
        memory=MemoryUsage(),
    )
    assert describe_load(stats) == (
        "5 of 8 places are taken, 2 of those requests wait, and 1 of 40 KV blocks are free"
    )


def test_of_several_requests_the_first_that_is_active_is_meant() -> None:
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
