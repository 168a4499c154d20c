"""How the kernel ends a model process whose launcher has died, in whatever code that process is.

The launcher keeps a FIFO for each model open for writing, the process of the model for reading,
which asks to be killed when anything happens to it: nothing is ever written, so what happens is the
launcher's death, however it dies. No two models share one, since not every kernel keeps from one
reader that another has closed (Linux does). A thread that looks for its parent comes too late for a
process that waits in Triton's code with Python's lock; Linux's parent-death signal cannot be used,
since Triton forks from a thread that ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

_VARIABLE = "INFLIGHT_LIFELINE"


class Lifeline:
    """The launcher's end, open until `close` or the end of this process."""

    def __init__(self, folder: Path, models: Iterable[str]) -> None:
        """Make ``folder`` and in it the FIFO of each model; `OSError` where there can be none."""
        self._folder = folder
        self._descriptors: list[int] = []
        try:
            folder.mkdir(mode=0o700)
            for model in models:
                os.mkfifo(folder / model, 0o600)
                self._descriptors.append(os.open(folder / model, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What a server must have in its environment for its models to find theirs."""
        return {_VARIABLE: str(self._folder)}

    def close(self) -> None:
        """Let go: the kernel kills every process that still holds on."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def die_with_launcher(model: str) -> None:
    """As the process of ``model``, be killed when the launcher is gone, from now on; at once if it
    is, never without one.

    Where the kernel does not do it (others than Linux's own lack a part of this), nothing happens:
    who looks for its parent now and then is enough of a guard to load a model.
    """
    if folder := os.environ.get(_VARIABLE):
        try:
            _die_with(Path(folder) / model)
        except OSError as error:
            _logger.warning("the kernel does not watch the launcher: %s", error.strerror)


def _die_with(path: Path) -> None:
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
