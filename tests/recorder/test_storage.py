"""Recordings on the disk, disks that are full, and files that are no recordings."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzing
from support.recorder_worlds import (
    GUARANTEED,
    MAX_UTILIZATION,
    PRICES,
    DraftingWorld,
    RecordedWorld,
    SearchingWorld,
    play,
    read,
    tiny_ring,
)

from inflight_recorder import storage
from inflight_recorder.exporters import write_svg
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.replay import replay
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.storage import (
    MAX_KEPT,
    RecordingFile,
    open_recording,
    rotate,
)
from inflight_recorder.timeline import build_timeline
from inflight_recorder.whatif import predict
from inflight_recorder.workload import read_workload
from inflight_scheduler import ContextChunking

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)
TEXT = play(SETTINGS, num_requests=20, seed=9).text
REUSING = Settings(MAX_UTILIZATION, 12, 4, 6, 40, ContextChunking(unit_size=3), True, True)


def play_into(path: Path) -> RecordedWorld:
    world = RecordedWorld(SETTINGS)
    world.recorder = FlightRecorder(SETTINGS, world.manager, sink=RecordingFile(path))
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
def test_a_disk_that_hangs_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody reads takes a page, then a write into it does not return."""
    monkeypatch.setattr(storage, "_CLOSE_SECONDS", 0.1)
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
        rotate(path)
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
    rotate(path)
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl"]
    rotate(Path("/dev/full"))  # what is no file is written to as it is


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    message = "no.jsonl cannot be read: No such file"
    with pytest.raises(RecordingError, match=message), open_recording(tmp_path / "no.jsonl"):
        pass
    with pytest.raises(RecordingError, match="cannot be read"), open_recording(tmp_path):
        pass


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_HEADER_BYTES", 2**20)
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: zeros without a line end
    with pytest.raises(RecordingError, match="longer than"), open_recording(path):
        pass


def middle_of_a_ring() -> str:
    with tiny_ring():
        return play(REUSING, num_requests=60, seed=9, max_iterations=50).text


def beams_and_drafts() -> Iterator[str]:
    """Both in both loops; with and without shared blocks."""
    for is_overlapped, reuse in itertools.product([False, True], repeat=2):
        settings = Settings(
            MAX_UTILIZATION, 40, 4, 6, 40, None, reuse, reuse, is_overlapped=is_overlapped
        )
        for world in (SearchingWorld(settings), DraftingWorld(settings, seed=9)):
            yield play(settings, num_requests=10, seed=9, world=world, fault_rate=0.05).text


TEXTS = [TEXT, play(REUSING, num_requests=20, seed=9).text, middle_of_a_ring()]
TEXTS += beams_and_drafts()


@pytest.mark.case(114)
def test_no_text_of_the_user_is_in_a_recording() -> None:
    """Numbers, fixed keys, fixed words and hashes only."""
    reasons = {"cancelled", "end_id", "error", "not_finite"}
    for line in [line for text in TEXTS for line in text.splitlines()[1:]]:
        content = json.loads(line)
        for arrival in content.pop("a", []):
            assert all(type(value) in (int, float) for value in arrival.values())
        assert {reason for _, reason in content.pop("e", [])} <= reasons
        growths = content.pop("l", [])
        assert all(len(row) == 2 and type(row[0]) is int for row in growths)
        rest = json.dumps(content)
        assert not set(rest) - set('0123456789-+.,:[]{}" ituedsfgcphknmyzbuwlra')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the recording is empty"),
        ("{}\n", "line 1: this is no recording"),
        ("[]\n", "line 1: Expected `object`, got `array`"),
        ("not json\n", "line 1: this is no JSON"),
        ("[" * 100_000 + "\n", "line 1: Expected `object`"),
        ('{"a":' + "[" * 100_000 + "\n", "line 1: this is no recording: it is nested too deeply"),
        (TEXT[:-10], "the line is cut off"),
        (
            '{"inflight_recording":1,"software":"0.0.9","settings":{"more":1}}\n',
            "line 1: the recording has format version 1, this inflight reads 2; use the release "
            "that wrote it ('0.0.9')",
        ),
        (TEXT.replace('"inflight_recording":2', '"inflight_recording":3'), "format version 3, "),
        (TEXT.replace('"i":3', '"i":4'), "line 4: iteration 4 follows 2"),
        (TEXT.replace('"t":', '"T":', 1), "line 2: Object contains unknown field `T`"),
        (TEXT.replace('"f":', '"f":-', 1), "line 2: f: Expected `int` >= 0"),
        (TEXT.replace('"f":', '"f":1e3,"d":', 1), "line 2: f: Expected `int`, got `float`"),
        (TEXT.replace('"t":', '"t":9007199254740992,"d":', 1), "line 3: t: "),
        (TEXT.replace('"prompt_len":', '"prompt_len":0,"x":', 1), "a[0].prompt_len: Expected"),
        (TEXT.replace('"request_id":1,', '"request_id":1,"priority":NaN,', 1), "is no JSON"),
        (TEXT.replace('"f":', '"l":[[1,"AAA"]],"f":', 1), "line 2: l[0][1]: Invalid base64"),
        (TEXT.replace('"max_num_tokens":40', '"max_num_tokens":"40"'), "settings.max_num_tokens: "),
    ],
)
@pytest.mark.case(111, 112)
def test_a_file_that_is_no_recording_gets_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(RecordingError) as caught:
        replay(read(text))
    assert message in str(caught.value)
    assert str(caught.value).startswith("test.jsonl, line ")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def predict_other(text: str | bytearray) -> None:
    """What-if, under the recorded settings or others."""
    settings, workload = read(text).settings, read_workload(read(text))
    fewer = max(1, settings.num_blocks * 2 // 3)
    changes: list[dict[str, Any]] = [
        {},
        {"is_overlapped": not settings.is_overlapped},
        {"policy": GUARANTEED, "num_blocks": fewer, "max_batch_size": 3},
    ]
    other = replace(settings, **changes[len(text) % 3])
    predict(other, workload.jobs, PRICES)


def outcome(text: str | bytearray) -> str:
    """What a user reads about this recording, whichever way it is read."""
    with suppress(RecordingError):
        "".join(write_svg(build_timeline(read(text))))
    with suppress(RecordingError):
        predict_other(text)
    try:
        return str(replay(read(text)))
    except RecordingError as error:
        return str(error)


@fuzzing
@given(st.data())
@pytest.mark.case(111, 122)
def test_damaged_recordings_end_well(data: st.DataObject) -> None:
    """Bytes changed, lines lost, doubled or moved: a clear error, or an answer; never a crash."""
    content = bytearray(data.draw(st.sampled_from(TEXTS)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "digit", "cut", "line"])):
            case "flip":
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "digit":
                digits = [k for k in range(place, min(place + 50, len(content)))
                          if chr(content[k]).isdigit()]  # fmt: skip
                for k in digits[:1]:
                    content[k : k + 1] = str(data.draw(st.integers(0, 10**19))).encode()
            case "cut":
                content = content[: max(place, 1)]
            case "line":
                lines = content.splitlines(keepends=True)
                source = data.draw(st.integers(0, len(lines) - 1))
                lines.insert(data.draw(st.integers(0, len(lines))), lines[source])
                content = bytearray(b"".join(lines))
    end = outcome(content)
    assert end.startswith(("test.jsonl", "identical", "iteration"))


@fuzzing
@given(st.data())
@pytest.mark.case(111, 122)
def test_other_facts_are_possible_or_an_error(data: st.DataObject) -> None:
    """Any value of any kind of recording is another one, is lost, doubled or of another type."""
    lines = data.draw(st.sampled_from(TEXTS)).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([0, *range(len(lines))]))
        content = json.loads(lines[place])
        nodes = [content]
        for node in nodes:
            inner = node.values() if isinstance(node, dict) else node
            nodes += [each for each in inner if isinstance(each, (dict, list)) and each]
        node = data.draw(st.sampled_from(nodes))
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        others = [v for each in nodes for v in (each.values() if isinstance(each, dict) else each)]
        match data.draw(st.sampled_from(["number", "other", "delete", "add"])):
            case "number":
                numbers = st.integers(-2, 14) | st.sampled_from([2**24, 2**53, 2**63, 10**19])
                node[key] = data.draw(numbers | st.none() | st.booleans() | st.floats(0, 1))
            case "other":
                node[key] = deepcopy(data.draw(st.sampled_from(others)))
            case "delete":
                del node[key]
            case "add" if isinstance(node, list):
                node.append(deepcopy(data.draw(st.sampled_from(node))))
            case "add":
                flag = data.draw(st.sampled_from("yzbuw"))
                content[flag] = not content.get(flag, False)
        lines[place] = json.dumps(content)
    end = outcome("\n".join(lines) + "\n")
    assert end.startswith(("test.jsonl, line", "identical", "iteration"))
