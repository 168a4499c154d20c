"""``tensorrt_llm_bls`` beside the real server's tests of it: which model it calls, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.relay_harness import answering, load
from support.triton_harness import WAIT, responses_of, text_of
from support.triton_stub import FakeRequest

from inflight_backend.triton.relay_wire import RelayedRequest, Tensors
from inflight_backend.triton_io.inputs import RequestHead
from inflight_backend.triton_models.bls import TritonPythonModel

Part = tuple[int, int, str]
"""Row, sequence, and what is new of it: the texts of beams with a blank between them."""


def relay_to(
    parts: Sequence[Part],
    outputs: Sequence[str] = ("text_output",),
    *,
    model: str = "tensorrt_llm",
    is_decoupled: bool = True,
    num_failures: int = 0,
    parameters: Any,
    **settings: Any,
) -> FakeRequest:
    """A request for four tokens after "1 2", in as many rows as a setting has, once it has ended:
    ``model`` answers ``parts``, with the indexes that were asked for. Its first translations
    fail."""

    def answer(request: RelayedRequest) -> list[Tensors]:
        made = []
        for row, sequence, texts in parts:
            indexes = {"batch_index": row, "sequence_index": sequence}
            tensors: Tensors = {
                name: np.array([[index]], np.int32)
                for name, index in indexes.items()
                if name in request.requested
            }
            made.append({"text_output": np.array(texts.encode().split(), object), **tensors})
        return made

    num_rows = max(map(len, settings.values()), default=1)
    tensors = {name: np.array(value, np.int32) for name, value in settings.items()}
    text = {"text_input": np.array([["1 2"]] * num_rows, object)}
    requests = [
        FakeRequest(
            {**text, "max_tokens": np.full((num_rows, 1), 4), **tensors}, "", tuple(outputs)
        )
        for _ in range(num_failures + 1)
    ]
    relay = TritonPythonModel()
    load(relay, "tensorrt_llm_bls", parameters, is_decoupled=is_decoupled)
    real = relay.translate

    def translate(request: Any, head: RequestHead) -> Any:
        if request is not requests[-1]:
            raise MemoryError("/a/path")
        return real(request, head)

    relay.translate = translate  # type: ignore[method-assign]
    with answering(answer, model):
        relay.execute(requests)
        assert all(request.sender.is_final.wait(WAIT) for request in requests)
    relay.finalize()
    for request in requests[:-1]:
        assert str(request.sender.responses[-1].error) == "the request could not be taken"
    return requests[-1]


@pytest.mark.contract("tensorrt_llm_bls parameter", "tensorrt_llm_model_name")
@pytest.mark.parametrize(
    ("parameters", "model"), [({}, "tensorrt_llm"), ({"tensorrt_llm_model_name": "mine"}, "mine")]
)
def test_it_calls_the_model_that_is_named(parameters: dict[str, str], model: str) -> None:
    """Behind a request that fails by a fault of ours, which ends alone."""
    asked = relay_to([(0, 0, "3")], model=model, num_failures=1, parameters=parameters)
    assert text_of(asked.sender) == "3"


SEQUENCES = [(0, 0, "0a"), (0, 1, "1a"), (0, 0, "0b"), (0, 1, "1b")]
ROWS = [(0, 0, "0a"), (0, 0, "0b"), (1, 0, "1a 1b"), (1, 0, "1c 1d"), (2, 0, "2a"), (2, 0, "2b")]


@pytest.mark.parametrize("outputs", [("text_output",), ("text_output", "sequence_index")])
@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize(
    ("parts", "settings", "wanted"),
    [
        (SEQUENCES, {"num_return_sequences": [[2]]}, ["0a", "1a", "0a0b", "1a1b"]),
        (ROWS, {"beam_width": [[1], [2], [1]]}, ["0a", "0a0b", "1a 1b", "1c 1d", "2a", "2a2b"]),
        ([(0, 0, "x y"), (0, 0, "xz yz")], {"beam_width": [[2]]}, ["x y", "xz yz"]),
    ],
    ids=["sequences", "rows", "beams"],
)
def test_texts_accumulate_apart(
    parts: Sequence[Part],
    settings: dict[str, Any],
    wanted: list[str],
    is_decoupled: bool,
    outputs: tuple[str, ...],
) -> None:
    """Also for a client that does not ask which one a response belongs to; those of a search say
    everything anyway."""
    accumulates = {"accumulate_tokens": "true"}
    asked = relay_to(parts, outputs, is_decoupled=is_decoupled, parameters=accumulates, **settings)
    responses = responses_of(asked.sender)
    texts = [b" ".join(tensors["text_output"]).decode() for tensors in responses]
    assert texts == (wanted if is_decoupled else wanted[-1:])
    assert {tuple(tensors) for tensors in responses} == {outputs}
