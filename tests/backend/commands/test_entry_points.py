"""Every command of the package is found, answers --help, and is light to load."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_runner import run

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
SECTION = PYPROJECT.read_text(encoding="utf-8").partition('."inflight.commands"]\n')[2]
COMMANDS = dict(re.findall(r'^([\w-]+) = "(\S+)"$', SECTION.partition("\n[")[0], re.MULTILINE))


def test_there_are_commands() -> None:
    assert {"serve", "replay", "timeline", "plan", "whatif", "model-repository"} <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help(name: str) -> None:
    module, _, function = COMMANDS[name].partition(":")
    done = run(getattr(importlib.import_module(module), function), "--help")
    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_the_commands_that_read_files_load_no_torch_and_no_numpy() -> None:
    modules = {target.partition(":")[0] for target in COMMANDS.values() if ".commands." in target}
    code = (
        f"import sys; [__import__(name) for name in {sorted(modules)!r}]\n"
        "print({'torch', 'numpy', 'triton', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
