"""What the front says. Nothing that it does depends on whether that can be said: whoever read its
pipe may be gone or stand still (a pager, Ctrl-S), the disk of its log may be full."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from queue import Full, Queue
from typing import TextIO

_PATIENCE_SECONDS = 0.5
_MAX_LINES = 1000  # that wait for whoever reads them; more are lost

_writers: dict[int, _Writer] = {}  # of each descriptor


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout, or stderr; what cannot be written is lost, or comes later."""
    writer = _put(sys.stderr if err else sys.stdout, text)
    if writer is not None:
        writer.wait()


class LogHandler(logging.Handler):
    """Log lines on stderr, as without a handler; but whoever logs waits for nobody, since that may
    be the thread on which every request depends."""

    def emit(self, record: logging.LogRecord) -> None:
        """Have it written."""
        with suppress(Exception):  # a library's line that cannot be put together
            _put(sys.stderr, self.format(record))

    def flush(self) -> None:
        """Comes when the process ends: what was logged last is still to be written."""
        for writer in _writers.values():
            writer.wait()


class _Writer:
    """Writes to one descriptor on a thread, since a write may wait for ever; and past the buffer of
    its stream, which Python would try to write once more when everything else is over: it ends with
    exit code 120 if that fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: Queue[bytes] = Queue(_MAX_LINES)
        threading.Thread(target=self._run, name="Messages", daemon=True).start()

    def put(self, line: bytes) -> None:
        """Have ``line`` written after those before it."""
        with suppress(Full):
            self._lines.put_nowait(line)

    def wait(self) -> None:
        """Until all is written, or somebody who is only slow would have read something."""
        done = self._lines.all_tasks_done
        with done:
            done.wait_for(lambda: not self._lines.unfinished_tasks, _PATIENCE_SECONDS)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError):
                while line:
                    line = line[os.write(self._descriptor, line) :]
            self._lines.task_done()


def _put(stream: TextIO | None, text: str) -> _Writer | None:
    """None where there is no such stream, or no room for a thread."""
    if stream is None:
        return None
    descriptor = stream.fileno()
    try:
        writer = _writers.get(descriptor) or _writers.setdefault(descriptor, _Writer(descriptor))
    except RuntimeError:
        return None
    writer.put(f"{text}\n".encode(stream.encoding, errors="replace"))
    return writer
