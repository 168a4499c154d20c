"""`TritonPythonModel`: what Triton's Python backend loads, calls and unloads.

Glue only. `execute` hands requests to the `Frontend` and returns at once; the loop runs on the
worker thread of `GptManager`, responses leave on the thread of the `ResponseDispatcher`. The
`PeriodicTasks` look for cancelled requests and for the wish to drain, the `Watchdog` for progress.
The `RelayListener` receives requests from our other models.

`initialize` refuses what would fail later or silently not work: a tritonserver whose Python stub
cannot run us, and settings of config.pbtxt that Triton accepts but ignores for this model, or
applies beside it. The limit of its queue is the model's, as with `tensorrtllm_backend`.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_backend.log import get_logger
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import (
    ServerParameters,
    TrtGptModelOptionalParams,
    parse_parameters,
    read_raw,
    set_or_empty,
)
from inflight_backend.models.checkpoint_files import checkpoint_name
from inflight_backend.process_guard import exit_with_parent
from inflight_backend.requests.validation import longest_text
from inflight_backend.status import StatusWriter, stop_file_of
from inflight_backend.text.generation_config import read_default_sampling
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.dispatcher import ResponseDispatcher
from inflight_backend.triton.feeds import StatisticsFeeds
from inflight_backend.triton.frontend import Frontend
from inflight_backend.triton.introspection import ModelInfo
from inflight_backend.triton.metrics import TritonMetrics
from inflight_backend.triton.queue import DRAINING, RequestQueue
from inflight_backend.triton.relay_server import RelayConnection, RelayListener
from inflight_backend.triton.relay_wire import RelayedRequest
from inflight_backend.triton.watchdog import (
    BEAT_SECONDS,
    PeriodicTask,
    PeriodicTasks,
    Watchdog,
)
from inflight_backend.triton_io.sender import ResponseFactory
from inflight_protocol import DRAFT_MODEL_NAME, ERRORS, EVENTS
from inflight_scheduler import TrtGptModelType, policy_name

_OWN_STUB = Path("/proc/self/exe")
# Named by pybind11 from 2.12 on, the first one that knows numpy 2 (python_backend#384).
_KNOWS_NUMPY_2 = b"NumpyVersion"
_NEEDED = (
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceResponse",
    "Logger",
    "MetricFamily.HISTOGRAM",
    "Tensor",
    "TritonError.ALREADY_EXISTS",
    "TritonError.INVALID_ARG",
    "TritonError.UNAVAILABLE",
    "TritonError.UNSUPPORTED",
)


def check_own_stub(pb_utils: Any) -> None:
    """`ConfigurationError` unless the stub of Triton's that we run in can do what we need."""
    for name in _NEEDED:
        owner = pb_utils
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            raise ConfigurationError(
                f"this tritonserver is too old: its Python backend has no {name}; use 24.10 or "
                "newer"
            )
    check_numpy(np.__version__, _OWN_STUB)


def check_numpy(version: str, stub: Path) -> None:
    """`ConfigurationError` for a numpy that ``stub``, the program of a model process, cannot work
    with."""
    if int(version.split(".")[0]) >= 2 and _KNOWS_NUMPY_2 not in stub.read_bytes():
        raise ConfigurationError(
            f"numpy {version} is too new for this tritonserver: text inputs would crash it; "
            "install a version below 2 with: pip install 'numpy<2'"
        )


_PROMPTS = ("input_ids", "text_input")
_GPU = ("KIND_GPU", "GPU")
_LIMIT = "max_queue_size"


def check_config(config: Mapping[str, Any], args: Mapping[str, str]) -> None:
    """`ConfigurationError` for what cannot be done; ``args`` are those of ``initialize``."""
    names = {each["name"] for each in config.get("input", ())}
    if not names.intersection(_PROMPTS):
        raise ConfigurationError(
            "the configuration of this model has neither input 'input_ids' nor 'text_input': write "
            "config.pbtxt with `inflight model-repository`; a configuration that is given with a "
            "load request takes its place as a whole"
        )
    _check_instances(config, args)
    if config.get("response_cache", {}).get("enable"):
        raise ConfigurationError(
            "response_cache is not for this model: stop and ready requests would be answered from "
            "it, and sampled answers repeated; leave it out (enable_kv_cache_reuse shares what "
            "prompts have in common)"
        )
    _check_queue(config)


def with_queue_limit(parameters: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """``parameters`` with the limit of Triton's queue as ``max_queue_size``, if there is one: there
    `tensorrtllm_backend` has it. `ConfigurationError` if they say something else."""
    limit = int(_queue_policy(config).get(_LIMIT, 0))
    own = set_or_empty(parameters.get(_LIMIT, ""))
    if limit and own and own != str(limit):
        raise ConfigurationError(
            f"dynamic_batching.default_queue_policy.{_LIMIT} is {limit} and the parameter {_LIMIT} "
            f"is {own}: they mean the same, leave one of them out"
        )
    return {**parameters, _LIMIT: str(limit)} if limit else dict(parameters)


def _queue_policy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    policy: Mapping[str, Any] = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return policy


def _check_instances(config: Mapping[str, Any], args: Mapping[str, str]) -> None:
    groups = config.get("instance_group", ())
    num_instances = sum(_num_instances(group) for group in groups)
    # Triton may add one to that which runs, and tells it the configuration of before.
    name = args.get("model_instance_name", "")
    if num_instances > 1 or any(_is_another(name, group) for group in groups):
        raise ConfigurationError(
            f"instance_group asks for {max(num_instances, 2)} instances of this model, and one "
            "batches all requests, since a stop request must reach what it stops: set count to 1, "
            "with one GPU at most; for more GPUs start a server for each (CUDA_VISIBLE_DEVICES)"
        )
    device = args.get("model_instance_device_id", "0")
    if args.get("model_instance_kind") in _GPU and device != "0":
        raise ConfigurationError(
            f"instance_group names GPU {device}, and this model runs on the first one that its "
            f"server sees: start it with CUDA_VISIBLE_DEVICES={device} and leave gpus out"
        )


def _is_another(name: str, group: Mapping[str, Any]) -> bool:
    """True if ``name`` is that of an instance of ``group`` behind its first."""
    number = name.removeprefix(f"{group.get('name', '')}_")
    return number != name and number.isdecimal() and int(number) > 0


def _num_instances(group: Mapping[str, Any]) -> int:
    num_devices = len(group.get("gpus", ())) if group.get("kind") in _GPU else 1
    return int(group.get("count", 1)) * max(num_devices, 1)


def _check_queue(config: Mapping[str, Any]) -> None:
    """Requests pass through Triton's queue at once and wait in the model."""
    key = "default_timeout_microseconds"
    if timeout := int(_queue_policy(config).get(key, 0)):
        raise ConfigurationError(
            f"dynamic_batching.default_queue_policy.{key} is {timeout}, but requests wait in the "
            "model, not in Triton's queue: leave it out; the parameter max_queue_seconds bounds "
            "how long they wait"
        )
    if levels := int(config.get("dynamic_batching", {}).get("priority_levels", 0)):
        raise ConfigurationError(
            f"dynamic_batching.priority_levels is {levels}, but requests wait in the model, not in "
            "Triton's queue: leave it out; the input 'priority' orders them"
        )


_logger = get_logger(__name__)

# With the default of 5 ms a sending thread waits that long for the interpreter lock whenever
# Python code runs on another one: 200 responses a second. 0.5 ms costs nothing measurable.
_SWITCH_INTERVAL_SECONDS = 0.0005
_STDERR = 2
_DRAIN_CHECK_SECONDS = 0.1
_IDLE_DRAIN_CHECK_SECONDS = 0.5
_IDLE_METRICS_SECONDS = 5.0  # an idle server's change by their time stamp only
_DEADLINE_CHECK_SECONDS = 0.02  # of requests in the queue; the batch manager looks by itself
_LEAVING_CHECK_SECONDS = 0.05
_FROZEN_RELAY_SECONDS = 5.0
_METRICS_SECONDS = 1.0  # an update takes 1 ms
_TIMES_SECONDS = 1.0  # some 100 counters, of 0.04 ms each
_GAUGES_SECONDS = 0.01  # 20 gauges, of 0.04 ms each
_STALLED = "the server makes no progress; send the request to another server"
_FAILING = "one step after the other fails"
_LEAVING = "the server is shutting down: this answer is not complete"

_MODEL_TYPES = {
    "v1": TrtGptModelType.V1,
    "inflight_batching": TrtGptModelType.InflightBatching,
    "inflight_fused_batching": TrtGptModelType.InflightFusedBatching,
}


class TritonPythonModel:
    """The model ``tensorrt_llm``; see `inflight_protocol` for its tensors and parameters."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and start the threads; any failure fails the load with one line."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        faulthandler.enable(_STDERR)  # a crash in native code says in the log where it was
        exit_with_parent(args["model_name"])
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        _honour_pythonpath()
        config = json.loads(args["model_config"])
        raw = read_raw(args["model_config"])
        status = StatusWriter(set_or_empty(raw.get("status_file", "")))
        try:
            with status.beating(BEAT_SECONDS):
                check_own_stub(pb_utils)
                check_config(config, args)
                parameters = parse_parameters(with_queue_limit(raw, config))
                self._start(pb_utils, args, config, parameters, status)
        except ServingError as error:
            status.write("failed", error=str(error))
            raise pb_utils.TritonModelException(str(error)) from None
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            status.write("failed", error=f"{type(error).__name__}: {first_line}")
            raise

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests; their responses leave through their response senders."""
        for request in requests:
            self._frontend.accept(request)
        self._periodic_tasks.wake()

    def is_ready(self) -> bool:
        """For Triton's readiness checks (python_backend#430): requests sent now will be served."""
        return not self._why_not_ready()

    def _why_not_ready(self) -> str:
        if self._queue.is_draining:
            return DRAINING
        if self._lost:
            return self._lost
        if self._watchdog.is_stalled:
            return _STALLED
        return "" if self._manager.health.is_healthy else _FAILING

    def finalize(self) -> None:
        """Stop what still runs, and every thread but one that is stuck."""
        faulthandler.disable()  # Triton 24.10 often crashes when its model process ends
        self._finish_relayed()
        self._queue.drain()  # not before: no model loaded again would get what has come
        try:
            self._frontend.end_all(_LEAVING)
        finally:
            threads = threading.Thread(target=self._end_threads, name="Leaving", daemon=True)
            threads.start()
            while threads.is_alive() and not self._watchdog.is_stalled:
                threads.join(_LEAVING_CHECK_SECONDS)
            self._watchdog.close()

    def _finish_relayed(self) -> None:
        """Deliver the streams that are relayed, as Triton waits for its own before it unloads; what
        a relay that is frozen does not take is not waited for long."""
        self._relays.shut()
        moved_at = time.monotonic()
        while not (self._relays.is_done or self._watchdog.is_stalled):
            now = time.monotonic()
            if self._frontend.num_live:
                moved_at = now
            elif now - moved_at > _FROZEN_RELAY_SECONDS:
                return
            time.sleep(_LEAVING_CHECK_SECONDS)

    def _end_threads(self) -> None:
        """In the order in which they feed one another."""
        self._periodic_tasks.close()
        self._manager.shutdown()
        self._dispatcher.close()
        self._factory.forget()
        self._relays.close()
        self._update_metrics()  # requests that just ended count too: the page survives a reload
        self._metrics.close()

    def _start(
        self,
        pb_utils: Any,
        args: dict[str, str],
        config: dict[str, Any],
        parameters: ServerParameters,
        status: StatusWriter,
    ) -> None:
        checkpoint = Path(parameters.gpt_model_path)
        self._status = status
        self._lost = ""
        self._drain_file = Path(parameters.drain_file) if parameters.drain_file else None
        self._is_draining = self._is_drained = False

        def report(num_loaded: int, num_total: int) -> None:
            status.write("loading", loaded_bytes=num_loaded, total_bytes=num_total)

        codec = TextCodec.load(checkpoint, parameters.tokenizer_dir)
        self._queue = RequestQueue(
            parameters.max_queue_size,
            parameters.priority_span,
            lambda: self._manager.describe_load(),
        )
        self._dispatcher = ResponseDispatcher(
            stop_request=lambda n: self._frontend.stop(n),
            on_end=lambda n, num_left_out: self._manager.lengths.sent(n, num_left_out),
            before_ends=self._show_ends,
            merges=parameters.merge_responses,
        )
        self._feeds = StatisticsFeeds(self._dispatcher.call_soon)
        self._manager = GptManager(
            checkpoint,
            _MODEL_TYPES[parameters.gpt_model_type.lower()],
            parameters.max_beam_width,
            parameters.batch_scheduler_policy,
            lambda room: self._queue.take(0 if self._dispatcher.is_behind else room),
            self._dispatcher.send_response,
            self._queue.poll_stop_signals,
            lambda text: self._feeds.add(self._queue.add_to(text)),
            TrtGptModelOptionalParams.from_parameters(parameters),
            exclude_input_in_output=parameters.exclude_input_in_output,
            on_progress=report,
            # Else `Frontend` wakes it; what waits there may become ready by time alone.
            poll_when_idle=lambda: len(self._queue) > 0,
        )
        self._dispatcher.shares_cores = not self._manager.engine.is_asynchronous
        self._manager.lengths.await_senders()
        if codec is not None:
            codec.check_fits(self._manager.limits.vocab_size)
        model_info = ModelInfo(
            checkpoint_name(checkpoint),
            Path(parameters.tokenizer_dir or checkpoint),
            self._manager.limits,
            codec,
            default_sampling=read_default_sampling(
                checkpoint,
                reads_checkpoint=parameters.generation_config == "auto",
                overrides=parameters.default_sampling,
            ),
            inputs={each["name"] for each in config.get("input", ())},
            adapters=self._manager.adapters,
        )
        is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", True)
        self._factory = ResponseFactory(pb_utils, is_decoupled)
        self._frontend = Frontend(
            self._factory,
            self._queue,
            self._dispatcher,
            self._feeds,
            self._manager,
            model_info,
            codec,
            frozenset(each["name"] for each in config.get("output", ())),
            why_not_ready=self._why_not_ready,
            on_error=lambda: self._show(with_gauges=False),
        )
        self._metrics_turn = threading.Lock()
        self._are_metrics_stuck = False
        self._gauges_at = self._times_at = -math.inf
        self._metrics = TritonMetrics(
            pb_utils,
            args["model_name"],
            args["model_version"],
            is_v1=self._manager.model_type == TrtGptModelType.V1,
            served_name=checkpoint_name(checkpoint),
            is_draft=args["model_name"] == DRAFT_MODEL_NAME,
            cache_config={
                "block_size": self._manager.engine.tokens_per_block,
                "num_gpu_blocks": self._manager.engine.num_blocks,
            },
        )
        cancellation_seconds = parameters.cancellation_check_period_ms / 1000
        metrics_seconds = parameters.stats_check_period_ms / 1000
        idle_metrics_seconds = max(metrics_seconds, _IDLE_METRICS_SECONDS)
        self._periodic_tasks = PeriodicTasks(
            [
                PeriodicTask(self._frontend.check_cancelled, cancellation_seconds),
                PeriodicTask(self._update_metrics, metrics_seconds, idle_metrics_seconds),
                PeriodicTask(self._frontend.expire_queued, _DEADLINE_CHECK_SECONDS),
                PeriodicTask(self._check_drain, _DRAIN_CHECK_SECONDS, _IDLE_DRAIN_CHECK_SECONDS),
            ],
            is_busy=self._is_busy,
        )
        engine = self._manager.engine
        self._ready_fields = {
            "model": checkpoint_name(checkpoint),
            "policy": policy_name(self._manager.policy),
            "max_batch_size": parameters.max_batch_size,
            "max_seq_len": longest_text(self._manager.limits),
            "max_num_tokens": engine.max_num_tokens,
            "num_blocks": engine.num_blocks,
            "tokens_per_block": engine.tokens_per_block,
            "device": engine.device_name,
            "dtype": engine.dtype_name,
        }
        self._relays = RelayListener(
            args["model_name"], self._accept_relayed, self._dispatcher.resume
        )
        self._told_error = "" if self._tell("") else None
        self._watchdog = Watchdog(
            (
                self._manager.health,
                self._dispatcher.progress,
                self._frontend.progress,
                self._periodic_tasks.progress,
            ),
            parameters.stall_seconds,
            on_stall=self._end_streams,
            on_move=lambda: self._queue.refuse(self._lost),
            beat=self._beat,
        )
        self._manager.when_lost(self._end_lost)

    def _accept_relayed(self, request: RelayedRequest, way_back: RelayConnection) -> None:
        self._frontend.accept_relayed(request, way_back)
        self._periodic_tasks.wake()

    def _is_busy(self) -> bool:
        return self._frontend.has_streams or self._manager.get_num_active_requests() > 0

    def _update_metrics(self, *, with_gauges: bool = True) -> None:
        """Put on Triton's page what has happened since the last time; from any thread.

        One at a time, so that the numbers are there when it returns. Where one call is stuck,
        because the server does not answer, only the first of the others waits for it.
        """
        seconds = 0.0 if self._are_metrics_stuck else _METRICS_SECONDS
        self._are_metrics_stuck = not self._metrics_turn.acquire(timeout=seconds)
        if self._are_metrics_stuck:
            return
        try:
            if with_gauges:
                self._gauges_at = time.monotonic()
            is_due = time.monotonic() - self._times_at >= _TIMES_SECONDS
            self._times_at = time.monotonic() if is_due else self._times_at
            self._metrics.update(
                self._queue.add_to(self._manager.stats_json) if with_gauges else None,
                self._manager.lengths.take(),
                {
                    ERRORS.name: self._frontend.errors.take(),
                    EVENTS.name: self._manager.events.take(),
                    **(self._manager.times.take() if is_due else {}),
                },
            )
        finally:
            self._metrics_turn.release()

    def _show_ends(self) -> None:
        """Update the metrics before the last responses of requests leave. Each number takes a round
        trip, in which Python stands still, so the gauges are set only now and then while other
        requests run; none is old when nothing runs any more."""
        is_idle = self._manager.get_num_active_requests() == 0
        is_old = time.monotonic() - self._gauges_at >= _GAUGES_SECONDS
        self._show(with_gauges=is_idle or is_old)

    def _show(self, *, with_gauges: bool) -> None:
        """`_update_metrics`, which is no reason to tell a client nothing."""
        try:
            self._update_metrics(with_gauges=with_gauges)
        except Exception:
            _logger.exception("the metrics could not be updated")

    def _end_streams(self) -> None:
        self._queue.refuse(_STALLED)
        self._frontend.fail_all(_STALLED)

    def _end_lost(self, reason: str) -> None:
        """A rank of the engine is lost, for which the loop may wait: nothing here waits for it."""
        self._lost = reason
        self._queue.refuse(reason)
        self._frontend.fail_all(reason)
        self._beat()

    def _beat(self) -> None:
        """Tell the launcher that this process lives, and whether it gets anything done."""
        is_failing = not self._manager.health.is_healthy
        error = _STALLED if self._watchdog.is_stalled else _FAILING if is_failing else ""
        error = self._lost or error
        if error != self._told_error:
            if self._tell(error):
                self._told_error = error
            elif error:
                return  # what cannot be told is at least noticed as silence
        self._status.beat()

    def _tell(self, error: str) -> bool:
        """Report that all is well, or the ``error``; False if that has to be done again."""
        if error:
            return self._status.write("unhealthy", error=error)
        return self._status.write("ready", **self._ready_fields)

    def _check_drain(self) -> None:
        """The launcher asks by a file: refuse new requests, say when nothing runs any more."""
        if self._drain_file is None or not self._drain_file.exists():
            return
        self._queue.drain()
        self._relays.shut()  # else one that asks again and again would have no end
        if not self._is_draining:
            self._is_draining = self._status.write("draining")
        if stop_file_of(self._drain_file).exists():
            self._frontend.end_all(_LEAVING)
        if self._frontend.num_live or self._relays.num_open:
            return
        self._frontend.close_feeds()
        if not self._is_drained:
            self._is_drained = self._status.write("drained")


def _honour_pythonpath() -> None:
    """Let a user's module be found: Triton's embedded interpreter ignores PYTHONPATH from 3.11."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path.extend(folder for folder in folders if folder and folder not in sys.path)
