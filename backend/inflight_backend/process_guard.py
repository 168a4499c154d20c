"""Ends a model process when its launcher or its tritonserver dies, for any reason.

A model process outlives a killed server, keeps its memory and ignores SIGTERM. Linux's parent-death
signal cannot be used, since Triton forks from a thread that ends.

Under `inflight serve` the kernel ends the process at once, whatever it executes: the launcher keeps
a FIFO for each model open for writing, and the model process, its reader, asks for SIGKILL at any
event. Nothing is ever written, so the only event is the launcher's death. Models do not share a
FIFO, since some kernels (not Linux) tell a reader that another one has closed it. Without a
launcher a thread waits for the death of tritonserver, or polls where the kernel cannot report it.
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
        """Make ``folder`` with a FIFO for each model; `OSError` if that fails."""
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
        """The environment variable by which the models of a server find their FIFOs."""
        return {_VARIABLE: str(self._folder)}

    def close(self) -> None:
        """Close all FIFOs: the kernel kills their readers."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def die_with_launcher(model: str) -> None:
    """Have this process, that of ``model``, killed when the launcher dies; at once if it is dead,
    never without one.

    On a kernel without the feature (some that emulate Linux) nothing happens: polling for the
    parent is enough.
    """
    if folder := os.environ.get(_VARIABLE):
        try:
            _die_with(Path(folder) / model)
        except OSError as error:
            _logger.warning("the kernel does not watch the launcher: %s", error.strerror)


def _die_with(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # a later run has removed the dead launcher's files
        os._exit(1)
    die_with_writer(descriptor)


def die_with_writer(descriptor: int) -> None:
    """Have the kernel kill this process, whatever it executes, when the other end of a pipe is
    closed; at once if it is. Nothing may be written there."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(descriptor, 1)
    except BlockingIOError:  # the result while the other end is open
        return
    os._exit(1)  # it died before F_SETFL


_CHECK_SECONDS = 0.5
_FLAGS = 6  # among the fields of /proc/PID/stat behind the name
_IS_EXITING = 0x4  # PF_EXITING, set about 20 ms before the process has exited
_LONGEST_STAT = 1024

_parent: _Parent | None = None


class _Parent:
    """The process that started this one."""

    def __init__(self) -> None:
        self.pid = os.getppid()
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_gone(self) -> bool:
        """True as soon as it starts to exit; takes 5 us."""
        if os.getppid() != self.pid:
            return True
        try:
            fields = os.pread(self._stat, _LONGEST_STAT, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            return True
        return bool(int(fields[_FLAGS]) & _IS_EXITING)


def exit_with_parent(model: str) -> None:
    """From now on end this process, that of ``model``, within 0.5 s of its parent's death.

    The thread runs until then, because a server may also die while the model loads or unloads.
    """
    global _parent
    die_with_launcher(model)
    _parent = _Parent()
    threading.Thread(target=_watch, args=(_parent,), name="ParentWatch", daemon=True).start()


def leave_if_orphaned() -> None:
    """End this process now if its parent is exiting.

    Call it before a function of Triton that waits for the server while it holds the GIL: if the
    server died then, no Python code could run any more, including the watching thread.
    """
    if _parent is not None and _parent.is_gone:
        os._exit(1)


def _watch(parent: _Parent) -> None:
    with suppress(OSError, AttributeError):  # a kernel without pidfd, or a Python made on one
        end = select.poll()
        end.register(os.pidfd_open(parent.pid), select.POLLIN)
        leave_if_orphaned()  # the pid may have been used again
        end.poll()
    while True:
        leave_if_orphaned()
        time.sleep(_CHECK_SECONDS)
