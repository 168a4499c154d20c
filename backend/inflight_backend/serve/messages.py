"""What the launcher says. Nothing that it does depends on whether that can be said.

Whoever read its pipe may be gone (Ctrl-C to ``inflight serve 2>&1 | tee log`` ends `tee` as well)
or stand still (a pager, a driver of logs, Ctrl-S), the disk of its log may be full. Then messages
are lost; the drain or the restart goes on.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

import typer

_PATIENCE_SECONDS = 0.5  # with a reader; one that is only slow has read something by then


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout, or stderr; what cannot be written is lost, or comes with a later line."""
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError):
        if stream is not None and _takes_more(stream):
            typer.echo(text, err=err)


def drop_unsaid() -> None:
    """Forget, at the end of the process, what could not be said.

    Python tries it once more when everything else is over, and ends with exit code 120 if that
    fails.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class ForgivingStream:
    """A stream for rich, which ends the process when nobody reads what it draws."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            if _takes_more(self._stream):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what can be passed on."""
        with suppress(OSError):
            self._stream.flush()


def _takes_more(stream: TextIO) -> bool:
    """False if a write would wait: a pipe or a terminal with room takes at least 4 KiB of it."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # that of a test, which has none
        return True
    return bool(select.select((), (descriptor,), (), _PATIENCE_SECONDS)[1])
