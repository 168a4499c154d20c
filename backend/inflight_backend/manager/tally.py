"""What happened since somebody last asked, by kind, for counters that are shown elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Tally:
    """Filled by any thread, emptied by another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, number: int = 1) -> None:
        """It happened once more, or ``number`` times."""
        if number:
            with self._lock:
                self._counts[kind] += number

    def take(self) -> Mapping[str, int]:
        """How often since the last call, by kind."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts
