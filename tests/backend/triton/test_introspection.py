"""Questions to a loaded model: why, statistics, description, recording; and error codes."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    ids_of,
    responses_of,
    text_of,
    wait_until,
    wait_until_queued,
)
from support.triton_stub import CountingEngine, FailingSender, FakePbUtils, FakeSender

from inflight_backend.status import read_status
from inflight_backend.triton import introspection as inspection
from inflight_backend.triton.live import ROW, LiveView
from inflight_protocol import INPUT_BY_NAME
from inflight_recorder.replay import replay
from inflight_recorder.storage import RecordingReader
from inflight_scheduler import ScheduledBatch


def answer_of(sender: FakeSender, name: str) -> str:
    [tensors] = responses_of(sender)
    assert list(tensors) == [name], sender.responses
    return str(tensors[name].item().decode())


def test_why_tells_running_waiting_queued_and_gone(server: Server, gate: threading.Event) -> None:
    """Four places: one that runs, three behind its blocks, and one in the queue."""
    gates = threading.Semaphore(0)

    def wait_for_gate(batch: ScheduledBatch) -> None:
        assert gates.acquire(timeout=WAIT)

    server.engine.before_step = wait_for_gate
    senders = [server.send("large", input_ids=[1], request_output_len=180, streaming=True)]
    gates.release()
    assert senders[0].has_response.wait(WAIT)
    senders += [
        server.send(f"next{k}", input_ids=[1], request_output_len=100, streaming=True)
        for k in range(4)
    ]
    gates.release()
    wait_until_queued(server, 1)  # three of them are taken
    wait_until(lambda: server.model._manager.get_num_active_requests() == 4)
    waiting_for = {name: server.send(name, why=True) for name in ("large", "next1", "next3", "no")}
    for _ in range(1000):
        gates.release()
    answers = {}
    for name, sender in waiting_for.items():
        assert sender.is_final.wait(WAIT)
        answers[name] = json.loads(answer_of(sender, "why"))
    assert answers["large"]["state"] == "generation"
    assert answers["large"]["generated_tokens"] >= 1
    assert answers["next1"]["state"] == "waiting"
    assert answers["next1"]["reason"].startswith("behind 1 other, first of them request ")
    assert (answers["next1"]["place"], answers["next1"]["num_waiting"]) == (2, 3)
    assert answers["next3"] == {
        "state": "queued",
        "reason": "all 4 places of max_batch_size are taken",
        "place": 1,
        "num_waiting": 1,
    }
    assert answers["no"]["state"] == "not in flight"
    for sender in senders:
        assert sender.is_final.wait(WAIT)


def test_live_tells_what_is_in_flight_and_what_has_happened_since(
    server: Server, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs, three behind its blocks, two in the queue; then all end. Answers are written when
    the queue is empty: that is no reason to lose those that were in it. The last one came after the
    question: it is told with its name."""
    gates, write = threading.Semaphore(0), LiveView.to_json

    def write_late(view: LiveView, names: Mapping[int, str], *others: Any) -> str:
        wait_until(lambda: not len(server.model._queue))
        return write(view, names, *others)

    monkeypatch.setattr(LiveView, "to_json", write_late)

    def wait_for_gate(batch: ScheduledBatch) -> None:
        assert gates.acquire(timeout=WAIT)

    server.engine.before_step = wait_for_gate
    senders = [
        server.send(
            "large", input_ids=[1], request_output_len=180, streaming=True, runtime_top_p=0.5
        )
    ]
    gates.release()
    assert senders[0].has_response.wait(WAIT)
    senders += [server.send("", input_ids=[1, 2], request_output_len=100) for _ in range(4)]
    gates.release()
    wait_until_queued(server, 1)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 4)
    asked = server.send(live=True, live_blocks=True)
    senders.append(server.send("late", input_ids=[3], request_output_len=5))
    wait_until_queued(server, 2)
    for _ in range(1000):
        gates.release()
    assert asked.is_final.wait(WAIT)
    answer = json.loads(answer_of(asked, "live"))
    first, *others = (dict(zip(ROW, row, strict=True)) for row in answer["requests"])
    assert (first["state"], first["pauses"], first["reason"]) == ("generation", 0, "")
    assert first["generated"] >= 1
    assert [each["place"] for each in others] == [1, 2, 3]
    assert others[0]["reason"].startswith("waiting for KV blocks: needs ")
    assert answer["num_queued"] == 2
    queued, late = answer["queued"]
    assert late[1] == "late"
    assert [queued[1], *queued[2:4]] == ["", 2, 100]
    assert queued[5] == "all 4 places of max_batch_size are taken"
    assert answer["is_new"]
    about = answer["about"][str(first["id"])]
    assert (about["name"], about["prompt_tokens"]) == ("large", 1)
    assert 0 <= int(about["sampling"].pop("seed")) < 2**64
    assert about["sampling"] == {"top_p": 0.5}
    held = sum(length for owner, length in answer["blocks"] if owner == first["id"])
    assert held == first["blocks"] > 0
    assert sum(length for _, length in answer["blocks"]) == answer["settings"]["num_blocks"]

    for sender in senders:
        assert sender.is_final.wait(WAIT)
    later = json.loads(answer_of(server.ask(live=True, live_since=answer["cursor"]), "live"))
    assert not later["is_new"]
    assert later["steps"][0]["i"] > max(step["i"] for step in answer["steps"])
    assert len(later["first"]) == 5
    assert sum(number for _, number in later["gaps"]) > 300
    assert (later["requests"], later["num_queued"]) == ([], 0)
    text = json.dumps([answer, later])
    assert "input_ids" not in text
    again = json.loads(answer_of(server.ask(live=True, live_since="1:no:cursor"), "live"))
    assert again["is_new"]


def test_why_tells_of_the_first_sequence_that_has_not_ended(
    make_server: MakeServer, gate: Gate
) -> None:
    """Two places, and one taken by another request: the sequences run one after the other."""
    server = make_server(CountingEngine(before_step=gate), max_batch_size="2")
    gate.close_after(0)
    senders = [server.send("long", input_ids=[1], request_output_len=200)]
    assert gate.is_reached.wait(WAIT)
    senders.append(
        server.send(
            "many", input_ids=[2], request_output_len=10, num_return_sequences=2, streaming=True
        )
    )
    which = ("state", "sequence", "num_sequences")
    answer = json.loads(answer_of(server.ask("many", why=True), "why"))
    assert [answer[name] for name in which] == ["queued", 1, 2]

    gate.go_on(4)  # the first one runs, the other one is queued
    asked = [server.send("many", why=True)]
    senders.append(server.send("urgent", input_ids=[3], request_output_len=10, priority=1.0))
    gate.go_on(10)  # the first one has ended, and the urgent one is before the other
    asked.append(server.send("many", why=True))
    gate.go_on(10)  # the other one runs
    asked.append(server.send("many", why=True))
    gate.go_on(5)
    told = []
    for sender in asked:
        assert sender.is_final.wait(WAIT)
        answer = json.loads(answer_of(sender, "why"))
        told.append([answer[name] for name in which])
    assert told == [["generation", 1, 2], ["queued", 2, 2], ["generation", 2, 2]]
    gate.set()
    for sender in senders:
        assert sender.is_final.wait(WAIT)
    answer = json.loads(answer_of(server.ask("many", why=True), "why"))
    assert answer["state"] == "not in flight"


def test_describe_tells_the_sampling_of_requests_that_name_none(
    make_server: MakeServer, tokenizer: None, tmp_path: Path
) -> None:
    content = '{"do_sample": true, "temperature": 0.5, "top_k": 20}'
    (tmp_path / "generation_config.json").write_text(content)
    for setting, expected in (
        ({"default_sampling": '{"top_k": 3}'}, {"temperature": 0.5, "top_k": 3}),
        ({"generation_config": "none"}, {}),
    ):
        server = make_server(CountingEngine(), **setting)
        description = json.loads(answer_of(server.ask(describe=True), "description"))
        assert description["default_sampling"] == expected


def test_describe_tells_every_end_of_the_checkpoint(
    make_server: MakeServer, tokenizer: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But the first alone where the model's config is older, with no input for the others: then
    the log says what to do."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8, 7]}')
    server = make_server(CountingEngine())
    description = json.loads(answer_of(server.ask(describe=True), "description"))
    assert (description["end_id"], description["stop_token_ids"]) == (9, [7, 8])
    assert text_of(server.ask(text_input="5", max_tokens=5)) == "5 6"
    assert "stop_token_ids" not in caplog.text
    old = make_server(CountingEngine(), without="stop_token_ids")
    description = json.loads(answer_of(old.ask(describe=True), "description"))
    assert (description["end_id"], description["stop_token_ids"]) == (9, [])
    assert set(INPUT_BY_NAME) - set(description["inputs"]) == {"stop_token_ids"}
    assert text_of(old.ask(text_input="5", max_tokens=5)) == "5 6"
    for part in ("without the input stop_token_ids", "at 9 alone, not at [7, 8]", "--force"):
        assert part in caplog.text


@pytest.mark.parametrize(
    ("num_blocks", "parameters", "longest"),
    [
        (8, {}, 32),
        (64, {}, 256),
        (64, {"batch_scheduler_policy": "max_utilization"}, 256),
        (
            64,
            {"batch_scheduler_policy": "max_utilization", "enable_chunked_context": "false"},
            61,
        ),
    ],
)
def test_what_is_told_to_fit_fits_and_no_token_more(
    make_server: MakeServer, num_blocks: int, parameters: dict[str, str], longest: int
) -> None:
    """A chat that names no number of tokens asks for all that fit."""
    server = make_server(CountingEngine(num_blocks=num_blocks, max_num_tokens=60), **parameters)
    description = json.loads(answer_of(server.ask(describe=True), "description"))
    assert description["max_seq_len"] == longest
    status = read_status(server.status_file)
    assert status is not None
    assert status.fields["max_seq_len"] == longest
    assert len(ids_of(server.ask(input_ids=[1, 2], request_output_len=longest - 2))) == longest
    message, _ = error_of(server.ask(input_ids=[1, 2], request_output_len=longest - 1))
    assert "prompt" in message


def test_the_recording_can_be_fetched_and_replays(server: Server) -> None:
    for _ in range(3):
        server.ask(input_ids=[5], request_output_len=4)
    text = answer_of(server.ask(recording=True), "recording")
    reader = RecordingReader(io.BytesIO(text.encode()), "fetched")
    assert str(replay(reader)) == "identical, 12 iterations (3 requests, 0 pauses)"
    again = answer_of(server.ask(recording=True), "recording")
    assert again == text


@pytest.mark.parametrize(
    "values",
    [
        {"stats": True, "streaming": False},
        {"stop": True},
        {"why": True},
        {"describe": True},
        {"recording": True},
        {},  # refused: no prompt
    ],
)
def test_an_answer_that_cannot_be_sent_is_no_silence(
    server: Server, values: dict[str, Any]
) -> None:
    """A send that raises, for want of shared memory say, is followed by an error."""
    sender = server.send("a", sender=FailingSender(), **values)
    assert sender.is_final.wait(WAIT)
    error_of(sender)


@pytest.mark.case(77)
def test_questions_beyond_the_limit_are_refused_while_the_loop_is_stuck(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "MAX_OPEN", 5)
    gate.close_after(3)
    server.send("a", input_ids=[1], request_output_len=200, streaming=True)
    assert gate.is_reached.wait(WAIT)
    first = server.send(recording=True)
    text, code = error_of(server.ask(recording=True))
    assert (text, code) == (
        "another recording is being put together; try again later",
        FakePbUtils.TritonError.UNAVAILABLE,
    )
    open_ones = [server.send("a", why=True) for _ in range(4)]
    for question in ("why", "recording", "describe"):
        text, code = error_of(server.ask("a", (), **{question: True}))
        assert text == "5 questions wait for an answer, which is the limit; try again later"
        assert code == FakePbUtils.TritonError.UNAVAILABLE
    gate.set()
    for sender, name in [(first, "recording"), *((each, "why") for each in open_ones)]:
        assert sender.is_final.wait(WAIT)
        assert answer_of(sender, name)
    assert answer_of(server.ask(recording=True), "recording"), "there is room again"


@pytest.mark.case(89)
@pytest.mark.parametrize("error", [KeyError("a place"), SystemExit()])
def test_an_answer_that_cannot_be_put_together_ends_with_an_error(
    make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """It is put together in a callback, and nobody hears what that raises."""

    def fail(*_: object) -> None:
        raise error

    server = make_server(CountingEngine(before_step=gate))
    gate.close_after(3)
    server.send("a", input_ids=[1], request_output_len=20, streaming=True)
    assert gate.is_reached.wait(WAIT)
    monkeypatch.setattr(inspection, "_which", fail)
    why = server.send("a", why=True)
    gate.set()
    assert why.is_final.wait(WAIT)
    assert error_of(why)[0] == "the request could not be explained"
    assert not server.model._frontend._introspection._waiting
