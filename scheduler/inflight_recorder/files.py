"""Recordings in files: written by a thread of their own, read line by line.

A full or slow disk ends the recording with one warning; serving goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from inflight_recorder.errors import RecordingError
from inflight_recorder.header import Header
from inflight_recorder.lines import MAX_LINE_BYTES, LineReader, LineWriter
from inflight_recorder.records import Iteration
from inflight_recorder.segment import Unpacker

_logger = logging.getLogger(__name__)

_WRITE_PERIOD_SECONDS = 0.25
_CLOSE_SECONDS = 5.0
_MAX_BACKLOG = 100_000  # iterations; minutes behind: this disk will not catch up

MAX_KEPT = 9
"""So many older recordings are kept beside a new one."""


class RecordingFile:
    """A `RecordingSink` that appends to nothing: an existing file is replaced.

    `OSError` if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open("w", encoding="ascii")
        self._writer = LineWriter()
        self._unpacker = Unpacker()
        self._pending: deque[bytes] = deque()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="RecordingFile", daemon=True)

    def begin(self, header: Header) -> None:
        """Write the first line at once."""
        self._write(self._writer.header(header))
        self._flush()  # a process that is killed young leaves a recording, not an empty file
        self._thread.start()

    def add(self, iteration: bytes) -> None:
        """Hand over an iteration; the file has it a quarter of a second later."""
        if self._has_failed:
            return
        if len(self._pending) >= _MAX_BACKLOG:
            self._fail("the disk does not keep up")
            return
        self._pending.append(iteration)

    def close(self) -> None:
        """Write what is left and close the file; not for longer than `_CLOSE_SECONDS`.

        A disk that hangs would keep who closes for ever: its thread is left behind then.
        """
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail("the disk does not answer")
            return
        try:
            self._file.close()
        except OSError as error:
            self._fail(str(error))

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = not self._is_closing.wait(_WRITE_PERIOD_SECONDS)
            while self._pending and not self._has_failed:
                iteration = self._unpacker.iteration(self._pending.popleft())
                self._write(self._writer.iteration(iteration))
            self._flush()

    def _write(self, line: str) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            self._fail(str(error))

    def _flush(self) -> None:
        if self._has_failed:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._pending.clear()
            _logger.warning("the recording %s ends here: %s", self._path, reason)


def set_aside(path: Path) -> None:
    """Make ``path`` free for a new recording: an older one becomes NAME.1, and NAME.1 NAME.2, ...

    Whoever starts to record calls it, not who starts the process: Triton may start a model process
    again by itself. One that holds no iteration is not kept, so that a server which fails again and
    again does not push out what it recorded before. ``OSError`` if a file cannot be renamed.
    """
    if not path.is_file() or _is_without_iteration(path):
        return
    for number in range(MAX_KEPT, 0, -1):
        newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))


def _is_without_iteration(path: Path) -> bool:
    with path.open("rb") as file:
        file.readline(MAX_LINE_BYTES)
        return not file.read(1)


class RecordingReader:
    """Reads a recording from its beginning: ``header``, then iterate once.

    Every error is a `RecordingError` that names the file and the line. One line is in memory at a
    time.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._reader = LineReader()
        self._line_number = 0
        with self._named_place():
            line = self._next_line()
            if line is not None:
                self.header: Header = self._reader.header(line, self._next_line)
        if line is None:
            raise RecordingError(f"{name} is empty")

    def __iter__(self) -> Iterator[Iteration]:
        while True:
            with self._named_place():
                line = self._next_line()
                if line is None:
                    return
                iteration = self._reader.iteration(line)
            yield iteration

    def fail(self, error: RecordingError) -> RecordingError:
        """``error`` with the place that was read last."""
        return RecordingError(f"{self._name}, line {self._line_number}: {error}")

    def _next_line(self) -> str | None:
        """The next line, None at the end of the file."""
        self._line_number += 1
        line = self._file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return None
        if len(line) > MAX_LINE_BYTES:
            raise RecordingError(f"the line is longer than {MAX_LINE_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise RecordingError("the line is cut off")
        try:
            return line.decode("ascii")
        except UnicodeDecodeError:
            raise RecordingError("the line is no ASCII text (damaged?)") from None

    @contextmanager
    def _named_place(self) -> Iterator[None]:
        try:
            yield
        except RecordingError as error:
            raise self.fail(error) from None


@contextmanager
def open_recording(path: Path) -> Iterator[RecordingReader]:
    """Open a recording. `RecordingError` if there is none, or it is none."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        yield RecordingReader(file, path.name)
