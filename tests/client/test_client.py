"""Both clients over both protocols, against a local server that speaks the wire."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from client.conftest import Local
from support.callers import CALLERS, LONG, Caller
from support.local_server import FOREIGN_MODELS, GAP_SECONDS, Arrival, LocalTriton

from inflight_client import (
    AsyncInflightClient,
    GenerateChunk,
    InflightClient,
    InvalidArgument,
    RequestTimeout,
    ServerError,
    ServerUnreachable,
    StreamInterrupted,
)
from inflight_client.address import Protocol

WAIT_SECONDS = 60.0


@pytest.fixture(params=sorted(CALLERS))
def caller(request: pytest.FixtureRequest, local: Local) -> Caller:
    """Each client in turn."""
    kind: str = request.param
    return CALLERS[kind](local.url, local.protocol)


def test_text_prompt_is_answered_with_text(caller: Caller, local: Local) -> None:
    result = caller.generate("count", 3, request_id="mine", temperature=0.5, top_k=4, seed=2**63)

    assert (result.text, result.token_ids, result.request_id) == (" 1 2 3", (), "mine")
    assert result.finish == "length"
    (arrival,) = local.triton.arrivals
    assert arrival.request_id == "mine"
    assert arrival.values == {
        "text_input": "count",
        "max_tokens": 3,
        "stream": False,
        "return_finish_reason": True,
        "exclude_input_in_output": True,
        "temperature": 0.5,
        "runtime_top_k": 4,
        "random_seed": 2**63,
    }


def test_token_prompt_is_answered_with_tokens(caller: Caller, local: Local) -> None:
    result = caller.generate([5, 6, 7], 3, min_tokens=2, end_id=-1)

    assert (result.text, result.token_ids, result.finish) == ("", (8, 9, 10), "length")
    assert local.triton.arrivals[0].values == {
        "input_ids": [5, 6, 7],
        "input_lengths": 3,
        "request_output_len": 3,
        "streaming": False,
        "return_finish_reason": True,
        "exclude_input_in_output": True,
        "min_tokens": 2,
        "end_id": -1,
    }


def test_streams_of_text_and_of_tokens(caller: Caller, local: Local) -> None:
    assert [chunk.text for chunk in caller.stream("count", 5)] == [f" {n}" for n in range(1, 6)]
    chunks = caller.stream([41], 3)
    assert chunks == [GenerateChunk(token_ids=(token,)) for token in (42, 43, 44)]
    assert all(arrival.is_completed.wait(WAIT_SECONDS) for arrival in local.triton.arrivals)


def test_several_answers_to_one_prompt(caller: Caller, local: Local) -> None:
    results = caller.generate_many([41], n=3, max_tokens=2, request_id="mine", seed=5)
    assert [result.token_ids for result in results] == [(42, 43), (420, 430), (4200, 4300)]
    assert {(result.request_id, result.finish) for result in results} == {("mine", "length")}
    assert local.triton.arrivals[0].values["num_return_sequences"] == 3
    chunks = caller.stream([7], 2, n=2)
    assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [
        (1, (80,)),
        (0, (8,)),
        (1, (90,)),
        (0, (9,)),
    ]


def test_leaving_a_stream_cancels_it(caller: Caller, local: Local) -> None:
    chunks = caller.stream("count", LONG, leave_after=3)

    assert len(chunks) == 3
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)
    assert not local.triton.arrivals[0].is_completed.is_set()


def test_cancel_from_the_side_ends_the_iteration(caller: Caller, local: Local) -> None:
    def have_some_left() -> bool:
        return any(arrival.num_sent > 20 for arrival in local.triton.arrivals)

    chunks = caller.cancel_when("count", have_some_left)

    assert 0 < len(chunks) < LONG
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


def test_cancel_before_the_first_response_reaches_the_server(caller: Caller, local: Local) -> None:
    assert caller.cancel_when("silent", lambda: bool(local.triton.arrivals)) == []

    (arrival, *_) = local.triton.arrivals
    if local.protocol == "grpc":
        assert arrival.is_left.wait(WAIT_SECONDS)
    else:  # Triton does not see the connection close: the client stops the request by its id
        assert arrival.request_id
        assert local.triton.stops == {arrival.request_id}


@pytest.mark.parametrize("kind", sorted(CALLERS))
def test_cancel_over_http_that_overtakes_its_request_is_repeated(
    kind: str, local_http: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server forgets the stop of a request that it does not have."""
    is_sent = threading.Event()
    arrive = LocalTriton.arrive

    def arrive_late(triton: LocalTriton, request_id: str, values: Any, *rest: Any) -> Arrival:
        if "text_input" in values:
            is_sent.set()
            while not triton.stops:
                time.sleep(GAP_SECONDS)
            triton.stops.clear()
        return arrive(triton, request_id, values, *rest)

    monkeypatch.setattr(LocalTriton, "arrive", arrive_late)
    assert CALLERS[kind](local_http.url, "http").cancel_when("silent", is_sent.is_set) == []
    (own,) = [arrival for arrival in local_http.triton.arrivals if arrival.values.get("text_input")]
    assert local_http.triton.stops == {own.request_id}


def test_stop_by_id_from_another_client(caller: Caller, local: Local) -> None:
    with InflightClient(local.url, protocol=local.protocol) as client:
        chunks = []
        for chunk in client.stream("count", LONG, request_id="other"):
            chunks.append(chunk)
            if len(chunks) == 3:
                caller.stop("other")

    assert 3 <= len(chunks) < LONG
    assert local.triton.arrivals[0].is_completed.wait(WAIT_SECONDS)


@pytest.mark.fast(2)
def test_timeout_cancels_a_stream(caller: Caller, local: Local) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout = 1\.0 s; the request was cancelled"):
        caller.stream("count", LONG, timeout=1.0)

    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


@pytest.mark.fast(1)
def test_timeout_without_any_response_cancels_too(caller: Caller, local: Local) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout = 1\.0 s"):
        caller.generate("silent", 1, timeout=1.0)

    arrival = local.triton.arrivals[0]
    if local.protocol == "grpc":
        assert arrival.is_left.wait(WAIT_SECONDS)
    else:
        assert local.triton.stops == {arrival.request_id}


def test_text_of_a_server_error_is_passed_on(caller: Caller) -> None:
    with pytest.raises(ServerError, match=r"^'text_input' is refused: say something else$"):
        caller.generate("refuse", 3)


def test_error_after_some_tokens(caller: Caller, local: Local) -> None:
    with pytest.raises(ServerError, match=r"^a step of the engine failed$"):
        caller.stream("fail late", 5)
    assert local.triton.arrivals[0].is_completed.wait(WAIT_SECONDS)


def test_stream_that_breaks_off_is_an_error(caller: Caller) -> None:
    with pytest.raises(StreamInterrupted, match="after 2 responses"):
        caller.stream("break", 5)


def test_last_statistics(caller: Caller, local: Local) -> None:
    assert caller.stats(10, follow=False) == [{"Iteration Counter": 1}]
    assert local.triton.arrivals[0].values == {"stats": True, "stream": False}


def test_why_gives_the_reason_and_its_numbers(caller: Caller, local: Local) -> None:
    assert caller.why("mine") == {
        "state": "waiting",
        "reason": "waiting for KV blocks: needs 5, free 3",
        "place": 2,
        "num_waiting": 7,
    }
    (arrival,) = local.triton.arrivals
    assert (arrival.request_id, arrival.values) == ("mine", {"why": True})
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        caller.why("")
    with pytest.raises(ServerError, match="not JSON"):
        caller.why("broken")


def test_a_question_given_up_does_not_stop_the_request_it_asks_about(
    caller: Caller, local: Local
) -> None:
    """It carries the id of that request."""
    with pytest.raises(RequestTimeout):
        caller.why("silent", timeout=0.3)
    assert caller.health()
    assert not any(arrival.values.get("stop") for arrival in local.triton.arrivals)
    local.triton.stops.add("silent")


def test_the_recording_comes_as_text(caller: Caller, local: Local) -> None:
    assert caller.recording() == '{"inflight_recording": 1}\n'
    (arrival,) = local.triton.arrivals
    assert (arrival.request_id, arrival.values) == ("", {"recording": True})


def test_statistics_feed_until_left(caller: Caller, local: Local) -> None:
    assert [stats["Iteration Counter"] for stats in caller.stats(4)] == [1, 2, 3, 2]
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


@pytest.mark.parametrize("kind", sorted(CALLERS))
@pytest.mark.parametrize(
    ("model", "refusal", "is_well"),
    [
        ("tensorrt_llm", "", True),
        # Triton 24.10 calls a model ready that is loaded and refuses every request.
        ("tensorrt_llm", "the server is shutting down", False),
        ("tensorrt_llm", "[UNAVAILABLE] stalled", False),
        ("other", "", False),
        # Models that pass requests on refuse what `tensorrt_llm` refuses.
        ("ensemble", "", True),
        ("ensemble", "the server is shutting down", False),
        ("ensemble", "Request for unknown model: 'tensorrt_llm' is not found", True),  # not ours
        # Models that do not know the question.
        *((model, "", True) for model in sorted(FOREIGN_MODELS)),
    ],
)
def test_health(kind: str, local: Local, model: str, refusal: str, is_well: bool) -> None:
    local.triton.refusal = refusal
    assert CALLERS[kind](local.url, local.protocol, model).health() == is_well


def test_a_model_that_hangs_is_not_well(local: Local) -> None:
    local.triton.refusal = "silent"
    with (
        InflightClient(local.url, protocol=local.protocol) as client,
        pytest.raises(RequestTimeout),
    ):
        client.health(timeout=0.2)
    local.triton.refusal = ""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("kind", sorted(CALLERS))
def test_a_port_without_a_listener(kind: str, protocol: Protocol, free_port: int) -> None:
    caller = CALLERS[kind](f"127.0.0.1:{free_port}", protocol)
    expected = rf"no server answers at {protocol}://127\.0\.0\.1:{free_port} .*`inflight serve`"

    with pytest.raises(ServerUnreachable, match=expected):
        caller.generate("count", 3)
    with pytest.raises(ServerUnreachable, match=expected):
        caller.health()


def test_wrong_port_is_explained(local_grpc: Local, local_http: Local) -> None:
    with pytest.raises(ServerUnreachable, match="is this the HTTP port"):
        CALLERS["sync"](local_http.url, "grpc").health()
    with pytest.raises(ServerUnreachable, match="is this the gRPC port"):
        CALLERS["sync"](local_grpc.url, "http").health()


def test_argument_errors_send_nothing(caller: Caller, local: Local) -> None:
    with pytest.raises(InvalidArgument, match="max_tokens = 4294967296 does not fit INT32"):
        caller.generate("count", 2**32)
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        caller.stop("")
    with pytest.raises(InvalidArgument, match="n = 2: generate gives one answer"):
        caller.generate("count", 3, n=2)
    assert local.triton.arrivals == []


def test_one_client_carries_many_streams(local: Local) -> None:
    with InflightClient(local.url, protocol=local.protocol) as client:
        streams = [client.stream([start * 100], 20) for start in range(8)]
        rows = zip(*streams, strict=True)  # all eight are open at once
        tokens = [[chunk.token_ids[0] for chunk in row] for row in rows]

    assert tokens == [[start * 100 + step for start in range(8)] for step in range(1, 21)]


def test_cancelled_task_cancels_its_request(local: Local) -> None:
    async def run() -> None:
        async with AsyncInflightClient(local.url, protocol=local.protocol) as client:
            task = asyncio.create_task(client.generate("silent", 1, request_id="mine"))
            while not local.triton.arrivals:
                await asyncio.sleep(GAP_SECONDS)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    if local.protocol == "grpc":
        assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)
    else:
        assert local.triton.stops == {"mine"}


def test_break_cancels_without_closing_by_hand(local: Local) -> None:
    async def run() -> None:
        async with AsyncInflightClient(local.url, protocol=local.protocol) as client:
            async for _ in client.stream("count", LONG):
                break
            while not local.triton.arrivals[0].is_left.is_set():
                await asyncio.sleep(GAP_SECONDS)

    asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))


def test_stream_cancelled_before_it_starts_sends_nothing(local: Local) -> None:
    with InflightClient(local.url, protocol=local.protocol) as client:
        stream = client.stream("count", 3)
        stream.cancel()
        assert list(stream) == []
    assert local.triton.arrivals == []


@pytest.mark.parametrize("kind", sorted(CALLERS))
def test_a_client_that_is_closed_interrupts_its_streams(kind: str, local: Local) -> None:
    """Their readers were not cancelled, and learn that the answer is not whole."""

    def have_some_left() -> bool:
        return any(arrival.num_sent > 5 for arrival in local.triton.arrivals)

    with pytest.raises(StreamInterrupted):
        CALLERS[kind](local.url, local.protocol).close_when("count", have_some_left)
