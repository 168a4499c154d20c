"""The status file, by which the model process reports its state to the launcher.

Triton knows only "ready" or not; the launcher needs the progress of loading, the size of the KV
pool and the end of a drain. The model writes one small JSON object, replaced atomically, so that a
reader sees a whole status. The launcher polls it.

The launcher's signals to the model are empty files, which fit even on a full disk.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from inflight_backend.log import get_logger

Phase = Literal["loading", "ready", "failed", "unhealthy", "draining", "drained"]
"""In order, except that *failed* may follow any other phase, and *ready* may follow *unhealthy*;
after *draining* there is no *ready* or *unhealthy*."""

PHASES: tuple[str, ...] = get_args(Phase)

_ON_THE_WAY_OUT = ("draining", "drained")
_AFTER_THAT = ("drained", "failed")

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The last report: the phase, the process that reported it, and the phase's fields.

    Fields by phase: *loading* ``loaded_bytes``, ``total_bytes`` (0: not known yet); *ready*
    ``model``, ``device``, ``dtype``, ``num_blocks``, ``tokens_per_block``, ``policy``,
    ``max_batch_size``, ``max_seq_len``, ``max_num_tokens``; *failed* and *unhealthy* ``error``.
    """

    phase: Phase
    pid: int
    fields: dict[str, Any] = field(default_factory=dict)


class StatusWriter:
    """Writes the status file; with an empty path it writes nothing. Thread-safe.

    A failing write is no error: serving matters more than reporting. The first of a row is logged.
    A phase that may not follow the last one is ignored: its writer did not know of that one.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._last_phase: Phase = "loading"
        self._is_failing = False

    def beat(self) -> None:
        """Update the time of the file, which shows that the process runs."""
        if self._path is not None:
            with suppress(OSError):
                os.utime(self._path)

    @contextmanager
    def beating(self, period: float) -> Iterator[None]:
        """Report *loading*, and beat from a thread until the end of the ``with`` block.

        Later beats come from the watchdog, which also checks for progress.
        """
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(period):
                self.beat()

        self.write("loading", loaded_bytes=0, total_bytes=0)
        thread = threading.Thread(target=beat, name="LoadingBeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def write(self, phase: Phase, **fields: Any) -> bool:
        """Replace the status by ``phase`` with its JSON-serialisable ``fields``.

        False if that failed; the caller must try again.
        """
        if self._path is None:
            return True
        text = json.dumps({"phase": phase, "pid": os.getpid(), "fields": fields})
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with self._lock:
            if self._last_phase in _ON_THE_WAY_OUT and phase not in _AFTER_THAT:
                return True
            try:
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(self._path)
            except OSError as error:
                if not self._is_failing:
                    _logger.warning("cannot write the status file %s: %s", self._path, error)
                self._is_failing = True
                return False
            self._last_phase = phase
            self._is_failing = False
            return True


def stop_file_of(drain_file: Path) -> Path:
    """The file beside ``drain_file`` that tells the model to end its running requests."""
    return drain_file.with_name(f"{drain_file.name}.stop")


def read_status(path: str | Path) -> ModelStatus | None:
    """The last status written to ``path``; None when there is none yet.

    ``ValueError`` for a file that no `StatusWriter` wrote.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("phase") not in PHASES:
        raise ValueError(f"{path} is not a status file")
    return ModelStatus(content["phase"], content["pid"], content["fields"])


def beat_of(path: str | Path) -> int:
    """A number that changes with every beat and every new status; 0 when there is none.

    To measure how long there was no beat, time its changes: the time in the file is
    that of a clock that may jump.
    """
    try:
        return Path(path).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
