"""Requests of any shape: each is answered or refused by name, and the next one is served."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import DTYPES, TEXTS, arrays_of, assert_tells_nothing_internal, fuzzing
from support.triton_harness import WAIT, Server, ids_of, wait_until
from support.triton_stub import FakePbUtils, FakeRequest, FakeTensor

import inflight_protocol as protocol

pytestmark = pytest.mark.slow

QUESTIONS = frozenset({"stats", "why", "recording"})
SPECS = [spec for spec in protocol.INPUTS if spec.name not in QUESTIONS]
TEXT = np.array([[b"1 2 3"]], dtype=np.object_)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Mostly what Triton lets through: a batch of one and some values."""
    if draw(st.integers(0, 3)):
        return (1, draw(st.integers(0, 5)))
    return tuple(draw(st.lists(st.integers(0, 3), max_size=4)))


@st.composite
def arrays(draw: st.DrawFn, spec: protocol.TensorSpec) -> np.ndarray[Any, Any]:
    """A tensor for ``spec``, mostly of its type."""
    shape = draw(shapes())
    is_right = draw(st.integers(0, 5)) > 0
    if (spec.dtype == "STRING") == is_right:
        return draw(arrays_of(np.dtype(np.object_), shape))
    own = protocol.DTYPE_TO_NUMPY[spec.dtype]
    return draw(arrays_of(np.dtype(own if is_right else draw(st.sampled_from(DTYPES))), shape))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Some tensors; often enough a prompt that could be served but for the rest."""
    chosen = draw(st.lists(st.sampled_from(SPECS), max_size=6, unique_by=lambda spec: spec.name))
    tensors = {spec.name: draw(arrays(spec)) for spec in chosen}
    prompt = draw(st.sampled_from(["ids", "text", "whatever"]))
    if prompt == "ids":
        tensors["input_ids"] = np.array([[1, 2, 3]], dtype=np.int32)
    if prompt == "text":
        tensors["text_input"] = np.array([[draw(TEXTS)]], dtype=np.object_)
    return tensors


def send(server: Server, tensors: dict[str, np.ndarray[Any, Any]], request_id: str = "") -> Any:
    request = FakeRequest({}, request_id)
    request._tensors = [FakeTensor(name, array) for name, array in tensors.items()]
    server.model.execute([request])
    assert request.sender.is_final.wait(WAIT), "a request without an end"
    return request.sender


@pytest.mark.case(6, 122, 123)
@fuzzing
@given(tensors=requests(), request_id=st.text(max_size=5))
@example({"text_input": np.array([[b"\0\x1b[2J"]], dtype=np.object_)}, "\n")
@example({"sampling_parameters": np.array([[True]])}, "")
@example({"beam_width": np.array([[b"2"]], dtype=np.object_), "text_input": TEXT}, "")
@example({"sampling_parameters": np.array([[b"[" * 2000]], dtype=np.object_)}, "")
def test_any_tensors_are_served_or_refused_by_name(
    server: Server, tensors: dict[str, np.ndarray[Any, Any]], request_id: str
) -> None:
    sender = send(server, tensors, request_id)
    errors = [response.error for response in sender.responses if response.error is not None]
    for error in errors:
        message = str(error)
        assert message != "the request could not be read", "an unexpected exception"
        assert "failed" not in message, "it reached the loop and raised there"
        assert_tells_nothing_internal(message)
        assert error.code != FakePbUtils.TritonError.INTERNAL
    assert ids_of(send(server, {"input_ids": np.array([[5]], np.int32)}))[:2] == [5, 6]
    manager = server.model._manager
    assert manager._batcher.is_idle_and_intact()
    assert manager.health.is_healthy


@pytest.mark.case(6, 123)
def test_no_prompt_is_ever_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = b"SECRETWORD\n\x1b[31m"
    send(server, {"text_input": np.array([[secret]], dtype=np.object_)}, "SECRETID")
    send(
        server,
        {"text_input": np.array([[secret + b"\xff"]], dtype=np.object_)},
        "SECRETID",
    )
    assert "SECRET" not in caplog.text
    assert "SECRET" not in str(FakePbUtils.Logger.lines)
    assert FakePbUtils.families
    assert "SECRET" not in str([vars(family) for family in FakePbUtils.families.values()])
    assert "SECRETWORD" not in str(send(server, {"max_tokens": np.array([[secret]], object)}))


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.case(6, 123)
@pytest.mark.parametrize(
    "place",
    [
        "inflight_backend.text.tokenizer.TextCodec.encode",
        "inflight_backend.text.tokenizer.TextCodec.decoder",
        "inflight_backend.manager.intake.validate",
        "inflight_backend.manager.gpt_manager.make_tensors",
        "support.triton_stub.CountingEngine.execute",
        "support.triton_stub.FakeSender.send",
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_what_an_exception_quotes_is_not_logged(
    server: Server, caplog: pytest.LogCaptureFixture, place: str, kind: type[BaseException]
) -> None:
    caplog.set_level("DEBUG")
    tensors = {"text_input": TEXT, "streaming": np.array([[True]])}
    error = kind("byte index 1 is inside 'x' of `SECRETWORD`")
    error.__cause__ = ValueError("SECRETWORD")
    with mock.patch(place, side_effect=error):
        request = FakeRequest(tensors, "SECRETID")
        server.model.execute([request])
        wait_until(lambda: kind.__name__ in caplog.text)
        wait_until(lambda: server.model._frontend.num_live == 0)
    assert "SECRET" not in caplog.text
    assert "SECRET" not in str(request.sender.responses)
    assert "test_fuzz_requests" in caplog.text or "mock.py" in caplog.text, "it says where"
    assert ids_of(send(server, {"input_ids": np.array([[5]], np.int32)}))[:2] == [5, 6]
