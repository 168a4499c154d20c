"""Ends a model process when its launcher or its tritonserver dies, however that happens.

A model process outlives a server that was killed, keeps its memory and ignores SIGTERM. Linux's
parent-death signal cannot be used, since Triton forks from a thread that ends.

Below `inflight serve` the kernel ends the process at once, in whatever code it is: the launcher
keeps a FIFO for each model open for writing, and the model process, the reader, asks to be killed
when anything happens to it. Nothing is ever written, so what happens is the launcher's death. No
two models share a FIFO, since not every kernel hides from one reader that another has closed
(Linux does). Without a launcher a thread waits for the death of tritonserver, or checks
periodically where the kernel cannot tell.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from inflight_backend.log import get_logger

_logger = get_logger(__name__)

_VARIABLE = "INFLIGHT_LIFELINE"


class DeathPipe:
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
    except BlockingIOError:  # the result while the other end is open
        return
    os._exit(1)  # it died before we held on


_CHECK_SECONDS = 0.5
_FLAGS = 6  # of the fields of /proc/PID/stat behind the name, which may hold anything
_IS_EXITING = 0x4  # PF_EXITING: set when it begins to go, which takes it some 20 ms
_LONGEST_STAT = 1024

_parent: _Parent | None = None


class _Parent:
    """The process that has started this one."""

    def __init__(self) -> None:
        self.pid = os.getppid()
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True from the moment at which it begins to exit; takes 5 us."""
        if os.getppid() != self.pid:
            return True
        try:
            fields = os.pread(self._stat, _LONGEST_STAT, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            return True
        return bool(int(fields[_FLAGS]) & _IS_EXITING)


def exit_with_parent(model: str) -> None:
    """From now on end this process, that of ``model``, within 0.5 s of its parent's death.

    The thread never ends, because a server may also die while the model loads or unloads.
    """
    global _parent
    die_with_launcher(model)
    _parent = _Parent()
    threading.Thread(target=_watch, args=(_parent,), name="ParentWatch", daemon=True).start()


def leave_if_orphaned() -> None:
    """End this process now if its parent is going.

    Comes before a call of Triton's that waits for the server with Python's lock: after its death no
    Python code would ever run again, not even that which looks.
    """
    if _parent is not None and _parent.is_gone:
        os._exit(1)


def _watch(parent: _Parent) -> None:
    with suppress(OSError):  # a kernel without this
        end = select.poll()
        end.register(os.pidfd_open(parent.pid), select.POLLIN)
        leave_if_orphaned()  # or it may be the end of another process
        end.poll()
    while True:
        leave_if_orphaned()
        time.sleep(_CHECK_SECONDS)
