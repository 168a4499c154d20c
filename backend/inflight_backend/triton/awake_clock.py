"""Time for who watches others: a machine or container that is stopped and goes on has missed none.

`docker pause`, a snapshot of a virtual machine and SIGSTOP stop the watched together with who
watches them, but not the clock. To the latter it then looks as if nothing had moved for all that
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds in which its owner has run; of one thread, which looks at it again and again."""

    def __init__(self, longest_turn: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``longest_turn``: what passes at most between two looks of an owner who runs."""
        self._longest_turn = longest_turn
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Seconds since it was made, but of every turn ``longest_turn`` at most."""
        now = self._clock()
        self._seconds += min(now - self._last, self._longest_turn)
        self._last = now
        return self._seconds
