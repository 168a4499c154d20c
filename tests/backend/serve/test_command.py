"""The command line: every foreseeable mistake is one line on stderr and exit code 1."""

from __future__ import annotations

import errno
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from inflight_server.commands.serve import serve
from inflight_server.serve import launcher
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings

app = typer.Typer()
app.command()(serve)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--host", ""], "--host is empty"),
        (["--set", "nonsense"], "--set needs key=value, got 'nonsense'"),
        (["--set", "max_batchsize=3"], "did you mean max_batch_size?"),
        (["--set", "max_batch_size=lots"], "max_batch_size must be a whole number, got 'lots'"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_mistake_that_nobody_hears_of_ends_alike(
    nobody_hears: AbstractContextManager[None],
) -> None:
    with nobody_hears:
        with pytest.raises(typer.Exit) as ended:
            serve(model=Path("nowhere"))
        sys.stderr.flush()  # as Python does at its end: nothing may be left
    assert ended.value.exit_code == 1


def test_two_equal_ports_are_refused(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    (tmp_path / "model.safetensors").touch()
    arguments = ["--model", str(tmp_path), "--http-port", "31999", "--grpc-port", "31999"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "--http-port and --grpc-port are both 31999" in result.stderr


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
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "run", settings.append)
    serve(host="localhost")
    assert settings[0].host == "127.0.0.1"


def test_a_folder_that_cannot_be_copied_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    full = OSError(errno.ENOSPC, "No space left on device")

    def copy(source: str, target: str) -> None:
        raise full

    def run(settings: ServeSettings) -> None:
        shutil.copytree(tmp_path, tmp_path / "copy", copy_function=copy)

    monkeypatch.setattr(launcher, "run", run)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"
