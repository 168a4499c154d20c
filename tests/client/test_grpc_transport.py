"""What comes out of a message of gRPC, how a channel is opened, and streams that requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from client.conftest import Local
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from inflight_client.address import Address, parse_address
from inflight_client.errors import InflightError, ServerError, StreamInterrupted
from inflight_client.grpc_transport import (
    GrpcTransport,
    SharedStream,
    channel_options,
    decode_response,
    encode_bytes,
)
from inflight_client.http_transport import client_settings
from inflight_client.options import Request

WAIT = 20.0


def test_bytes_that_are_no_text_are_marked() -> None:
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 2])
    array = np.array([[b"caf\xc3\xa9", b"\xff"]], dtype=np.object_)
    message.infer_response.raw_output_contents.append(serialize_byte_tensor(array).item())

    response, is_final = decode_response(message)

    assert response.tensors == {"text_output": ["café", "\ufffd"]}
    assert not is_final


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("box", False)],
)
def test_no_proxy_for_this_machine(host: str, is_local: bool) -> None:
    address = Address("http", host, 9)

    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is is_local
    assert client_settings(address)["trust_env"] is not is_local


def test_a_server_that_is_back_is_found_soon() -> None:
    """gRPC's own patience grows to two minutes while a server is away."""
    options = dict(channel_options(Address("grpc", "box", 9)))
    assert options["grpc.initial_reconnect_backoff_ms"] <= 1000
    assert options["grpc.max_reconnect_backoff_ms"] <= 1000


@asynccontextmanager
async def sharing(local: Local) -> AsyncIterator[SharedStream]:
    transport = GrpcTransport(parse_address(local.url, "grpc"))
    try:
        shared = SharedStream(transport)
        assert await shared.is_open(WAIT)
        yield shared
    finally:
        await transport.close()


def call(prompt: str, count: int = 5) -> bytes:
    values = {"text_input": prompt, "max_tokens": count, "stream": True}
    return encode_bytes(Request(values, ("text_output",), prompt))


async def texts(shared: SharedStream, request: bytes) -> list[str]:
    async with aclosing(shared.receive(request, WAIT)) as responses:
        return [response.tensors["text_output"][0] async for response in responses]


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_requests_share_a_stream_and_the_last_one_ends_it(local_grpc: Local) -> None:
    async def run() -> None:
        async with sharing(local_grpc) as shared:
            counts = (5, 1, 3)
            calls = [texts(shared, call("accents" if n == 3 else f"p{n}", n)) for n in counts]
            answers = await asyncio.gather(*calls)
            assert answers[:2] == [[" 1", " 2", " 3", " 4", " 5"], [" 1"]]
            assert answers[2] == ["é1", "é2", "é3"]
            stream, *own = local_grpc.triton.arrivals
            await until(stream.is_left.is_set)
            assert not shared.is_usable
            assert shared.is_over(0.0), "the next one may open another at once"
            await until(lambda: all(each.is_completed.is_set() for each in own))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("refuse", ServerError), ("fail late", ServerError), ("break", StreamInterrupted)],
)
def test_an_error_ends_one_of_those_that_share(
    local_grpc: Local, prompt: str, error: type[InflightError]
) -> None:
    async def run() -> None:
        async with sharing(local_grpc) as shared:
            other = asyncio.create_task(texts(shared, call("p", 20)))
            with pytest.raises(error):
                await texts(shared, call(prompt))
            assert len(await other) == 20

    asyncio.run(run())


def test_who_leaves_a_shared_stream_cancels_the_own_request(local_grpc: Local) -> None:
    async def run() -> None:
        async with sharing(local_grpc) as shared:
            other = asyncio.create_task(texts(shared, call("p", 20)))
            async with aclosing(shared.receive(call("left", 10_000), WAIT)) as responses:
                await anext(responses)
            [left] = [each for each in local_grpc.triton.arrivals if each.request_id == "left"]
            await until(left.is_left.is_set)
            assert len(await other) == 20

    asyncio.run(run())


def test_a_shared_stream_that_breaks_interrupts_its_requests(local_grpc: Local) -> None:
    async def run() -> None:
        async with sharing(local_grpc) as shared:
            asking = asyncio.create_task(texts(shared, call("p", 10_000)))
            await until(lambda: len(local_grpc.triton.arrivals) == 2)
            for parts in local_grpc.triton.shared.values():
                parts.put(None)
            with pytest.raises(StreamInterrupted, match="without a final one"):
                await asking
            assert not shared.is_usable
            assert not shared.is_over(WAIT), "another one would break as well"

    asyncio.run(run())


def test_a_model_that_was_loaded_again_answers_on_the_own_stream(local_grpc: Local) -> None:
    async def run() -> None:
        async with sharing(local_grpc) as shared:
            local_grpc.triton.shared.clear()
            assert await texts(shared, call("p", 3)) == [" 1", " 2", " 3"]
            assert not shared.is_usable

    asyncio.run(run())
