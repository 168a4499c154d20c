"""Clients that leave, do not read, or come in crowds: everything is freed, others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.calls import assert_counts, stream_text, wait_for_active
from support.server_process import HOST, TRITONSERVER, ServeProcess
from tritonclient.grpc import service_pb2

from inflight_client import AsyncInflightClient, grpc_transport
from inflight_client.options import Request

pytestmark = pytest.mark.e2e

PROMPT = "1 2 3 4"
ENDLESS = 8000


@pytest.fixture(autouse=True)
def nothing_left(server: ServeProcess) -> Iterator[None]:
    """After each test everything is free and the server answers."""
    yield
    stats = wait_for_active(server, 0)
    assert stats["Used KV cache blocks"] == 0
    assert "Repairs" not in stats, "the idle check found blocks or slots that were not released"
    assert_counts(PROMPT, "".join(stream_text(server, PROMPT, 30)), 30)


def http_request(server: ServeProcess, action: str, max_tokens: int) -> socket.socket:
    """A raw connection with a running request."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": max_tokens, "stream": True}).encode()
    if action == "generate":
        body = body.replace(b"true", b"false")
    head = (
        f"POST /v2/models/tensorrt_llm/{action} HTTP/1.1\r\nHost: {HOST}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((HOST, server.http_port), timeout=30)
    connection.sendall(head.encode() + body)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN, as a client does whose machine is gone."""
    linger = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


@pytest.mark.case(68, 69)
@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_closed_connection_ends_its_stream(
    server: ServeProcess, leave: Callable[[socket.socket], None]
) -> None:
    """To `tensorrt_llm`; an ensemble does not forward that its client has gone."""
    connection = http_request(server, "generate_stream", ENDLESS)
    received = b""
    while received.count(b"data:") < 5:
        received += connection.recv(4096)
    leave(connection)
    wait_for_active(server, 0, within=10.0)


@pytest.mark.case(70)
def test_answer_without_streaming_runs_to_its_end_without_its_client(server: ServeProcess) -> None:
    """Triton does not tell the model; only the limits of the request end it."""
    connection = http_request(server, "generate", 1000)
    wait_for_active(server, 1)
    reset(connection)
    wait_for_active(server, 0)


@pytest.mark.case(67, 75)
def test_cancel_at_any_phase_frees_everything(server: ServeProcess) -> None:
    """Sixty calls, cancelled after nothing up to a tenth of a second; some had begun to answer."""

    async def call(client: AsyncInflightClient, seconds: float) -> None:
        async def read() -> None:
            async for _ in client.stream(PROMPT * 20, ENDLESS // 4):
                pass

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), seconds)

    async def crowd() -> None:
        draw = random.Random(6)
        async with AsyncInflightClient(server.grpc_url) as client:
            await asyncio.gather(*(call(client, draw.random() * 0.1) for _ in range(60)))

    asyncio.run(crowd())
    wait_for_active(server, 0, within=10.0)


@pytest.mark.slow
@pytest.mark.case(72)
def test_thousand_idle_streams_do_not_block_others(server: ServeProcess) -> None:
    """Open gRPC streams without requests, over ten connections; then each is used before any is
    closed, since a client might only have queued them."""
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    channels = [
        grpc.insecure_channel(server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(10)
    ]
    held = [_Idle() for _ in range(1000)]
    calls = [channels[number % 10].stream_stream(method)(idle) for number, idle in enumerate(held)]
    began = time.monotonic()
    assert_counts(PROMPT, "".join(stream_text(server, PROMPT, 60)), 60)
    assert time.monotonic() - began < 20.0
    question = grpc_transport.encode_request(Request({"ready": True})).SerializeToString()
    for idle in held:
        idle.ask(question)
    for each in calls:
        answer = service_pb2.ModelStreamInferResponse.FromString(next(each))
        assert answer.error_message == ""
    assert not any(each.done() for each in calls), "the server keeps them open"
    for each in calls:
        each.cancel()
    for idle in held:
        idle.end()
    for channel in channels:
        channel.close()


class _Idle:
    """The requests of a stream, which sends none until `ask`."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __iter__(self) -> _Idle:
        return self

    def __next__(self) -> bytes:
        if (request := self._requests.get()) is None:
            raise StopIteration
        return request

    def ask(self, request: bytes) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)


@pytest.mark.slow
@pytest.mark.case(121)
def test_256_requests_at_once(server: ServeProcess) -> None:
    num_tokens = 256  # so that the first one still runs when the last one arrives

    async def crowd() -> tuple[list[str], int]:
        async def one(number: int) -> str:
            prompt = f"{10 * number + 1} {10 * number + 2}"
            return "".join([chunk.text async for chunk in client.stream(prompt, num_tokens)])

        async def most_active() -> int:
            """From the feed, which has every iteration."""
            most = 0
            async for stats in client.stats(follow=True):
                most = max(most, stats["Active Request Count"])
                if most > 0 and stats["Active Request Count"] == 0:
                    break
            return most

        async with AsyncInflightClient(server.grpc_url) as client:
            feed = asyncio.create_task(most_active())
            answers = await asyncio.gather(*(one(number) for number in range(256)))
            return answers, await feed

    texts, most = asyncio.run(crowd())
    for number, text in enumerate(texts):
        assert_counts(f"{10 * number + 1} {10 * number + 2}", text, num_tokens)
    assert most == 256


@pytest.mark.slow
@pytest.mark.case(71)
def test_clients_that_never_read_hold_little_memory_and_block_no_other(
    server: ServeProcess,
) -> None:
    """The memory they hold is bounded by the length of their answers."""
    pid = server.pid_of(TRITONSERVER)
    before = resident_mb(pid)
    connections = [http_request(server, "generate_stream", 400) for _ in range(20)]
    wait_for_active(server, len(connections))
    began = time.monotonic()
    assert_counts(PROMPT, "".join(stream_text(server, PROMPT, 60)), 60)
    assert time.monotonic() - began < 20.0
    wait_for_active(server, 0)
    assert resident_mb(pid) - before < 20 * 400 * 4096 / 1e6
    for connection in connections:
        connection.close()


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.case(71, 75)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_client_is_cancelled(server: ServeProcess, number: signal.Signals) -> None:
    """A frozen one does not answer the keep-alive, which takes 10 s at most."""
    code = (
        "import sys; from inflight_client import InflightClient;"
        "client = InflightClient(sys.argv[1]);"
        f"[print(chunk.text, flush=True) for chunk in client.stream({PROMPT!r}, {ENDLESS})]"
    )
    command = [sys.executable, "-c", code, server.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline()
        client.send_signal(number)
        try:
            wait_for_active(server, 0, within=40.0)
        finally:
            client.kill()
