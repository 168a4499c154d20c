"""What travels between a model that relays and ``tensorrt_llm``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inflight_backend.triton import relay_wire as module
from inflight_backend.triton.relay_wire import (
    LENGTHS,
    LastTensors,
    Message,
    RelayedEnd,
    RelayedError,
    RelayedRequest,
    pack,
    unpack,
)

NUMBERS = st.sampled_from([np.int32, np.float32, np.uint8, np.int64, np.bool_, np.uint64])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
TENSORS = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        arrays.arrays(NUMBERS, SHAPES),
        arrays.arrays(np.object_, SHAPES, elements=st.binary(max_size=5)),
    ),
    max_size=3,
)


def travel(message: Message) -> Message:
    """The message as the other side gets it."""
    packed = pack(message)
    head_size, contents_size = LENGTHS.unpack_from(packed)
    head, contents = packed[LENGTHS.size :][:head_size], packed[LENGTHS.size + head_size :]
    assert len(contents) == contents_size
    return unpack(head, contents)


def assert_same(tensors: Any, expected: dict[str, Any]) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].tobytes() == tensor.tobytes() or tensor.dtype.hasobject
        assert tensor.dtype.kind != "O" or tensors[name].tolist() == tensor.tolist()


@given(TENSORS)
def test_tensors_come_out_as_they_went_in(tensors: dict[str, Any]) -> None:
    assert_same(travel(tensors), tensors)


@given(TENSORS, st.lists(st.text(max_size=5), max_size=3))
def test_requests_come_out_as_they_went_in(tensors: dict[str, Any], names: list[str]) -> None:
    request = travel(RelayedRequest(tensors, names))
    assert isinstance(request, RelayedRequest)
    assert request.requested == names
    assert_same(request.inputs, tensors)


@given(TENSORS)
def test_the_last_ones_are_known(tensors: dict[str, Any]) -> None:
    last = travel(LastTensors(tensors))
    assert isinstance(last, LastTensors)
    assert_same(last, tensors)
    assert not isinstance(travel(tensors), LastTensors)


@pytest.mark.parametrize("message", [RelayedError("no \u00e9\n", "UNAVAILABLE"), RelayedEnd(), {}])
def test_errors_and_ends_come_out_as_they_went_in(message: Message) -> None:
    assert travel(message) == message


def test_what_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONTENT_BYTES", 7)
    assert isinstance(travel({"a": np.zeros(7, np.uint8)}), dict)
    with pytest.raises(ValueError, match="tensors of 8 bytes are more than a message can hold"):
        pack({"a": np.zeros(8, np.uint8)})
