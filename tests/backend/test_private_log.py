"""What loggers write of an exception: types and frames, and a message only about the machine."""

from __future__ import annotations

import pytest

from inflight_backend import log as private_log
from inflight_backend.log import get_logger

SAYING = "SECRET"  # not in the lines that the frames show


def fail(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


def logged(caplog: pytest.LogCaptureFixture, error: BaseException) -> str:
    try:
        try:
            fail(error)
        except BaseException as first:
            fail(RuntimeError(SAYING), first)
    except BaseException:
        get_logger("test").exception("step %d failed", 3)
    return caplog.text


def test_each_exception_of_a_chain_is_its_type_and_its_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = logged(caplog, KeyError(SAYING))
    assert "step 3 failed" in text
    assert text.index("KeyError\nwhich led to\n") < text.index("RuntimeError\n")
    assert text.count("in fail\n") == 2
    assert "SECRET" not in text


def test_want_of_memory_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's is called."""

    text = logged(caplog, OutOfMemoryError(f"tried to allocate 2 GiB\n{SAYING}"))
    assert "OutOfMemoryError: tried to allocate 2 GiB\n" in text
    assert "SECRET" not in text


def test_a_chain_that_bites_its_tail_ends(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError(SAYING)
    error.__cause__ = error
    assert "ValueError" in logged(caplog, error)


def test_an_exception_that_cannot_be_described_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever logs may have no memory left: that is no reason to fail in turn."""

    def fail_again(error: BaseException) -> str:
        raise MemoryError

    monkeypatch.setattr(private_log, "_describe", fail_again)
    assert logged(caplog, KeyError(SAYING)).splitlines()[-1] == "RuntimeError"
