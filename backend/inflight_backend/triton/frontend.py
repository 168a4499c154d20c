"""Everything `execute` does with one Triton request: check it, queue it, or answer it at once.

Several answers to one prompt are one Triton request and one request of the batch manager each,
told apart by ``sequence_index``. They end together: the Triton request ends with the last one. An
error of one ends all: the others are stopped, and the client gets the error when they have ended,
so that nothing is held any more. With block reuse the sequences share the blocks of the prompt,
since the scheduler lets the first one compute them. Sequence i samples with seed + i, so sequence 0
is what the request would have got alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight_backend.errors import CapacityExceeded, ErrorText, InvalidRequest, ServingError
from inflight_backend.log import get_logger
from inflight_backend.manager.responses import make_unstarted_tensors
from inflight_backend.manager.statistics import EventCounter
from inflight_backend.manager.wait_reasons import PREPARING
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import validate
from inflight_backend.text.generation_config import to_inputs
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton.feeds import StatisticsFeeds
from inflight_backend.triton.introspection import Introspection, ModelInfo
from inflight_backend.triton.queue import RequestIds, RequestQueue
from inflight_backend.triton.relay_server import RelayConnection
from inflight_backend.triton.relay_wire import RelayedRequest, RelayedResponseFactory
from inflight_backend.triton.shared_answers import SharedAnswers, SharedResponseFactory
from inflight_backend.triton.watchdog import Progress
from inflight_backend.triton_io.aliases import expand
from inflight_backend.triton_io.answer_stream import AnswerStream
from inflight_backend.triton_io.inputs import read_head
from inflight_backend.triton_io.outputs import make_answer_stream, names_none
from inflight_backend.triton_io.request import Prompt, RequestKind, TritonRequest
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_scheduler import LlmRequest

if TYPE_CHECKING:
    from inflight_backend.manager.gpt_manager import GptManager


def copy_request(request: InferenceRequest, numbers: Sequence[int]) -> list[InferenceRequest]:
    """``request`` and, for each of ``numbers``, another one like it with a seed of its own."""
    copies = [request]
    for index, number in enumerate(numbers, start=1):
        copy = request.copy(number)
        if copy.has_tensor("random_seed"):
            seed = int(copy.get_tensor("random_seed").reshape(-1)[0]) + index
            copy.replace_tensor("random_seed", np.array([[seed % 2**64]], dtype=np.uint64))
        copies.append(copy)
    return copies


def _keep_deadlines(request: LlmRequest, begun: float) -> None:
    """Those of the answer that it goes on with: that has started, and runs since ``begun``."""
    request.queue_deadline = None
    if request.run_deadline is not None:
        request.run_deadline -= time.monotonic() - begun


_logger = get_logger(__name__)

_LAST_SECONDS = 1.0  # for what is stopped at the end to be freed; a step takes 0.03


class Frontend:
    """Accepts Triton requests and knows which are in flight. Never waits for the engine."""

    def __init__(
        self,
        factory: ResponseFactory,
        queue: RequestQueue,
        dispatcher: ResponseDispatcher,
        feeds: StatisticsFeeds,
        manager: GptManager,
        model_info: ModelInfo,
        codec: TextCodec | None,
        outputs: frozenset[str],
        *,
        why_not_ready: Callable[[], str],
        on_error: Callable[[], None],
    ) -> None:
        """``outputs``: those of the model's configuration, which may be another than our own.

        ``why_not_ready`` says why requests sent now will not be served; "" if they will.
        ``on_error`` is called when one more is among ``errors``, before its client hears of it.
        """
        self.progress = Progress()
        self.errors = EventCounter()  # by code: Triton counts these requests as successes
        self._factory = factory
        self._coded = replace(factory, tells_codes=True)
        self._relayed = RelayedResponseFactory(factory.pb_utils)
        self._queue = queue
        self._dispatcher = dispatcher
        self._feeds = feeds
        self._shared = SharedAnswers(dispatcher.call_soon)
        self._manager = manager
        self._introspection = Introspection(manager, queue, dispatcher, model_info)
        self._codec = codec
        self._default_sampling = to_inputs(model_info.default_sampling)
        self._outputs = outputs
        self._why_not_ready = why_not_ready
        self._on_error = on_error
        self._accepting = threading.Lock()  # Triton's thread and those of relayed requests
        self._ids = RequestIds()
        self._live: dict[int, ResponseSender] = {}
        self._groups: dict[int, list[int]] = {}  # of requests with several sequences

    @property
    def num_live(self) -> int:
        """Generation requests accepted and not ended."""
        return len(self._live)

    @property
    def has_streams(self) -> bool:
        """True while a client may leave: a request is in flight, a feed or shared stream open."""
        return bool(self._live or self._feeds or self._shared)

    def accept(self, triton_request: Any) -> None:
        """Take one request; it is answered here or later, but always exactly once to the end."""
        head = read_head(triton_request)
        factory = self._coded if head.asks_for_codes else self._factory
        sender = triton_request.get_response_sender()
        if (shared := self._shared.sender(head.shared, sender)) is not None:
            sender, factory = (
                shared,
                SharedResponseFactory(factory.pb_utils, factory.is_decoupled, factory.tells_codes),
            )
        stream = ResponseSender(sender, factory, count_error=self._count_error)
        self._take(stream, lambda: TritonRequest.read(triton_request, head, self._outputs))

    def accept_relayed(self, request: RelayedRequest, way_back: RelayConnection) -> None:
        """`accept` a request of another model of ours."""
        stream = ResponseSender(
            way_back, self._relayed, lambda: way_back.is_behind, count_error=self._count_error
        )
        outputs = frozenset(request.requested)
        self._take(
            stream,
            lambda: TritonRequest.from_inputs("", expand(request.inputs), outputs),
            begun=request.begun,
        )

    def stop_group(self, number: int) -> None:
        """Stop a Triton request in flight: all its sequences."""
        self._stop_each(self._groups.get(number, [number]))

    def stop(self, number: int) -> None:
        """Stop one sequence in flight, waiting or running."""
        request = self._queue.stop(number)
        if request is None:
            self._manager.wake()
            return
        assert request.llm_request is not None, "validated before it was queued"
        tensors = make_unstarted_tensors(request.llm_request, request.created_ns)
        self._dispatcher.send_response(number, tensors, True, "")

    def end_all(self, message: str) -> None:
        """Stop everything and end it with an error; what is not free after a second ends anyway."""
        for number, stream in list(self._live.items()):
            stream.end_with(message, "UNAVAILABLE")
            self.stop_group(number)
        deadline = time.monotonic() + _LAST_SECONDS
        while self._live and time.monotonic() < deadline:
            time.sleep(0.005)
        self.fail_all(message)

    def fail_all(self, message: str) -> None:
        """End every stream with an error now, without waiting for the thread that works on it.

        Never raises: one stream that breaks or is stuck in a send keeps no other from its end.
        """
        for number, stream in list(self._live.items()):
            numbers = self._groups.get(number, [number])  # the end of the stream forgets them
            stream.abort(message)
            self._stop_each(numbers)
        self.close_feeds()
        self._introspection.fail_all(message)

    def close_feeds(self) -> None:
        """End the streams that never end by themselves; never raises."""
        self._feeds.close()
        self._shared.close()

    def expire_queued(self) -> None:
        """End the requests whose deadline has passed in the queue, with an error that says why."""
        for overdue in self._queue.take_overdue():
            place = f"place {overdue.place} of {overdue.num_waiting} in the queue"
            why = self._manager.why_queued() if overdue.request.is_ready else PREPARING
            error = CapacityExceeded(f"not started before its deadline: {place}, and {why}")
            number = overdue.request.request_id
            self._dispatcher.send_response(number, (), True, ErrorText.of(error))

    def check_cancelled(self) -> None:
        """Look once at every open stream and stop those whose client has gone."""
        for number, stream in list(self._live.items()):
            if stream.is_cancelled():
                self.stop_group(number)
        self._feeds.check_cancelled()
        self._shared.check_cancelled()

    def _check_one_response(self, prompts: Sequence[Prompt], num_answers: int) -> None:
        """`InvalidRequest` for what has several responses, where Triton takes one only."""
        if self._factory.is_decoupled:
            return
        if any(prompt.is_streaming for prompt in prompts):
            raise InvalidRequest(
                "'streaming' needs a decoupled deployment: this one sends whole answers only"
            )
        if num_answers > 1:
            raise InvalidRequest(
                f"{num_answers} answers (rows of the prompt times 'num_return_sequences') need a "
                "decoupled deployment: this one sends one response per request"
            )

    def _stop_each(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.stop(number)

    def _take(
        self,
        stream: ResponseSender,
        read: Callable[[], TritonRequest],
        *,
        begun: float | None = None,
    ) -> None:
        """``begun``: when, for one that goes on with an answer."""
        with self._accepting, self.progress:
            try:
                request = read()
                match request.kind:
                    case RequestKind.GENERATE:
                        self._enqueue(request, stream, begun)
                    case RequestKind.STOP:
                        self._stop_by_name(request.request_id, stream)
                    case RequestKind.STATS:
                        self._send_stats(request, stream)
                    case RequestKind.SHARED:
                        self._share(request.request_id, stream)
                    case _:
                        self._inform(request, stream)
            except BaseException as error:  # whatever a request contains, it ends only itself
                self._refuse(stream, error)

    def _enqueue(
        self, triton_request: TritonRequest, stream: ResponseSender, begun: float | None
    ) -> None:
        continues = begun is not None
        name, prompts = triton_request.request_id, triton_request.prompts
        outputs = triton_request.outputs
        limits = self._manager.limits
        number = self._ids.reserve(name)
        numbers = [number]
        try:
            counts = [prompt.count_requests(self._manager.max_num_requests) for prompt in prompts]
            self._check_one_response(prompts, sum(counts))
            # Now, since validation starts to compile grammars.
            self._queue.check_room(sum(counts), continues=continues)
            numbers += [self._ids.reserve("") for _ in range(1, sum(counts))]
            if len(numbers) > 1:
                self._groups[number] = numbers
            open_: set[AnswerStream] = set()
            requests: list[InferenceRequest] = []
            for row, prompt in enumerate(prompts):
                own = numbers[len(requests) : len(requests) + counts[row]]
                request = prompt.make_request(own[0], self._codec, limits, self._default_sampling)
                for index, one in enumerate(copy_request(request, own[1:])):
                    llm_request = validate(one, limits)
                    if begun is not None:
                        _keep_deadlines(llm_request, begun)
                    answer = make_answer_stream(stream, one, prompt, outputs, self._codec)
                    if len(numbers) > 1:
                        open_.add(answer)
                        answer.open_, answer.stop_all = open_, partial(self._stop_each, numbers)
                    if len(prompts) > 1:
                        answer.set_index("batch_index", row, is_asked=names_none(outputs))
                    if len(own) > 1:
                        answer.set_index("sequence_index", index, is_asked=names_none(outputs))
                    self._dispatcher.open(one.request_id, answer)
                    requests.append(one)
            stream.on_final(lambda: self._forget(number, name))
            self._live[number] = stream  # from now on others may end it
            self._queue.put(*requests, continues=continues)
        except BaseException:
            for opened in numbers:
                self._dispatcher.discard(opened)
            self._forget(number, name)
            raise
        self._manager.wake()

    def _forget(self, number: int, name: str) -> None:
        self._live.pop(number, None)
        self._groups.pop(number, None)
        self._ids.release(name, number)

    def _stop_by_name(self, name: str, stream: ResponseSender) -> None:
        """Acknowledge at once, also for an id that is not in flight (any more)."""
        if not name:
            raise InvalidRequest("a stop request needs the request id of the request to stop")
        number = self._ids.find(name)
        if number is not None:
            self.stop_group(number)
        else:
            _logger.debug("stop for a request that is not in flight")
        stream.send({}, is_final=True)

    def _inform(self, request: TritonRequest, stream: ResponseSender) -> None:
        """Answer a request for information."""
        if request.kind is RequestKind.READY:
            if reason := self._why_not_ready():
                raise CapacityExceeded(reason)
            stream.send({}, is_final=True)
        elif request.kind is RequestKind.DESCRIBE:
            self._introspection.answer_description(stream)
        elif request.kind is RequestKind.RECORDING:
            self._introspection.answer_recording(stream)
        elif request.kind is RequestKind.LIVE:
            self._introspection.answer_live(
                request.cursor, request.wants_blocks, self._ids.names, stream
            )
        elif request.kind is RequestKind.ADAPTERS:
            self._introspection.answer_adapters(*request.adapter, stream)
        elif not request.request_id:
            raise InvalidRequest("'why' needs the request id of the request it asks about")
        else:
            number = self._ids.find(request.request_id)
            numbers = [] if number is None else self._groups.get(number, [number])
            self._introspection.answer_why(numbers, stream)

    def _send_stats(self, request: TritonRequest, stream: ResponseSender) -> None:
        """The last statistics at once, then one JSON per iteration unless streaming is off."""
        if not self._factory.is_decoupled or request.is_streaming is False:
            last = np.array([[self._last_stats().encode()]], dtype=np.object_)
            stream.send({"stats": last}, is_final=True)
            return
        if self._queue.is_draining:
            raise CapacityExceeded("the server is shutting down; it feeds no more statistics")
        self._feeds.open(stream, self._last_stats, lambda: self._queue.refusal)

    def _share(self, name: str, stream: ResponseSender) -> None:
        if not self._factory.is_decoupled:
            raise InvalidRequest("'shared' needs a decoupled deployment")
        if self._queue.is_draining:
            raise CapacityExceeded("the server is shutting down; it opens no more shared streams")
        self._shared.open(name, stream)

    def _last_stats(self) -> str:
        return self._queue.add_to(self._manager.stats_json)

    def _count_error(self, code: str) -> None:
        self.errors.add(code)
        self._on_error()

    def _refuse(self, stream: ResponseSender, error: BaseException) -> None:
        if stream.has_ended:  # by the watchdog, which has told why
            return
        if stream.is_closed:
            _logger.exception("an answer could not be sent", exc_info=error)
            stream.abandon("the answer could not be sent")
            return
        if isinstance(error, ServingError):
            stream.fail(str(error), error.code)
            return
        _logger.exception("a request could not be read", exc_info=error)
        stream.fail("the request could not be read")
