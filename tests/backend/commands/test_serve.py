"""The command line: every foreseeable mistake is one line on stderr and exit code 1."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from support.command_runner import run

from inflight_server.commands.serve import serve
from inflight_server.serve import launcher
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--host", ""], "--host is empty"),
        (["--draft-set", "max_batch_size=2"], "--draft-set needs --draft-model"),
        (["--draft-model", "nowhere"], "nowhere does not exist"),
        (["--draft-model", str(DEMO_MODEL), "--draft-set", "surprise=2"], "setting 'surprise'"),
        (["--set", "nonsense"], "--set needs key=value, got 'nonsense'"),
        (["--http-port", "31999", "--grpc-port", "31999"], "and --grpc-port are both 31999"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], message: str) -> None:
    result = run(serve, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--http-port", "0"],
        ["--drain-seconds", "-1"],
        ["--max-connection-seconds", "inf"],
        ["--max-connection-seconds", "1e10"],
        ["--max-connection-seconds", "0.0009"],
    ],
)
def test_numbers_out_of_range_are_refused(arguments: list[str]) -> None:
    assert run(serve, *arguments).exit_code == 2


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "run", settings.append)
    serve(host="localhost")
    assert settings == [ServeSettings(model=DEMO_MODEL)]


def test_a_folder_that_cannot_be_copied_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def copy(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def copy_folder(settings: ServeSettings) -> None:
        shutil.copytree(tmp_path, tmp_path / "copy", copy_function=copy)

    monkeypatch.setattr(launcher, "run", copy_folder)
    result = run(serve)
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"
