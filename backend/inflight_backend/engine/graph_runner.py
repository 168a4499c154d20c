"""Generation steps recorded once per batch-size bucket and replayed.

What is recorded must read its inputs from fixed addresses only: no number of the host's may enter
it, since a replay would repeat the number it had when it was recorded. A step takes the slots of
its rows from the head of the packed copy; rows up to the bucket's size are the padding slot's,
which attends to nothing and keeps nothing.

The decoder and the draw of a step are two recordings: a step whose requests want more done to their
logits than a recording holds replays the decoder only.

Recording is a strategy (`Capture`): CUDA graphs on a GPU; in tests something that runs the same
function again on the same tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from inflight_backend.private_log import get_logger

_logger = get_logger(__name__)

Runner = TypeVar("Runner")

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""slots [B] int32 at a fixed address -> hidden states [B, hidden_size]."""

Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""slots [B] int32 and hidden states, both at fixed addresses -> tokens [B] int64."""

Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Records a call: what replays it, and the tensor that holds its answer after each replay."""


@dataclass(frozen=True, slots=True)
class _Recording:
    replay_forward: Callable[[], Any]
    hidden: Tensor
    replay_draw: Callable[[], Any]
    tokens: Tensor


class GraphRunner:
    """Owner of the recordings; the largest is made first, so that the others fit its memory."""

    def __init__(self, forward: Forward, draw: Draw, slots: Tensor, capture: Capture) -> None:
        """``slots`` [max_batch_size] int32 keeps its address; now it holds padding only."""
        self._sizes = bucket_sizes(len(slots))
        self._recordings: dict[int, _Recording] = {}
        for size in reversed(self._sizes):
            replay_forward, hidden = capture(partial(forward, slots[:size]))
            replay_draw, tokens = capture(partial(draw, slots[:size], hidden))
            self._recordings[size] = _Recording(replay_forward, hidden, replay_draw, tokens)

    @property
    def num_recordings(self) -> int:
        """Sizes of steps that are recorded."""
        return len(self._recordings)

    def run(self, num_rows: int) -> Tensor:
        """Replay the smallest bucket that holds ``num_rows``: their tokens [num_rows] int64.

        The tensor is overwritten by the next replay of its bucket.
        """
        recording = self._find(num_rows)
        recording.replay_forward()
        recording.replay_draw()
        return recording.tokens[:num_rows]

    def forward(self, num_rows: int) -> Tensor:
        """Replay the decoder only: hidden states [num_rows, hidden_size], until the next replay."""
        recording = self._find(num_rows)
        recording.replay_forward()
        return recording.hidden[:num_rows]

    def _find(self, num_rows: int) -> _Recording:
        return self._recordings[self._sizes[bisect_left(self._sizes, num_rows)]]


def unless_refused(what: str, record: Callable[[], Runner]) -> Runner | None:
    """What ``record`` gives; None, and a line in the log about ``what``, where a capture fails."""
    try:
        return record()
    except RuntimeError as error:  # nobody's request is in it: it may be quoted
        reason = str(error).partition("\n")[0]
        _logger.warning(
            "%s cannot be recorded and run eagerly, which is slower: %s",
            what,
            reason,
            exc_info=True,
        )
        return None


class CudaCapture:
    """Records CUDA graphs that share one memory pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Run once, so that kernels are compiled and libraries initialised, then record."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # torch would stay there after a refusal
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    tokens = call()
            except BaseException:
                self._close()
                raise
        return graph.replay, tokens

    def _close(self) -> None:
        """What torch leaves undone where the device refuses a recording: its allocator believes for
        ever that one is under way, so that the next `torch.cuda.empty_cache` is an internal error,
        and keeps the memory."""
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, self._pool)
        except RuntimeError:  # none is under way: something else than the device has failed
            return
        torch._C._cuda_releasePool(device, self._pool)


def bucket_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, then steps of 8 to 64, 16 to 128 and 64 beyond, up to and with the maximum.

    A step of 64 beyond 128 wastes a third at most there; doubling would waste half.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_batch_size, 64)]
    return [*(size for size in sizes if size < max_batch_size), max_batch_size]
