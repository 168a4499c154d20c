"""The clients over both protocols, against a local server that speaks the wire.

The client for threads runs every call in the asyncio client, so most tests use that one alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from itertools import islice
from typing import Any

import pytest
from client.conftest import Local
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
LONG = 5_000
"""Tokens of an answer that no test reads to its end."""


@pytest.fixture
def client(local: Local) -> Iterator[InflightClient]:
    """Over each protocol in turn."""
    with InflightClient(local.url, protocol=local.protocol) as client:
        yield client


def once(is_time: Callable[[], object], act: Callable[[], None]) -> None:
    """Call ``act`` in another thread as soon as ``is_time``."""

    def run() -> None:
        while not is_time():
            time.sleep(GAP_SECONDS)
        act()

    threading.Thread(target=run).start()


def test_a_prompt_is_answered_in_kind(client: InflightClient, local: Local) -> None:
    """Text with text, tokens with tokens. What else is sent: see test_options.py."""
    result = client.generate("count", 3, request_id="mine", seed=2**63)
    assert (result.text, result.token_ids, result.request_id) == (" 1 2 3", (), "mine")
    assert result.finish == "length"
    (arrival,) = local.triton.arrivals
    assert (arrival.request_id, arrival.values["random_seed"]) == ("mine", 2**63)
    result = client.generate([5, 6, 7], 3, min_tokens=2, end_id=-1)
    assert (result.text, result.token_ids, result.finish) == ("", (8, 9, 10), "length")
    assert local.triton.arrivals[1].values == {
        "input_ids": [5, 6, 7],
        "input_lengths": 3,
        "request_output_len": 3,
        "streaming": False,
        "return_finish_reason": True,
        "exclude_input_in_output": True,
        "min_tokens": 2,
        "end_id": -1,
    }


def test_streams_of_text_and_of_tokens(client: InflightClient, local: Local) -> None:
    assert [chunk.text for chunk in client.stream("count", 5)] == [f" {n}" for n in range(1, 6)]
    assert "".join(chunk.text for chunk in client.stream("accents", 3)) == "é1é2é3"
    chunks = list(client.stream([41], 3))
    assert chunks == [GenerateChunk(token_ids=(token,)) for token in (42, 43, 44)]
    assert all(arrival.is_completed.wait(WAIT_SECONDS) for arrival in local.triton.arrivals)


def test_several_answers_to_one_prompt(client: InflightClient, local: Local) -> None:
    results = client.generate_many([41], n=3, max_tokens=2, request_id="mine", seed=5)
    assert [result.token_ids for result in results] == [(42, 43), (420, 430), (4200, 4300)]
    assert {(result.request_id, result.finish) for result in results} == {("mine", "length")}
    assert local.triton.arrivals[0].values["num_return_sequences"] == 3
    chunks = list(client.stream([7], 2, n=2))
    assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [
        (1, (80,)),
        (0, (8,)),
        (1, (90,)),
        (0, (9,)),
    ]


def test_leaving_a_stream_cancels_it(client: InflightClient, local: Local) -> None:
    assert len(list(islice(client.stream("count", LONG), 3))) == 3
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)
    assert not local.triton.arrivals[0].is_completed.is_set()


def test_cancel_from_the_side_ends_the_iteration(client: InflightClient, local: Local) -> None:
    stream = client.stream("count", LONG)
    once(lambda: any(arrival.num_sent > 20 for arrival in local.triton.arrivals), stream.cancel)
    assert 0 < len(list(stream)) < LONG
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


def test_cancel_before_the_first_response_reaches_the_server(
    client: InflightClient, local: Local
) -> None:
    stream = client.stream("silent", LONG)
    once(lambda: local.triton.arrivals, stream.cancel)
    assert list(stream) == []
    (arrival, *_) = local.triton.arrivals
    if local.protocol == "grpc":
        assert arrival.is_left.wait(WAIT_SECONDS)
    else:  # Triton does not see the connection close: the client stops the request by its id
        assert arrival.request_id
        assert local.triton.stops == {arrival.request_id}


def test_cancel_over_http_that_overtakes_its_request_is_repeated(
    local_http: Local, monkeypatch: pytest.MonkeyPatch
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
    with InflightClient(local_http.url, protocol="http") as client:
        stream = client.stream("silent", LONG)
        once(is_sent.is_set, stream.cancel)
        assert list(stream) == []
    (own,) = [arrival for arrival in local_http.triton.arrivals if arrival.values.get("text_input")]
    assert local_http.triton.stops == {own.request_id}


def test_stop_by_id_from_another_client(client: InflightClient, local: Local) -> None:
    with InflightClient(local.url, protocol=local.protocol) as other:
        chunks = []
        for chunk in other.stream("count", LONG, request_id="other"):
            chunks.append(chunk)
            if len(chunks) == 3:
                client.stop("other")

    assert 3 <= len(chunks) < LONG
    assert local.triton.arrivals[0].is_completed.wait(WAIT_SECONDS)


@pytest.mark.fast(2)
def test_timeout_cancels_a_stream(client: InflightClient, local: Local) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout = 1\.0 s; the request was cancelled"):
        list(client.stream("count", LONG, timeout=1.0))

    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


@pytest.mark.fast(1)
def test_timeout_without_any_response_cancels_too(client: InflightClient, local: Local) -> None:
    with pytest.raises(RequestTimeout, match=r"timeout = 1\.0 s"):
        client.generate("silent", 1, timeout=1.0)

    arrival = local.triton.arrivals[0]
    if local.protocol == "grpc":
        assert arrival.is_left.wait(WAIT_SECONDS)
    else:
        assert local.triton.stops == {arrival.request_id}


def test_text_of_a_server_error_is_passed_on(client: InflightClient) -> None:
    with pytest.raises(ServerError, match=r"^'text_input' is refused: say something else$"):
        client.generate("refuse", 3)


def test_error_after_some_tokens(client: InflightClient, local: Local) -> None:
    with pytest.raises(ServerError, match=r"^a step of the engine failed$"):
        list(client.stream("fail late", 5))
    assert local.triton.arrivals[0].is_completed.wait(WAIT_SECONDS)


def test_stream_that_breaks_off_is_an_error(client: InflightClient) -> None:
    with pytest.raises(StreamInterrupted, match="after 2 responses"):
        list(client.stream("break", 5))


def test_why_gives_the_reason_and_its_numbers(client: InflightClient, local: Local) -> None:
    assert client.why("mine") == {
        "state": "waiting",
        "reason": "waiting for KV blocks: needs 5, free 3",
        "place": 2,
        "num_waiting": 7,
    }
    (arrival,) = local.triton.arrivals
    assert (arrival.request_id, arrival.values) == ("mine", {"why": True})
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        client.why("")
    with pytest.raises(ServerError, match="not JSON"):
        client.why("broken")


def test_a_question_given_up_does_not_stop_the_request_it_asks_about(
    client: InflightClient, local: Local
) -> None:
    """It carries the id of that request."""
    with pytest.raises(RequestTimeout):
        client.why("silent", timeout=0.3)
    assert client.health()
    assert not any(arrival.values.get("stop") for arrival in local.triton.arrivals)
    local.triton.stops.add("silent")


def test_statistics_feed_until_left(client: InflightClient, local: Local) -> None:
    assert [stats["Iteration Counter"] for stats in islice(client.stats(), 4)] == [1, 2, 3, 2]
    assert local.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


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
def test_health(local: Local, model: str, refusal: str, is_well: bool) -> None:
    local.triton.refusal = refusal
    with InflightClient(local.url, model, local.protocol) as client:
        assert client.health() == is_well


def test_a_model_that_hangs_is_not_well(client: InflightClient, local: Local) -> None:
    local.triton.refusal = "silent"
    with pytest.raises(RequestTimeout):
        client.health(timeout=0.2)
    local.triton.refusal = ""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_port_without_a_listener(protocol: Protocol, free_port: int) -> None:
    expected = rf"no server answers at {protocol}://127\.0\.0\.1:{free_port} .*`inflight serve`"
    with InflightClient(f"127.0.0.1:{free_port}", protocol=protocol) as client:
        with pytest.raises(ServerUnreachable, match=expected):
            client.generate("count", 3)
        with pytest.raises(ServerUnreachable, match=expected):
            client.health()


def test_wrong_port_is_explained(local_grpc: Local, local_http: Local) -> None:
    wrong: tuple[tuple[str, Protocol, str], ...] = (
        (local_http.url, "grpc", "is this the HTTP port"),
        (local_grpc.url, "http", "is this the gRPC port"),
    )
    for url, protocol, question in wrong:
        with (
            InflightClient(url, protocol=protocol) as client,
            pytest.raises(ServerUnreachable, match=question),
        ):
            client.health()


def test_argument_errors_send_nothing(client: InflightClient, local: Local) -> None:
    with pytest.raises(InvalidArgument, match="max_tokens = 4294967296 does not fit INT32"):
        client.generate("count", 2**32)
    with pytest.raises(InvalidArgument, match="request_id is empty"):
        client.stop("")
    with pytest.raises(InvalidArgument, match="n = 2: generate gives one answer"):
        client.generate("count", 3, n=2)
    assert local.triton.arrivals == []


def test_one_client_carries_many_streams(client: InflightClient) -> None:
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


@pytest.mark.parametrize("closes", [False, True])
def test_a_task_that_leaves_a_stream_cancels_it(local: Local, closes: bool) -> None:
    """By hand, and by the event loop."""

    async def run() -> None:
        async with AsyncInflightClient(local.url, protocol=local.protocol) as client:
            if closes:
                async with aclosing(client.stream("count", LONG)) as stream:
                    assert (await anext(stream)).text == " 1"
            else:
                async for _ in client.stream("count", LONG):
                    break
            while not local.triton.arrivals[0].is_left.is_set():
                await asyncio.sleep(GAP_SECONDS)

    asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))


def test_stream_cancelled_before_it_starts_sends_nothing(
    client: InflightClient, local: Local
) -> None:
    stream = client.stream("count", 3)
    stream.cancel()
    assert list(stream) == []
    assert local.triton.arrivals == []


def test_a_client_that_is_closed_interrupts_its_streams(
    client: InflightClient, local: Local
) -> None:
    """Their readers were not cancelled, and learn that the answer is not whole."""
    once(lambda: any(arrival.num_sent > 5 for arrival in local.triton.arrivals), client.close)
    with pytest.raises(StreamInterrupted):
        list(client.stream("count", LONG))
