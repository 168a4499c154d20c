"""Ctrl-C beside gRPC.

Python raises `KeyboardInterrupt` in the main thread, wherever that is. Inside gRPC's iterator it
may be a step after a lock was taken and before anybody is bound to release it; gRPC's own thread
then waits for that lock, and closing the channel waits for the thread, for ever (grpcio 1.85, one
Ctrl-C in about 300 while an answer is awaited). So the main thread never is inside that iterator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")

_LOOK_SECONDS = 0.2
"""After so long at most Ctrl-C is noticed, also where a signal does not end a wait: on Windows, or
after ``signal.siginterrupt(SIGINT, False)``."""


def iterate_beside_main_thread(
    items: Generator[_Item, None, None], cancel: Callable[[], None]
) -> Generator[_Item, None, None]:
    """``items``; if the main thread asks, another one takes them, one whenever one is asked for.

    ``cancel`` makes a wait inside ``items`` end; called from the main thread when it leaves early.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from items
        return
    is_next_wanted: SimpleQueue[bool] = SimpleQueue()
    given: SimpleQueue[_Item | BaseException] = SimpleQueue()

    def take() -> None:
        with closing(items):
            try:
                while is_next_wanted.get():
                    given.put(next(items))
            except BaseException as error:
                given.put(error)

    taker = threading.Thread(target=take, name="inflight-responses", daemon=True)
    taker.start()
    try:
        while True:
            is_next_wanted.put(True)
            item = _get(given)
            if isinstance(item, StopIteration):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_next_wanted.put(False)
        cancel()
        taker.join()


def _get(given: SimpleQueue[_Item]) -> _Item:
    while True:
        try:
            return given.get(timeout=_LOOK_SECONDS)
        except Empty:
            continue
