"""How a request that another model of ours relays gets its answer: one response to each call."""

from __future__ import annotations

import time

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from fakes import CountingEngine, FakePbUtils, FakeRequest, FakeSender
from triton_harness import WAIT, Gate, Server, wait_until

from inflight_backend.errors import CapacityExceeded, InvalidRequest
from inflight_backend.triton import mailbox as module
from inflight_backend.triton.mailbox import Mailbox, Part, RelayedError, pack, unpack
from inflight_backend.triton.stream import ResponseFactory, ResponseStream
from inflight_client.tensors import make_inputs


def reader_of(sender: FakeSender) -> ResponseStream:
    return ResponseStream(sender, ResponseFactory(FakePbUtils))


def parts_of(sender: FakeSender) -> tuple[list[Part], bool]:
    """Those of the one response, which is no error to Triton."""
    assert sender.is_final.wait(WAIT)
    [response] = sender.responses
    assert response.error is None
    [tensor] = response.output_tensors
    assert tensor.name() == "relay"
    return unpack(tensor.as_numpy())


def ids_in(parts: list[Part]) -> list[int]:
    return [int(each) for part in parts for each in np.ravel(part["output_ids"])]  # type: ignore[index]


@pytest.mark.parametrize("shape", [(), (0,), (1, 3), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint8, np.int64, np.bool_])
def test_numbers_come_out_as_they_went_in(dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    tensor = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    [[part], is_over] = unpack(pack([{"one": tensor}], is_over=False))
    assert not is_over
    assert isinstance(part, dict)
    assert part["one"].dtype == tensor.dtype
    assert np.array_equal(part["one"], tensor)


def test_parts_with_texts_errors_and_nothing_come_out_as_they_went_in() -> None:
    texts = np.array([[b"a\x00b", b""], ["\u00e9".encode(), b"\xff"]], dtype=object)
    packed = pack([{"a": texts, "n": np.ones(2)}, {}, RelayedError("no", "INTERNAL")], is_over=True)
    [[first, second, third], is_over] = unpack(packed)
    assert is_over
    assert isinstance(first, dict)
    assert first["a"].tolist() == texts.tolist()
    assert first["n"].tolist() == [1.0, 1.0]
    assert (second, third) == ({}, RelayedError("no", "INTERNAL"))


def test_a_call_has_what_came_since_the_last_one_and_waits_where_nothing_did() -> None:
    senders = [FakeSender() for _ in range(4)]
    box = Mailbox(reader_of(senders[0]))
    one = {"output_ids": np.array([1])}
    box.send(one)
    assert parts_of(senders[0]) == ([one], False)
    box.send({"output_ids": np.array([2])})
    box.send({"output_ids": np.array([3])})
    box.fetch(reader_of(senders[1]))
    parts, is_over = parts_of(senders[1])
    assert (ids_in(parts), is_over) == ([2, 3], False)
    box.fetch(reader_of(senders[2]))
    assert senders[2].responses == []
    with pytest.raises(InvalidRequest, match="another call waits"):
        box.fetch(reader_of(senders[3]))
    assert not box.is_done
    box.send(None, flags=1)
    assert parts_of(senders[2]) == ([], True)
    assert box.is_done


def test_who_waits_and_leaves_is_gone_and_so_is_who_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender = FakeSender()
    box = Mailbox(reader_of(sender))
    assert not box.is_cancelled()
    sender.cancelled = True
    assert box.is_cancelled()
    sender.cancelled = False
    box.send({"output_ids": np.array([1])})
    box.send(None, flags=1)
    assert (box.is_cancelled(), box.is_done) == (False, False), "its end waits"
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    time.sleep(0.02)
    assert (box.is_cancelled(), box.is_done) == (True, True)


def test_a_call_has_few_parts_so_that_the_next_one_comes_soon() -> None:
    sender = FakeSender()
    box = Mailbox(reader_of(sender))
    num_parts = 3 * module.MAX_PARTS + 1
    for number in range(num_parts):
        box.send({"output_ids": np.array([number])})
    box.send(None, flags=1)
    parts, is_over = parts_of(sender)
    ids, nums = ids_in(parts), [len(parts)]
    while not is_over:
        assert not box.is_done
        sender = FakeSender()
        box.fetch(reader_of(sender))
        parts, is_over = parts_of(sender)
        ids += ids_in(parts)
        nums.append(len(parts))
    assert ids == list(range(num_parts))
    assert nums == [1] + 3 * [module.MAX_PARTS]
    assert box.is_done


def test_who_comes_too_late_hears_that_the_answer_may_not_be_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    box = Mailbox(reader_of(FakeSender()))
    box.send({"output_ids": np.array([1])})
    time.sleep(0.02)
    assert box.is_cancelled()
    box.send({"output_ids": np.array([2])}, flags=1)  # since it is stopped
    with pytest.raises(CapacityExceeded, match=r"nobody asked for more of this answer for 0\.01 s"):
        box.fetch(reader_of(FakeSender()))


class FailingSender(FakeSender):
    """Its first send raises."""

    is_broken = True

    def send(self, response: object = None, flags: int = 0) -> None:
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("shm full")
        super().send(response, flags)  # type: ignore[arg-type]


def test_a_send_that_fails_ends_the_call_with_an_error_and_the_request() -> None:
    sender = FailingSender()
    box = Mailbox(reader_of(sender))
    with pytest.raises(RuntimeError):
        box.send({"output_ids": np.array([1])})
    assert str(sender.responses[-1].error) == "the response could not be sent"
    assert (box.is_cancelled(), box.is_done) == (True, True), "nobody will ask for more"


def test_a_part_that_cannot_be_packed_ends_the_call_with_an_error() -> None:
    sender = FakeSender()
    box = Mailbox(reader_of(sender))
    with pytest.raises(AttributeError):
        box.send({"output_ids": "no array"})  # type: ignore[dict-item]
    assert sender.is_final.is_set()
    assert str(sender.responses[-1].error) == "the response could not be sent"
    assert (box.is_cancelled(), box.is_done) == (True, True)


def request_of(request_id: str, parameters: str, **values: object) -> FakeRequest:
    return FakeRequest(make_inputs(values), request_id, ("output_ids", "relay"), parameters)


def ask(server: Server, request_id: str, parameters: str, **values: object) -> FakeSender:
    request = request_of(request_id, parameters, **values)
    server.model.execute([request])
    return request.sender


PROMPT = {"input_ids": [1], "streaming": True}
FIRST, NEXT = '{"inflight_relay": true}', '{"inflight_relay": "next"}'


def ids_to_the_end(server: Server, num_tokens: int) -> list[int]:
    """Ask until it is over."""
    sender = ask(server, "r", FIRST, request_output_len=num_tokens, **PROMPT)
    parts, is_over = parts_of(sender)
    ids = ids_in(parts)
    while not is_over:
        parts, is_over = parts_of(ask(server, "r", NEXT, streaming=True))
        ids += ids_in(parts)
    return ids


def test_the_llm_answers_a_relay_call_by_call_and_keeps_nothing(server: Server) -> None:
    assert ids_to_the_end(server, 30) == list(range(2, 32))
    wait_until(lambda: not server.model._frontend._mailboxes)
    [error], is_over = parts_of(ask(server, "r", NEXT, streaming=True))
    assert is_over
    assert isinstance(error, RelayedError)
    assert error.message.startswith("no relayed request with this id is in flight: the model was")
    assert error.code == "UNAVAILABLE", "the client has done nothing wrong"


@pytest.mark.parametrize(
    ("request_id", "parameters", "message"),
    [
        ("", FIRST, "'inflight_relay' needs a request id of its own"),
        ("r", '{"inflight_relay": "sometimes"}', "request parameter 'inflight_relay' must be true"),
        ("r", '{"inflight_relay": true, "surprise": 1}', "'surprise' came as a request parameter"),
    ],
)
def test_what_is_wrong_is_told_as_a_part(
    server: Server, request_id: str, parameters: str, message: str
) -> None:
    [error], is_over = parts_of(ask(server, request_id, parameters, request_output_len=3, **PROMPT))
    assert is_over
    assert isinstance(error, RelayedError)
    assert error.message.startswith(message)
    assert error.code == "INVALID_ARG"


def test_an_end_that_nobody_has_fetched_is_waited_for_in_a_drain(
    server: Server, gate: Gate
) -> None:
    gate.close_after(1)
    first = ask(server, "r", FIRST, request_output_len=30, **PROMPT)
    assert not parts_of(first)[1]
    gate.set()
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    wait_until(lambda: not server.model._frontend._live)
    assert server.model._frontend.num_live == 1
    while not parts_of(ask(server, "r", NEXT, streaming=True))[1]:
        pass
    assert server.model._frontend.num_live == 0


def test_an_end_that_comes_while_its_request_is_taken_is_waited_for_as_well(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.close_after(1)
    frontend, counts = server.model._frontend, []
    wake = frontend._wake
    request = request_of("r", FIRST, request_output_len=30, **PROMPT)

    def wake_and_see_the_end() -> None:
        wake()
        assert not parts_of(request.sender)[1]
        gate.set()
        wait_until(lambda: not frontend._live)
        counts.append(frontend.num_live)

    monkeypatch.setattr(frontend, "_wake", wake_and_see_the_end)
    server.model.execute([request])
    assert counts == [1]


@pytest.mark.parametrize("wrong", [{"beam_width": 9}, {"request_output_len": -1}])
def test_a_request_that_is_refused_leaves_no_mailbox(server: Server, wrong: dict[str, int]) -> None:
    values = {"request_output_len": 3, **PROMPT, **wrong}
    assert parts_of(ask(server, "r", FIRST, **values))[1]
    assert not server.model._frontend._mailboxes
    assert ids_to_the_end(server, 3) == [2, 3, 4]


def test_a_request_whose_relay_has_gone_ends(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    engine = CountingEngine(
        num_blocks=9000, max_seq_len=9000, before_step=lambda batch: time.sleep(0.001)
    )
    server = make_server(engine)
    assert parts_of(ask(server, "r", FIRST, request_output_len=8000, **PROMPT))
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    assert len(engine.batches) < 7000
    wait_until(lambda: not server.model._frontend._mailboxes)
    assert server.model._frontend.num_live == 0
