"""`inflight replay` and `inflight timeline` from the outside."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_runner import piped, run
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_server.commands.recordings import replay, timeline

EXAMPLES = Path(__file__).parents[3] / "examples"


def record(path: Path, scheduler_class: str | None = None) -> Path:
    recorder = Recorder([request(i, [i], 4 * i) for i in range(1, 9)])
    params = TrtGptModelOptionalParams(
        max_batch_size=5,
        record_file=str(path),
        scheduler_class=scheduler_class,
        kv_cache_config=KvCacheConfig(tokens_per_block=4),
    )
    with running(recorder, None, MAX_UTILIZATION, params=params):
        recorder.wait_for_finals(*range(1, 9))
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recording") / "r.jsonl")


def test_a_replay_is_identical_or_shows_the_difference(recording: Path, tmp_path: Path) -> None:
    done = run(replay, recording)
    assert done.exit_code == 0
    assert done.stdout.startswith("identical, ")
    assert done.stdout.endswith(" iterations (8 requests, 0 pauses)\n")
    counts = {"num_requests": 8, "num_pauses": 0, "divergence": None}
    assert counts.items() <= json.loads(run(replay, recording, "--json").stdout).items()
    path = tmp_path / "r.jsonl"
    path.write_text(recording.read_text().replace('"max_batch_size":5', '"max_batch_size":2'))
    done = run(replay, path)
    assert done.exit_code == 1
    assert "differs in" in done.stdout
    assert "recorded: [" in done.stdout
    found = json.loads(run(replay, path, "--json").stdout)["divergence"]
    assert done.stdout.startswith(f"iteration {found['number']} differs in {found['what']}\n")
    assert "recordings do not hold" not in done.stdout, "ours decides by nothing else"


@pytest.mark.parametrize(
    ("options", "what", "end"),
    [
        (["replay"], "replaying", r"([\d.]+)/\1 kB"),
        (["whatif", "--kv-blocks=9"], "predicting", "100%"),
    ],
)
def test_a_terminal_sees_how_far_it_is(
    recording: Path, options: list[str], what: str, end: str
) -> None:
    primary, secondary = pty.openpty()
    command = [str(Path(sys.executable).parent / "inflight"), *options, str(recording)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=secondary,
        check=False,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(secondary)
    shown = os.read(primary, 65536).decode()
    os.close(primary)
    assert done.returncode == 0
    assert what in shown
    assert re.search(end, shown)
    assert what not in done.stdout.decode()


def test_the_scheduler_of_the_user_decides_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example; the recording alone does not load it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    name = "own_scheduler:ShortestFirst"
    path = record(tmp_path / "r.jsonl", name)
    refused = run(replay, path)
    assert refused.exit_code == 1
    assert "give it with --scheduler-class" in refused.stderr
    done = run(replay, path, "--scheduler-class", name)
    assert done.stdout.startswith("identical, ")
    other = run(replay, path, "--scheduler-class", "support.user_schedulers:FirstOne")
    assert other.exit_code == 1
    assert "differs in" in other.stdout
    assert "by deadlines, salts, adapters or texts decides otherwise here" in other.stdout


def test_errors_of_a_replay_are_one_line(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"\x00\xff")
    unmade = "support.user_schedulers:AsksForMore"
    for done, message in (
        (run(replay, tmp_path / "r.jsonl"), "r.jsonl, line 1: the line is cut off\n"),
        (run(replay, recording, "--scheduler-class", unmade), "scheduler_class AsksForMore cannot"),
    ):
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {message}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "start"), [("t.svg", "<svg "), ("t.html", "<!doctype html>"), ("t.JSON", "{")]
)
def test_the_name_says_the_form(recording: Path, tmp_path: Path, name: str, start: str) -> None:
    """A pipe is drawn as a file is."""
    output = tmp_path / name
    done = run(timeline, recording, "-o", output)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{output}: 8 requests, ")
    drawn = output.read_text(encoding="utf-8")
    assert drawn.startswith(start)
    if start == "{":
        json.loads(drawn)
    with piped(recording) as path:
        done = run(timeline, path, "-o", output)
    assert done.exit_code == 0, done.stderr
    assert output.read_text(encoding="utf-8") == drawn


def test_a_file_that_cannot_be_drawn_is_refused(recording: Path, tmp_path: Path) -> None:
    """Also the recording under another name, or by a link."""
    content = recording.read_bytes()
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    path.write_bytes(content)
    link.symlink_to(path)
    again = tmp_path / ".." / tmp_path.name / "r.json"
    for output, message in (
        (tmp_path / "t.png", "ends in .png: choose one of .svg, .html, .json"),
        (tmp_path / "no" / "t.svg", "t.svg cannot be written: there is no such folder"),
        *((each, f"{each} is the recording: choose another name") for each in (path, link, again)),
    ):
        done = run(timeline, path, "-o", output)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.endswith(f"{message}\n")
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
