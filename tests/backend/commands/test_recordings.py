"""`inflight replay` and `inflight timeline` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_runner import piped, run
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_server.commands.recordings import replay, timeline

EXAMPLES = Path(__file__).parents[3] / "examples"


def record(path: Path, scheduler_class: str | None = None) -> None:
    recorder = Recorder([request(i, [i], 4 * i) for i in range(1, 9)])
    params = TrtGptModelOptionalParams(
        max_batch_size=3, record_file=str(path), scheduler_class=scheduler_class
    )
    with running(recorder, params=params):
        recorder.wait_for_finals(*range(1, 9))


def test_identical_and_exit_code_zero(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl")
    done = run(replay, tmp_path / "r.jsonl")
    assert done.exit_code == 0
    assert done.stdout.startswith("identical, ")
    assert done.stdout.endswith(" iterations (8 requests, 0 pauses)\n")


def test_a_divergence_is_shown_and_exit_code_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path)
    path.write_text(path.read_text().replace('"max_batch_size":3', '"max_batch_size":2'))
    done = run(replay, path)
    assert done.exit_code == 1
    assert "differs in" in done.stdout
    assert "recorded: [" in done.stdout
    assert "recordings do not hold" not in done.stdout, "ours decides by nothing else"


def test_replay_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\x00\xff")
    done = run(replay, path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: r.jsonl, line 1: the line is cut off\n"


def test_the_scheduler_of_the_user_decides_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example; the recording alone does not load it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    name = "own_scheduler:ShortestFirst"
    record(tmp_path / "r.jsonl", name)
    refused = run(replay, tmp_path / "r.jsonl")
    assert refused.exit_code == 1
    assert "give it with --scheduler-class" in refused.stderr
    done = run(replay, tmp_path / "r.jsonl", "--scheduler-class", name)
    assert done.stdout.startswith("identical, ")
    other = run(
        replay, tmp_path / "r.jsonl", "--scheduler-class", "support.user_schedulers:FirstOne"
    )
    assert other.exit_code == 1
    assert "differs in" in other.stdout
    assert "by deadlines, salts, adapters or texts decides otherwise here" in other.stdout


def test_a_scheduler_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl")
    done = run(
        replay, tmp_path / "r.jsonl", "--scheduler-class", "support.user_schedulers:AsksForMore"
    )
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: scheduler_class AsksForMore cannot be made: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "r.jsonl"
    recorder = Recorder([request(i, [i], 4 * i) for i in range(1, 9)])
    params = TrtGptModelOptionalParams(
        max_batch_size=5, record_file=str(path), kv_cache_config=KvCacheConfig(tokens_per_block=4)
    )
    with running(recorder, None, MAX_UTILIZATION, params=params):
        recorder.wait_for_finals(*range(1, 9))
    return path


@pytest.mark.parametrize(
    ("name", "start"), [("t.svg", "<svg "), ("t.html", "<!doctype html>"), ("t.JSON", "{")]
)
def test_the_name_says_the_form(recording: Path, tmp_path: Path, name: str, start: str) -> None:
    done = run(timeline, recording, "-o", tmp_path / name)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / name}: 8 requests, ")
    content = (tmp_path / name).read_text(encoding="utf-8")
    assert content.startswith(start)
    if start == "{":
        json.loads(content)


@pytest.mark.parametrize("name", ["t.svg", "t.html", "t.json"])
def test_a_pipe_is_drawn_as_a_file_is(recording: Path, tmp_path: Path, name: str) -> None:
    assert run(timeline, recording, "-o", tmp_path / name).exit_code == 0
    drawn = (tmp_path / name).read_bytes()
    with piped(recording) as path:
        done = run(timeline, path, "-o", tmp_path / name)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / name).read_bytes() == drawn


def test_timeline_errors_are_one_line(recording: Path, tmp_path: Path) -> None:
    done = run(timeline, recording, "-o", tmp_path / "t.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.endswith("ends in .png: choose one of .svg, .html, .json\n")
    done = run(timeline, recording, "-o", tmp_path / "no" / "t.svg")
    assert done.exit_code == 1
    assert done.stderr.endswith("t.svg cannot be written: there is no such folder\n")


def test_the_recording_is_not_overwritten(recording: Path, tmp_path: Path) -> None:
    """Also under another name, or by a link."""
    content = recording.read_bytes()
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    path.write_bytes(content)
    link.symlink_to(path)
    for output in (path, link, tmp_path / ".." / tmp_path.name / "r.json"):
        done = run(timeline, path, "-o", output)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.endswith(f"{output} is the recording: choose another name\n")
        assert path.read_bytes() == content


def test_a_picture_needs_no_scheduler_of_the_user(recording: Path, tmp_path: Path) -> None:
    """Only the reasons are missing."""
    text = recording.read_text().replace(
        '"settings":{', '"settings":{"scheduler_class":"nobody:HasThis",'
    )
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    done = run(timeline, path, "-o", tmp_path / "t.svg")
    assert done.exit_code == 0
    picture = (tmp_path / "t.svg").read_text(encoding="utf-8")
    assert "nobody:HasThis" in picture
    assert "request limit" not in picture
