"""A feed of statistics that is opened while iterations go on: no gap, nothing twice."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton.stream import ResponseStream


class Sent(ResponseStream):
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
