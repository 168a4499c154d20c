"""Answers of many requests on one stream: the same as on their own, and each ends by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    Gate,
    Server,
    error_of,
    ids_of,
    responses_of,
    wait_for_phase,
    wait_until,
)
from support.triton_stub import (
    CountingEngine,
    FailingSender,
    FakePbUtils,
    FakeRequest,
    FakeSender,
)

from inflight_backend.triton import shared_answers as module
from inflight_protocol.shared import SharedPart, decode_texts, unpack_parts
from inflight_protocol.tensors import make_inputs

WAIT = 60.0


def send(server: Server, place: object, request_id: str = "", **values: Any) -> FakeSender:
    """A request whose answer should come at ``place``, in detail."""
    parameters = json.dumps({"inflight_shared": place})
    values = {"request_output_len": 5, "streaming": True, **values}
    request = FakeRequest(make_inputs(values), request_id, parameters=parameters)
    server.model.execute([request])
    return request.sender


def parts_of(stream: FakeSender, tag: str) -> list[SharedPart]:
    contents = [tensors["shared"] for tensors in responses_of(stream)]
    parts = [part for content in contents for part in unpack_parts(content.tobytes())]
    return [part for part in parts if part.tag == tag]


def wait_for_end(stream: FakeSender, tag: str) -> list[dict[str, Any]]:
    """The responses of ``tag``, of which there are no more behind the end."""
    wait_until(lambda: any(part.tensors is None for part in parts_of(stream, tag)))
    *parts, last = parts_of(stream, tag)
    assert last.tensors is None
    return [decode_texts(part.tensors or {}) for part in parts]


def test_answers_come_on_the_shared_stream(make_server: MakeServer) -> None:
    gate = Gate()
    server = make_server(CountingEngine(before_step=gate))
    stream = server.send("s", shared=True)
    assert [unpack_parts(each["shared"].tobytes()) for each in responses_of(stream)] == [[]]
    gate.clear()  # so that they run together
    prompts = {"a": 10, "b": 20, "c": 30}
    own = {tag: send(server, f"s {tag}", input_ids=[last]) for tag, last in prompts.items()}
    gate.set()
    for tag, last in prompts.items():
        assert own[tag].is_final.wait(WAIT)
        assert own[tag].responses == [], "its own stream only ends it"
        responses = wait_for_end(stream, tag)
        ids = [number for each in responses for number in each["output_ids"]]
        assert ids == list(range(last + 1, last + 6))
        assert sum(number for each in responses for number in each["sequence_length"]) == 5
    whole = send(server, "s d", input_ids=[40], streaming=False)
    assert whole.is_final.wait(WAIT)
    [response] = wait_for_end(stream, "d")
    assert response["output_ids"] == [40, 41, 42, 43, 44, 45]
    assert not stream.is_final.is_set()
    stream.cancelled = True
    assert stream.is_final.wait(WAIT)


def test_an_error_comes_on_the_own_stream(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    stream = server.send("s", shared=True)
    for values in ({"input_ids": [1], "beam_width": 0}, {"input_ids": [2000]}):
        refused = send(server, "s a", **values)
        assert refused.is_final.wait(WAIT)
        assert error_of(refused)[1] == FakePbUtils.TritonError.INVALID_ARG
    assert send(server, "s b", input_ids=[1]).is_final.wait(WAIT)
    assert wait_for_end(stream, "b")


@pytest.mark.parametrize("place", ["", "t a", "s"])
def test_without_such_a_stream_answers_come_on_their_own(
    make_server: MakeServer, place: str
) -> None:
    """``s`` was there, and its client has left: a model that was loaded again knows it no more."""
    server = make_server(CountingEngine())
    stream = server.send("s", shared=True)
    stream.cancelled = True
    assert stream.is_final.wait(WAIT)
    own = send(server, place, input_ids=[1])
    assert own.is_final.wait(WAIT)
    assert ids_of(own) == [2, 3, 4, 5, 6]


def test_a_client_that_leaves_is_noticed(make_server: MakeServer) -> None:
    gate = Gate()
    server = make_server(CountingEngine(before_step=gate))
    server.send("s", shared=True)
    gate.close_after(3)
    own = send(server, "s a", input_ids=[1], request_output_len=100)
    assert gate.is_reached.wait(WAIT)
    own.cancelled = True
    wait_until(lambda: any(server.model._queue.poll_stop_signals()))
    gate.set()


def test_names_of_shared_streams(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(CountingEngine())
    monkeypatch.setattr(module, "_MAX_STREAMS", 1)
    assert error_of(server.ask(shared=True))[0].startswith("'shared' needs a request id")
    server.send("s", shared=True)
    assert error_of(server.ask("s", shared=True))[0].startswith("'shared' needs a request id")
    text, code = error_of(server.ask("t", shared=True))
    assert text.startswith("1 shared streams are open, which is the limit")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    text, _ = error_of(send(server, 5, input_ids=[1]))
    assert text == "'inflight_shared' must be a text"


def test_a_drain_ends_shared_streams_behind_their_requests(make_server: MakeServer) -> None:
    gate = Gate()
    server = make_server(CountingEngine(before_step=gate))
    stream = server.send("s", shared=True)
    gate.clear()
    own = send(server, "s a", input_ids=[1])
    server.drain_file.touch()
    wait_for_phase(server, "draining")
    assert error_of(server.ask("t", shared=True))[0].startswith("the server is shutting down")
    gate.set()
    assert own.is_final.wait(WAIT)
    assert wait_for_end(stream, "a")
    wait_for_phase(server, "drained")
    assert stream.is_final.is_set()


def test_a_shared_stream_that_breaks_ends_and_its_requests_too(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    stream = FailingSender(num_good=1)
    server.send("s", sender=stream, shared=True)
    own = send(server, "s a", input_ids=[1])
    assert own.is_final.wait(WAIT)
    assert stream.is_final.wait(WAIT)
    assert stream.responses[-1].error is not None
    after = send(server, "s b", input_ids=[1])
    assert after.is_final.wait(WAIT)
    assert ids_of(after) == [2, 3, 4, 5, 6]
