"""How the kernel ends a model process whose launcher has died, in whatever code that process is.

The launcher keeps a FIFO open for writing, each model process for reading, and asks to be killed
when anything happens to it: nothing is ever written, so what happens is the launcher's death,
however it dies. A thread that looks for its parent comes too late for a process that waits in
Triton's code with Python's lock; Linux's parent-death signal cannot be used, since Triton forks
from a thread that ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

_VARIABLE = "INFLIGHT_LIFELINE"


class Lifeline:
    """The launcher's end, open until `close` or the end of this process."""

    def __init__(self, path: Path) -> None:
        """Make the FIFO at ``path``, which must not exist; `OSError` where there can be none."""
        os.mkfifo(path, 0o600)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._path = path

    @property
    def environment(self) -> dict[str, str]:
        """What a server must have in its environment for its models to find the FIFO."""
        return {_VARIABLE: str(self._path)}

    def close(self) -> None:
        """Let go: the kernel kills every process that still holds on."""
        os.close(self._descriptor)


def die_with_launcher() -> None:
    """From now on be killed when the launcher is gone; at once if it is, never without one.

    Where the kernel does not do it (others than Linux's own lack a part of this), nothing happens:
    who looks for its parent now and then is enough of a guard to load a model.
    """
    if path := os.environ.get(_VARIABLE):
        try:
            _die_with(path)
        except OSError as error:
            _logger.warning("the kernel does not watch the launcher: %s", error.strerror)


def _die_with(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # a later run has swept up after the launcher
        os._exit(1)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(descriptor, 1)
    except BlockingIOError:  # what it says while somebody holds the other end
        return
    os._exit(1)  # it died before we held on
