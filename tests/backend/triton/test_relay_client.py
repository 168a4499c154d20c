"""What both relays do when a client, a send or ``tensorrt_llm`` behind them fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.relay_harness import answering, asking, load, packed
from support.triton_harness import WAIT, Server, error_of, ids_of, wait_until
from support.triton_stub import (
    CountingEngine,
    FailingSender,
    FakePbUtils,
    FakeRequest,
    FakeSender,
    HeldSender,
)

from inflight_backend.triton import model as triton_model
from inflight_backend.triton import relay_server, relay_wire
from inflight_backend.triton.relay_wire import RelayedRequest, Tensors
from inflight_backend.triton_models import relay_client as module
from inflight_backend.triton_models.bls import TritonPythonModel

NOT_RELAYED = "the request could not be relayed"
NOT_LOADED = "the model 'tensorrt_llm' is not loaded, or the server is shutting down"


@pytest.fixture
def llm(make_server: Callable[..., Server], tokenizer: None) -> Server:
    """A server that counts for ever."""
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: step_slowly()
    )
    return make_server(engine)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonPythonModel]:
    """``tensorrt_llm_bls`` with three threads."""
    monkeypatch.setattr(module, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(module, "_CANCEL_CHECK_SECONDS", 0.01)
    model = TritonPythonModel()
    load(model, "tensorrt_llm_bls", {})
    yield model
    model.finalize()


def step_slowly() -> None:
    """What the engine does before each step; a test may put something else in its place."""
    time.sleep(0.002)


def send(
    relay: TritonPythonModel,
    num_tokens: int = 8000,
    sender: FakeSender | None = None,
) -> FakeSender:
    """Ask for a stream of so many tokens; the default never ends by itself."""
    tensors = {
        "text_input": np.array([[b"1"]], dtype=object),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
    }
    request = FakeRequest(tensors, "", ("output_ids",), sender=sender)
    relay.execute([request])
    return request.sender


def send_and_wait(relay: TritonPythonModel, num_tokens: int) -> FakeSender:
    sender = send(relay, num_tokens)
    assert sender.is_final.wait(WAIT)
    return sender


def wait_for_rest(relay: TritonPythonModel, llm: Server) -> None:
    """Until nothing runs any more, behind the relay and in it."""
    wait_until(lambda: llm.model._manager.get_num_active_requests() == 0)
    wait_until(lambda: llm.model._relays.num_open == 0)
    wait_until(lambda: not relay._live)


def test_a_client_that_leaves_has_its_request_stopped(
    relay: TritonPythonModel, llm: Server
) -> None:
    senders = [send(relay) for _ in range(3)]
    for sender in senders:
        assert sender.has_response.wait(WAIT)
    num_threads = threading.active_count()
    for sender in senders:
        sender.cancelled = True
    for sender in senders:
        assert sender.is_final.wait(WAIT)
        assert all(response.error is None for response in sender.responses)
    wait_for_rest(relay, llm)
    assert threading.active_count() <= num_threads
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


@pytest.mark.slow
def test_the_llm_is_not_drained_before_the_client_was_told(
    relay: TritonPythonModel, llm: Server
) -> None:
    """Triton is stopped when it is, and may cut what the relay still has to send."""
    sender = HeldSender(flags=1)
    send(relay, 3, sender)
    assert sender.is_held.wait(WAIT)
    wait_until(lambda: llm.model._frontend.num_live == 0)
    llm.drain_file.touch()
    wait_until(lambda: '"draining"' in llm.status_file.read_text())
    time.sleep(0.3)  # three looks
    assert '"draining"' in llm.status_file.read_text()
    assert error_of(send_and_wait(relay, 3))[0] == NOT_LOADED
    sender.release.set()
    wait_until(lambda: '"drained"' in llm.status_file.read_text())


def test_a_send_that_fails_stops_what_was_asked_for(relay: TritonPythonModel, llm: Server) -> None:
    sender = send(relay, sender=FailingSender(num_good=1))
    assert sender.is_final.wait(WAIT)
    assert str(sender.responses[-1].error) == NOT_RELAYED
    wait_for_rest(relay, llm)
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def test_a_relay_that_is_slower_than_the_engine_gets_all_in_fewer_parts(
    relay: TritonPythonModel, llm: Server
) -> None:
    """What it has no room for travels together: it has never much before it."""
    sender = HeldSender()
    send(relay, 300, sender)
    wait_until(lambda: len(llm.engine.batches) == 300)
    sender.release.set()
    assert sender.is_final.wait(WAIT)
    assert ids_of(sender) == list(range(2, 302))
    sizes = [response.output_tensors[0].as_numpy().size for response in sender.responses]
    assert len(sizes) < 150
    assert max(sizes) > 20
    wait_for_rest(relay, llm)


def test_a_slow_reader_holds_up_no_other(relay: TritonPythonModel, llm: Server) -> None:
    slow = HeldSender()
    send(relay, 500, slow)
    assert slow.is_held.wait(WAIT)
    assert ids_of(send_and_wait(relay, 300)) == list(range(2, 302))
    slow.cancelled = True
    slow.release.set()
    wait_for_rest(relay, llm)


def test_too_many_requests_are_a_named_refusal(relay: TritonPythonModel, llm: Server) -> None:
    senders = [send(relay) for _ in range(3)]
    text, code = error_of(send_and_wait(relay, 3))
    assert text.startswith("3 requests are on their way through this model, which is the limit")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    for sender in senders:
        sender.cancelled = True
    wait_for_rest(relay, llm)
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def test_no_more_open_files_are_a_named_refusal(
    relay: TritonPythonModel, llm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", fail)
        text, code = error_of(send_and_wait(relay, 3))
    assert text == "no connection to 'tensorrt_llm' can be opened: Too many open files"
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def test_a_model_that_is_loaded_again_at_that_moment_is_waited_for(
    relay: TritonPythonModel,
    make_server: Callable[..., Server],
    tokenizer: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_wire, "_CONNECT_SECONDS", WAIT)  # a busy machine may take a second
    sender = send(relay, 3)
    time.sleep(0.05)
    make_server(CountingEngine())
    assert sender.is_final.wait(WAIT)
    assert ids_of(sender) == [2, 3, 4]


def test_a_process_that_ends_amid_an_answer_is_an_error(relay: TritonPythonModel) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def begin(request: RelayedRequest) -> Iterator[Tensors]:
        yield {"output_ids": np.array([[2]], np.int32)}
        has_begun.set()
        assert may_end.wait(WAIT)

    with answering(begin) as listener:
        sender = send(relay)
        assert has_begun.wait(WAIT)
        for connection in list(listener._open.values()):  # which its threads change
            connection.cut()
        assert sender.is_final.wait(WAIT)
        may_end.set()
    assert ids_of(sender) == [2]
    error = sender.responses[-1].error
    assert str(error) == "the process of the model 'tensorrt_llm' has ended"
    assert error is not None
    assert error.code == FakePbUtils.TritonError.INTERNAL


@pytest.mark.slow
def test_an_unload_delivers_the_streams_that_are_relayed(
    relay: TritonPythonModel, llm: Server
) -> None:
    """As Triton has those that are not."""
    sender = send(relay, 300)
    assert sender.has_response.wait(WAIT)
    llm.model.finalize()
    assert sender.is_final.wait(WAIT)
    assert ids_of(sender) == list(range(2, 302))
    assert error_of(send_and_wait(relay, 3))[0] == NOT_LOADED


def test_an_unload_does_not_wait_for_a_relay_that_is_frozen(
    llm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would still have to read does not fit into the socket."""
    monkeypatch.setattr(triton_model, "_FROZEN_RELAY_SECONDS", 0.2)
    monkeypatch.setattr(relay_server, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setitem(globals(), "step_slowly", llm.send_all)  # else all may be one message
    with asking(packed(200)):
        wait_until(lambda: len(llm.engine.batches) == 200)
        wait_until(lambda: llm.model._frontend.num_live == 0)
        assert not llm.model._relays.is_done
        llm.model.finalize()


def test_a_call_asks_again_on_the_connection_it_has() -> None:
    """By which a model that drains sees that the answer goes on: it accepts no new ones then."""
    message = packed(1)
    with answering(lambda request: [{"text_output": np.array([b"x"], object)}]) as listener:
        call = module.RelayedCall("tensorrt_llm", Mock(), RelayedRequest({}, []))
        assert [len(list(call.ask("tensorrt_llm", message))) for _ in range(2)] == [2, 2]
        listener.shut()
        assert len(list(call.ask("tensorrt_llm", message))) == 2
        assert listener.num_open == 1
        call.close()
        wait_until(lambda: listener.num_open == 0)
