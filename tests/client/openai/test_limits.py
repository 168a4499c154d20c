"""What ends a request of the front: its limits, a client that reads nothing, and our own end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web
from client.conftest import Local
from client.local_server import GAP_SECONDS, Arrival, LocalTriton
from client.openai.front import front_of, serving

from inflight_client.grpc_transport import encode_bytes
from inflight_openai import app, upstream
from inflight_openai.parsing import parse_chat
from inflight_openai.running import run
from inflight_openai.settings import FrontSettings

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60.0
COMPLETION = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 3}
PATH = "/v1/completions"
MIB = 2**20

_Result = TypeVar("_Result")


def finish(work: Awaitable[_Result]) -> _Result:
    """What ``work`` gives, which must not wait for ever."""

    async def wait() -> _Result:
        return await asyncio.wait_for(work, WAIT_SECONDS)

    return asyncio.run(wait())


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.text()


async def until(is_so: Any) -> None:
    while not is_so():
        await asyncio.sleep(GAP_SECONDS)


def answer_one_token_and_wait(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    yield {"text_output": [" 1"], "sequence_length": [1]}
    arrival.is_left.wait(WAIT_SECONDS)


@pytest.fixture
def waiting(local_grpc: Local, monkeypatch: pytest.MonkeyPatch) -> Local:
    """A server that never ends an answer."""
    monkeypatch.setattr(LocalTriton, "answer", answer_one_token_and_wait)
    return local_grpc


@pytest.mark.case(100, 126)
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_what_runs_at_the_drain_limit_is_told_so(waiting: Local, seconds: float) -> None:
    async def ask() -> tuple[str, tuple[int, str], float]:
        async with serving(waiting, drain_seconds=seconds) as runner, client_of(runner) as client:
            whole = asyncio.create_task(post(client, PATH, COMPLETION))
            async with client.post(PATH, json={**COMPLETION, "stream": True}) as stream:
                first = await stream.content.readline()
                await until(lambda: len(waiting.triton.arrivals) == 2)
                begin = time.monotonic()
                await runner.cleanup()
                duration = time.monotonic() - begin
                text = (first + await stream.read()).decode()
            return text, await whole, duration

    text, (status, body), duration = finish(ask())
    first, error, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert json.loads(first)["choices"][0]["text"] == " 1"
    assert "shutting down" in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    assert (status, "shutting down" in body) == (503, True)
    assert seconds <= duration < seconds + 20
    assert all(arrival.is_left.wait(WAIT_SECONDS) for arrival in waiting.triton.arrivals)


@asynccontextmanager
async def client_of(runner: web.AppRunner) -> AsyncIterator[aiohttp.ClientSession]:
    host, port = runner.addresses[0]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
        yield client


def answer_at_length(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    """More than the kernel takes for a client that reads nothing, see `take_little`."""
    is_large = arrival.values["request_output_len"] > 3
    for _ in range(8 if is_large else 1):
        yield {"text_output": ["x" * (MIB // 8 if is_large else 1)], "sequence_length": [1]}


def take_little(*sockets: Any) -> None:
    """Have the kernel keep some KiB of what nobody reads; else it may be many MiB."""
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_who_reads_nothing_holds_a_place_until_it_is_hung_up(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    monkeypatch.setattr(LocalTriton, "answer", answer_at_length)
    large = json.dumps({**COMPLETION, "max_tokens": 97, "stream": is_streaming})
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n"

    async def ask() -> None:
        async with serving(local_grpc, max_requests=1, timeout=5.0) as runner:
            with socket.socket() as silent:
                take_little(silent)
                silent.connect(runner.addresses[0])
                (connection,) = await connections_of(runner)
                take_little(connection.transport.get_extra_info("socket"))
                silent.sendall((head + large).encode())
                await until(lambda: connection.transport.get_write_buffer_size() > 0)
                limits = connection.transport.get_write_buffer_limits()
                assert limits == (0, 0), "the rest of an answer holds a place, however little"
                async with client_of(runner) as client:
                    assert (await post(client, PATH, COMPLETION))[0] == 429
                    await until(lambda: connection not in connections_in(runner))
                    while (status := (await post(client, PATH, COMPLETION))[0]) == 429:
                        await asyncio.sleep(GAP_SECONDS)  # its handler is still to hear of it
                    assert status == 200

    finish(ask())


async def connections_of(runner: Any) -> list[Any]:
    await until(lambda: connections_in(runner))
    return connections_in(runner)


def connections_in(runner: Any) -> list[Any]:
    return list(runner.server.connections)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_an_answer_that_takes_too_long_is_a_504(local_grpc: Local, is_streaming: bool) -> None:
    async def ask() -> tuple[int, str]:
        async with front_of(local_grpc, timeout=1.0) as client:
            return await post(client, PATH, {**COMPLETION, "stream": is_streaming})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTriton, "answer", answer_nothing)
        status, text = finish(ask())
    assert (status, "took too long" in text) == (504, True)
    assert local_grpc.triton.arrivals[0].is_left.wait(WAIT_SECONDS)


def answer_nothing(self: LocalTriton, arrival: Arrival) -> Iterator[dict[str, Any]]:
    arrival.is_left.wait(WAIT_SECONDS)
    yield from ()


def test_a_body_that_does_not_come_is_a_408(local_grpc: Local) -> None:
    async def ask() -> bytes:
        async with serving(local_grpc, body_timeout=0.3) as runner:
            reader, writer = await asyncio.open_connection(*runner.addresses[0])
            writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
            status = await reader.readline()
            writer.close()
            return status

    assert b" 408 " in finish(ask())


def test_chats_that_are_slow_to_read_hold_up_chats_only(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def parse_late(*arguments: Any) -> Any:
        assert is_over.wait(WAIT_SECONDS / 2)
        return parse_chat(*arguments)

    monkeypatch.setattr(app, "parse_chat", parse_late)

    async def ask() -> list[int]:
        async with front_of(local_grpc) as client:
            chats = [
                asyncio.create_task(post(client, "/v1/chat/completions", CHAT)) for _ in range(12)
            ]
            for _ in range(3):
                assert (await post(client, PATH, COMPLETION))[0] == 200
            assert not any(chat.done() for chat in chats)
            is_over.set()
            return [status for status, _ in await asyncio.gather(*chats)]

    assert finish(ask()) == [200] * 12


def test_who_waits_too_long_to_be_read_is_told_to_come_again(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(app, "parse_chat", lambda *_: is_over.wait(WAIT_SECONDS))

    async def ask() -> None:
        async with front_of(local_grpc, thread_timeout=0.2) as client:
            path = "/v1/chat/completions"
            chats = [asyncio.create_task(post(client, path, CHAT)) for _ in range(3)]
            done, _ = await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
            ((status, text),) = [await chat for chat in done]
            assert (status, "too many requests are being read" in text) == (503, True)
            is_over.set()
            await asyncio.gather(*chats)

    finish(ask())


def test_requests_are_encoded_beside_the_event_loop(
    local_grpc: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(call: Any) -> bytes:
        threads.append(threading.current_thread())
        return encode_bytes(call)

    monkeypatch.setattr(upstream, "encode_bytes", noted)

    async def ask() -> int:
        async with front_of(local_grpc) as client:
            return (await post(client, PATH, {**COMPLETION, "logit_bias": {"5": 1}}))[0]

    assert finish(ask()) == 200
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_asks_a_server_that_is_silent(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def accept() -> None:
            accepted.append(server.accept()[0])
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=accept)
        thread.start()
        begin = time.monotonic()
        run(FrontSettings(url=f"127.0.0.1:{server.getsockname()[1]}", port=0))
        thread.join()
        accepted[0].close()
    assert time.monotonic() - begin < upstream._DESCRIBE_SECONDS / 2
