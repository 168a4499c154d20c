"""The thread that sends responses, so that the generation loop never waits for the server.

A send is a round trip of about 100 us however many tokens it carries (measured on Triton 24.10), so
the dispatcher takes *everything* that has piled up and sends one response per request: with few
streams that is one token each, under load consecutive tokens of a request travel together. The
first token leaves at once in both cases.

A request whose response cannot be built or sent is stopped, and gets the error when it has ended.
Nothing ends the thread.

A round that served many requests is followed by a rest: sending takes the interpreter lock and a
core from the engine, and what piles up meanwhile is sent at the same price. First tokens, ends and
answers to questions leave in a rest, too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from inflight_backend.errors import ErrorText
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array, NamedTensor
from inflight_backend.triton.watchdog import Progress
from inflight_backend.triton_io.answer_stream import AnswerStream, TokenExtras
from inflight_backend.triton_io.sender import ResponseSender


@dataclass(slots=True)
class MergedResponse:
    """What is to be sent of an ``answer``: tokens, the other tensors by name, perhaps the end."""

    request_id: int
    answer: AnswerStream
    ids: list[int] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=TokenExtras)
    is_final: bool = False
    error: str = ""

    is_first: bool = False

    @property
    def is_urgent(self) -> bool:
        """True for what a client waits for."""
        return self.is_first or self.is_final

    @property
    def has_room(self) -> bool:
        """False while it should wait for a slow reader; an end does not."""
        return self.is_final or not self.answer.stream.is_behind

    def add(self, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        """Append one response."""
        self.is_final = is_final or bool(error)
        self.error = self.error or error
        if self.answer.repeats_all:
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
_REST = 1.0  # as long as the round
_MAX_REST_SECONDS = 0.02
_SHARED_REST = 4.0  # where the engine computes on the same cores: sending takes a fifth of one
_MAX_SHARED_REST_SECONDS = 0.05  # text still flows
_MAX_BACKLOG = 16_384  # responses that wait to be sent; a token takes less than 1 KiB
_MAX_BACKLOG_BYTES = 2**28  # of their tensors: all beams each time, or a row of logits
_NOT_SENT = "the response could not be sent"


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the thread; ``num_bytes``: what it holds to be sent."""

    run: Callable[[], None]
    num_bytes: int = 0


_Response = tuple[int, Sequence[NamedTensor], bool, str]
_Message = _Response | _Call | None


def _num_bytes_of(message: _Message) -> int:
    """What a message holds; small things around that do not count, nor a token with its length: it
    comes for every stream in every step, and of these messages the number is bounded."""
    if isinstance(message, tuple):
        tensors = message[1]
        if len(tensors) == 2 and tensors[0].tensor.size == 1:
            return 0
        return sum([tensor.nbytes for _, tensor in tensors])
    return 0 if message is None else message.num_bytes


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
        self._queue: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._num_bytes = 0  # of what is in the queue or being sent
        self._num_bytes_lock = threading.Lock()
        self._streams: dict[int, AnswerStream] = {}
        # To be sent in this round, or when there is room, or after the rest.
        self._pieces: dict[int, MergedResponse] = {}
        self._unanswered: set[int] = set()  # requests whose first token has not come
        self._urgent = threading.Event()  # ends a rest
        self.shares_cores = False  # with the engine: rests are longer
        self.progress = Progress()  # of its rounds
        self._thread = threading.Thread(target=self._run, name="ResponseDispatcher", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """True while so much waits to be sent that no new request should be started.

        What a slow reader has no room for does not count: it is bounded by that one answer, and a
        frozen reader would block all other requests.
        """
        return self._queue.qsize() > _MAX_BACKLOG or self._num_bytes > _MAX_BACKLOG_BYTES

    def open(self, request_id: int, stream: AnswerStream) -> None:
        """Make a request known; call it before the request can produce anything."""
        self._streams[request_id] = stream
        self._unanswered.add(request_id)

    def discard(self, request_id: int) -> None:
        """Forget a request that was opened but never accepted."""
        self._streams.pop(request_id, None)
        self._unanswered.discard(request_id)

    def send_response(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        """The send-response callback: returns at once."""
        is_urgent = is_final or bool(error) or request_id in self._unanswered
        self._put((request_id, tensors, is_final, error), is_urgent=is_urgent)

    def answer(self, stream: ResponseSender, name: str, text: str) -> None:
        """Send ``text`` as tensor ``name``, the only response of ``stream``; from any thread."""
        self._put(_Call(lambda: _send_answer(stream, name, text), len(text)))

    def call_soon(self, run: Callable[[], None]) -> None:
        """Call ``run`` on the thread that sends; from any thread. It should handle its errors: one
        that it raises ends the requests of the round."""
        self._put(_Call(run))

    def resume(self) -> None:
        """Look again at the streams that were behind; from any thread."""
        self._put(_Call(lambda: None))

    def close(self) -> None:
        """Send everything handed over so far, and stop the thread."""
        self._put(None)
        self._thread.join()

    def _put(self, message: _Message, *, is_urgent: bool = True) -> None:
        if (num_bytes := _num_bytes_of(message)) > 0:
            self._count(num_bytes)
        self._queue.put(message)
        if is_urgent:
            self._urgent.set()

    def _count(self, num_bytes: int) -> None:
        with self._num_bytes_lock:
            self._num_bytes += num_bytes

    def _run(self) -> None:
        is_open, rest_ends = True, 0.0
        while is_open:
            self._urgent.wait(max(rest_ends - time.perf_counter(), 0.0))
            self._urgent.clear()  # before the queue is read
            is_resting = time.perf_counter() < rest_ends
            messages = self._take_all(waits=not is_resting and not rest_ends)
            is_resting = is_resting and None not in messages
            started = time.perf_counter()
            is_open = None not in messages
            with self.progress:
                num_requests = self._send_or_end(messages, only_urgent=is_resting)
            self._count(-sum(map(_num_bytes_of, messages)))
            if not is_resting:
                rest_ends = self._end_of_rest(started, num_requests)

    def _end_of_rest(self, started: float, num_requests: int) -> float:
        """Until when to rest after a round, 0 for not at all."""
        if num_requests <= _FEW_REQUESTS:
            return 0.0
        factor, longest = _REST, _MAX_REST_SECONDS
        if self.shares_cores and self._merges:
            factor, longest = _SHARED_REST, _MAX_SHARED_REST_SECONDS
        now = time.perf_counter()
        return now + min(factor * (now - started), longest)

    def _take_all(self, *, waits: bool) -> list[_Message]:
        """Everything in the queue; ``waits``: for the first, if there is none."""
        messages = [self._queue.get()] if waits else []
        with suppress(queue.Empty):
            while True:
                messages.append(self._queue.get_nowait())
        return messages

    def _send_or_end(self, messages: Sequence[_Message], *, only_urgent: bool) -> int:
        """`_send_round`; if even that fails, end every request in it. Returns how many requests
        were served."""
        responses = [message for message in messages if isinstance(message, tuple)]
        try:
            for message in messages:
                if isinstance(message, _Call):
                    message.run()
                    self.progress.moved()
            return self._send_round(responses, only_urgent=only_urgent)
        except BaseException:  # the thread must live: no other thread sends
            _logger.exception("a round of responses failed; its requests end")
        for response in responses:
            try:
                self._end(response)
            except BaseException:
                _logger.exception("not even an end could be sent")
        return 0

    def _end(self, response: _Response) -> None:
        """End the request of a response in a failed round."""
        request_id, _, is_final, error = response
        if (answer := self._streams.get(request_id)) is None:
            return
        self._pieces.pop(request_id, None)
        self._unanswered.discard(request_id)
        self._give_up(request_id)
        if is_final or error:
            del self._streams[request_id]
            self._on_end(request_id, answer.num_left_out)
            answer.abandon(_NOT_SENT)

    def _send_round(self, responses: Sequence[_Response], *, only_urgent: bool = False) -> int:
        """Merge per request and send; how many requests were served.

        What a slow reader has no room for is kept, and travels with what comes next; so does what
        is not urgent, in a rest.
        """
        for response in responses:
            self._merge(response)
        ready = [
            piece
            for piece in self._pieces.values()
            if piece.has_room and (piece.is_urgent or not only_urgent)
        ]
        for piece in ready:
            del self._pieces[piece.request_id]
            if not piece.is_final:
                self._send_piece(piece)
        if ends := [piece for piece in ready if piece.is_final]:
            self._send_ends(ends)
        return len(ready)

    def _merge(self, response: _Response) -> None:
        request_id, tensors, is_final, error = response
        piece = self._pieces.get(request_id)
        if piece is not None and piece.has_room and not self._merges:
            self._send_piece(self._pieces.pop(request_id))
            piece = None
        if piece is None:
            if (answer := self._streams.get(request_id)) is None:
                _logger.error("a response for the unknown request %d was dropped", request_id)
                return
            is_first = request_id in self._unanswered
            self._unanswered.discard(request_id)
            piece = MergedResponse(request_id, answer, is_first=is_first)
            self._pieces[request_id] = piece
        try:
            piece.add(tensors, is_final, error)
        except BaseException:
            _logger.exception("a response of request %d could not be put together", request_id)
            self._give_up(request_id)

    def _send_piece(self, piece: MergedResponse) -> None:
        """Send what is not the end of a request."""
        try:
            if piece.answer.send(piece.ids, piece.extras.joined()):
                self._stop_request(piece.request_id)
        except BaseException:  # one client's stream may break, others must not
            _logger.exception("sending a response of request %d failed", piece.request_id)
            self._give_up(piece.request_id)
        self.progress.moved()

    def _send_ends(self, ends: Sequence[MergedResponse]) -> None:
        """Make the last responses, count them, and only then send them: a client that has read one
        finds it on the page of metrics."""
        made = [(piece, self._make_last(piece)) for piece in ends]
        for piece in ends:
            self._on_end(piece.request_id, piece.answer.num_left_out)
        self._before_ends()
        for piece, tensors in made:
            error = piece.error
            try:
                if error:
                    code = error.code if isinstance(error, ErrorText) else "INTERNAL"
                    piece.answer.finish_with_error(error, code)
                else:
                    piece.answer.finish(tensors)
            except BaseException:
                _logger.exception("sending the end of request %d failed", piece.request_id)
                self._give_up(piece.request_id)
                piece.answer.abandon(_NOT_SENT)
            del self._streams[piece.request_id]
            self.progress.moved()

    def _make_last(self, piece: MergedResponse) -> dict[str, Array]:
        """The tensors that a request ends with; if that is an error its last tokens leave now."""
        try:
            if not piece.error:
                return piece.answer.make_last(piece.ids, piece.extras.joined())
            if piece.ids:
                piece.answer.send(piece.ids, piece.extras.joined())
        except BaseException:
            _logger.exception("the end of request %d could not be put together", piece.request_id)
            self._give_up(piece.request_id)
        return {}

    def _give_up(self, request_id: int) -> None:
        """Stop a request, whose end will be an error; never raises."""
        if (answer := self._streams.get(request_id)) is not None:
            answer.fail(_NOT_SENT)
        try:
            self._stop_request(request_id)
        except BaseException:
            _logger.exception("request %d could not be stopped", request_id)


def _send_answer(stream: ResponseSender, name: str, text: str) -> None:
    try:
        stream.send({name: np.array([[text.encode()]], dtype=np.object_)}, is_final=True)
    except BaseException:
        _logger.exception("sending an answer failed")
        stream.abandon("the answer could not be sent")
