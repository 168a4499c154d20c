"""A launcher that nobody hears."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest


@pytest.fixture(params=["the reader is gone", "the disk is full"])
def unheard(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor to which nothing can be written.

    "The reader does not read" is for other processes: pytest could not say that a test waits.
    """
    if request.param == "the disk is full":
        writer = os.open("/dev/full", os.O_WRONLY)
        yield writer
    else:
        reader, writer = os.pipe()
        if request.param == "the reader is gone":
            os.close(reader)
        else:
            _fill(writer)
        yield writer
        if request.param != "the reader is gone":
            os.close(reader)
    os.close(writer)


def _fill(writer: int) -> None:
    """Leave no room in a pipe; who writes to it waits from now on."""
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)


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
