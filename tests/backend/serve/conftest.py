"""A launcher whose output cannot be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest


def _pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _full_pipe() -> int:
    """A pipe without room, whose reader stays open as long as this process."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return writer


_OPEN: dict[str, Callable[[], int]] = {
    "the reader is gone": _pipe_without_reader,
    "the reader does not read": _full_pipe,  # for other processes: pytest itself would wait
    "the disk is full": lambda: os.open("/dev/full", os.O_WRONLY),
}


@pytest.fixture(params=["the reader is gone", "the disk is full"])
def unheard(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor to which nothing can be written."""
    writer = _OPEN[request.param]()
    yield writer
    os.close(writer)


@pytest.fixture
def nobody_hears(unheard: int) -> AbstractContextManager[None]:
    """While entered, stdout and stderr of this process are such descriptors.

    Not from the setup of the test on: pytest sets its own ones again after that.
    """
    return _unheard_output(unheard)


@contextmanager
def _unheard_output(descriptor: int) -> Iterator[None]:
    streams = [os.fdopen(os.dup(descriptor), "w", buffering=1) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        yield
    for stream in streams:
        stream.close()
