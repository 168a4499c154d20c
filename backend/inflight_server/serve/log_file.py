"""The server's log file: bounded in size, and searched for the line that explains a failure."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 * 2**20
"""Of the log; the one before it may have as many."""

_TAIL_BYTES = 64 * 1024

# E1121 03:10:06.394779 7499 model_lifecycle.cc:642] "failed to load 'tensorrt_llm' version 1: ..."
_LOAD_FAILURE = re.compile(r"failed to load '[^']*' version \d+: (?:\w+: )?(?P<reason>.*)")
_SEVERITY = re.compile(r"^[A-Z]\d{4} [\d:.]+\s+\d+ \S+\] ")
_ERROR = re.compile(r"^(?:E\d{4} |error:|\S+: error while loading)", re.IGNORECASE)
# The last message of an abort: of C++, of an assertion or of the C library.
_ABORT = re.compile(
    r"^(?:terminate called .*|\s+what\(\): .*|.*: Assertion .* failed\.|Fatal glibc error: .*"
    r"|(?:malloc|free|realloc|munmap_chunk)\(\): .*|double free or corruption.*|corrupted .*"
    r"|\*\*\* .* \*\*\*.*)$"
)
# Said as errors by every healthy server on a machine without a GPU.
_NOISE = ("NVML", "CudaDriverHelper", "CUDA driver version is insufficient")


def keep_small(log_file: Path) -> None:
    """Start a new log where it is too long; the old one goes to the file of `before`.

    The server keeps it open, so it is copied and truncated; its writers must append. A line
    written at that moment may be lost, or all of it where the disk has no room for a copy.
    """
    with suppress(OSError):  # there is none with --verbose
        if log_file.stat().st_size > MAX_BYTES:
            with suppress(OSError):
                shutil.copyfile(log_file, before(log_file))
            os.truncate(log_file, 0)


def before(log_file: Path) -> Path:
    """Where `keep_small` leaves the log before this one."""
    return log_file.with_name(f"{log_file.name}.1")


def explain(log_file: Path) -> str:
    """Why the model could not be loaded, else the last error; one line, no traceback. Maybe ""."""
    lines = _tail(log_file)
    for line in reversed(lines):
        failure = _LOAD_FAILURE.search(line)
        if failure:
            return _without_traceback(failure["reason"])
    for line in reversed(lines):
        if _ERROR.match(line) and not any(word in line for word in _NOISE):
            return _without_traceback(line)
    return ""


def explain_abort(log_file: Path) -> str:
    """The message of a process that aborted itself, in one line; maybe ""."""
    return " ".join(line.strip() for line in _tail(log_file) if _ABORT.match(line))


def _tail(log_file: Path) -> list[str]:
    """Of the log before as well: the message may have been written just before the cut."""
    tail = (_end_of(before(log_file)) + _end_of(log_file))[-_TAIL_BYTES:]
    return tail.decode(errors="replace").splitlines()


def _end_of(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read()
    except FileNotFoundError:
        return b""


def _without_traceback(text: str) -> str:
    """Cut the escaped Python traceback that Triton appends, and its time stamp and quotes."""
    text = _SEVERITY.sub("", text)
    return re.split(r"\\n\\nAt:|\\nTraceback|(?<!\\)\"$", text)[0].strip(' "').replace("\\n", " ")
