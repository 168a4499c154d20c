"""Feeds of statistics: the JSON of every iteration to each client that has asked for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inflight_backend.errors import CapacityExceeded
from inflight_backend.log import get_logger
from inflight_backend.triton_io.sender import ResponseSender

_logger = get_logger(__name__)

_MAX_FEEDS = 16
_MAX_FEED_BYTES = 2**28  # Triton keeps for ever what the reader of a feed does not read


@dataclass(slots=True, eq=False)
class _Feed:
    """``texts`` are not sent yet. ``opened_at``: the iteration that the first one tells of, until
    the next one comes: that may be of the same iteration."""

    stream: ResponseSender
    texts: list[str]
    opened_at: int | None
    num_bytes: int = 0


class StatisticsFeeds:
    """Owner of the open feeds. Any thread opens and ends them; that of the dispatcher sends."""

    def __init__(self, send_soon: Callable[[Callable[[], None]], None]) -> None:
        """``send_soon`` has the thread of the dispatcher call something."""
        self._send_soon = send_soon
        self._feeds: list[_Feed] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._feeds)

    def open(
        self, stream: ResponseSender, last_stats: Callable[[], str], refusal: Callable[[], str]
    ) -> None:
        """Send ``stream`` the last statistics, then those of every further iteration without a
        gap, until its client leaves, `close` or very many bytes.

        `CapacityExceeded` for a ``refusal`` that is not "", and while too many feeds are open.
        """
        with self._lock:  # `add` waits; so does `close` of a stall, which refuses before
            if reason := refusal():
                raise CapacityExceeded(reason)
            if len(self._feeds) >= _MAX_FEEDS:
                raise CapacityExceeded(
                    f"{_MAX_FEEDS} feeds of statistics are open, which is the limit; "
                    "ask without streaming, or try again later"
                )
            text = last_stats()
            self._feeds.append(_Feed(stream, [text], _iteration_of(text)))
        self._send_soon(self._send)

    def add(self, text: str) -> None:
        """The statistics callback."""
        if not self._feeds:
            return
        with self._lock:
            for feed in self._feeds:
                if feed.opened_at is None or _iteration_of(text) > feed.opened_at:
                    feed.texts.append(text)
                feed.opened_at = None
        self._send_soon(self._send)

    def close(self, *streams: ResponseSender) -> None:
        """End these feeds, or all, with a final response; never raises."""
        with self._lock:
            ended = [each for each in self._feeds if not streams or each.stream in streams]
            self._feeds = [each for each in self._feeds if each not in ended]
        for feed in ended:
            feed.stream.close()

    def check_cancelled(self) -> None:
        """End the feeds whose clients have gone."""
        for feed in list(self._feeds):
            if feed.stream.is_closed or feed.stream.is_cancelled():
                self.close(feed.stream)

    def _send(self) -> None:
        with self._lock:
            waiting = [(feed, feed.texts) for feed in self._feeds if feed.texts]
            for feed, _ in waiting:
                feed.texts = []
        for feed, texts in waiting:
            try:
                tensor = np.array([[text.encode() for text in texts]], dtype=np.object_)
                feed.stream.send({"stats": tensor}, is_final=False)
                feed.num_bytes += sum(map(len, texts))
                if feed.num_bytes > _MAX_FEED_BYTES:
                    self.close(feed.stream)
            except BaseException:
                _logger.exception("sending statistics failed; this feed ends")
                feed.stream.end_with("the statistics could not be sent")
                self.close(feed.stream)


def _iteration_of(text: str) -> int:
    return int(json.loads(text)["Iteration Counter"])
