"""Recordings on the disk, and disks that are full."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest
from inflight_recorder.lines import MAX_LINE_BYTES
from recorder.recorded import MAX_UTILIZATION, RecordedWorld, play

from inflight_recorder import files
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.storage import MAX_KEPT, RecordingFile, open_recording, set_aside

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6)


def play_into(path: Path) -> RecordedWorld:
    world = RecordedWorld(SETTINGS)
    world.recorder = FlightRecorder(SETTINGS, sink=RecordingFile(path))
    play(SETTINGS, num_requests=100, seed=2, world=world)
    world.recorder.close()
    return world


def test_a_file_holds_everything_from_the_start(tmp_path: Path) -> None:
    world = play_into(tmp_path / "r.jsonl")
    with open_recording(tmp_path / "r.jsonl") as reader:
        result = replay(reader)
    assert result.divergence is None
    assert result.num_requests == 100
    assert result.num_pauses == world.num_pauses


@pytest.mark.case(95)
def test_a_full_disk_ends_the_recording_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        world = play_into(Path("/dev/full"))
    assert len(world.finished) == 100
    [record] = caplog.records
    assert "/dev/full ends here" in record.getMessage()


@pytest.mark.case(95)
def test_a_disk_that_hangs_keeps_nobody_who_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody reads takes a page, then a write into it does not return."""
    monkeypatch.setattr(files, "_CLOSE_SECONDS", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    try:
        world = play_into(path)
        assert len(world.finished) == 100
        [record] = caplog.records
        assert record.getMessage().endswith("/pipe ends here: the disk does not answer")
        [writer] = [thread for thread in threading.enumerate() if thread.name == "RecordingFile"]
    finally:
        os.close(reader)
    writer.join()


def test_older_recordings_are_kept_and_few(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for number in range(MAX_KEPT + 4):
        set_aside(path)
        path.write_text(f"header\niteration of {number}\n")
    kept = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert len(kept) == MAX_KEPT + 1
    assert path.read_text().endswith("of 12\n")
    assert (tmp_path / "r.jsonl.1").read_text().endswith("of 11\n")
    assert (tmp_path / f"r.jsonl.{MAX_KEPT}").read_text().endswith("of 3\n")


@pytest.mark.parametrize("text", ["", "header\n", "hea"])
def test_a_recording_of_nothing_pushes_nothing_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    set_aside(path)
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl"]
    set_aside(Path("/dev/full"))  # what is no file is written to as it is


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    message = "no.jsonl cannot be read: No such file"
    with pytest.raises(RecordingError, match=message), open_recording(tmp_path / "no.jsonl"):
        pass
    with pytest.raises(RecordingError, match="cannot be read"), open_recording(tmp_path):
        pass


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.truncate(8 * MAX_LINE_BYTES)  # sparse: zeros without a line end
    with pytest.raises(RecordingError, match="longer than"), open_recording(path):
        pass


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordingError, match="line 1: the line is no ASCII"), open_recording(path):
        pass
