"""Questions that arrive as Triton requests: why does this one wait, what was decided lately, what
is served. Nothing here waits for the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inflight_backend.errors import CapacityExceeded
from inflight_backend.manager.why import (
    NOT_IN_FLIGHT,
    PREPARING,
    Places,
    describe_queued,
    why_queued,
)
from inflight_backend.private_log import get_logger
from inflight_backend.triton.arrivals import ArrivalQueue
from inflight_backend.triton.description import ModelDescription
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton_io.stream import ResponseStream

_logger = get_logger(__name__)

MAX_OPEN = 1024
"""Questions that wait for an answer; that is more than come at once, unless somebody is stuck."""


class Inspected(Places, Protocol):
    """What is asked; `GptManager` is one."""

    def why(self, *request_ids: int) -> Future[dict[str, Any]]:
        """What the first of these that is active does."""

    def recording(self) -> Future[Iterator[str]]:
        """What was decided lately, line by line."""


class Inspector:
    """Answers on the thread of the dispatcher; a recording is put together on one of its own."""

    def __init__(
        self,
        manager: Inspected,
        arrivals: ArrivalQueue,
        dispatcher: ResponseDispatcher,
        description: ModelDescription,
    ) -> None:
        self._manager = manager
        self._description = description
        self._arrivals = arrivals
        self._dispatcher = dispatcher
        self._recording_for: ResponseStream | None = None  # until it is sent: it may be long
        self._waiting: set[ResponseStream] = set()  # for the loop or the dispatcher
        self._waiting_lock = threading.Lock()

    def answer_why(self, numbers: Sequence[int], stream: ResponseStream) -> None:
        """Send why the request with these sequences waits; without any it is not in flight.

        The answer is about the first sequence that has not ended.
        """
        self._open(stream)
        num_before, answer = self._find_queued(numbers)
        if num_before == 0:
            self._dispatcher.answer(stream, "why", json.dumps(answer))
            return
        self._manager.why(*numbers[:num_before]).add_done_callback(
            lambda done: self._send_why(stream, done, numbers, answer)
        )

    def answer_description(self, stream: ResponseStream) -> None:
        """Send what is served."""
        self._open(stream)
        self._dispatcher.answer(stream, "description", self._description.to_json())

    def answer_recording(self, stream: ResponseStream) -> None:
        """Send the recording; `CapacityExceeded` while another one is put together."""
        self._open(stream, is_recording=True)
        self._manager.recording().add_done_callback(
            lambda done: self._start_recording(stream, done)
        )

    def fail_all(self, message: str) -> None:
        """End every question without an answer with an error: the loop or the dispatcher does not
        move. Never raises."""
        with self._waiting_lock:
            waiting = list(self._waiting)
        for stream in waiting:
            stream.abort(message)

    def _open(self, stream: ResponseStream, *, is_recording: bool = False) -> None:
        """Have `fail_all` end ``stream`` until it ends; `CapacityExceeded` while nothing moves, or
        if very many wait already, or another one for a recording."""
        stream.on_final(lambda: self._forget(stream))  # before others may end it
        with self._waiting_lock:
            if len(self._waiting) >= MAX_OPEN:
                raise CapacityExceeded(
                    f"{MAX_OPEN} questions wait for an answer, which is the limit; try again later"
                )
            if is_recording:
                if self._recording_for is not None:
                    raise CapacityExceeded(
                        "another recording is being put together; try again later"
                    )
                self._recording_for = stream
            self._waiting.add(stream)
        if refusal := self._arrivals.refusal:  # after the other, since `fail_all` comes after it
            raise CapacityExceeded(refusal)

    def _forget(self, stream: ResponseStream) -> None:
        with self._waiting_lock:
            self._waiting.discard(stream)
            if self._recording_for is stream:
                self._recording_for = None

    def _find_queued(self, numbers: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """The index of the first sequence in the queue, and the answer about it.

        With nobody there, how many sequences there are, and the answer that they have ended.
        """
        for index, number in enumerate(numbers):
            place = self._arrivals.find_place(number)
            if place is not None:
                is_preparing = self._arrivals.is_preparing(number)
                reason = PREPARING if is_preparing else why_queued(self._manager)
                return index, describe_queued(*place, reason) | _which(index, numbers)
        return len(numbers), NOT_IN_FLIGHT

    def _send_why(
        self,
        stream: ResponseStream,
        done: Future[dict[str, Any]],
        numbers: Sequence[int],
        otherwise: dict[str, Any],
    ) -> None:
        """Send what the manager says of one of ``numbers``, or ``otherwise`` of another one."""
        try:
            answer = done.result()
            if answer is NOT_IN_FLIGHT:
                answer = otherwise
            else:
                answer = answer | _which(numbers.index(answer["request"]), numbers)
            self._dispatcher.answer(stream, "why", json.dumps(answer))
        except BaseException:  # a future tells nobody what its callback raises
            _logger.exception("a request could not be explained")
            stream.fail("the request could not be explained")

    def _start_recording(self, stream: ResponseStream, done: Future[Iterator[str]]) -> None:
        try:
            threading.Thread(
                target=self._send_recording, args=(stream, done), name="Recording", daemon=True
            ).start()
        except BaseException:  # no more threads; nobody hears what a callback raises
            _logger.exception("a recording could not be put together")
            stream.fail("the recording could not be put together")

    def _send_recording(self, stream: ResponseStream, done: Future[Iterator[str]]) -> None:
        try:
            self._dispatcher.answer(stream, "recording", "".join(done.result()))
        except BaseException:  # nor what a thread raises
            _logger.exception("a recording could not be put together")
            stream.fail("the recording could not be put together")


def _which(index: int, numbers: Sequence[int]) -> dict[str, int]:
    """Which of several sequences an answer is about, from 1."""
    if len(numbers) == 1:
        return {}
    return {"sequence": index + 1, "num_sequences": len(numbers)}
