"""Calling what others wrote: whatever it raises is logged once per callback, and stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TypeVar

from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

_Result = TypeVar("_Result")


class CallbackGuard:
    """Calls callbacks for a thread that must not end, even if one raises `SystemExit`."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def call(self, name: str, callback: Callable[..., _Result], *args: object) -> _Result | None:
        """What the callback returns; None if it raises, which is logged the first time."""
        try:
            return callback(*args)
        except BaseException:
            if name not in self._failed:
                self._failed.add(name)
                _logger.exception("the %s callback failed (said once)", name)
            return None

    def call_for_list(
        self, name: str, callback: Callable[..., Iterable[_Result] | None], *args: object
    ) -> list[_Result]:
        """What a callback returns, as a list; empty if that is None or no collection.

        If it fails on its way, as a generator may, what came before is kept.
        """
        items: list[_Result] = []

        def collect() -> None:
            found = callback(*args)
            for item in () if found is None else found:
                items.append(item)

        self.call(name, collect)
        return items

    def call_for_ids(
        self, name: str, callback: Callable[..., Iterable[object] | None]
    ) -> list[int]:
        """The same for ids of requests; whatever is no integer, of Python or numpy, is logged."""
        items = self.call_for_list(name, callback)
        for item in items:
            if not isinstance(item, Integral):
                _logger.error("the %s callback returned a %s", name, type(item).__name__)
        return [int(item) for item in items if isinstance(item, Integral)]
