"""The processes of the other ranks: started, written to, watched and ended."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from inflight_backend.errors import EngineLost
from inflight_backend.log import get_logger
from inflight_backend.ranks.messages import Begin, Failed, Ready, Stop, pack, receive_answer

_WAIT_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_SEND_SECONDS = 5.0
_EXIT_SECONDS = 0.2  # a process closes its connections just before it has ended
_MIN_SILENCE_SECONDS = 2.0

_logger = get_logger(__name__)


class _Rank:
    """One of them: a process here, or a connection to another machine."""

    def __init__(
        self, number: int, connection: socket.socket, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.number, self.connection, self.process = number, connection, process
        self.heard_at = time.monotonic()

    def kill(self) -> None:
        """At once, whatever it does; on another machine it ends with its connection."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class RankGroup:
    """The ranks behind the first. Every method may be called by any thread, `send` by one only."""

    def __init__(self, ranks: Sequence[_Rank], lifeline: int, silence_seconds: float) -> None:
        """``lifeline``: the end of a pipe by whose closing the ranks here die."""
        self._ranks, self._lifeline = ranks, lifeline
        self._silence_seconds = max(silence_seconds, _MIN_SILENCE_SECONDS)
        self.error = ""
        """Why a rank ended, in its own words, if the user can mend it."""
        self.reason = ""
        """Which rank is lost, and how."""
        self._ready = set[int]()
        self._turn = threading.Lock()
        self._lost, self._is_closing = threading.Event(), False
        self._tell: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.connection, selectors.EVENT_READ, rank)
        self._watcher = threading.Thread(target=self._watch, name="Ranks", daemon=True)
        self._watcher.start()

    @classmethod
    def start(
        cls,
        orders: Sequence[Begin],
        silence_seconds: float,
        joined: Mapping[int, socket.socket] | None = None,
    ) -> RankGroup:
        """A process on this machine for each of ``orders``, but for those ranks that have
        ``joined`` from others."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        ranks: list[_Rank] = []
        process: subprocess.Popen[bytes] | None
        try:
            for order in orders:
                if joined is not None and order.rank in joined:
                    own, process = joined[order.rank], None
                else:
                    own, process = _start(reader)
                ranks.append(_Rank(order.rank, own, process))
                own.settimeout(_SEND_SECONDS)
                own.sendall(pack(order))
        except BaseException:
            for rank in ranks:
                rank.kill()
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return cls(ranks, writer, silence_seconds)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._ranks)

    def send(self, message: bytes) -> None:
        """To all; `EngineLost` if one does not take it."""
        self.send_each([message] * self.size)

    def send_each(self, messages: Sequence[bytes]) -> None:
        """One message to each rank, in their order."""
        for rank, message in zip(self._ranks, messages, strict=True):
            try:
                rank.connection.sendall(message)
            except OSError as error:
                self.lose(f"rank {rank.number} takes no messages ({error})")
                raise EngineLost from None

    def wait_until_ready(self) -> None:
        """Until all are about to meet; `EngineLost` if one has ended instead."""
        while len(self._ready) < self.size:
            if self.is_lost(_LOOK_SECONDS / 4):
                raise EngineLost

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once a rank is lost; at once if one is."""
        with self._turn:
            if not self._lost.is_set():
                self._tell.append(tell)
                return
        tell()

    def is_lost(self, seconds: float) -> bool:
        """Whether one is lost, or is within so many seconds."""
        return self._lost.wait(seconds) if seconds else self._lost.is_set()

    def lose(self, reason: str) -> None:
        """Kill all, so that no collective waits for them, and tell those who asked."""
        with self._turn:
            if self._lost.is_set() or self._is_closing:
                return
            self.reason = reason
            self._lost.set()
            tell, self._tell = self._tell, []
        _logger.error("%s: the model has to be loaded again", reason)
        for rank in self._ranks:
            rank.kill()
        for each in tell:
            each()

    def close(self, *, is_orderly: bool) -> None:
        """End all ranks, those that do not end by themselves within 2 s by force."""
        with self._turn:
            is_orderly = is_orderly and not self._lost.is_set()
            self._is_closing = True
        deadline = time.monotonic() + _WAIT_SECONDS
        for rank in self._ranks:
            if is_orderly:
                with suppress(OSError):
                    rank.connection.sendall(pack(Stop()))
        for rank in self._ranks:
            if rank.process is not None and is_orderly:
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(deadline - time.monotonic(), 0))
            rank.kill()
            if rank.process is not None:
                rank.process.wait()
        self._watcher.join()
        os.close(self._lifeline)
        for rank in self._ranks:
            rank.connection.close()
        self._selector.close()

    def _watch(self) -> None:
        while not (self._is_closing or self._lost.is_set()):
            for key, _ in self._selector.select(_LOOK_SECONDS):
                rank = key.data
                try:
                    answer = receive_answer(rank.connection)
                except (EOFError, OSError):
                    self.lose(f"rank {rank.number} has ended{_how(rank.process)}")
                    return
                rank.heard_at = time.monotonic()
                if isinstance(answer, Ready):
                    self._ready.add(rank.number)
                if isinstance(answer, Failed):
                    self.error = answer.error if answer.is_expected else self.error
                    self.lose(f"rank {rank.number} failed: {answer.error}")
                    return
            now = time.monotonic()
            for rank in self._ranks:
                if (seconds := now - rank.heard_at) > self._silence_seconds:
                    self.lose(f"rank {rank.number} has said nothing for {seconds:.1f} s")
                    return


def _start(lifeline: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A rank on this machine, and the way to it."""
    own, other = socket.socketpair()
    with other:
        connection = str(other.fileno())
        command = [sys.executable, "-m", "inflight_backend.ranks.worker", connection, str(lifeline)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(), lifeline)
        )
    return own, process


def _how(process: subprocess.Popen[bytes] | None) -> str:
    if process is None:
        return ""
    try:
        code = process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    return f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
