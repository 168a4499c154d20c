"""Being asked to stop: counted, never raised, so that cleaning up is never interrupted."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, ``count`` says how often SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopSignals:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_end = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._previous = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_end)
        os.close(self._read_end)
        os.close(self._write_end)

    def is_asked(self, times: int = 1) -> bool:
        """True once the user has asked at least ``times`` times."""
        return self.count >= times

    def wait(self, seconds: float, processes: Iterable[int] = ()) -> None:
        """Wait for so long, or until a signal comes or one of ``processes`` ends.

        Where the kernel cannot watch a process its end is not noticed here.
        """
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        watched = []
        for pid in processes:
            with suppress(OSError):
                watched.append(os.pidfd_open(pid))
                poll.register(watched[-1], select.POLLIN)
        try:
            poll.poll(1000 * seconds)
            with suppress(BlockingIOError):
                while os.read(self._read_end, 512):
                    pass
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
