"""`GptManager` with recording callbacks around an engine that counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.triton_stub import CountingEngine

from inflight_backend.engine.interface import StepEngine
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import OverlapScheduler, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest, NamedTensor
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch, TrtGptModelType

if TYPE_CHECKING:
    from inflight_backend.engine import Engine

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
BOTH_LOOPS = pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
STEP_FAILED = "the engine failed while it ran this request"
LOOP_FAILED = "the batch manager failed while it held this request"
WAIT = 120.0  # for what takes milliseconds: a busy machine may not come to it for long


class GatedEngine(CountingEngine):
    """Waits before its first step until the test lets it go."""

    def __init__(self, **options: Any) -> None:
        super().__init__(before_step=self._wait, **options)
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    def _wait(self, batch: ScheduledBatch) -> None:
        self.has_begun.set()
        assert self.go_on.wait(WAIT)


class Recorder:
    """The four callbacks, with everything they were given."""

    def __init__(self, requests: Sequence[InferenceRequest] = ()) -> None:
        self.pending = list(requests)
        self.rooms: list[int] = []
        self.responses: dict[int, list[tuple[list[int], bool, str]]] = {}
        self.events: list[str] = []
        self.stops: set[int] = set()
        self.stats: list[dict[str, Any]] = []
        self.named_tensors: dict[int, list[dict[str, Any]]] = {}
        self.done = threading.Condition()
        self.on_response: Callable[[int, bool], None] = lambda request_id, is_final: None
        self._acts: dict[tuple[int, int], Callable[[], Any]] = {}

    def get(self, room: int) -> list[InferenceRequest]:
        self.rooms.append(room)
        self.events.append("get")
        room = max(room, 0)
        new = self.pending[:room]
        del self.pending[: len(new)]  # in place: a test may append meanwhile
        return new

    def send(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        self.events.append("send")
        ids = [i for t in tensors if t.name == "output_ids" for i in t.tensor.reshape(-1).tolist()]
        with self.done:
            self.responses.setdefault(request_id, []).append((ids, is_final, error))
            self.named_tensors.setdefault(request_id, []).append(
                {t.name: t.tensor for t in tensors}
            )
            self.on_response(request_id, is_final)
            act = self._acts.pop((request_id, len(self.responses[request_id])), None)
            if act is not None:
                act()
            self.done.notify_all()

    def poll(self) -> set[int]:
        self.events.append("poll")
        return self.stops

    def return_stats(self, text: str) -> None:
        self.events.append("stats")
        self.stats.append(json.loads(text))

    def when(self, request_id: int, num_responses: int, act: Callable[[], Any]) -> None:
        """Call ``act`` in the so-many-th response of a request, on the thread of the loop."""
        self._acts[request_id, num_responses] = act

    def finals(self) -> set[int]:
        return {i for i, sent in self.responses.items() if sent[-1][1]}

    def final_errors(self, request_id: int) -> list[str]:
        """The error of each final response of a request: "" for an ordinary end."""
        return [error for _, is_final, error in self.responses[request_id] if is_final]

    def wait_for_finals(self, *request_ids: int) -> None:
        with self.done:
            assert self.done.wait_for(lambda: self.finals() >= set(request_ids), WAIT)

    def joined(self, request_id: int, name: str) -> Any:
        """The rows of a tensor [1, beams, tokens, ...] of all responses."""
        return np.concatenate([sent[name] for sent in self.named_tensors[request_id]], axis=2)

    def last(self, request_id: int, name: str) -> Any:
        """The one value of a tensor in the final response."""
        return self.named_tensors[request_id][-1][name].item()

    def total(self, key: str) -> float:
        """The sum of a statistic over the iterations."""
        return float(sum(stats.get(key, 0) for stats in self.stats))

    def tokens(self, request_id: int) -> list[int]:
        return [token for ids, _, _ in self.responses[request_id] for token in ids]


@contextmanager
def running(
    recorder: Recorder,
    engine: StepEngine | Path | None = None,
    policy: CapacitySchedulerPolicy | str = GUARANTEED,
    **options: Any,
) -> Iterator[GptManager]:
    """A manager with the callbacks of ``recorder``; ``options`` are its own, or fields of its
    ``optional_params``."""
    params = options.pop("params", TrtGptModelOptionalParams(max_batch_size=8))
    names = [each.name for each in fields(params) if each.name in options]
    params = replace(params, **{name: options.pop(name) for name in names})
    model_type = options.pop("model_type", TrtGptModelType.InflightFusedBatching)
    manager = GptManager(
        engine or CountingEngine(),
        model_type,
        options.pop("max_beam_width", 1),
        policy,
        recorder.get,
        recorder.send,
        recorder.poll,
        recorder.return_stats,
        params,
        **options,
    )
    try:
        yield manager
    finally:
        manager.shutdown()


def serve(
    requests: Recorder | Sequence[InferenceRequest],
    engine: StepEngine | Path | None = None,
    policy: CapacitySchedulerPolicy | str = GUARANTEED,
    **options: Any,
) -> Recorder:
    """Answer all requests that are there at the start, and shut down."""
    recorder = requests if isinstance(requests, Recorder) else Recorder(requests)
    ids = [each.request_id for each in recorder.pending if isinstance(each, InferenceRequest)]
    with running(recorder, engine, policy, **options):
        recorder.wait_for_finals(*ids)
    return recorder


def request(
    request_id: int, prompt: Sequence[int], num_new: int, *, streaming: bool = True, **values: Any
) -> InferenceRequest:
    return InferenceRequest.from_tokens(
        request_id, prompt, num_new, is_streaming=streaming, **values
    )


def small_engine(folder: Path, num_tokens: int = 1024, **changes: Any) -> Engine:
    """The engine of a tiny checkpoint on a CPU, with room for ``num_tokens`` in blocks of 4."""
    from inflight_backend.engine import Engine, EngineConfig  # torch: seconds to import

    settings: dict[str, Any] = {
        "device": "cpu",
        "max_batch_size": 8,
        "tokens_per_block": 4,
        "max_num_tokens": 64,
        "max_seq_len": 64,
        "max_tokens_in_paged_kv_cache": num_tokens,
    }
    return Engine.load(folder, EngineConfig(**(settings | changes)))


class Once:
    """Raises ``error`` at the next call after `arm`; passes all others on to ``function``."""

    def __init__(self, function: Callable[..., Any], error: BaseException) -> None:
        self._function = function
        self._error = error
        self._is_armed = False

    def arm(self) -> None:
        self._is_armed = True

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._is_armed:
            self._is_armed = False
            raise self._error
        return self._function(*args, **options)


def fail_once(owner: Any, name: str, error: BaseException) -> Once:
    """Have a method of one object, which may have slots, raise ``error`` once `Once.arm`-ed."""
    once = Once(getattr(owner, name), error)
    cls = type(owner)

    class Wrapped(cls):  # type: ignore[misc,valid-type]
        __slots__ = ()

    setattr(Wrapped, name, lambda self, *args, **options: once(*args, **options))
    owner.__class__ = Wrapped
    return once


def assert_serves(recorder: Recorder, manager: GptManager, request_id: int = 99) -> None:
    """A new request is answered in full, and then everything is free."""
    recorder.pending.append(request(request_id, [500], 4))
    manager.wake()
    recorder.wait_for_finals(request_id)
    assert recorder.tokens(request_id) == [501, 502, 503, 504]
    assert manager.get_num_active_requests() == 0
    assert manager._batcher.is_idle_and_intact()
    assert manager.health.is_healthy
