"""What the launcher says. Nothing that it or its server does depends on whether that can be said.

Whoever read its pipe may be gone (Ctrl-C to ``inflight serve 2>&1 | tee log`` ends `tee` as well)
or stand still (a pager, a driver of logs, a terminal far away, Ctrl-S), the disk of its log may be
full. Then messages are lost; the drain or the restart goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_STDERR = 2
_CHUNK_BYTES = 2**16  # what a pipe holds
_PATIENCE_SECONDS = 0.5  # with a reader; one that is only slow has read something by then

_turns = threading.Lock()
_writers: dict[int, threading.Thread] = {}  # the last of each descriptor


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout, or stderr; what cannot be written is lost, or comes later."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:
        _write(stream, f"{text}\n")


@contextmanager
def shown() -> Iterator[int]:
    """A descriptor for processes that end within the block: what they write comes to our stderr.

    They wait for nobody who reads it, other than if they wrote there themselves.
    """
    reader, writer = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reader,), name="ServerLog", daemon=True)
    thread.start()
    try:
        yield writer
    finally:
        os.close(writer)
        thread.join(_PATIENCE_SECONDS)


def occupy_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed, as for some service managers.

    The next file would get their numbers else, and what anybody writes to stderr.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)


class ForgivingStream:
    """A stream for rich, which ends the process when nobody reads what it draws."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        _write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Nothing is ever left to be passed on."""


def _write(stream: TextIO, text: str) -> None:
    """Past the buffer of ``stream``: Python tries what is left there once more when everything else
    is over, and ends with exit code 120 if that fails."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # that of a test, which has none
        stream.write(text)
        return
    with suppress(RuntimeError):  # there may be no room for a thread
        _write_aside(descriptor, text.encode(stream.encoding, errors="replace"))


def _write_aside(descriptor: int, data: bytes) -> None:
    """On a thread, which nobody waits for if it waits: a terminal takes a line and not its end,
    and says before that it has room. Who comes after it does not wait once more, and is lost."""
    with _turns:
        before = _writers.get(descriptor)
        if before is not None and before.is_alive():
            return
        writer = threading.Thread(target=_put, args=(descriptor, data), name="Message", daemon=True)
        writer.start()
        _writers[descriptor] = writer
        writer.join(_PATIENCE_SECONDS)


def _pass_on(reader: int) -> None:
    while data := os.read(reader, _CHUNK_BYTES):
        with suppress(RuntimeError):
            _write_aside(_STDERR, data)
    os.close(reader)


def _put(descriptor: int, data: bytes) -> None:
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
