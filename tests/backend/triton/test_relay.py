"""What both relays do when a client, a send or ``tensorrt_llm`` behind them fails."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import CountingEngine, FakePbUtils, FakeRequest, FakeSender, FakeTensor
from relay_harness import Answer
from triton_harness import WAIT, Server, error_of, ids_of, wait_until

from inflight_backend.triton import relay as module
from inflight_backend.triton.bls_model import TritonPythonModel
from inflight_backend.triton.mailbox import Tensors


class Inner(FakeRequest):
    """A call of the server of this test; each has one response and no error, as Triton needs it."""

    server: Server
    stops: list[str]
    may_stop: threading.Event

    def __init__(
        self,
        model_name: str,
        requested_output_names: list[str],
        inputs: list[FakeTensor],
        request_id: str,
        parameters: dict[str, bool] | None = None,
        timeout: int = 0,
    ) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in inputs}
        text = json.dumps(parameters or {})
        super().__init__(tensors, request_id, tuple(requested_output_names), text)
        self._is_stop = "stop" in tensors

    def exec(self, decoupled: bool) -> Iterator[Answer]:
        assert decoupled
        if self._is_stop:
            self.stops.append(self.request_id())
            assert self.may_stop.wait(WAIT)
        self.server.model.execute([self])
        return self._read()

    def _read(self) -> Iterator[Answer]:
        assert self.sender.is_final.wait(WAIT)
        [response] = self.sender.responses
        assert response.error is None
        yield Answer(response)


class RelayUtils(FakePbUtils):
    InferenceRequest = Inner


@pytest.fixture
def relay(
    make_server: Callable[..., Server], server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TritonPythonModel]:
    """``tensorrt_llm_bls`` with three threads, before a server that counts for ever."""
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: step_slowly()
    )
    Inner.server = make_server(engine)
    Inner.stops, Inner.may_stop = [], threading.Event()
    Inner.may_stop.set()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", RelayUtils)
    monkeypatch.setattr(module, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(module, "_CANCEL_CHECK_SECONDS", 0.01)
    model = TritonPythonModel()
    config = {"parameters": {}, "model_transaction_policy": {"decoupled": True}}
    model.initialize({"model_config": json.dumps(config), "model_name": "tensorrt_llm_bls"})
    yield model
    Inner.may_stop.set()
    Inner.server.model.finalize()
    model.finalize()


def step_slowly() -> None:
    """What the engine does before each step; a test may put something else in its place."""
    time.sleep(0.002)


def send(
    relay: TritonPythonModel,
    num_tokens: int = 8000,
    sender: FakeSender | None = None,
    parameters: str = "{}",
) -> FakeSender:
    """Ask for a stream of so many tokens; the default never ends by itself."""
    tensors = {
        "text_input": np.array([[b"1"]], dtype=object),
        "max_tokens": np.array([[num_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
    }
    request = FakeRequest(tensors, "", ("output_ids",), parameters)
    request.sender = sender or request.sender
    relay.execute([request])
    return request.sender


class SlowSender(FakeSender):
    """Slower than the engine."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        time.sleep(0.005)
        super().send(response, flags)


def wait_for_rest(relay: TritonPythonModel) -> None:
    """Until nothing runs any more, behind the relay and in it."""
    wait_until(lambda: Inner.server.model._manager.get_num_active_requests() == 0)
    wait_until(lambda: not relay._relay._live)


class FailingSender(FakeSender):
    """Its second send raises."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sends = 0

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.num_sends += 1
        if self.num_sends == 2:
            raise RuntimeError("shm full")
        super().send(response, flags)


def test_clients_that_leave_cost_no_threads_while_a_stop_does_not_return(
    relay: TritonPythonModel,
) -> None:
    senders = [send(relay) for _ in range(3)]
    for sender in senders:
        assert sender.has_response.wait(WAIT)
    num_threads = threading.active_count()
    Inner.may_stop.clear()
    for sender in senders:
        sender.cancelled = True
    wait_until(lambda: bool(Inner.stops))
    time.sleep(0.1)  # ten looks
    assert threading.active_count() == num_threads
    Inner.may_stop.set()
    for sender in senders:
        assert sender.is_final.wait(WAIT)
    wait_for_rest(relay)
    assert len(set(Inner.stops)) == 3


def test_a_stream_ends_when_no_call_for_it_is_on_its_way(relay: TritonPythonModel) -> None:
    """Triton may unload the model then."""
    sender = send(relay, 60)
    assert sender.has_response.wait(WAIT)
    Inner.may_stop.clear()
    sender.cancelled = True
    wait_until(lambda: bool(Inner.stops))
    wait_until(lambda: Inner.server.model._manager.get_num_active_requests() == 0)
    assert not sender.is_final.wait(0.1)
    Inner.may_stop.set()
    assert sender.is_final.wait(WAIT)
    num_stops = len(Inner.stops)
    time.sleep(0.05)  # five looks
    assert len(Inner.stops) == num_stops


def test_a_send_that_fails_stops_what_was_asked_for(relay: TritonPythonModel) -> None:
    sender = send(relay, sender=FailingSender())
    assert sender.is_final.wait(WAIT)
    assert str(sender.responses[-1].error) == "the request could not be relayed"
    wait_for_rest(relay)
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def test_a_relay_that_is_slower_than_the_engine_loses_nothing(relay: TritonPythonModel) -> None:
    sender = send(relay, 500, sender=SlowSender())
    assert sender.is_final.wait(WAIT)
    assert ids_of(sender) == list(range(2, 502))
    wait_for_rest(relay)


def test_a_call_for_more_that_fails_stops_what_was_asked_for(
    relay: TritonPythonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = Inner.exec, [RuntimeError("shm full")]

    def fail_once(self: Inner, decoupled: bool) -> Any:
        if failures and "next" in self.parameters():
            raise failures.pop()
        return real(self, decoupled)

    monkeypatch.setattr(Inner, "exec", fail_once)
    sender = send_and_wait(relay, 8000)
    assert str(sender.responses[-1].error) == "the request could not be relayed"
    wait_for_rest(relay)


def test_an_answer_that_cannot_be_told_stops_what_was_asked_for(
    relay: TritonPythonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(responses: Iterator[Tensors]) -> Iterator[Tensors]:
        yield next(responses)
        raise BaseException("as a panic of a library in Rust")

    with monkeypatch.context() as patch:
        real = relay.translate

        def translate(*args: Any) -> tuple[Any, Sequence[str], Any]:
            inputs, outputs, _ = real(*args)
            return inputs, outputs, fail

        patch.setattr(relay, "translate", translate)
        sender = send_and_wait(relay, 8000)
    assert str(sender.responses[-1].error) == "the request could not be relayed"
    wait_for_rest(relay)


@pytest.mark.parametrize("parameters", ["{}", '{"inflight_error_codes": true}'])
def test_an_error_amid_an_answer_ends_it(
    relay: TritonPythonModel, monkeypatch: pytest.MonkeyPatch, parameters: str
) -> None:
    sender = send(relay, parameters=parameters)
    assert sender.has_response.wait(WAIT)

    def fail() -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setitem(globals(), "step_slowly", fail)
        assert sender.is_final.wait(WAIT)
    error = sender.responses[-1].error
    assert error is not None
    prefix = "" if parameters == "{}" else "[INTERNAL] "
    assert str(error) == f"{prefix}the engine failed while it ran this request"
    assert error.code == FakePbUtils.TritonError.INTERNAL
    wait_for_rest(relay)
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def test_a_stop_that_fails_is_tried_again(
    relay: TritonPythonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = send(relay)
    assert sender.has_response.wait(WAIT)
    real, failures = Inner.exec, [RuntimeError("no")]

    def fail_once(self: Inner, decoupled: bool) -> Any:
        if failures and self._is_stop:
            raise failures.pop()
        return real(self, decoupled)

    monkeypatch.setattr(Inner, "exec", fail_once)
    sender.cancelled = True
    assert sender.is_final.wait(WAIT)
    wait_for_rest(relay)


def test_too_many_requests_are_a_named_refusal(relay: TritonPythonModel) -> None:
    senders = [send(relay) for _ in range(3)]
    text, code = error_of(send_and_wait(relay, 3))
    assert text.startswith("3 requests are on their way through this model, which is the limit")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    for sender in senders:
        sender.cancelled = True
    wait_for_rest(relay)
    assert ids_of(send_and_wait(relay, 3)) == [2, 3, 4]


def send_and_wait(relay: TritonPythonModel, num_tokens: int) -> FakeSender:
    sender = send(relay, num_tokens)
    assert sender.is_final.wait(WAIT)
    return sender
