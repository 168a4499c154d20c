"""Several prompts in one Triton request: `batch_index` tells the answers apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.triton_harness import WAIT, Server, error_of
from support.triton_stub import FakeRequest, FakeSender

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton_io.request import TritonRequest

LENGTHS = np.array([[1], [3]], np.int32)
PROMPTS = np.array([[4, 0, 0], [10, 11, 12]], np.int32)  # the first one is padded


def ask(server: Server, **tensors: Any) -> FakeSender:
    request = FakeRequest({name: np.asarray(tensor) for name, tensor in tensors.items()})
    server.model.execute([request])
    assert request.sender.is_final.wait(WAIT)
    return request.sender


def answers_of(sender: FakeSender) -> dict[tuple[int, int], list[int]]:
    """Tokens by row and sequence."""
    answers: dict[tuple[int, int], list[int]] = {}
    for response in sender.responses:
        tensors = {t.name(): t.as_numpy().reshape(-1).tolist() for t in response.output_tensors}
        place = (tensors["batch_index"][0], tensors.get("sequence_index", [0])[0])
        answers.setdefault(place, []).extend(tensors["output_ids"])
    return answers


@pytest.mark.contract("tensorrt_llm input", "input_lengths")
@pytest.mark.case(20)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_each_row_gets_its_own_answer(server: Server, is_streaming: bool) -> None:
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[2], [4]], np.int32),
        exclude_input_in_output=np.array([[True], [True]]),
        streaming=np.array([[is_streaming]] * 2),
    )
    assert answers_of(sender) == {(0, 0): [5, 6], (1, 0): [13, 14, 15, 16]}


@pytest.mark.parametrize("name", ["stop", "stats", "why", "recording", "describe", "ready"])
def test_rows_may_say_that_they_ask_no_question(server: Server, name: str) -> None:
    rows = {"input_ids": PROMPTS, "input_lengths": LENGTHS}
    rows["request_output_len"] = np.array([[1], [1]], np.int32)
    neutral = ask(server, **rows, **{name: np.array([[False], [False]])})
    assert {place[0] for place in answers_of(neutral)} == {0, 1}
    for values in ([[True], [False]], [[True], [True]]):
        message, _ = error_of(ask(server, **rows, **{name: np.array(values)}))
        assert message == f"'{name}' must hold one value, got 2"


@pytest.mark.contract("tensorrt_llm output", "batch_index sequence_index")
def test_rows_and_sequences_together(server: Server) -> None:
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[1], [1]], np.int32),
        num_return_sequences=np.array([[1], [2]], np.int32),
        exclude_input_in_output=np.array([[True], [True]]),
    )
    assert answers_of(sender) == {(0, 0): [5], (1, 0): [13], (1, 1): [13]}
    assert not server.model._frontend._groups


def test_a_bad_row_refuses_all_before_any_starts(server: Server) -> None:
    num_before = len(server.engine.batches)
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[1], [0]], np.int32),
    )
    assert error_of(sender)[0].startswith("'request_output_len' is 0")
    assert len(server.engine.batches) == num_before
    assert server.model._frontend.num_live == 0


def test_another_number_of_rows_is_refused_by_name() -> None:
    inputs = {"input_ids": PROMPTS, "temperature": np.ones((1, 1), np.float32)}
    with pytest.raises(InvalidRequest, match=r"'temperature' has shape \[1, 1\], but the prompt"):
        TritonRequest.from_inputs("", inputs, frozenset())
