"""What the soak says of answers that are wrong, from servers that play them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.soak_servers import asked, names_of, pieces_of, response

from inflight_backend.triton.queue import RequestIds

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_parts.answers import continuation
from soak_parts.places import count_forgotten
from soak_parts.traffic import LONG_ENOUGH, Tally, Traffic

pytestmark = pytest.mark.slow

RIGHT = "the right token"


@pytest.fixture
def ids() -> RequestIds:
    return RequestIds()


def test_an_id_that_was_never_given_back_is_found(ids: RequestIds) -> None:
    """Only `why` was asked once, which knows nothing of such an id."""

    async def script(each: Any) -> AsyncIterator[Any]:
        try:
            number = ids.reserve(each.id)
        except Exception as error:
            yield response(error=str(error))
            return
        if each.id != "leaked":
            ids.release(each.id, number)
        yield response(" ")
        yield response(is_final=True)

    async def twice(traffic: Traffic) -> list[str]:
        return [await traffic.why_held(name) for name in ("sound", "leaked") for _ in range(2)]

    sound, again, leaked, held = asked(script, twice)
    assert [sound, again, leaked] == [""] * 3
    assert "still being processed" in held


@pytest.mark.parametrize(
    ("kind", "num_pieces"), [("complete", 1), ("stopped", 1000), ("bad", 0), ("feature", 1)]
)
def test_wrong_ends_and_second_finals_are_found(kind: str, num_pieces: int) -> None:
    """An answer that lost its end, one that a stop did not end, bad input that ended twice."""

    async def script(each: Any) -> AsyncIterator[Any]:
        if kind == "bad":
            yield response(error="no such thing")
        first = int(each.raw_input_contents[0].split()[-1]) + 1 if num_pieces > 1 else 1
        text = "".join(f" {first + i}" for i in range(num_pieces))[:2000]
        yield response(text)
        yield response(is_final=True)
        yield response(is_final=True)

    async def one(traffic: Traffic) -> Traffic:
        await getattr(traffic, f"_{kind}")()
        return traffic

    tally = asked(script, one).tally
    assert len(tally.wrong) == 1
    assert tally.finals == {3 if kind == "bad" else 2: 1}


async def many_cancelled(traffic: Traffic) -> Tally:
    for _ in range(12):
        await traffic._cancelled()
    return traffic.tally


def num_cancelled(tally: Tally) -> int:
    """Through a model that relays, too."""
    return tally.outcomes["cancelled"] + tally.outcomes["cancelled, relayed"]


def test_a_sound_stream_that_is_cancelled_is_right() -> None:
    models = Counter[str]()

    async def script(each: Any) -> AsyncIterator[Any]:
        models[each.model_name] += 1
        for piece in pieces_of(each, 10):
            yield response(piece)
        await asyncio.sleep(60)

    tally = asked(script, many_cancelled)
    assert (num_cancelled(tally), tally.wrong, tally.finals) == (12, [], {})
    assert min(models["tensorrt_llm"], models["tensorrt_llm_bls"]) > 0


def test_a_full_server_refuses_those_that_are_to_be_cancelled_once_each() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response(error="Maximum queue size of 12 has been reached")

    tally = asked(script, many_cancelled)
    num_refused = tally.outcomes["refused: Maximum queue size"]
    assert num_refused + num_cancelled(tally) == 12
    assert (tally.wrong, tally.finals) == ([], {1: num_refused})


@pytest.mark.parametrize(
    "how", ["no token", "one token", "cut", "final", "wrong token", "nothing in it"]
)
def test_what_comes_before_a_cancel_is_judged(how: str) -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        pieces = pieces_of(each, 10)
        if how in ("one token", "cut"):
            yield response(pieces[0])
        elif how in ("final", "wrong token", "nothing in it"):
            for piece in pieces:
                text = {"final": piece, "wrong token": "x"}.get(how, "")
                yield response(text, is_final=how == "final")
            return
        for _ in range(0 if how == "cut" else 2):
            yield response(is_final=True)

    tally = asked(script, many_cancelled)
    assert len(tally.wrong) + num_cancelled(tally) == 12
    assert len(tally.wrong) >= 6  # some are cancelled at once, or at the first token
    assert set(tally.finals) <= {0, 2}


def test_a_stop_with_two_finals_is_found() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        if "stop" in names_of(each):
            yield response(is_final=True)
        else:
            for piece in pieces_of(each, 5):
                yield response(piece)
        yield response(is_final=True)

    async def stop(traffic: Traffic) -> Tally:
        await traffic._stopped()
        return traffic.tally

    tally = asked(script, stop)
    assert (tally.wrong, tally.finals) == ([], {1: 1, 2: 1})


def test_a_second_request_of_an_id_with_three_finals_is_found() -> None:
    is_first = iter([True, False])

    async def script(each: Any) -> AsyncIterator[Any]:
        if next(is_first):
            yield response(pieces_of(each, LONG_ENOUGH))
        else:
            yield response(error="a request with this id is still being processed")
            yield response(is_final=True)
            yield response(is_final=True)
        if each.raw_input_contents[0][4:] != b"7":
            yield response(is_final=True)

    async def duplicate(traffic: Traffic) -> Tally:
        await traffic._duplicate()
        return traffic.tally

    tally = asked(script, duplicate)
    assert (tally.wrong, tally.finals) == ([], {1: 1, 3: 1})


@pytest.mark.parametrize(
    "ask",
    [
        lambda traffic: traffic.ask_json("", "text_output", stats=True),
        lambda traffic: traffic.why_held("some id"),
        lambda traffic: traffic.try_once(),
    ],
)
def test_a_question_with_two_finals_is_found(ask: Callable[[Traffic], Awaitable[Any]]) -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        yield response("{}")
        yield response(is_final=True)
        yield response(is_final=True)

    async def tally(traffic: Traffic) -> Tally:
        await ask(traffic)
        return traffic.tally

    assert asked(script, tally).finals == {2: 1}


@pytest.mark.parametrize("num_forgotten", [0, 2])
def test_requests_forgotten_in_the_queue_are_counted(num_forgotten: int) -> None:
    """Of a server with five places among the active ones."""
    running: set[str] = set()
    waiting: set[str] = set()
    stopped = asyncio.Event()

    async def script(each: Any) -> AsyncIterator[Any]:
        if "stop" in names_of(each):
            stopped.set()
        elif "why" in names_of(each):
            state = "queued" if each.id in waiting else "not in flight"
            told = {"state": state, "num_waiting": num_forgotten + len(waiting)}
            yield response(json.dumps(told), name="why")
        else:
            (running if len(running) < 5 else waiting).add(each.id)
            if each.id in running:
                yield response(" ")
            await stopped.wait()
        yield response(is_final=True)

    async def count(traffic: Traffic) -> tuple[tuple[int, list[str]], Tally]:
        return await count_forgotten(traffic, 5), traffic.tally

    counted, tally = asked(script, count)
    assert counted == (num_forgotten, [])
    assert (len(running), len(waiting), set(tally.finals)) == (5, 1, {1})


def test_a_queue_without_room_for_those_that_may_run_is_found() -> None:
    async def script(each: Any) -> AsyncIterator[Any]:
        if "why" in names_of(each):
            yield response('{"state": "not in flight"}', name="why")
            yield response(is_final=True)
        elif "stop" in names_of(each):
            yield response(is_final=True)
        else:
            yield response(error="Maximum queue size of 12 has been reached")

    num_forgotten, wrong = asked(script, lambda traffic: count_forgotten(traffic, 5))
    assert (num_forgotten, len(wrong)) == (-1, 6)


def over_http(prompt: str, status: int, payloads: Sequence[str | dict[str, str]]) -> bytes:
    """As Triton answers: events in chunks, which end anywhere; ``RIGHT`` is the next token."""
    right = iter(continuation(prompt, 10))
    body = ""
    for payload in payloads:
        if payload == RIGHT:
            payload = {"text_output": next(right)}
        body += f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n"
    chunks = [body[at : at + 25] for at in range(0, len(body), 25)]
    told = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in (*chunks, ""))
    return f"HTTP/1.1 {status} Any\r\nTransfer-Encoding: chunked\r\n\r\n{told}".encode()


def reset(status: int, payloads: Sequence[str | dict[str, str]]) -> Tally:
    """The tally of five connections to a server that answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        prompt = json.loads(await reader.readexactly(int(length[1])))["text_input"]
        writer.write(over_http(prompt, status, payloads))
        await writer.drain()
        await reader.read()
        writer.close()

    async def run() -> Tally:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        traffic = Traffic("127.0.0.1:1", server.sockets[0].getsockname()[1], 1)
        for _ in range(5):
            await traffic._reset()
        await traffic.close()
        server.close()
        return traffic.tally

    return asyncio.run(run())


FULL = {"error": "Maximum queue size of 12 has been reached (max_queue_size)"}


def test_sound_streams_that_are_reset_and_refusals_over_http_are_right() -> None:
    tally = reset(200, [RIGHT] * 9)
    assert (tally.outcomes, tally.wrong) == ({"reset": 5}, [])
    tally = reset(400, [FULL])
    assert (tally.outcomes, tally.wrong) == ({"refused over HTTP: Maximum queue size": 5}, [])


@pytest.mark.parametrize(
    ("status", "payloads"),
    [
        (500, []),
        (500, [FULL]),
        (400, [{"error": "the batch manager failed while it held this request"}]),
        (400, ["no JSON"]),
        (200, []),
        (200, ["no JSON"]),
        (200, [{"error": "the engine failed while it ran this request"}]),
        (200, [{"text_output": " 99 somebody else"}] * 3),
        (200, [{"text_output": ""}] * 3),
        (200, [{}] * 3),
    ],
)
def test_what_comes_before_a_reset_is_judged(
    status: int, payloads: Sequence[str | dict[str, str]]
) -> None:
    tally = reset(status, payloads)
    assert (len(tally.wrong), tally.outcomes) == (5, {})


def test_a_stall_that_ends_a_stream_before_a_reset_is_counted() -> None:
    tally = reset(200, [RIGHT, {"error": "the server makes no progress"}])
    assert tally.outcomes["refused: makes no progress"] > 0
    assert (tally.outcomes.total(), tally.wrong) == (5, [])


def test_an_end_before_a_reset_is_found() -> None:
    tally = reset(200, [RIGHT])
    assert tally.wrong
    assert len(tally.wrong) + tally.outcomes["reset"] == 5
