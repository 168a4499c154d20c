"""A last response that needs more shared memory than there is: its client hears of it."""

from __future__ import annotations

import numpy as np
import pytest
from support.triton_harness import WAIT, error_of
from support.triton_stub import FakePbUtils, FakeResponse, FakeSender

from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton_io.sender import Array, ResponseFactory, ResponseSender
from inflight_backend.triton_io.token_stream import TokenStream

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


class CountingSender(FakeSender):
    def __init__(self) -> None:
        super().__init__()
        self.flags: list[int] = []

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.flags.append(flags)
        super().send(response, flags)


def stream_to(sender: FakeSender, *, is_decoupled: bool = True) -> ResponseSender:
    return ResponseSender(sender, ResponseFactory(FakePbUtils, is_decoupled))


@pytest.mark.case(117)
def test_who_gets_a_last_response_without_room_for_it_gets_an_error() -> None:
    dispatcher = ResponseDispatcher(stop_request=lambda request_id: None)
    answer, question = FullMemory(), FullMemory()
    dispatcher.open(1, TokenStream(stream_to(answer), frozenset({"generation_logits"})))
    dispatcher.send_response(1, [NamedTensor("generation_logits", LOGITS)], True, "")
    dispatcher.answer(stream_to(question), "recording", TEXT)
    dispatcher.close()
    internal = FakePbUtils.TritonError.INTERNAL
    assert error_of(answer) == ("the response could not be sent", internal)
    assert error_of(question) == ("the answer could not be sent", internal)
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


def test_a_model_that_sends_one_response_marks_it_as_the_last() -> None:
    """Triton tells clients of such a model nothing behind it."""
    sender = CountingSender()
    stream_to(sender, is_decoupled=False).send({"generation_logits": LOGITS}, is_final=True)
    assert sender.flags == [1]
