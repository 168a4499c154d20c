"""The private folder of one run, and everything else that a run could leave on the machine.

A run owns ``<tmp>/inflight-serve-XXXXXXXX`` (mode 0700); the same name is the prefix of its shared
memory. A file in it is locked while its launcher lives, so that a later run can recognise and
remove the files of a killed one; the folder itself is locked so that a cleaner of temporary files,
which removes files that were read at a start only, leaves it alone.

The Python backend makes a folder ``/tmp/python_env_XXXXXX``, whatever TMPDIR says, leaves it when
it is killed, and does not mark whose it is. Removing that of another server crashes it when it
stops. So launchers start their servers one at a time until the folder has appeared: the new one is
ours.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from inflight_backend.process_guard import DeathPipe
from inflight_backend.status import stop_file_of
from inflight_protocol import DRAFT_MODEL_NAME
from inflight_server.serve.log_file import before
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS

PARENT = Path("/tmp")
_PATTERN = "python_env_*"
_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.02


class BackendTmp:
    """Entered just before the server starts, left when it is gone; `look` in between.

    ``note`` is the file that will hold the path, for cleaning up even after a kill.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        # The lock on the folder itself needs no file that would stay behind.
        self._lock: int | None = os.open(PARENT, os.O_RDONLY | os.O_DIRECTORY)
        self._is_ours_alone = _lock_in_time(self._lock)
        self._before = _folders()
        self._unnoted: Path | None = None

    def __enter__(self) -> BackendTmp:
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


def remove_backend_tmp(folder: Path) -> None:
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


_PREFIX = "inflight-serve-"
_SHARED_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_SCRATCH_NOTE = "scratch"
_REGION = re.compile(rf"({_PREFIX}.{{8}}).+")  # eight characters are what `mkdtemp` adds
_OLD_SECONDS = 3600.0


class Workspace:
    """The private folder as a context manager; leaving it removes every trace of the run."""

    def __init__(self) -> None:
        """Create the folder, after removing those whose launcher is dead."""
        clean_stale()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.shm_prefix = self.path.name  # of all shared memory of this run
        self.models = self.path / "models"  # the model repository
        self.backends = self.path / "backends"  # the copy of the Python backend, if one is needed
        self.status_file = self.path / "status.json"  # where the model reports
        self.drain_file = self.path / "drain"  # see `ask_to_drain`
        self.log_file = self.path / "server.log"  # the output of server and models
        self.openai_log_file = self.path / "openai.log"  # the output of `inflight openai`
        self.scratch_note = self.path / _SCRATCH_NOTE  # the path of the folder of `BackendTmp`
        unlocked = self.path / f"{_LOCK}.new"
        try:
            self._lock = unlocked.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self.path / _LOCK)  # never seen unlocked under its name
        except OSError:  # no room: a folder without a lock would never be removed
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._folder = _kept_from_cleaners(self.path)
        self._death_pipe = _death_pipe_in(self.path)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the server with which its models die with us."""
        return {} if self._death_pipe is None else self._death_pipe.environment

    def ask_to_drain(self, stop_all: bool = False) -> None:
        """Tell the model to refuse new requests; with ``stop_all`` also to end the running ones."""
        self.drain_file.touch()
        if stop_all:
            stop_file_of(self.drain_file).touch()

    def clear_run(self) -> None:
        """Remove the files of a server that has failed, and keep the rest for the next one."""
        _remove_outside(self.path)
        asked = (self.drain_file, stop_file_of(self.drain_file))
        for file in (self.status_file, *asked, self.scratch_note):
            file.unlink(missing_ok=True)
        old = self.log_file.with_suffix(".old")
        for log, kept in ((self.log_file, old), (before(self.log_file), before(old))):
            kept.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                log.replace(kept)

    def remove(self) -> None:
        """Remove folder, shared memory and backend scratch; the processes must be gone."""
        _remove_run(self.path)
        if self._death_pipe is not None:
            self._death_pipe.close()
        os.close(self._folder)
        self._lock.close()


def _kept_from_cleaners(folder: Path) -> int:
    """A descriptor of ``folder`` with a lock; cleaners such as systemd (tmpfiles.d(5), the note
    on aging) skip a locked folder with everything below it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # of a file system that locks no folders
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _death_pipe_in(folder: Path) -> DeathPipe | None:
    """None on a file system without FIFOs: its models look for their parent now and then."""
    with suppress(OSError):
        models = (*DEFAULT_MODELS, *OPTIONAL_MODELS, DRAFT_MODEL_NAME)
        return DeathPipe(folder / "death_pipe", models)
    return None


def clean_stale() -> None:
    """Remove the files of this user's runs whose launcher was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_run(folder)
        except OSError:
            continue  # alive, not yet locked, or removed by another launcher just now
    _sweep_regions()


def _sweep_regions() -> None:
    """Remove old shared memory of this user's runs whose folder has gone before it.

    The folder of a living run may be where we do not look (another TMPDIR, another container), so
    a region that any process has mapped stays.
    """
    regions = [region for region in _SHARED_MEMORY.glob(f"{_PREFIX}*") if _is_left(region)]
    mapped = _mapped_files() if regions else set()
    for region in regions:
        if str(region) not in mapped:
            region.unlink(missing_ok=True)


def _is_left(region: Path) -> bool:
    """True for an old region of this user without a folder."""
    name = _REGION.fullmatch(region.name)
    if name is None or (Path(tempfile.gettempdir()) / name[1]).exists():
        return False
    try:
        status = region.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_SECONDS


def _mapped_files() -> set[str]:
    """Files mapped by the processes that this user may look at."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            found |= {each.path for each in process.memory_maps()}
    return found


def _remove_run(folder: Path) -> None:
    _remove_outside(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_outside(folder: Path) -> None:
    """Shared memory and backend scratch; another user's file under a name of ours stays."""
    for region in _SHARED_MEMORY.glob(f"{folder.name}*"):
        with suppress(OSError):
            region.unlink()
    note = folder / _SCRATCH_NOTE
    with suppress(OSError):
        remove_backend_tmp(Path(note.read_text(encoding="utf-8")))
