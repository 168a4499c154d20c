"""A request that cannot be taken, behind Triton: it is answered, and its id is free again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.triton_harness import WAIT, error_of, ids_of, wait_until
from support.triton_stub import CountingEngine, FakePbUtils

from inflight_backend.manager.logits_processors import ActiveProcessors
from inflight_backend.status import read_status
from inflight_scheduler import ScheduledBatch


@pytest.mark.case(89, 117)
def test_one_of_a_burst_cannot_be_taken(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One runs, and three wait while its step does, so that they are fetched together."""
    go_on = threading.Event()

    def wait(batch: ScheduledBatch) -> None:
        assert go_on.wait(WAIT)

    server = make_server(CountingEngine(before_step=wait), max_batch_size="8")
    add, num_left = ActiveProcessors.add, 1

    def add_but_one(owner: ActiveProcessors, request: Any) -> None:
        nonlocal num_left
        if num_left and request.get_tensor("input_ids").item() == 300:
            num_left = 0
            raise BaseException("as a panic of a library in Rust")
        add(owner, request)

    monkeypatch.setattr(ActiveProcessors, "add", add_but_one)
    first = server.send("one", input_ids=[1], request_output_len=30, streaming=True)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 1)
    burst = [
        server.send(name, input_ids=[start], request_output_len=5, streaming=True)
        for name, start in (("two", 200), ("three", 300), ("four", 400))
    ]
    go_on.set()
    for sender in (first, *burst):
        assert sender.is_final.wait(WAIT)
    assert ids_of(first) == list(range(2, 32))
    assert ids_of(burst[0]) == list(range(201, 206))
    assert error_of(burst[1]) == (
        "the request could not be taken",
        FakePbUtils.TritonError.INTERNAL,
    )
    assert ids_of(burst[2]) == list(range(401, 406))
    again = server.ask("three", input_ids=[300], request_output_len=2)
    assert ids_of(again) == [300, 301, 302]
    assert server.model._frontend.num_live == 0
    server.drain_file.write_text("")
    wait_until(lambda: getattr(read_status(server.status_file), "phase", "") == "drained")
