"""The folder that the Python backend makes for itself and leaves when it is killed.

It is ``/tmp/python_env_XXXXXX``, whatever TMPDIR says, and nothing tells whose it is. Taking away
that of another server crashes it when it stops. So launchers start their servers one at a time
until the folder has appeared: the one that is new then is ours.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

PARENT = Path("/tmp")
_PATTERN = "python_env_*"
_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.02


class BackendScratch:
    """Entered just before the server starts, left when it is gone; `look` in between.

    ``note`` is the file that will hold the path, for whoever cleans up, even after a kill.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        # The lock on the folder itself needs no file that would stay behind.
        self._lock: int | None = os.open(PARENT, os.O_RDONLY | os.O_DIRECTORY)
        self._is_ours_alone = _lock_in_time(self._lock)
        self._before = _folders()
        self._unnoted: Path | None = None

    def __enter__(self) -> BackendScratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        self.release()

    def look(self) -> None:
        """See whether the folder has appeared; cheap enough to be called in a polling loop.

        A disk without room for the note takes away the note, until there is room.
        """
        if self._lock is not None and (new := _folders() - self._before):
            if self._is_ours_alone and len(new) == 1:
                self._unnoted = new.pop()
            self.release()
        if self._unnoted is not None:
            with suppress(OSError):
                self._note.write_text(str(self._unnoted), encoding="utf-8")
                self._unnoted = None

    def release(self) -> None:
        """Stop looking and let other launchers start their servers."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_scratch(folder: Path) -> None:
    """Remove ``folder`` if it is an empty scratch folder of a Python backend."""
    if folder.parent == PARENT and folder.match(_PATTERN):
        with suppress(OSError):
            folder.rmdir()


def _folders() -> set[Path]:
    return set(PARENT.glob(_PATTERN))


def _lock_in_time(descriptor: int) -> bool:
    """True once locked; False if others keep the lock for too long."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        else:
            return True
    return False
