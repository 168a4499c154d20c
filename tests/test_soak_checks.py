"""What the soak calls right, leaked or late: each check finds what it is there for."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from e2e.harness import assert_counts, assert_counts_in_part
from manager_harness import Recorder, request, running
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from inflight_backend.triton.arrivals import RequestIds
from inflight_scheduler import BlockManager

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_parts import ends, memory
from soak_parts.answers import is_cut, is_whole
from soak_parts.server import MODEL, Footprint, footprint, repairs
from soak_parts.traffic import Span, Traffic

PROMPT = "1 2 3"

Script = Callable[[Any], AsyncIterator[Any]]


@pytest.mark.parametrize(
    ("text", "num_tokens", "whole", "cut"),
    [
        (" 4 5 6 7", 8, True, False),
        (" 4 5 6 7", 9, False, True),
        ("", 8, False, True),
        (" 4", 150, False, True),
        (" 4 5 6 7", 4, False, False),
        (" 4 6", 8, False, False),
        (" 4 5 5", 8, False, False),
        (" 9 10", 8, False, False),
    ],
)
def test_an_answer_is_whole_or_cut_or_wrong(
    text: str, num_tokens: int, whole: bool, cut: bool
) -> None:
    assert is_whole(PROMPT, text, num_tokens) == whole
    assert is_cut(PROMPT, text, num_tokens) == cut


@pytest.mark.parametrize("text", ["", " 4", " 4 5 6 7 8", " 4 5 6 6"])
def test_the_tests_of_the_real_server_see_it_too(text: str) -> None:
    assert_counts(PROMPT, " 4 5 6 7", 8)
    with pytest.raises(AssertionError):
        assert_counts(PROMPT, text, 8)
    with pytest.raises(AssertionError):
        assert_counts_in_part(PROMPT, text, 0)


def test_memory_kept_of_each_request_is_found() -> None:
    """150 bytes of each of 20 requests a second are only 10 MB in an hour."""

    def judged(bytes_per_request: float) -> list[str]:
        steady = memory.Samples()
        for second in range(0, 900, 5):
            held = 400 + 20 * second * bytes_per_request / 2**20
            steady.add(second, {MODEL: Footprint(held, 1)})
        return memory.judge(memory.Samples(), steady, True, 20 * 895)[1]

    assert judged(0) == judged(90) == []
    assert "150 bytes per request" in judged(150)[0]


def test_a_descriptor_too_many_is_told_with_its_kind() -> None:
    before = {MODEL: Footprint(1, 1, Counter({"pipe": 2}))}
    after = {MODEL: Footprint(1, 1, Counter({"pipe": 2, "socket, connected": 1}))}
    report, failures = memory.compare(before, after)
    assert report[MODEL]["more_of"] == {"socket, connected": 1}
    assert failures == [f"{MODEL}: 1 more descriptors"]


def test_streams_that_end_late_or_never_are_found() -> None:
    spans = [Span(1.0, 9.0, False), Span(5.0, 11.5, True), Span(10.4, 10.6, True)]
    report, failures = ends.judge(spans, [11.0], 10.0, 14.0, 2.0)
    assert (report["open_streams"], report["seconds_until_they_ended_max"]) == (1, 1.5)
    assert (report["sent_meanwhile_seconds_max"], failures) == (0.2, [])
    spans += [Span(5.0, 13.5, True), Span(10.5, 14.0, True)]
    _, failures = ends.judge(spans, [4.0], 10.0, 14.0, 2.0)
    assert failures == ["1 streams did not end", "2 streams ended after up to 3.5 s, not 2"]


def test_what_the_idle_check_mends_is_found_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder([request(1, [100], 9)])
    with running(recorder):
        recorder.wait_for_finals(1)
    assert repairs(caplog.text) == []
    monkeypatch.setattr(BlockManager, "release", lambda self, leaving: None)
    recorder = Recorder([request(1, [100], 9)])
    with running(recorder) as manager:
        recorder.wait_for_finals(1)
        while '"Repairs": 1' not in manager.stats_json:
            manager.wake()
    assert len(repairs(caplog.text)) == 1


@pytest.fixture
def ids() -> RequestIds:
    return RequestIds()


def response(text: str = "", *, error: str = "", is_final: bool = False) -> Any:
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    message.infer_response.parameters["triton_final_response"].bool_param = is_final
    if text:
        message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        array = np.asarray([text], dtype=np.object_)
        message.infer_response.raw_output_contents.append(serialize_byte_tensor(array).item())
    return message


def asked(script: Script, ask: Callable[[Traffic], Awaitable[Any]]) -> Any:
    """What ``ask`` returns with a server that answers each request with ``script``."""

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for each in requests:
                async for message in script(each):
                    yield message

    async def run() -> Any:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        traffic = Traffic(f"127.0.0.1:{port}", 0, 1)
        result = await ask(traffic)
        await traffic.close()
        await server.stop(None)
        return result

    return asyncio.run(run())


def test_an_id_that_was_never_given_back_is_found(ids: RequestIds) -> None:
    """Only `why` was asked once, which knows nothing of such an id."""

    async def script(each: Any) -> AsyncIterator[Any]:
        try:
            ids.reserve(each.id)
        except Exception as error:
            yield response(error=str(error))
            return
        if each.id != "leaked":
            ids.release(each.id)
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


def test_a_connection_to_whoever_counts_is_no_leak() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = footprint(os.getpid())
        assert before.descriptors["socket, listening"] >= 1
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert footprint(os.getpid()).descriptors == before.descriptors
    left, right = socket.socketpair()
    with left, right:
        more = footprint(os.getpid()).descriptors - before.descriptors
        assert more == {"socket, of another kind": 2}
