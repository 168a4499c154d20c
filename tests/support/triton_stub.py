"""Stand-ins for what cannot run inside a unit test: Triton's ``pb_utils``, and a slow model.

`CountingEngine` answers every request with last token + 1: a gap, a duplicate or a token of another
request is visible in the answer. The real engine and the real server have tests of their own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from inflight_backend.engine.interface import (
    AdapterPages,
    ContextLogits,
    MemoryUsage,
    StepOutputs,
)
from inflight_scheduler import NO_OUTPUTS, ScheduledBatch, SlotSetup


@dataclass(frozen=True)
class CountedStep:
    """The tokens of a step that has run when it was submitted; with ``error`` nobody gets them."""

    tokens: list[int]
    outputs: StepOutputs | None = None
    error: Exception | None = None

    def read(self) -> list[int]:
        if self.error is not None:
            raise self.error
        return self.tokens

    def read_outputs(self) -> StepOutputs | None:
        return self.outputs


class CountingEngine:
    """A `StepEngine` whose next token is the last one plus 1, modulo the vocabulary."""

    device_name = "fake"
    dtype_name = "int"
    is_asynchronous = False  # it is not; a test may say so to get the overlapped loop
    supports_drafts = True
    max_beam_width = 2
    supports_block_reuse = True
    num_cross_blocks = max_encoder_len = 0
    start_ids: tuple[int, ...] = ()
    num_snapshots: int | None = None
    adapter_pages: AdapterPages | None = None
    windows: tuple[int | None, ...] = (None,)

    def __init__(
        self,
        num_blocks: int = 64,
        tokens_per_block: int = 4,
        vocab_size: int = 1000,
        max_seq_len: int = 256,
        max_num_tokens: int = 256,
        before_step: Callable[[ScheduledBatch], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max_num_tokens
        self.before_step = before_step
        self.batches: list[ScheduledBatch] = []
        self._last_token: dict[int, int] = {}
        self._setups: dict[int, SlotSetup] = {}

    def execute(self, batch: ScheduledBatch) -> list[int]:
        if self.before_step is not None:
            self.before_step(batch)
        self.batches.append(batch)
        tokens = []
        self._last_token |= {told.slot: told.token for told in batch.verified}
        self._last_token |= {move.slot: move.token for move in batch.beam_moves}
        for run in batch.runs:
            self._last_token[run.slot] = run.tokens[-1]
            if run.is_last:
                tokens.append(self._step(run.slot))
            tokens += [(draft + 1) % self.vocab_size for draft in run.drafts]
        tokens += [self._step(slot) for slot in batch.generation_slots]
        return tokens

    def submit(self, batch: ScheduledBatch) -> CountedStep:
        return CountedStep(self.execute(batch), self._outputs_of(batch))

    def _outputs_of(self, batch: ScheduledBatch) -> StepOutputs | None:
        """What requests have asked for, as if all tokens were equally likely."""
        outputs, logits = StepOutputs(), np.zeros(self.vocab_size, np.float32)
        self._setups |= {setup.slot: setup for setup in batch.setups}
        rows = [(run.slot, len(run.drafts) + 1) for run in batch.runs if run.is_last]
        for slot, num_tokens in (*rows, *((slot, 1) for slot in batch.generation_slots)):
            setup = self._setups[slot]
            asked, number = setup.outputs, setup.request_id
            top = list(range(asked.num_top_log_probs)), [-1.0] * asked.num_top_log_probs
            outputs.log_probs[number] = [-1.0] * num_tokens
            outputs.ranks[number] = [1] * num_tokens
            outputs.top_log_probs[number] = [top] * num_tokens
            if setup.num_candidates:
                outputs.candidates[slot] = [(i, -1.0 - i) for i in range(setup.num_candidates)]
            if asked.generation_logits:
                outputs.generation_logits[number] = [logits] * num_tokens
        for chunk in batch.context_chunks:
            if (setup := self._setups[chunk.slot]).outputs.context_logits:
                rows_of = np.tile(logits, (len(chunk.tokens), 1))
                outputs.context_logits.append(ContextLogits(setup.request_id, chunk.start, rows_of))
        asking = (s.num_candidates or s.outputs is not NO_OUTPUTS for s in self._setups.values())
        return outputs if any(asking) else None

    def prepare_adapter(self, adapter: object) -> object:
        return adapter

    def load_adapter(self, place: int, adapter: object) -> None:
        """There are no weights."""

    def prepare_thread(self) -> None:
        """Any thread will do."""

    def mask_next(self, source: object) -> None:
        """There are no logits."""

    def edit_next(self, source: object) -> None:
        """There are no logits."""

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def _step(self, slot: int) -> int:
        token = (self._last_token[slot] + 1) % self.vocab_size
        self._last_token[slot] = token
        return token


@dataclass
class FakeTensor:
    """``pb_utils.Tensor``: a name and an array."""

    tensor_name: str
    array: Any
    is_on_gpu: bool = False

    def name(self) -> str:
        return self.tensor_name

    def is_cpu(self) -> bool:
        return not self.is_on_gpu

    def as_numpy(self) -> Any:
        """Its values; the error of Triton's own class for those on a GPU."""
        if self.is_on_gpu:
            raise RuntimeError("Tensor is stored in GPU and cannot be converted to NumPy.")
        return self.array


class FakeTritonError(Exception):
    """``pb_utils.TritonError`` with the codes of the real one."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS = range(7)

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class FakeResponse:
    """``pb_utils.InferenceResponse``."""

    output_tensors: list[FakeTensor] = field(default_factory=list)
    error: FakeTritonError | None = None


class FakeMetric:
    """``pb_utils.Metric``: the last value or the sum, and everything a histogram was given."""

    def __init__(self, family: FakeMetricFamily, key: str) -> None:
        self._family = family
        self._key = key

    def set(self, value: float) -> None:
        self._family.values[self._key] = value

    def increment(self, value: float) -> None:
        self._family.values[self._key] = self._family.values.get(self._key, 0) + value

    def observe(self, value: float) -> None:
        self._family.observed.append(value)


class FakeMetricFamily:
    """``pb_utils.MetricFamily``; remembers what its metrics were told."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.values: dict[str, float] = {}
        self.observed: list[float] = []
        self.buckets: list[float] = []
        FakePbUtils.families[name] = self

    def Metric(self, labels: dict[str, str], buckets: Sequence[float] = ()) -> FakeMetric:
        """A metric of this family; only histograms have buckets."""
        assert (self.kind == self.HISTOGRAM) == bool(buckets)
        self.buckets = list(buckets)
        return FakeMetric(self, ",".join(f"{k}={v}" for k, v in labels.items()))


class FakeLogger:
    """``pb_utils.Logger``; keeps the lines."""

    lines: ClassVar[list[str]] = []

    @classmethod
    def log_verbose(cls, line: str) -> None:
        cls.lines.append(line)


class FakePbUtils:
    """The part of ``triton_python_backend_utils`` that the glue uses."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = FakeTensor
    TritonError = FakeTritonError
    TritonModelException = RuntimeError
    InferenceResponse = FakeResponse
    MetricFamily = FakeMetricFamily
    Logger = FakeLogger
    families: dict[str, FakeMetricFamily]


@contextmanager
def fake_pb_utils() -> Iterator[None]:
    """Triton's module is `FakePbUtils`. Modules that are first imported meanwhile stay, which
    ``mock.patch.dict`` of ``sys.modules`` would take out: numba's cannot be imported twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
        yield


FakePbUtils.families = {}


class FakeSender:
    """A response sender that keeps what was sent and insists on the rules of the real one."""

    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.is_final = threading.Event()
        self.has_response = threading.Event()
        self.ends_empty = False  # the end came by itself, behind the last response
        self.cancelled = False

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        """Keep a response; an error after the final one, as in Triton."""
        if self.is_final.is_set():
            raise RuntimeError("send after the final response")
        if response is not None:
            self.responses.append(response)
            self.has_response.set()
        if flags:
            self.ends_empty = response is None
            self.is_final.set()

    def is_cancelled(self) -> bool:
        """In Triton 24.10 this kills the server after the final response."""
        assert not self.is_final.is_set(), "is_cancelled() after the final response"
        return self.cancelled


class FailingSender(FakeSender):
    """Some sends raise, as where shared memory is full: ``num_failures`` of those with ``flags`` or
    more, behind the first ``num_good``."""

    def __init__(self, num_failures: int = 1, *, flags: int = 0, num_good: int = 0) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.num_finals = 0  # that were tried
        self._flags = flags
        self._num_good = num_good

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        self.num_finals += bool(flags)
        self._num_good -= 1
        if self.num_failures and flags >= self._flags and self._num_good < 0:
            self.num_failures -= 1
            raise RuntimeError("shm full")
        super().send(response, flags)


class HeldSender(FakeSender):
    """A send with ``flags`` or more does not return before ``release`` is set."""

    def __init__(self, flags: int = 0) -> None:
        super().__init__()
        self.is_held, self.release = threading.Event(), threading.Event()
        self._flags = flags

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        if flags >= self._flags:
            self.is_held.set()
            assert self.release.wait(180)
        super().send(response, flags)


class FakeRequest:
    """``pb_utils.InferenceRequest`` with its sender."""

    def __init__(
        self,
        tensors: dict[str, Any],
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: str = "{}",
        sender: FakeSender | None = None,
    ) -> None:
        self._tensors = [FakeTensor(name, np.asarray(value)) for name, value in tensors.items()]
        self._request_id = request_id
        self._outputs = outputs
        self._parameters = parameters
        self.sender = sender or FakeSender()

    def inputs(self) -> list[FakeTensor]:
        return self._tensors

    def request_id(self) -> str:
        return self._request_id

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def get_response_sender(self) -> FakeSender:
        return self.sender
