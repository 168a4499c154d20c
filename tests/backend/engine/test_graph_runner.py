"""Buckets and recordings, without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.graph_replay import Rerun
from torch import Tensor

from inflight_backend.engine.cuda_graphs import CudaCapture, GraphRunner, bucket_sizes

PADDING = 20


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (200, [*bucket_sizes(64), 80, 96, 112, 128, 192, 200]),
    ],
)
def test_bucket_sizes(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


def test_buckets_waste_little() -> None:
    sizes = bucket_sizes(1024)
    padded = {rows: min(size for size in sizes if size >= rows) for rows in range(1, 1025)}
    assert max(size - rows for rows, size in padded.items()) <= 63
    assert max(size / rows for rows, size in padded.items() if rows > 64) < 1.5


def test_the_smallest_bucket_runs_on_the_current_slots() -> None:
    seen: list[list[int]] = []

    def step(slots: torch.Tensor) -> torch.Tensor:
        seen.append(slots.tolist())
        return slots.long() * 10

    slots = torch.full((6,), PADDING, dtype=torch.int32)
    capture = Rerun()
    capture._run = lambda call: call()  # type: ignore[method-assign]  # tolist is this test's own
    runner = GraphRunner(step, lambda _, hidden: hidden + 1, slots, capture)
    assert seen == [[PADDING] * size for size in (6, 4, 2, 1)]  # the largest first
    slots[:3] = torch.tensor([5, 1, 3])
    assert runner.run(3).tolist() == [51, 11, 31]
    assert seen[-1] == [5, 1, 3, PADDING]
    assert runner.forward(2).tolist() == [50, 10]  # the decoder alone
    slots[:6] = torch.arange(6)
    assert runner.run(6).tolist() == [1, 11, 21, 31, 41, 51]


def test_the_stand_in_refuses_what_a_graph_cannot_hold() -> None:
    slots = torch.full((2,), PADDING, dtype=torch.int32)
    with pytest.raises(AssertionError, match="waits for the device"):
        GraphRunner(
            lambda rows: rows.long() * int(rows.sum()), lambda _, hidden: hidden, slots, Rerun()
        )


class Recorder:
    """The part of torch that recording CUDA graphs needs, by the rules of its own allocator."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stream: object = "default"
        self.is_open = self.is_refused = False
        self.num_users = 0  # of the pool's memory
        self.order: list[str] = []
        stream = SimpleNamespace(wait_stream=lambda other: self.order.append(f"behind {other}"))
        calls = {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda: stream,
            "stream": partial(Inside, self),
            "current_stream": lambda: self.stream,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "empty_cache": self.empty_cache,
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self._begin, capture_end=self._end, replay=lambda: None
            ),
        }
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_pool, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self._release, raising=False)

    def empty_cache(self) -> None:
        assert not self.is_open, "captures_underway.empty() INTERNAL ASSERT FAILED"

    def call(self) -> Tensor:
        self.order.append("recorded" if self.is_open else "run")
        return torch.zeros(1)

    def _begin(self, pool: tuple[int, int], **_: object) -> None:
        self.is_open = True
        self.num_users += 1

    def _end(self) -> None:
        if self.is_refused:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        self.is_open = False

    def _end_pool(self, device: int, pool: tuple[int, int]) -> None:
        if not self.is_open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_open = False

    def _release(self, device: int, pool: tuple[int, int]) -> None:
        self.num_users -= 1


class Inside:
    """A stream is the current one until it is left, as torch has it."""

    def __init__(self, recorder: Recorder, stream: object) -> None:
        self._recorder, self._stream = recorder, stream
        self._before: object = None

    def __enter__(self) -> None:
        self._before, self._recorder.stream = self._recorder.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._recorder.stream = self._before


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def failing(recorder: Recorder, fail: Callable[[], None]) -> Callable[[], Tensor]:
    """Fails when it is recorded, not before."""

    def call() -> Tensor:
        if recorder.is_open:
            fail()
        return torch.zeros(1)

    return call


def test_a_call_runs_before_it_is_recorded(recorder: Recorder) -> None:
    CudaCapture()(recorder.call)
    assert recorder.order == ["behind default", "run", "recorded"]
    assert (recorder.stream, recorder.is_open, recorder.num_users) == ("default", False, 1)


def test_what_the_device_refuses_to_record_leaves_torch_as_it_was(recorder: Recorder) -> None:
    def synchronize() -> None:
        recorder.is_refused = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture()(failing(recorder, synchronize))
    recorder.empty_cache()
    assert (recorder.stream, recorder.num_users) == ("default", 0)


def test_memory_of_a_recording_that_has_ended_is_its_own(recorder: Recorder) -> None:
    """Its graph releases it; done twice, others would lose what they share."""

    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(failing(recorder, run_out))
    recorder.empty_cache()
    assert (recorder.stream, recorder.num_users) == ("default", 1)
