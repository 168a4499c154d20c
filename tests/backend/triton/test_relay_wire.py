"""What travels between a model that relays and ``tensorrt_llm``, and who may be the other side."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inflight_backend.errors import CapacityExceeded
from inflight_backend.triton import relay_wire as module
from inflight_backend.triton.relay_wire import (
    Message,
    RelayedRequest,
    RelayedResponse,
    address_of,
    allow_many_connections,
    connect,
    pack,
    read_message,
    read_messages,
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


def travel(message: Message) -> Message | None:
    """The message as the other side gets it."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(pack(message))
        return read_message(here)


def assert_same(tensors: Any, expected: dict[str, Any]) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert tensors[name].tobytes() == tensor.tobytes() or tensor.dtype.hasobject
        assert tensor.dtype.kind != "O" or tensors[name].tolist() == tensor.tolist()


@given(TENSORS, st.lists(st.text(max_size=5), max_size=3))
def test_requests_come_out_as_they_went_in(tensors: dict[str, Any], names: list[str]) -> None:
    request = travel(RelayedRequest(tensors, names))
    assert isinstance(request, RelayedRequest)
    assert request.requested == names
    assert_same(request.inputs, tensors)


@given(TENSORS, st.booleans())
def test_responses_come_out_as_they_went_in(tensors: dict[str, Any], is_final: bool) -> None:
    response = travel(RelayedResponse(tensors, is_final=is_final))
    assert isinstance(response, RelayedResponse)
    assert response.is_final == is_final
    assert_same(response.tensors, tensors)


@pytest.mark.parametrize(
    "response", [RelayedResponse(None, "no \u00e9\n", "UNAVAILABLE", True), RelayedResponse()]
)
def test_errors_and_ends_come_out_as_they_went_in(response: RelayedResponse) -> None:
    assert travel(response) == response


CUT = pack(RelayedResponse({"output_ids": np.zeros((1, 1, 9), np.int32)}))


@pytest.mark.parametrize("num_bytes", [0, 5, 20, len(CUT) - 1])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_message_that_is_cut_off_is_none(num_bytes: int, is_reset: bool) -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            if is_reset:
                here.sendall(b"never read")
            there.sendall(CUT + CUT[:num_bytes])
        assert len(list(read_messages(here))) == 1


def test_only_a_process_of_the_same_user_and_parent_is_one_of_ours() -> None:
    class Peer:
        """A connection to a process of ``user``."""

        def __init__(self, process: int, user: int) -> None:
            self.credentials = module._CREDENTIALS.pack(process, user, 0)

        def getsockopt(self, *_: int) -> bytes:
            return self.credentials

    def is_sibling(process: int, user: int) -> bool:
        return module.is_sibling(Peer(process, user))  # type: ignore[arg-type]

    assert is_sibling(os.getpid(), os.geteuid())
    assert not is_sibling(os.getpid(), os.geteuid() + 1)
    assert not is_sibling(os.getppid(), os.geteuid())


def test_a_process_in_the_place_of_the_model_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_sibling", lambda connection: False)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as connection:
        listening.bind(address_of("tensorrt_llm"))
        listening.listen()
        with pytest.raises(CapacityExceeded, match="has gone, or another process is in its place"):
            connect(connection, "tensorrt_llm")


def test_a_model_that_accepts_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUEUE_SECONDS", 0.1)
    with ExitStack() as stack:
        listening, first, second = (
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
        )
        listening.bind(address_of("tensorrt_llm"))
        listening.listen(0)
        connect(first, "tensorrt_llm")
        with pytest.raises(CapacityExceeded, match="'tensorrt_llm' takes no requests just now"):
            connect(second, "tensorrt_llm")
        assert first.gettimeout() is None


def test_there_are_as_many_open_files_as_requests_may_come() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if 0 <= hard < 8192 else 8192
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        for _ in range(2):
            allow_many_connections()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
