"""Every command of the server side is found, answers --help, and is light to load."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from inflight_client.cli import PLUGIN_GROUP, add_plugins
from inflight_server.commands import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_a_module_with_an_app_is_a_command() -> None:
    own = {"serve", "models", "replay", "timeline", "plan", "whatif", "worker", "model-repository"}
    assert set(COMMANDS) == own


def test_the_entry_points_name_them_all() -> None:
    whole = typer.Typer()
    add_plugins(whole, list(entry_points(group=PLUGIN_GROUP)))
    names = set(typer.main.get_command(whole).commands)  # type: ignore[attr-defined]
    assert names == {*COMMANDS, "openai"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_commands_load_no_torch_and_no_grpc() -> None:
    code = (
        "import sys, inflight_server.commands\n"
        "print({'torch', 'triton', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
