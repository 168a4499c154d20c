"""Recordings in files: written by a thread of their own, read line by line.

A full or slow disk ends the recording with one warning; serving continues. Formatting and reading
need msgspec, which is imported when they begin (see `settings`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from inflight_recorder.settings import RecordingError, Settings

if TYPE_CHECKING:
    from inflight_recorder.schema import Iteration

_logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 256 * 2**20
"""The first line says what a pool of any size has cached."""

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
        self._file = path.open("w", encoding="utf-8")
        self._pending: deque[bytes] = deque()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="RecordingFile", daemon=True)

    def begin(self, settings: Settings, software: str, started: str) -> None:
        """Write the first line at once."""
        from inflight_recorder.schema import format_header

        self._write(format_header(settings, software, started))
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
        """Write the remainder and close the file; not for longer than `_CLOSE_SECONDS`.

        A disk that hangs would keep the caller for ever: its thread is left behind then.
        """
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail("the disk does not answer")
            return
        with self._reported_failure():
            self._file.close()

    def _run(self) -> None:
        from inflight_recorder.schema import format_iteration

        is_open = True
        while is_open:
            is_open = not self._is_closing.wait(_WRITE_PERIOD_SECONDS)
            while self._pending and not self._has_failed:
                self._write(format_iteration(self._pending.popleft()))
            self._flush()

    def _write(self, line: str) -> None:
        with self._reported_failure():
            self._file.write(line)

    def _flush(self) -> None:
        if not self._has_failed:
            with self._reported_failure():
                self._file.flush()

    @contextmanager
    def _reported_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._pending.clear()
            _logger.warning("the recording %s ends here: %s", self._path, reason)


def rotate(path: Path) -> None:
    """Make ``path`` free for a new recording: an older one becomes NAME.1, and NAME.1 NAME.2, ...

    The process that records calls it, not the one that starts it: Triton may start a model process
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
    """Reads a recording from its beginning: ``header`` and ``settings``, then iterate once.

    Every error is a `RecordingError` that names the file and the line. One line is in memory at a
    time.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        from inflight_recorder import schema

        self._file = file
        self._name = name
        self._line_number = 0
        with self.named_place():
            line = self._next_line(MAX_HEADER_BYTES)
            if line is None:
                raise RecordingError("the recording is empty")
            self.header = schema.decode_header(line)
            self.settings = self.header.settings.settings()

    def __iter__(self) -> Iterator[Iteration]:
        from inflight_recorder.schema import apply_changes, decode_iteration

        number = start_us = 0
        generation: tuple[int, ...] = ()
        while True:
            with self.named_place():
                line = self._next_line(MAX_LINE_BYTES)
                if line is None:
                    return
                iteration = decode_iteration(line)
                if number and iteration.number != number + 1:
                    raise RecordingError(f"iteration {iteration.number} follows {number}")
                number = iteration.number
                if iteration.start_us < start_us:
                    raise RecordingError(f"t: {iteration.start_us} follows {start_us}")
                start_us = iteration.start_us
                decision = iteration.decision
                if decision is not None:
                    if decision.changes is not None:
                        generation = apply_changes(generation, decision.changes)
                        decision.generation = generation
                    generation = decision.generation
            yield iteration

    @contextmanager
    def named_place(self) -> Iterator[None]:
        """Errors of the block name the file and the line that was read last."""
        try:
            yield
        except RecordingError as error:
            place = f"{self._name}, line {self._line_number}"
            raise RecordingError(f"{place}: {error}") from None

    def _next_line(self, max_bytes: int) -> bytes | None:
        """The next line, None at the end of the file."""
        self._line_number += 1
        line = self._file.readline(max_bytes + 1)
        if not line:
            return None
        if len(line) > max_bytes:
            raise RecordingError(f"the line is longer than {max_bytes} bytes")
        if not line.endswith(b"\n"):
            raise RecordingError("the line is cut off")
        return line


@contextmanager
def open_recording(
    path: Path, watch: Callable[[BinaryIO], AbstractContextManager[BinaryIO]] = nullcontext
) -> Iterator[RecordingReader]:
    """Open a recording. `RecordingError` if there is none, or it is none.

    ``watch`` stands before the file and sees what is read.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    with file, watch(file) as watched:
        yield RecordingReader(watched, path.name)
