"""How a model process ends with the tritonserver that has started it, whoever kills that.

A model process outlives a server that was killed, keeps its memory and ignores SIGTERM; Linux's
parent-death signal cannot be used, since Triton forks from a thread that ends. Below `inflight
serve` the kernel does it, at once (see `lifeline`); elsewhere a thread waits for that, or where the
kernel cannot tell it looks now and then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from inflight_backend.lifeline import die_with_launcher

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
