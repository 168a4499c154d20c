"""Priority, salt and deadlines of a request: from its tensors to what the batch manager does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.manager_harness import WAIT, GatedEngine, Recorder, request, running, serve
from support.triton_stub import CountingEngine

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_scheduler import LlmRequest


def limits(**values: Any) -> RequestLimits:
    return RequestLimits(
        vocab_size=100,
        max_input_len=20,
        max_seq_len=32,
        exclude_input_in_output=False,
        refusal_reason=lambda request: None,
        **values,
    )


def validated(bounds: dict[str, Any] | None = None, **values: Any) -> tuple[float, LlmRequest]:
    """When the request came, on the clock of the deadlines, and what became of it."""
    sent = InferenceRequest.from_tokens(1, [1, 2], 4, **values)
    return sent.created_ns / 1e9, validate(sent, limits(**(bounds or {})))


def test_what_is_sent_arrives() -> None:
    came, sent = validated(
        priority=0.25, cache_salt="tenant ä", max_queue_time_ms=1500, allotted_time_ms=2**31 - 1
    )
    assert (sent.priority, sent.cache_salt) == (0.25, "tenant ä".encode())
    assert (sent.queue_deadline, sent.run_deadline) == (came + 1.5, came + 2147483.647)


def test_without_them_nothing_changes() -> None:
    _, plain = validated()
    assert (plain.priority, plain.cache_salt) == (0.5, b"")
    assert (plain.queue_deadline, plain.run_deadline) == (None, None)


@pytest.mark.parametrize("priority", [0.0, 0.5, 1.0])
def test_bounds_of_priority_are_served(priority: float) -> None:
    assert validated(priority=priority)[1].priority == priority


@pytest.mark.parametrize(("asked", "allowed"), [(None, 2.0), (500, 0.5), (60_000, 2.0)])
def test_a_request_may_ask_for_less_time_than_the_server_allows_not_for_more(
    asked: int | None, allowed: float
) -> None:
    values = {"max_queue_time_ms": asked, "allotted_time_ms": asked} if asked else {}
    came, sent = validated({"max_queue_seconds": 2.0, "max_run_seconds": 2.0}, **values)
    assert (sent.queue_deadline, sent.run_deadline) == (came + allowed, came + allowed)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("priority", 1.5, "'priority' is 1.5; it must be a finite number, 0..1"),
        ("priority", -0.001, "'priority' is -0.001; it must be a finite number, 0..1"),
        ("priority", float("nan"), "'priority' is nan"),
        ("cache_salt", "", "'cache_salt' has 0 bytes, outside 1..256"),
        ("cache_salt", "é" * 129, "'cache_salt' has 258 bytes, outside 1..256"),
        ("max_queue_time_ms", -1, "'max_queue_time_ms' is -1, outside 1..2147483647"),
        ("allotted_time_ms", 0, "'allotted_time_ms' is 0, outside 1..2147483647"),
        ("max_queue_time_ms", 0, "'max_queue_time_ms' is 0, outside 1..2147483647"),
        ("allotted_time_ms", -5, "'allotted_time_ms' is -5, outside 1..2147483647"),
    ],
)
@pytest.mark.case(44, 45)
def test_bad_values_name_field_and_bound(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        validated(**{name: value})


def test_a_salt_of_any_bytes_is_served_and_two_are_not() -> None:
    sent = InferenceRequest.from_tokens(1, [1], 4)
    sent.set_tensor("cache_salt", np.array([[b"\xff\x00"]], dtype=np.object_))
    assert validate(sent, limits()).cache_salt == b"\xff\x00"
    twice = InferenceRequest.from_tokens(1, [1], 4)
    twice.set_tensor("cache_salt", np.array([[b"a", b"b"]], dtype=np.object_))
    with pytest.raises(InvalidRequest, match="'cache_salt' must hold one value, got 2"):
        validate(twice, limits())


def test_only_equal_salts_share_cached_blocks() -> None:
    prompt = list(range(20))
    engine = CountingEngine(tokens_per_block=4)
    recorder = Recorder()
    num_reused = []
    with running(recorder, engine):
        for request_id, salt in enumerate([None, "a", "b", "a", None]):
            values: dict[str, Any] = {"cache_salt": salt} if salt else {}
            recorder.pending.append(request(request_id, prompt, 3, **values))
            recorder.wait_for_finals(request_id)
            num_reused.append(recorder.stats[-1]["Reused KV cache blocks"])
    assert num_reused == [0, 0, 0, 4, 8]
    assert all(recorder.tokens(i) == [20, 21, 22] for i in range(5))


@pytest.mark.case(45)
def test_deadlines_count_from_arrival_not_from_acceptance() -> None:
    """Who has waited too long before it is handed over is ended in that iteration."""
    late = [
        request(1, [1], 30, max_queue_time_ms=1),
        request(2, [1], 30, allotted_time_ms=1),
        request(3, [1], 3),
    ]
    time.sleep(0.002)
    recorder = serve(late)
    for request_id in (1, 2):
        ((ids, is_final, error),) = recorder.responses[request_id]
        assert (ids, is_final) == ([], True)
        assert error.startswith("not started before its deadline: ")
    assert recorder.tokens(3) == [2, 3, 4]


def test_who_has_started_ends_with_what_it_has() -> None:
    engine = GatedEngine()
    sent = request(1, [1], 200, max_queue_time_ms=WAIT * 1000, allotted_time_ms=1000)
    recorder = Recorder([sent])
    with running(recorder, engine):
        assert engine.has_begun.wait(WAIT)
        time.sleep(1.0)
        engine.go_on.set()
        recorder.wait_for_finals(1)
    assert recorder.responses[1] == [([2], False, ""), ([], True, "")]
