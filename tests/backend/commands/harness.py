"""Runs a command of the server side in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.testing import CliRunner


def run(command: Callable[..., None], *arguments: object) -> Any:
    """What ``inflight <command> <arguments>`` does: exit code, stdout, stderr."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
