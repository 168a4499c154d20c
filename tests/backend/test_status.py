"""The status file: what is written is read back, whole or not at all."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from inflight_backend.status import ModelStatus, Phase, StatusWriter, beat_of, read_status


def phase_in(path: Path) -> str:
    status = read_status(path)
    assert status is not None
    return status.phase


def test_last_status_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    writer = StatusWriter(str(path))
    writer.write("loading", loaded_bytes=3, total_bytes=9)
    sizes = {"loaded_bytes": 3, "total_bytes": 9}
    assert read_status(path) == ModelStatus("loading", os.getpid(), sizes)
    writer.write("draining")
    assert read_status(path) == ModelStatus("draining", os.getpid(), {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_loading_beats_until_it_has_ended(tmp_path: Path) -> None:
    """Later beats come from the watchdog and say more than that the process lives."""
    path = tmp_path / "status.json"
    writer = StatusWriter(path)
    with writer.beating(0.001):
        assert read_status(path) == ModelStatus(
            "loading", os.getpid(), {"loaded_bytes": 0, "total_bytes": 0}
        )
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while beat_of(path) == 0:
            assert time.monotonic() < deadline
    assert "LoadingBeat" not in [thread.name for thread in threading.enumerate()]


def test_phase_that_may_not_follow_is_ignored(tmp_path: Path) -> None:
    """The watchdog may see progress again just when the drain begins or has ended."""
    path = tmp_path / "status.json"
    writer = StatusWriter(path)
    written: list[tuple[Phase, Phase]] = [  # written, then read
        ("ready", "ready"),
        ("unhealthy", "unhealthy"),
        ("ready", "ready"),
        ("draining", "draining"),
        ("unhealthy", "draining"),
        ("ready", "draining"),
        ("drained", "drained"),
        ("ready", "drained"),
        ("unhealthy", "drained"),
        ("failed", "failed"),
    ]
    for phase, expected in written:
        writer.write(phase)
        assert phase_in(path) == expected


def test_readers_never_see_half_a_status(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    writer = StatusWriter(path)
    error = "x" * 20_000

    def write_many() -> None:
        for _ in range(50):
            writer.write("failed", error=error)

    threads = [threading.Thread(target=write_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status = read_status(path)
        assert status is None or status.fields["error"] == error
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("path", [None, ""])
def test_empty_path_writes_nothing(
    path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    StatusWriter(path).write("draining")
    assert list(tmp_path.iterdir()) == []


def test_failing_write_is_logged_once_and_may_be_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A *draining* that was not written does not count as the last phase."""
    path = tmp_path / "gone" / "status.json"
    writer = StatusWriter(path)
    assert [writer.write("draining") for _ in range(3)] == [False, False, False]
    assert caplog.text.count("cannot write the status file") == 1
    path.parent.mkdir()
    for phase in ("draining", "drained"):
        assert writer.write(phase)
        assert phase_in(path) == phase
    assert writer.write("ready"), "an ignored phase need not be written again"
    path.unlink()
    path.parent.rmdir()
    assert not writer.write("failed", error="e")
    assert caplog.text.count("cannot write the status file") == 2


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"phase": "dancing"}')
    with pytest.raises(ValueError, match="not a status file"):
        read_status(path)
