"""A response sender: one thread at a time in Triton, one end, responses larger than memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.triton_harness import WAIT, error_of
from support.triton_stub import (
    FailingSender,
    FakePbUtils,
    FakeResponse,
    FakeSender,
    FakeTensor,
    HeldSender,
)

from inflight_backend.manager.statistics import EventCounter
from inflight_backend.requests.inference_request import Array, NamedTensor
from inflight_backend.requests.tensors import finish_reason_tensor, number_tensor
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton_io import sender as module
from inflight_backend.triton_io.answer_stream import AnswerStream, TokenStream
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_scheduler import FinishReason

INTERNAL = FakePbUtils.TritonError.INTERNAL


class CountingSender(HeldSender):
    """Notes the flags of every send, how many threads were inside at most, and questions."""

    def __init__(self) -> None:
        super().__init__()
        self.release.set()
        self.flags: list[int] = []
        self.num_inside = self.most_inside = self.num_questions = 0

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.flags.append(flags)
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        super().send(response, flags)
        self.num_inside -= 1

    def is_cancelled(self) -> bool:
        self.num_questions += 1
        self.is_held.set()
        assert self.release.wait(WAIT)
        return True


def stream_to(sender: FakeSender, *, is_decoupled: bool = True) -> ResponseSender:
    return ResponseSender(sender, ResponseFactory(FakePbUtils, is_decoupled))


def test_one_thread_at_a_time_is_in_triton_and_nobody_asks_during_a_send_or_after_the_end() -> None:
    """Triton 24.10 dies of it."""
    sender = CountingSender()
    stream = stream_to(sender)
    assert stream.is_cancelled()
    sender.is_held.clear()
    sender.release.clear()
    threads = [threading.Thread(target=stream.send, args=({},), kwargs={"is_final": False})]
    threads[0].start()
    assert sender.is_held.wait(WAIT)
    assert not stream.is_cancelled()
    threads.append(threading.Thread(target=stream.abandon, args=("over",)))
    threads[1].start()
    threads[1].join(0.02)  # time enough to come in
    sender.release.set()
    for thread in threads:
        thread.join(WAIT)
    assert (sender.most_inside, sender.num_questions) == (1, 1)
    assert [str(response.error or "") for response in sender.responses] == ["", "over"]
    assert stream.has_ended
    assert not stream.is_cancelled()
    assert sender.num_questions == 1


def test_an_end_that_cannot_be_sent_is_tried_once_more_as_an_error_and_holds_up_nobody() -> None:
    sender = FailingSender()
    stream = stream_to(sender)
    stream.close()
    assert error_of(sender) == ("the end could not be sent", INTERNAL)
    assert not stream._lock.locked(), "a send behind it would wait for ever"
    stream.send({}, is_final=True)
    assert len(sender.responses) == 1


def test_the_first_reason_for_an_end_is_the_one_that_is_told() -> None:
    sender = FakeSender()
    stream = stream_to(sender)
    stream.end_with("first", "INVALID_ARG")
    stream.end_with("second")
    stream.send({}, is_final=False)
    assert not sender.responses
    stream.send({}, is_final=True)
    assert error_of(sender) == ("first", FakePbUtils.TritonError.INVALID_ARG)


@pytest.mark.case(92)
def test_a_stream_to_be_ended_during_a_long_question_ends_when_that_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.01)
    sender = CountingSender()
    sender.release.clear()
    slow = stream_to(sender)
    asking = threading.Thread(target=slow.is_cancelled)
    asking.start()
    assert sender.is_held.wait(WAIT)
    slow.abort("no more")
    assert not sender.is_final.is_set()
    sender.release.set()
    asking.join()
    assert error_of(sender) == ("no more", FakePbUtils.TritonError.UNAVAILABLE)


def test_tensors_that_are_the_same_each_time_are_made_once() -> None:
    """Those of the module of constants: of others, also equal ones, each is made."""
    factory = ResponseFactory(FakePbUtils)

    def made() -> list[FakeTensor]:
        tensors = {
            "sequence_length": number_tensor(1),
            "batch_index": number_tensor(1),
            "finish_reason": finish_reason_tensor(FinishReason.NOT_FINISHED),
            "num_output_tokens": number_tensor(1000),
            "output_ids": np.array([[[1]]], np.int32),
        }
        response: FakeResponse = factory.tensors(tensors)
        return response.output_tensors

    first, second = made(), made()
    names = ["sequence_length", "batch_index", "finish_reason"]
    same = [a.name() for a, b in zip(first, second, strict=True) if a is b]
    assert same == names
    assert [int(each.array.flat[0]) for each in first if each.name() not in names] == [1000, 1]
    factory.forget()
    assert not any(a is b for a, b in zip(first, made(), strict=True))


def test_a_stream_is_counted_once_however_it_ends() -> None:
    counts = EventCounter()
    factory = ResponseFactory(FakePbUtils)
    broken, also_broken, twice, well = FailingSender(), FailingSender(), FakeSender(), FakeSender()
    stream = ResponseSender(broken, factory, count_error=counts.add)
    with pytest.raises(RuntimeError, match="shm full"):
        stream.send({}, is_final=True)
    stream.abandon("it could not be sent")
    assert error_of(broken)[1] == INTERNAL
    ResponseSender(also_broken, factory, count_error=counts.add).fail("no", "INVALID_ARG")
    assert error_of(also_broken)[1] == INTERNAL
    stream = ResponseSender(twice, factory, count_error=counts.add)
    stream.abort("it makes no progress")
    stream.fail("too late")
    ResponseSender(well, factory, count_error=counts.add).send({}, is_final=True)
    assert counts.take() == {"INTERNAL": 1, "INVALID_ARG": 1, "UNAVAILABLE": 1}
    assert counts.take() == {}


@pytest.mark.parametrize("has_raised", [False, True])
def test_sequences_that_all_fail_end_their_request_with_the_first_error(has_raised: bool) -> None:
    sender, num_stops = FakeSender(), list[int]()
    stream = stream_to(sender)
    sequences = [TokenStream(stream, frozenset()) for _ in range(3)]
    open_: set[AnswerStream] = {*sequences}
    for name, sequence in zip(("first", "second", "third"), sequences, strict=True):
        sequence.open_, sequence.stop_all = open_, lambda: num_stops.append(1)
        assert not sender.is_final.is_set(), "the third one holds blocks"
        if has_raised:
            sequence.abandon(name)
        else:
            sequence.finish_with_error(name, "INTERNAL")
        assert num_stops
    assert error_of(sender) == ("first", INTERNAL)
    assert sender.is_final.is_set()


LOGITS = np.zeros((1, 1, 2000, 256), dtype=np.float32)

TEXT = "x" * 2**21


class FullMemory(FakeSender):
    """Shared memory has no room beyond what a model begins with. Triton closes a sender when it is
    to send with the flag of the last response, before it looks for room for that."""

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        tensors = [] if response is None else response.output_tensors
        if any(each.array is LOGITS or TEXT.encode() in each.array for each in tensors):
            if flags:
                self.is_final.set()
            raise RuntimeError("Failed to increase the shared memory pool size")
        super().send(response, flags)


@pytest.mark.case(117)
def test_who_gets_a_last_response_without_room_for_it_gets_an_error() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    answer, question = FullMemory(), FullMemory()
    dispatcher.open(1, TokenStream(stream_to(answer), frozenset({"generation_logits"})))
    dispatcher.send_response(1, [NamedTensor("generation_logits", LOGITS)], True, "")
    dispatcher.answer(stream_to(question), "recording", TEXT)
    dispatcher.close()
    assert error_of(answer) == ("the response could not be sent", INTERNAL)
    assert error_of(question) == ("the answer could not be sent", INTERNAL)
    assert answer.is_final.wait(WAIT)
    assert question.is_final.wait(WAIT)


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("generation_logits", LOGITS, [0, 1]),
        ("generation_logits", LOGITS[:, :, :100], [1]),
    ],
    ids=["large", "small"],
)
def test_only_large_responses_leave_before_the_news_that_they_were_the_last(
    name: str, value: Array, flags: list[int]
) -> None:
    sender = CountingSender()
    is_free: list[int] = []
    stream = stream_to(sender)
    stream.on_final(lambda: is_free.append(len(sender.flags)))
    stream.send({name: value}, is_final=True)
    assert sender.flags == flags
    assert len(sender.responses) == 1
    assert is_free == [0], "the id is free before the answer is there"
    assert stream.has_ended


def test_who_was_to_get_an_error_in_place_of_a_large_response_gets_one() -> None:
    sender = CountingSender()
    stream = stream_to(sender)
    stream.end_with("too late")
    stream.send({"generation_logits": LOGITS}, is_final=True)
    assert sender.flags == [1]
    assert error_of(sender) == ("too late", FakePbUtils.TritonError.INTERNAL)
