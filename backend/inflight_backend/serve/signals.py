"""Being asked to stop: counted, never raised, so that cleaning up is never interrupted."""

from __future__ import annotations

import signal
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, ``count`` says how often SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_asked(self, times: int = 1) -> bool:
        """True once the user has asked at least ``times`` times."""
        return self.count >= times

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
