"""The log of an exception: types and frames, and a message only about the machine."""

from __future__ import annotations

import pytest

from inflight_backend import log
from inflight_backend.log import get_logger

MESSAGE = "SECRET"  # the frames show lines of code, which hold no such word


def fail(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


def logged(caplog: pytest.LogCaptureFixture, error: BaseException) -> str:
    try:
        try:
            fail(error)
        except BaseException as first:
            fail(RuntimeError(MESSAGE), first)
    except BaseException:
        get_logger("test").exception("step %d failed", 3)
    return caplog.text


def test_exception_chain_is_logged_as_types_and_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = logged(caplog, KeyError(MESSAGE))
    assert "step 3 failed" in text
    assert text.index("KeyError\nwhich led to\n") < text.index("RuntimeError\n")
    assert text.count("in fail\n") == 2
    assert MESSAGE not in text


def test_memory_error_is_logged_with_its_first_line(caplog: pytest.LogCaptureFixture) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's is called."""

    text = logged(caplog, OutOfMemoryError(f"tried to allocate 2 GiB\n{MESSAGE}"))
    assert "OutOfMemoryError: tried to allocate 2 GiB\n" in text
    assert MESSAGE not in text


def test_circular_chain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError(MESSAGE)
    error.__cause__ = error
    assert "ValueError" in logged(caplog, error)


def test_exception_that_cannot_be_described_is_logged_by_its_type(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have no memory left."""

    def fail_again(error: BaseException) -> str:
        raise MemoryError

    monkeypatch.setattr(log, "_describe", fail_again)
    assert logged(caplog, KeyError(MESSAGE)).splitlines()[-1] == "RuntimeError"
