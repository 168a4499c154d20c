"""The status file: what is written is read back, whole or not at all."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from inflight_backend.status import ModelStatus, Phase, StatusWriter, beat_of, read_status


def test_nothing_written_reads_as_none(tmp_path: Path) -> None:
    assert read_status(tmp_path / "status.json") is None


def test_phase_fields_and_process_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusWriter(path).write("loading", loaded_bytes=3, total_bytes=9)
    status = read_status(path)
    assert status is not None
    assert (status.phase, status.pid) == ("loading", os.getpid())
    assert status.fields == {"loaded_bytes": 3, "total_bytes": 9}


def test_beats_while_something_loads_and_no_longer(tmp_path: Path) -> None:
    """What comes after has a beat of its own, which says more than that the process lives."""
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


def test_last_write_wins_and_leaves_one_file(tmp_path: Path) -> None:
    writer = StatusWriter(str(tmp_path / "status.json"))
    writer.write("ready", model="m")
    writer.write("draining")
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert (status.phase, status.fields) == ("draining", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_who_is_on_the_way_out_stays_there(tmp_path: Path) -> None:
    """The watchdog may find out that things move again just when the drain begins or has ended."""
    path = tmp_path / "status.json"
    writer = StatusWriter(path)
    written: list[tuple[Phase, Phase]] = [  # and what is read then
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
        status = read_status(path)
        assert status is not None
        assert status.phase == expected


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
def test_no_path_writes_nothing(
    path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    StatusWriter(path).write("draining")
    assert list(tmp_path.iterdir()) == []


def test_failing_write_is_logged_once_not_raised_and_can_be_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A *draining* that nobody has read does not count as the last phase."""
    path = tmp_path / "gone" / "status.json"
    writer = StatusWriter(path)
    assert [writer.write("draining") for _ in range(3)] == [False, False, False]
    assert caplog.text.count("cannot write the status file") == 1
    path.parent.mkdir()
    for phase in ("draining", "drained"):
        assert writer.write(phase)
        status = read_status(path)
        assert status is not None
        assert status.phase == phase
    assert writer.write("ready"), "what is passed over needs no other try"
    path.unlink()
    path.parent.rmdir()
    assert not writer.write("failed", error="e")
    assert caplog.text.count("cannot write the status file") == 2


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"phase": "dancing"}')
    with pytest.raises(ValueError, match="not a status file"):
        read_status(path)
