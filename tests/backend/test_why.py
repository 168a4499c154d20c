"""What `GptManager.why` says of a request, in every state that it may be in."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from fakes import CountingEngine
from manager_harness import MAX_UTILIZATION, WAIT, Recorder, request, running

from inflight_backend.optional_params import KvCacheConfig, TrtGptModelOptionalParams


def test_every_state_is_told_with_its_numbers() -> None:
    """Prompts that run in three chunks, and room for three of six answers."""
    recorder = Recorder()
    params = TrtGptModelOptionalParams(
        max_batch_size=8,
        enable_chunked_context=True,
        context_chunk_unit=2,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
    )
    engine = CountingEngine(num_blocks=22, tokens_per_block=4, max_num_tokens=8)
    asked: list[Future[dict[str, Any]]] = []
    with running(recorder, engine, MAX_UTILIZATION, params=params) as manager:
        # Before each iteration, about all of them.
        manager._stats_cb = lambda text: asked.extend(map(manager.why, range(1, 7)))
        recorder.pending += [request(i, [100 * i] * 6, 40) for i in range(1, 7)]
        recorder.wait_for_finals(*range(1, 7))
    answers = [future.result(WAIT) for future in asked]
    by_state: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        by_state.setdefault(answer["state"], []).append(answer)
    assert by_state.keys() == {"waiting", "context", "generation", "paused", "not in flight"}
    for answer in by_state["paused"]:
        assert (answer["num_pauses"] > 0, answer["held_blocks"]) == (True, 0)
        assert answer["generated_tokens"] > 0
        assert 1 <= answer["place"] <= answer["num_waiting"]
    for answer in by_state["context"]:
        assert answer["reason"] == "runs in the coming iteration"
    assert {answer["num_pauses"] > 0 for answer in by_state["context"]} == {False, True}
    assert all(answer["generated_tokens"] > 0 for answer in by_state["generation"])
    waiting = [answer for answer in by_state["waiting"] if answer["held_blocks"] > 0]
    assert waiting, "between two chunks one holds cache, whatever it waits for"


def test_of_several_requests_the_first_that_is_active_is_meant() -> None:
    recorder = Recorder([request(i, [100 * i], 50 * i) for i in (1, 2, 3)])
    asked: list[Future[dict[str, Any]]] = []
    with running(recorder) as manager:
        recorder.on_response = lambda i, is_final: (
            asked.append(manager.why(9, 1, 2, 3)) if is_final else None
        )
        recorder.wait_for_finals(1, 2, 3)
    answers = [future.result(WAIT) for future in asked]
    assert [answer.get("request") for answer in answers] == [2, 3, None]
    assert answers[-1]["state"] == "not in flight"
