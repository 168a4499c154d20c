"""Answers are taken beside the main thread, so that Ctrl-C never falls inside gRPC."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from inflight_client.main_thread import iterate_beside_main_thread

WAIT_SECONDS = 60.0


class Source:
    """Gives 1, 2, 3 and then what `end` says; remembers where it ran and whether it was closed."""

    def __init__(self, end: BaseException | None = None, is_endless: bool = False) -> None:
        self.threads: set[threading.Thread] = set()
        self.num_taken = 0
        self.is_closed = False
        self.is_cancelled = threading.Event()
        self.is_cancelled_in_time = False
        self._end = end
        self._is_endless = is_endless

    def items(self) -> Generator[int, None, None]:
        """The numbers."""
        try:
            for number in (1, 2, 3):
                self.threads.add(threading.current_thread())
                self.num_taken += 1
                yield number
            if self._is_endless:
                main = threading.main_thread().ident
                assert main is not None
                time.sleep(0.1)  # the main thread waits by then
                signal.pthread_kill(main, signal.SIGINT)  # where the kernel sends Ctrl-C
                self.is_cancelled_in_time = self.is_cancelled.wait(WAIT_SECONDS)
            if self._end is not None:
                raise self._end
        finally:
            self.is_closed = True

    def iterate(self) -> Generator[int, None, None]:
        """As a transport would."""
        return iterate_beside_main_thread(self.items(), self.is_cancelled.set)


def test_the_main_thread_gets_all_and_is_not_inside() -> None:
    source = Source()

    assert list(source.iterate()) == [1, 2, 3]
    assert threading.main_thread() not in source.threads
    assert source.is_closed


def test_other_threads_iterate_themselves() -> None:
    source = Source()
    thread = threading.Thread(target=lambda: list(source.iterate()))
    thread.start()
    thread.join(WAIT_SECONDS)

    assert source.threads == {thread}


def test_an_error_comes_out() -> None:
    source = Source(end=ValueError("broken"))

    with pytest.raises(ValueError, match="broken"):
        list(source.iterate())

    assert source.is_closed


def test_nothing_is_taken_before_it_is_asked_for() -> None:
    source = Source()
    iteration = source.iterate()

    assert (next(iteration), source.num_taken) == (1, 1)
    iteration.close()
    assert (source.num_taken, source.is_closed) == (1, True)


@pytest.fixture(params=[True, False], ids=["a signal ends a wait", "a signal ends no wait"])
def _ctrl_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """Python looks for Ctrl-C when a wait has ended; not every system ends one for it."""
    signal.siginterrupt(signal.SIGINT, request.param)
    yield
    signal.siginterrupt(signal.SIGINT, True)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_cancels_what_is_awaited() -> None:
    source = Source(is_endless=True)
    received: list[int] = []

    with pytest.raises(KeyboardInterrupt):
        received.extend(source.iterate())

    assert received == [1, 2, 3]
    assert source.is_cancelled_in_time
    assert source.is_closed
