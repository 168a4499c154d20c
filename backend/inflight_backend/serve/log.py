"""Reading the server's log for the one line that explains why it ended."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 64 * 1024

# E1121 03:10:06.394779 7499 model_lifecycle.cc:642] "failed to load 'tensorrt_llm' version 1: ..."
_LOAD_FAILURE = re.compile(r"failed to load '[^']*' version \d+: (?:\w+: )?(?P<reason>.*)")
_SEVERITY = re.compile(r"^[A-Z]\d{4} [\d:.]+\s+\d+ \S+\] ")
_ERROR = re.compile(r"^(?:E\d{4} |error:|\S+: error while loading)", re.IGNORECASE)
# What an abort says last, by C++, by an assertion or by the C library.
_ABORT = re.compile(
    r"^(?:terminate called .*|\s+what\(\): .*|.*: Assertion .* failed\.|Fatal glibc error: .*"
    r"|(?:malloc|free|realloc|munmap_chunk)\(\): .*|double free or corruption.*|corrupted .*"
    r"|\*\*\* .* \*\*\*.*)$"
)
# Said as errors by every healthy server on a machine without a GPU.
_NOISE = ("NVML", "CudaDriverHelper", "CUDA driver version is insufficient")


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
    """What the process said when it aborted itself, in one line; maybe ""."""
    return " ".join(line.strip() for line in _tail(log_file) if _ABORT.match(line))


def _tail(log_file: Path) -> list[str]:
    try:
        with log_file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _without_traceback(text: str) -> str:
    """Cut the escaped Python traceback that Triton appends, and its time stamp and quotes."""
    text = _SEVERITY.sub("", text)
    return re.split(r"\\n\\nAt:|\\nTraceback|(?<!\\)\"$", text)[0].strip(' "').replace("\\n", " ")
