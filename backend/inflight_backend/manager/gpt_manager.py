"""`GptManager`: one worker thread that turns requests into tokens through four callbacks.

The contract is that of TensorRT-LLM's batch manager (`docs/source/batch_manager.md` and
`cpp/include/tensorrt_llm/batch_manager/GptManager.h`); names are its names in Python's spelling.

Order of one iteration, and what each part may do:

1. *get* new requests, as many as fit, and admit them (`RequestIntake`); end those whose deadline
   has passed;
2. *schedule*: which requests hold cache, which run; pause, assign slots and blocks, make the plan;
3. *execute* the plan on the engine and apply the tokens; finished requests release all they hold
   (in the overlapped loop these are the tokens of the step before, see `step_loop`);
4. *send* what was produced: only now, so that everything is free before a final response;
5. *poll stop signals*: these requests release all they hold, then get an ordinary final response;
6. *return statistics*, unless nothing was active.

A rejected request does not affect others; a failing step ends the requests of that step with an
error; a failing callback is logged; an unexpected exception fails all requests and resets the loop.
None of them stops the loop (see `LoopHealth`). Blocks or slots that are still held when no request
is active would stay lost, so `IdleCheck` compares the counts then.

While idle the loop waits for `GptManager.wake` if the owner of the callbacks promises to call it,
and otherwise polls the callbacks at growing intervals. A wake-up is never lost: new requests are
there before `wake`, and the loop asks for them after it has cleared the wake-up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from inflight_backend.calls import LoopCalls
from inflight_backend.engine.interface import RankedEngine, StepEngine
from inflight_backend.errors import ConfigurationError, EngineLost, ErrorText, InvalidRequest
from inflight_backend.guided.compiler import GuideService
from inflight_backend.kv_events import KvEventPublisher
from inflight_backend.log import get_logger
from inflight_backend.manager.batcher import (
    Batcher,
    effective_settings,
    load_engine,
    make_adapters,
)
from inflight_backend.manager.health import DeadlineWatch, LoopHealth
from inflight_backend.manager.intake import RequestIntake
from inflight_backend.manager.logits_processors import NO_TOKEN
from inflight_backend.manager.parameters import TrtGptModelOptionalParams, check_parameter
from inflight_backend.manager.responses import QueuedResponse, make_tensors
from inflight_backend.manager.statistics import (
    EventCounter,
    IterationStats,
    LengthHistograms,
    RequestParameters,
    RequestTimes,
)
from inflight_backend.manager.step_loop import StepLoop
from inflight_backend.manager.wait_reasons import (
    WaitReasons,
    describe_wait,
    expiry_error,
    why_queued,
)
from inflight_backend.requests.inference_request import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from inflight_backend.requests.stop_words import StopWordWatch
from inflight_scheduler import (
    CapacitySchedulerPolicy,
    FinishReason,
    LlmRequest,
    ScheduledBatch,
    TrtGptModelType,
)

if TYPE_CHECKING:
    from inflight_backend.guided.matchers import CompiledGuide


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
                _logger.exception("the %s callback failed (logged once)", name)
            return None

    def call_for_list(
        self, name: str, callback: Callable[..., Iterable[_Result] | None], *args: object
    ) -> list[_Result]:
        """What a callback returns, as a list; empty if that is None or no collection.

        If it is a generator that raises, the items before are kept.
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
        """The same for ids of requests; items that are no integers (also numpy's) are logged."""
        items = self.call_for_list(name, callback)
        for item in items:
            if not isinstance(item, Integral):
                _logger.error("the %s callback returned a %s", name, type(item).__name__)
        return [int(item) for item in items if isinstance(item, Integral)]


FULL_SECONDS = 60.0
"""Seconds between full checks, which take O(blocks); the counts are compared every time."""


class IdleCheck:
    """Checks that everything is free when the loop becomes idle; used by the loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_due = False
        self._next_full = clock()
        self.num_repairs = 0
        """How often something was not free, and the batcher was rebuilt."""

    def finds_fault(self, batcher: Batcher, *, is_running: bool) -> bool:
        """Call it in every turn. True, with an error in the log, if no request is active, no step
        `is_running`, and blocks or slots are held or the tables are inconsistent."""
        if is_running or batcher.active:
            self._is_due = True
            return False
        if not self._is_due:
            return False
        self._is_due = False
        is_full = self._clock() >= self._next_full
        if is_full:
            self._next_full = self._clock() + FULL_SECONDS
        if batcher.is_idle_and_intact() if is_full else batcher.is_idle_and_free():
            return False
        self.num_repairs += 1
        _logger.error(
            "no request is active, but %d blocks and %d slots are held or the tables are "
            "inconsistent: they are rebuilt",
            batcher.block_manager.num_used_blocks,
            batcher.num_used_slots,
        )
        return True


TURN_SECONDS = 5.0
"""The longest wait of a loop that is woken for new requests: the time stamp of its statistics shows
that it runs."""

_FIRST_POLL_SECONDS = 0.005
LAST_POLL_SECONDS = 0.05
"""The longest interval at which callbacks are polled."""


class IdleWait:
    """Lets an idle loop wait until it is woken or must poll its callbacks."""

    def __init__(self, guard: CallbackGuard, poll_when_idle: Callable[[], bool]) -> None:
        """``poll_when_idle``: True if the callbacks may return something new without a call of
        `wake`; an exception, which ``guard`` logs, counts as True."""
        self._guard = guard
        self._poll_when_idle = poll_when_idle
        self._event = threading.Event()
        self._poll_seconds = _FIRST_POLL_SECONDS

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        self._event.set()

    def after_turn(self, *, is_idle: bool, has_requests: bool) -> None:
        """After a turn that did nothing, wait for something to do.

        If the loop ``has_requests`` it polls: they may continue or expire by time alone.
        """
        if not is_idle:
            self._poll_seconds = _FIRST_POLL_SECONDS
            return
        seconds = TURN_SECONDS
        if has_requests or self._must_poll():
            seconds = self._poll_seconds
            self._poll_seconds = min(2 * seconds, LAST_POLL_SECONDS)
        self._event.wait(seconds)
        self._event.clear()

    def _must_poll(self) -> bool:
        return self._guard.call("poll_when_idle", self._poll_when_idle) is not False


_NON_FINITE = -1  # the engine's token for a row without finite logits
_NO_BATCH = ScheduledBatch(iteration=0)


class GptManager:
    """Owns the loop, the requests in flight and their KV blocks; see the module's docstring.

    ``model`` is a Hugging Face checkpoint folder (or an engine that is loaded already). The
    callbacks run on the worker thread, which starts at once. Use it as a context manager or call
    `shutdown`. ``scheduler_policy`` may be any name that `register_policy` knows. With
    ``model_type`` V1 the policy is STATIC_BATCH whatever ``scheduler_policy`` says, and streaming
    requests get one whole answer (see `batcher`).

    An id that `get_inference_requests_cb` returns while it is in flight is logged and not
    accepted: an error response would end the running request. ``terminate_req_id``: a request
    with this id ends the loop once everything in flight has finished.

    ``poll_when_idle`` is called when nothing is in flight: True, the default, polls the callbacks
    after 5 ms, then at growing intervals up to 50 ms; False waits for `wake`, which must then
    follow each new request and stop signal.

    `ConfigurationError` or `CheckpointError` if a setting or the checkpoint cannot be served.
    """

    def __init__(
        self,
        model: str | Path | StepEngine,
        model_type: TrtGptModelType,
        max_beam_width: int,
        scheduler_policy: CapacitySchedulerPolicy | str,
        get_inference_requests_cb: GetInferenceRequestsCallback,
        send_response_cb: SendResponseCallback,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
        exclude_input_in_output: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        poll_when_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        check_parameter("max_beam_width", max_beam_width)
        policy, params = effective_settings(model_type, scheduler_policy, optional_params)
        engine = load_engine(model, params, on_progress, max_beam_width)
        is_v1 = model_type == TrtGptModelType.V1
        adapters = make_adapters(engine, params, model)
        self.adapters = None if adapters is None else adapters.service
        self.lengths, self.events = LengthHistograms(), EventCounter()
        self.times = RequestTimes()
        self._kv_events = self._publish_kv_events(engine, params)
        batcher = Batcher(
            engine,
            policy,
            params,
            max_beam_width,
            is_v1=is_v1,
            adapters=adapters,
            kv_events=self._kv_events,
        )
        self._use(batcher)
        self._guide_service = GuideService(
            params.guided_decoding_config,
            Path(model) if isinstance(model, str | Path) else None,
            engine.vocab_size,
        )
        self._rules = self._batcher.rules
        self._rules.mask_maker.tokenizer_end_id = self._guide_service.end_id
        self.model_type = model_type
        self.limits = self._batcher.make_limits(
            exclude_input_in_output=exclude_input_in_output,
            may_stream=not is_v1,
            start_guide=lambda guide: self._guide_service.start(guide, self.wake),
            guided_end_id=self._guide_service.end_id,
            guided_more_end_ids=self._guide_service.more_end_ids,
        )
        self._intake = RequestIntake(
            self.limits,
            lambda request_id: self._active.get(request_id) is not None,
            self._activate,
            self._refuse,
        )
        self.max_num_requests = params.max_batch_size
        self._get_cb = get_inference_requests_cb
        self._send_cb = send_response_cb
        self._poll_cb = poll_stop_signal_cb
        self._stats_cb = return_batch_manager_stats_cb
        self._terminate_req_id = terminate_req_id
        self.health, self._idle_check = LoopHealth(), IdleCheck()
        self._responses: deque[QueuedResponse] = deque()
        self._iteration = self._num_waiting = 0
        self._batch, self._is_idle = _NO_BATCH, True
        self._guard = CallbackGuard()
        self._stats = self._measure()
        self._calls = LoopCalls(self.wake)
        self._is_closing = False
        self._tell_lost: list[Callable[[str], None]] = []
        self._idle_wait = IdleWait(self._guard, poll_when_idle)
        if isinstance(engine, RankedEngine):
            engine.when_lost(self._note_lost)
        is_prepared = self._calls.call_soon(engine.prepare_thread)
        self._thread = threading.Thread(target=self._run, name="GptManager", daemon=True)
        self._thread.start()
        if is_prepared.exception() is not None:
            self.shutdown()
        is_prepared.result()

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def stats_json(self) -> str:
        """The statistics of the last iteration; while idle, of an iteration without a step."""
        return self._stats.to_json()

    def adapter_labels(self) -> dict[str, str]:
        """The labels of `LORA_REQUESTS` as of the last iteration; none without LoRA."""
        return self._batcher.adapter_labels()

    def describe_load(self) -> str:
        """The load after the last iteration, for error messages; from any thread."""
        return self._stats.describe_load()

    @property
    def engine(self) -> StepEngine:
        """The engine that runs the plans."""
        return self._batcher.engine

    @property
    def policy(self) -> CapacitySchedulerPolicy | str:
        """The capacity policy in force; one outside the Executor API by its name."""
        return self._batcher.policy

    def get_num_active_requests(self) -> int:
        """Requests accepted and not finished."""
        return len(self._active) + len(self._intake)

    def why_queued(self) -> str:
        """Why a request that was not fetched yet has to wait; from any thread."""
        return why_queued(self.get_num_active_requests(), self.max_num_requests)

    def wake(self) -> None:
        """Poll for requests and stop signals now, also while idle; from any thread."""
        self._idle_wait.wake()

    def why(self, *request_ids: int) -> Future[dict[str, Any]]:
        """The state of the first active one of these, and why it waits; from any thread."""
        return self._calls.call_soon(lambda: describe_wait(self._batcher, *request_ids))

    def inspect(
        self, look: Callable[[Batcher, RequestTimes, IterationStats], _Result]
    ) -> Future[_Result]:
        """What ``look`` finds between two iterations, on the thread of the loop; it must be quick
        and change nothing. From any thread."""
        return self._calls.call_soon(lambda: look(self._batcher, self.times, self._stats))

    def recording(self) -> Future[Iterator[str]]:
        """The recorded lines of recent iterations (see `FlightRecorder`); from any thread."""
        return self._calls.call_soon(self._batcher.recorder.lines)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Have ``tell`` called with the reason, on any thread, when a rank of the engine is lost;
        the loop, which may wait for that rank, ends all requests as soon as it can."""
        self._tell_lost.append(tell)
        if self.health.is_engine_lost:
            tell(str(EngineLost()))

    def _note_lost(self) -> None:
        self.health.lose_engine()
        for tell in self._tell_lost:
            tell(str(EngineLost()))
        self.wake()

    def shutdown(self) -> None:
        """End the loop once no request is active, and wait for that."""
        self._is_closing = True
        self.wake()
        self.wait_until_terminate()

    def wait_until_terminate(self) -> None:
        """Wait until the loop has ended, by `shutdown` or by ``terminate_req_id``."""
        self._thread.join()

    # The loop. Everything below runs on the worker thread only.

    def _run(self) -> None:
        self._calls.run_pending()  # the engine's `prepare_thread`
        while True:
            self.health.iteration_begins()
            try:
                self._iterate()
            except BaseException:  # our bug, or a callback that wants to end the thread
                with self.health.recovering(self._iteration):
                    self._reset()
            self._calls.run_pending()  # also if every iteration fails
            self.health.iteration_ends(has_work=bool(self._active))
            has_requests = self.get_num_active_requests() > 0
            if self._is_closing and not has_requests:
                break
            is_idle = self._is_idle and not self._steps.is_running
            self._idle_wait.after_turn(is_idle=is_idle, has_requests=has_requests)
        try:
            self._batcher.recorder.close()
            self._guide_service.close()
            if self._kv_events is not None:
                self._kv_events.close()
            if isinstance(self.engine, RankedEngine):
                self.engine.close()
        finally:
            self._calls.close()

    def _iterate(self) -> None:
        if not self._is_closing:
            self.fetch_new_requests()
        if self.health.is_engine_lost and self.get_num_active_requests():
            self._end_all(str(EngineLost()))
        self._intake.admit_ready()
        was_active = bool(self._active)
        self.finish_timed_out_requests()
        self.step()
        self.return_completed_requests()
        self.poll_stop_signals()
        self._batcher.recorder.finish_iteration()
        if self._kv_events is not None:
            self._kv_events.end_iteration()
        self._stats = self._measure()
        if was_active:
            self.return_batch_manager_stats()
        if self._idle_check.finds_fault(self._batcher, is_running=self._steps.is_running):
            self._rebuild()

    def fetch_new_requests(self) -> None:
        """Get new requests and admit them."""
        room = max(self.max_num_requests - self.get_num_active_requests(), 0)  # not "no bound"
        for request in self._guard.call_for_list("get_inference_requests", self._get_cb, room):
            is_request = isinstance(request, InferenceRequest)
            if is_request and request.request_id == self._terminate_req_id:
                self._is_closing = True
            else:
                self._intake.accept(request)

    def finish_timed_out_requests(self) -> None:
        """End requests past a deadline; without any token that is an error with the reason."""
        if not (expired_requests := self._deadlines.take_expired()):
            return
        waits = WaitReasons.of(self._batcher)  # before one of them frees its blocks
        for expired in expired_requests:
            request = expired.request
            error = expiry_error(expired, waits)
            request.finish(FinishReason.TIMED_OUT)
            self._end(request, error)

    def step(self) -> None:
        """Schedule, execute, update; nothing when no request is active."""
        outcome = self._steps.run_once()
        self._batch = outcome.batch
        self.events.add("pause", self._batcher.num_paused)
        self._is_idle = self._batch.is_empty and not outcome.is_completed
        batch_size = len(self._batch.context_chunks) + self._batch.num_generation_requests
        self._num_waiting = len(self._active) - batch_size
        self._iteration += not self._batch.is_empty
        self.health.note(
            is_completed=outcome.is_completed,
            has_failed=bool(outcome.failed),
            is_device_lost=self._steps.has_lost_device,
        )
        self._gatherer.executed(outcome.advanced, outcome.outputs)
        self.times.stepped(self._batch, outcome.advanced, self._batcher.num_paused)
        self._stop_words.check()
        for request in outcome.concerned(self._active):
            self._apply(request)
        for request in outcome.failed:
            if self._active.get(request.request_id) is request:  # else a later one has its id
                self._end(request, self._steps.why_failed)

    def return_completed_requests(self) -> None:
        """Send all responses of this iteration; everything of finished requests is free.

        Responses leave their list one by one, so an exception here loses no other response.
        """
        if any(each.is_final for each in self._responses):
            self._stats = self._measure()  # a client may read them after its final response
        while self._responses:
            response = self._responses.popleft()
            request, is_final, error = response.request, response.is_final, response.error
            try:
                tensors = [] if error else make_tensors(request, is_final, self._gatherer)
            except BaseException:  # only this request ends with an error
                _logger.exception("a response of request %d cannot be built", request.request_id)
                self._end_instead(request, "the response could not be built")
                continue
            if error:
                self._gatherer.discard(request.request_id)
            self._guard.call(
                "send_response", self._send_cb, request.request_id, tensors, is_final, error
            )

    def poll_stop_signals(self) -> None:
        """End the requests named by the stop callback; unknown ids are ignored."""
        if self._poll_cb is None:
            return
        for request_id in self._guard.call_for_ids("poll_stop_signal", self._poll_cb):
            self._intake.stop_waiting(request_id)
            request = self._active.get(request_id)
            if request is not None:
                request.finish(FinishReason.CANCELLED)
                self._end(request)
        self.return_completed_requests()

    def return_batch_manager_stats(self) -> None:
        """Hand the JSON of this iteration to the statistics callback."""
        if self._stats_cb is not None:
            self._guard.call("return_batch_manager_stats", self._stats_cb, self._stats.to_json())

    def _refuse(self, request_id: int, error: str) -> None:
        self._guard.call("send_response", self._send_cb, request_id, [], True, error)

    def _activate(
        self, request: InferenceRequest, llm_request: LlmRequest, guide: CompiledGuide | None
    ) -> None:
        """Make a request known to all parts of the manager, or to none."""
        if self.adapters is not None and llm_request.lora_task_id is not None:
            self.adapters.store.acquire(llm_request.lora_task_id, request.adapter)
        try:
            self._rules.add(request, guide)
            self._active.add(llm_request)
            self._deadlines.add(llm_request)
            if llm_request.beams is None:  # a beam search checks them in each beam
                self._stop_words.add(llm_request, llm_request.stop_words)
            self._gatherer.add(llm_request, request.created_ns)
            self.times.arrived(llm_request.request_id, request.created_ns)
            self.times.parameters.append(RequestParameters.of(llm_request))
            self._batcher.recorder.arrived(llm_request, request.created_ns)
        except BaseException:
            self._rules.discard(llm_request.request_id)
            self._stop_words.forget(llm_request)
            self._gatherer.discard(llm_request.request_id)
            self.times.ended(llm_request, "withdrawn")
            self._batcher.recorder.withdrawn(llm_request)
            self._active.remove(llm_request)
            self._release_adapter(llm_request)
            raise
        finally:
            request.adapter = None  # as above: the object may be sent again

    def _release_adapter(self, request: LlmRequest) -> None:
        if self.adapters is not None and request.lora_task_id is not None:
            self.adapters.store.release(request.lora_task_id)

    def _apply(self, request: LlmRequest) -> None:
        """Queue a response for a new token, or end its request."""
        num_known = request.num_drawn_tokens
        if request.tokens[num_known - 1] == _NON_FINITE:
            reason = self._rules.why_no_token(request.request_id)
            self._end(request, ErrorText.of(InvalidRequest(reason)) if reason else NO_TOKEN)
        elif request.is_finished:
            self._end(request)
        elif request.is_streaming and num_known > request.orig_prompt_len + request.num_sent_tokens:
            self._responses.append(QueuedResponse(request, is_final=False))

    def _end(self, request: LlmRequest, error: str = "") -> None:
        """Release everything of a request, then queue its final response."""
        self._rules.discard(request.request_id)
        self._batcher.planner.release(request)
        if self._active.remove(request):
            self._release_adapter(request)
            self._responses.append(QueuedResponse(request, is_final=True, error=error))
            self.health.ended()
            self.times.ended(request, error)
            if not error:
                self.lengths.ended(request)
            self._stop_words.forget(request)
            self._batcher.recorder.ended(request, error)

    def _end_instead(self, request: LlmRequest, error: str) -> None:
        """Replace the queued responses of a request by a final one with ``error``."""
        self._responses = deque(each for each in self._responses if each.request is not request)
        if self._active.get(request.request_id) is request:
            self._end(request, error)
        else:  # it was released already: this replaces its final response
            self._responses.append(QueuedResponse(request, is_final=True, error=error))

    def _publish_kv_events(
        self, engine: StepEngine, params: TrtGptModelOptionalParams
    ) -> KvEventPublisher | None:
        """None if they are not wanted; `ConfigurationError` if nothing is kept to tell of."""
        if params.kv_events is None:
            return None
        if not params.kv_cache_config.enable_block_reuse:
            raise ConfigurationError(
                "kv_events tells what is cached, but enable_kv_cache_reuse is false: set it to "
                "true or remove kv_events"
            )
        if not engine.supports_block_reuse:
            raise ConfigurationError(
                "kv_events tells what is cached, but this checkpoint does not allow KV cache "
                "reuse: remove kv_events"
            )
        if engine.windows[0] is not None:
            raise ConfigurationError(
                "kv_events tells what layers with full attention have cached, and this checkpoint "
                "has none: remove kv_events"
            )
        return KvEventPublisher(
            params.kv_events,
            engine.tokens_per_block,
            replay_endpoint=params.kv_events_replay,
            topic=params.kv_events_topic or "",
            event_format=params.kv_events_format,
            on_drop=lambda: self.events.add("kv_events_dropped"),
            **({} if self.adapters is None else {"name_of": self.adapters.name_of}),
        )

    def _measure(self) -> IterationStats:
        return self._batcher.measure(
            self._batch,
            iteration=self._iteration,
            num_waiting=self._num_waiting,
            num_repairs=self._idle_check.num_repairs,
        )

    def _reset(self) -> None:
        """End all requests with an error; rebuild the batcher if it may be damaged."""
        self._batch, self._is_idle = _NO_BATCH, True
        try:
            self._end_all("the batch manager failed while it held this request")
        finally:
            self._steps.abandon()
            # It is unknown how far a step came that had begun, also to the recording.
            is_intact = self._batcher.is_idle_and_intact() and self._batcher.planner.is_at_rest
            if self.health.has_failed_again or not is_intact:
                self._rebuild()

    def _rebuild(self) -> None:
        """Replace the batcher by one with free blocks and slots; no request or step is active."""
        self._use(self._batcher.rebuild())
        self._batcher.rules = self._rules

    def _use(self, batcher: Batcher) -> None:
        self._batcher, self._steps = batcher, StepLoop(batcher)
        self._active, self._gatherer = batcher.active, batcher.gatherer
        self._deadlines, self._stop_words = DeadlineWatch(batcher.active), StopWordWatch()

    def _end_all(self, error: str) -> None:
        """All requests in flight get a final response with ``error``, even if a release fails."""
        self._intake.end_waiting(error)
        requests = list(self._active)
        for request in requests:
            try:
                self._end(request, error)
            except BaseException:
                _logger.exception("request %d could not release all it held", request.request_id)
        have_final = {each.request.request_id for each in self._responses if each.is_final}
        self._responses += [
            QueuedResponse(request, is_final=True, error=error)
            for request in requests
            if request.request_id not in have_final
        ]
        self._batcher.recorder.finish_iteration()
        self.return_completed_requests()
