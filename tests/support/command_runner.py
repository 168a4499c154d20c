"""Runs a command of the server side in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner


@contextmanager
def piped(path: Path) -> Iterator[Path]:
    """The file as a shell's ``<(zcat file.gz)`` names it: it can be read once."""
    content = path.read_bytes()
    assert len(content) < 60_000, "it would not fit the pipe"
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
        os.close(writer)
        yield Path(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


def run(command: Callable[..., None], *arguments: object) -> Any:
    """What ``inflight <command> <arguments>`` does: exit code, stdout, stderr."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
