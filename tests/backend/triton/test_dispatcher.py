"""A feed of statistics that is opened while iterations go on: no gap, nothing twice."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.triton_harness import error_of, ids_of
from support.triton_stub import FakePbUtils, FakeSender

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream


class Sent(ResponseSender):
    """A stream that keeps the iterations it is sent; ``gate`` holds every send back."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.iterations: list[int] = []
        self.finals: list[bool] = []

    def send(self, tensors: dict[str, Any], *, is_final: bool) -> None:
        self.gate.wait(10)
        lines = tensors["stats"].reshape(-1) if tensors else []
        self.iterations += [json.loads(line)["Iteration Counter"] for line in lines]
        self.finals.append(is_final)

    def close(self) -> None:
        self.send({}, is_final=True)


def stats_of(iteration: int) -> str:
    return json.dumps({"Iteration Counter": iteration})


def test_iterations_while_a_feed_opens_come_once_each() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    gate = threading.Event()
    early, late = Sent(gate), Sent(gate)

    def last_stats() -> str:
        """Iterations 3 and 4 are reported while this is answered, and 3 is in the answer."""
        dispatcher.return_stats(stats_of(3))
        dispatcher.return_stats(stats_of(4))
        return stats_of(3)

    dispatcher.subscribe(early, lambda: stats_of(0))
    for iteration in (1, 2):
        dispatcher.return_stats(stats_of(iteration))
    dispatcher.subscribe(late, last_stats)
    gate.set()
    while len(late.iterations) < 2:  # the timeout of the test ends it
        time.sleep(0.001)
    dispatcher.return_stats(stats_of(5))
    dispatcher.close()
    assert early.iterations == [0, 1, 2, 3, 4, 5]
    assert late.iterations == [3, 4, 5]
    for stream in (early, late):
        assert stream.finals == [False] * (len(stream.finals) - 1) + [True]


def test_an_answer_in_a_round_that_fails_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(ResponseDispatcher, "_send_round", fail)
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    sender = FakeSender()
    dispatcher.answer(ResponseSender(sender, ResponseFactory(FakePbUtils)), "why", "{}")
    dispatcher.close()
    assert error_of(sender)[0] == "the answer could not be sent"


def test_tokens_that_wait_when_an_error_comes_are_told_before_it() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    dispatcher.close()  # the round is ours
    sender = FakeSender()
    stream = ResponseSender(sender, ResponseFactory(FakePbUtils))
    dispatcher.open(1, TokenStream(stream, frozenset({"output_ids"})))
    tokens = [NamedTensor("output_ids", np.array([[[5, 6]]], dtype=np.int32))]
    dispatcher._send_round([(1, tokens, False, ""), (1, [], True, "broken")])
    assert ids_of(sender) == [5, 6]
    assert [str(each.error or "") for each in sender.responses] == ["", "broken"]
    assert not dispatcher._streams
