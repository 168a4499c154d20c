"""The thread that sends responses, so that the generation loop never waits for the server.

A send is a round trip of about 100 us however many tokens it carries (measured on Triton 24.10), so
the dispatcher takes *everything* that has piled up and sends one response per request: with few
streams that is one token each, under load consecutive tokens of a request travel together. The
first token leaves at once in both cases.

A request whose response cannot be built or sent is stopped, and gets the error when it has ended.
Nothing ends the thread.

A round that served many requests is followed by a rest as long as the round: sending takes the
interpreter lock and a core from the engine, and what piles up meanwhile is sent at the same price.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from inflight_backend.errors import CapacityText, RefusalText
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array, NamedTensor
from inflight_backend.triton.watchdog import Progress, ProgressSource
from inflight_backend.triton_io.beam_stream import BeamStream
from inflight_backend.triton_io.sender import ResponseSender
from inflight_backend.triton_io.token_stream import TokenExtras, TokenStream


@dataclass(slots=True)
class MergedResponse:
    """Tokens, the other tensors by name, and perhaps the end.

    ``is_whole``: each response repeats everything (beams), and all its tensors are ``extras``.
    """

    ids: list[int] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=TokenExtras)
    is_final: bool = False
    error: str = ""
    is_whole: bool = False

    def add(self, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        """Append one response."""
        self.is_final = is_final or bool(error)
        self.error = self.error or error
        if self.is_whole:
            self.extras.last.update(tensors)
            return
        for name, tensor in tensors:
            if name == "output_ids":
                if tensor.size == 1:  # nearly always
                    self.ids.append(tensor.item())
                else:
                    self.ids += tensor.ravel().tolist()
            elif name != "sequence_length":  # that follows from the ids
                self.extras.add(name, tensor)


_logger = get_logger(__name__)

_FEW_REQUESTS = 16  # up to here every token leaves on its own
_MAX_REST_SECONDS = 0.02
_MAX_BACKLOG = 16_384  # responses that wait to be sent; a token takes less than 1 KiB
_MAX_BACKLOG_BYTES = 2**28  # of their tensors: all beams each time, or a row of logits
_MAX_FEED_BYTES = 2**28  # Triton keeps for ever what the reader of a feed does not read
_NOT_SENT = "the response could not be sent"


@dataclass(frozen=True, slots=True)
class _Stats:
    text: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to a request that is not a generation."""

    stream: ResponseSender
    name: str
    text: str


@dataclass(slots=True)
class _Ending:
    """The end of a request, before it is sent: an ``error``, else its last tensors."""

    token_stream: TokenStream | BeamStream
    error: str
    tensors: dict[str, Array] = field(default_factory=dict)

    def send(self) -> None:
        """Nothing of the request comes behind it."""
        if self.error:
            self.token_stream.stream.send_error(self.error, _code_of(self.error))
        else:
            self.token_stream.stream.send(self.tensors, is_final=True)


class _Call(Enum):
    """Why the thread is woken, other than to send something: a feed was opened, whose first entry
    waits; a reader that was slow has caught up."""

    FEED = 0
    ROOM = 1


@dataclass(slots=True)
class _Feed:
    """A subscriber: its first entry until that is sent, which iteration that is (-1: a later one
    was sent too), and the bytes it was sent."""

    first: str | None
    after: int
    num_bytes: int = 0

    def take(self, texts: list[str]) -> list[str]:
        """What of ``texts`` is new here, behind the first entry."""
        if self.after >= 0:
            texts = [text for text in texts if _iteration_of(text) > self.after]
            self.after = -1 if texts else self.after
        if self.first is not None:
            texts, self.first = [self.first, *texts], None
        return texts


_Item = tuple[int, Sequence[NamedTensor], bool, str]
_Message = _Item | _Stats | _Answer | _Call


def _num_bytes_of(message: _Message | None) -> int:
    """What a message holds; small things around that do not count, nor a token with its length: it
    comes for every stream in every step, and of these messages the number is bounded."""
    if isinstance(message, tuple):
        tensors = message[1]
        if len(tensors) == 2 and tensors[0].tensor.size == 1:
            return 0
        return sum([tensor.nbytes for _, tensor in tensors])
    return len(message.text) if isinstance(message, _Stats | _Answer) else 0


class ResponseDispatcher:
    """Sends what the callbacks of `GptManager` hand over; its own thread, in order per request."""

    def __init__(
        self,
        stop_request: Callable[[int], None],
        on_end: Callable[[int, int], None] = lambda request_id, num_left_out: None,
        before_ends: Callable[[], None] = lambda: None,
        *,
        merges: bool = True,
    ) -> None:
        """``stop_request``: called with the id of a request whose answers can no longer be sent.

        ``on_end``: called with the id of a request that is about to get its end, and how many of
        its tokens were left out of its answer. ``before_ends``: called when that was said of all
        that end in a round, before their clients hear of it.

        ``merges`` False: a response for each that is handed over, for clients that count them;
        what a slow reader has no room for travels together all the same.
        """
        self._stop_request = stop_request
        self._on_end = on_end
        self._before_ends = before_ends
        self._merges = merges
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._num_bytes = 0  # of what is in the queue or being sent
        self._num_bytes_lock = threading.Lock()
        self._streams: dict[int, TokenStream | BeamStream] = {}
        self._pieces: dict[
            int, MergedResponse
        ] = {}  # to be sent in this round, or when there is room
        self._subscribers: dict[ResponseSender, _Feed] = {}
        self._subscribers_lock = threading.Lock()
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="ResponseDispatcher", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """True while so much waits to be sent that no new request should be started.

        What a slow reader has no room for does not count: it is bounded by that one answer, and a
        frozen reader would block all other requests.
        """
        return self._queue.qsize() > _MAX_BACKLOG or self._num_bytes > _MAX_BACKLOG_BYTES

    @property
    def mover(self) -> ProgressSource:
        """For the watchdog: busy while anything waits to be sent or is being sent."""
        progress = self._progress
        return ProgressSource(
            is_busy=lambda: progress.is_busy or not self._queue.empty(),
            num_moves=lambda: progress.num_moves,
        )

    def open(self, request_id: int, stream: TokenStream | BeamStream) -> None:
        """Make a request known; call it before the request can produce anything."""
        self._streams[request_id] = stream

    def discard(self, request_id: int) -> None:
        """Forget a request that was opened but never accepted."""
        self._streams.pop(request_id, None)

    def send_response(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        """The send-response callback: returns at once."""
        self._put((request_id, tensors, is_final, error))

    def return_stats(self, text: str) -> None:
        """The statistics callback: feeds everyone who subscribed."""
        if self._subscribers:
            self._put(_Stats(text))

    def answer(self, stream: ResponseSender, name: str, text: str) -> None:
        """Send ``text`` as tensor ``name``, the only response of ``stream``; from any thread."""
        self._put(_Answer(stream, name, text))

    def subscribe(self, stream: ResponseSender, last_stats: Callable[[], str]) -> None:
        """Send ``stream`` the last statistics JSON, then that of every further iteration without
        a gap, until `unsubscribe` or very many bytes."""
        with self._subscribers_lock:
            feed = self._subscribers[stream] = _Feed(None, -1)  # from now on all are queued
            feed.first = last_stats()
            feed.after = _iteration_of(feed.first)
        self._put(_Call.FEED)

    def unsubscribe(self, stream: ResponseSender) -> None:
        """End the feed of ``stream`` with a final response; from any thread, never raises."""
        with self._subscribers_lock:
            self._subscribers.pop(stream, None)
        stream.close()

    def resume(self) -> None:
        """Look again at the streams that were behind; from any thread."""
        self._put(_Call.ROOM)

    def close(self) -> None:
        """Send everything handed over so far, end the feeds, and stop the thread."""
        self._put(None)
        self._thread.join()
        for stream in list(self._subscribers):
            self.unsubscribe(stream)

    def _put(self, message: _Message | None) -> None:
        if (num_bytes := _num_bytes_of(message)) > 0:
            self._count(num_bytes)
        self._queue.put(message)

    def _count(self, num_bytes: int) -> None:
        with self._num_bytes_lock:
            self._num_bytes += num_bytes

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = self._take_all()
            started = time.perf_counter()
            is_open = None not in items
            with self._progress:
                num_requests = self._send_or_end(items)
            self._count(-sum(map(_num_bytes_of, items)))
            if num_requests > _FEW_REQUESTS and is_open:
                time.sleep(min(time.perf_counter() - started, _MAX_REST_SECONDS))

    def _take_all(self) -> list[_Message | None]:
        """Everything in the queue, waiting for the first."""
        items = [self._queue.get()]
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def _send_or_end(self, items: Sequence[_Message | None]) -> int:
        """`_send_round`; if even that fails, end every request in it."""
        try:
            return self._send_round(items)
        except BaseException:  # the thread must live: no other thread sends
            _logger.exception("a round of responses failed; its requests end")
        for item in items:
            try:
                self._end(item)
            except BaseException:
                _logger.exception("not even an end could be sent")
        return 0

    def _end(self, item: _Message | None) -> None:
        """End the request of an item of a failed round."""
        if isinstance(item, _Answer):
            item.stream.fail("the answer could not be sent")
        elif isinstance(item, tuple) and (token_stream := self._streams.get(item[0])):
            self._pieces.pop(item[0], None)
            self._give_up(item[0], token_stream)
            if item[2] or item[3]:
                del self._streams[item[0]]
                self._on_end(item[0], token_stream.num_left_out)
                token_stream.stream.abandon(_NOT_SENT)

    def _send_round(self, items: Sequence[_Message | None]) -> int:
        """Merge per request and send; how many requests were served.

        What a slow reader has no room for is kept, and travels with what comes next.
        """
        stats: list[str] = []
        is_opening = False
        for item in items:
            if isinstance(item, _Stats):
                stats.append(item.text)
            elif isinstance(item, _Answer):
                self._send_answer(item)
            elif isinstance(item, _Call):
                is_opening = is_opening or item is _Call.FEED
            elif item is not None:
                self._merge(item)
        ready = [request_id for request_id in self._pieces if self._has_room(request_id)]
        ends: list[tuple[int, MergedResponse]] = []
        for request_id in ready:
            piece = self._pieces.pop(request_id)
            if piece.is_final:
                ends.append((request_id, piece))
            else:
                self._send_piece(request_id, piece)
        if ends:
            self._send_ends(ends)
        if stats or is_opening:
            self._send_stats(stats)
        return len(ready)

    def _has_room(self, request_id: int) -> bool:
        token_stream = self._streams.get(request_id)
        is_behind = token_stream is not None and token_stream.stream.is_behind
        return self._pieces[request_id].is_final or not is_behind

    def _merge(self, item: _Item) -> None:
        request_id, tensors, is_final, error = item
        if not self._merges and request_id in self._pieces and self._has_room(request_id):
            self._send_piece(request_id, self._pieces.pop(request_id))
        if request_id not in self._pieces:
            is_whole = isinstance(self._streams.get(request_id), BeamStream)
            self._pieces[request_id] = MergedResponse(is_whole=is_whole)
        try:
            self._pieces[request_id].add(tensors, is_final, error)
        except BaseException:
            _logger.exception("a response of request %d could not be put together", request_id)
            self._give_up(request_id, self._streams.get(request_id))

    def _send_piece(self, request_id: int, piece: MergedResponse) -> None:
        """Send what is not the end of a request."""
        token_stream = self._streams.get(request_id)
        if token_stream is None:
            _logger.error("a response for the unknown request %d was dropped", request_id)
            return
        try:
            if token_stream.send(piece.ids, piece.extras.joined(), is_final=False):
                self._stop_request(request_id)
        except BaseException:  # one client's stream may break, others must not
            _logger.exception("sending a response of request %d failed", request_id)
            self._give_up(request_id, token_stream)
        self._progress.moved()

    def _send_ends(self, ends: Sequence[tuple[int, MergedResponse]]) -> None:
        """Make the last responses, count them, and only then send them: a client that has read one
        finds it on the page of metrics."""
        made: list[tuple[int, _Ending]] = []
        for request_id, piece in ends:
            token_stream = self._streams.get(request_id)
            if token_stream is None:
                _logger.error("the end of the unknown request %d was dropped", request_id)
            else:
                made.append((request_id, self._make_end(request_id, token_stream, piece)))
            self._on_end(request_id, token_stream.num_left_out if token_stream else 0)
        self._before_ends()
        for request_id, ending in made:
            del self._streams[request_id]
            try:
                ending.send()
            except BaseException:
                _logger.exception("sending the end of request %d failed", request_id)
                self._give_up(request_id, ending.token_stream)
                ending.token_stream.stream.abandon(_NOT_SENT)
            self._progress.moved()

    def _make_end(
        self, request_id: int, token_stream: TokenStream | BeamStream, piece: MergedResponse
    ) -> _Ending:
        """What a request ends with; its last tokens leave now if that is an error."""
        ending = _Ending(token_stream, piece.error)
        try:
            if not piece.error:
                ending.tensors = token_stream.make_last(piece.ids, piece.extras.joined())
            elif piece.ids:
                token_stream.send(piece.ids, piece.extras.joined(), is_final=False)
        except BaseException:
            _logger.exception("the end of request %d could not be put together", request_id)
            self._give_up(request_id, token_stream)
        return ending

    def _give_up(self, request_id: int, token_stream: TokenStream | BeamStream | None) -> None:
        """Stop a request, whose end will be an error; never raises."""
        if token_stream is not None:
            token_stream.stream.end_with(_NOT_SENT)
        try:
            self._stop_request(request_id)
        except BaseException:
            _logger.exception("request %d could not be stopped", request_id)

    def _send_answer(self, answer: _Answer) -> None:
        try:
            tensor = np.array([[answer.text.encode()]], dtype=np.object_)
            answer.stream.send({answer.name: tensor}, is_final=True)
        except BaseException:
            _logger.exception("sending an answer failed")
            answer.stream.abandon("the answer could not be sent")
        self._progress.moved()

    def _send_stats(self, texts: list[str]) -> None:
        with self._subscribers_lock:  # a feed that is not there yet takes the next ones
            feeds = list(self._subscribers.items())
        for stream, feed in feeds:
            self._feed(stream, feed, texts)
            self._progress.moved()

    def _feed(self, stream: ResponseSender, feed: _Feed, texts: list[str]) -> None:
        try:
            texts = feed.take(texts)
            if texts:
                tensor = np.array([[text.encode() for text in texts]], dtype=np.object_)
                feed.num_bytes += sum(map(len, texts))
                stream.send({"stats": tensor}, is_final=False)
            if feed.num_bytes > _MAX_FEED_BYTES:
                self.unsubscribe(stream)
        except BaseException:
            _logger.exception("sending statistics failed; this feed ends")
            stream.end_with("the statistics could not be sent")
            self.unsubscribe(stream)


def _code_of(error: str) -> str:
    """Whose fault it is."""
    if isinstance(error, RefusalText):
        return "INVALID_ARG"
    return "UNAVAILABLE" if isinstance(error, CapacityText) else "INTERNAL"


def _iteration_of(text: str) -> int:
    return int(json.loads(text)["Iteration Counter"])
