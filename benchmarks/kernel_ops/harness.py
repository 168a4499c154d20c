"""What the kernel benchmarks share: rows, settings, and the time of a call on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]
_L2_BYTES = 2**28  # read between two calls: several times any GPU's L2
_CYCLES_PER_US = 2000  # of the fastest clock; at a slower one the device sleeps longer
_LEAST_SLEEP_US = 150.0
_QUEUED_AT_ONCE = 32  # calls; with a full queue (1,024 launches) the host would wait in a call
_LATE_SHARE = 0.2  # of the calls: so few that the host was late for leave the median alone


@dataclass(frozen=True)
class Row:
    """One measurement: what runs, and what it moves and computes at least."""

    parameters: dict[str, Any]
    call: Call
    num_bytes: int  # read and written once each
    num_flops: int = 0
    baselines: Mapping[str, Call] = field(default_factory=dict)  # the same work by something else


@dataclass(frozen=True)
class Setting:
    """Where rows run and how large they are."""

    device: torch.device
    is_dry: bool
    has_sweep: bool
    is_wanted: Callable[[int, int], bool] = lambda batch, context: True
    """Of the generation attention: (batch, context) that are made at all."""


Rows = Callable[[Setting], Iterator[Row]]


class Timing(NamedTuple):
    """Median microseconds of a call on the device. ``is_hidden`` is False where the host took
    longer to queue calls than the device slept, so that ``us`` may be the host's."""

    us: float
    is_hidden: bool

    @property
    def note(self) -> dict[str, str]:
        """For a row: nothing, or what it should say."""
        return {} if self.is_hidden else {"note": "the host was late: its time may be in us"}


def time_us(call: Call, seconds: float = 0.1, *, clears_by_writing: bool = False) -> Timing:
    """Time a call on the device, L2 cleared before each.

    It is cleared by reading, as the weights of a step leave it. Written lines would go back to
    memory while the call is timed: as many bytes again as a small call reads.

    Before each the device also sleeps until all of its launches are queued: `do_bench` does not,
    and with it a call of two launches and many checked arguments is as long as the host takes. It
    sleeps twice as long as the host has needed in a first round.
    """
    scratch = torch.zeros(_L2_BYTES // 4, dtype=torch.int32, device="cuda")

    sleep_us = _LEAST_SLEEP_US

    def run(count: int) -> tuple[list[float], list[float]]:
        """Microseconds of the device, and of the host to queue, of each call."""
        pairs, queued = [], []
        for _ in range(count):
            start, end = (_timing_event() for _ in range(2))
            scratch.zero_() if clears_by_writing else scratch.amax()
            torch.cuda._sleep(int(sleep_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            start.record()
            call()
            end.record()
            queued.append(1e6 * (time.perf_counter() - began))
            pairs.append((start, end))
            if len(pairs) % _QUEUED_AT_ONCE == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs], queued

    run(1)  # compiles
    began = time.perf_counter()
    _, queued = run(3)
    each = (time.perf_counter() - began) / 3
    sleep_us = max(sleep_us, 2 * statistics.median(queued))
    count = min(max(int(seconds / each), 5), 300)
    run(count // 5)  # clocks rise
    times, queued = run(count)
    num_late = sum(one > sleep_us for one in queued)
    return Timing(statistics.median(times), is_hidden=num_late <= count * _LATE_SHARE)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def num_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
