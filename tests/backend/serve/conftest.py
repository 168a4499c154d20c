"""A launcher that nobody hears."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from inflight_backend.serve.messages import drop_unsaid


@pytest.fixture(params=["the reader is gone", "the disk is full"])
def unheard(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor to which nothing can be written."""
    if request.param == "the disk is full":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
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
        try:
            yield
        finally:
            drop_unsaid()
    for stream in streams:
        stream.close()
