"""Steps captured once per size and replayed: CUDA graphs of generation steps and of mixed ones.

What is captured must read its inputs from fixed addresses only: no number of the host may enter
it, since a replay would repeat the number of the capture. A generation step takes the slots of its
rows from the head of the packed copy; rows up to the bucket's size are the padding slot's, which
attends to nothing and keeps nothing. A mixed step (contexts and drafts beside generations) reads a
second packed copy (`mixed_step.MixedBuffer`).

Decoder and sampling of a generation step are two graphs: a step whose requests want more done to
their logits than a graph holds replays the decoder only. Of a mixed step only the decoder is
captured. A mixed step that fits no size, or whose context logits are wanted, runs eagerly.

Capturing is a strategy (`Capture`): CUDA graphs on a GPU; in tests a function that runs again on
the same tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.mixed_step import (
    MixedBuffer,
    MixedSizes,
    MixedWords,
    mixed_sizes,
    sizes_of,
)
from inflight_backend.engine.slot_table import SamplingInputs, SlotTable
from inflight_backend.log import get_logger
from inflight_backend.models.attention import AttentionBackend, CapturableBackend
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.kv_cache import DeviceMemory
from inflight_scheduler import ScheduledBatch

_logger = get_logger(__name__)

Runner = TypeVar("Runner")

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""slots [B] int32 at a fixed address -> hidden states [B, hidden_size]."""

Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""slots [B] int32 and hidden states, both at fixed addresses -> tokens [B] int64."""

Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Records a call: what replays it, and the tensor that holds its answer after each replay."""


@dataclass(frozen=True, slots=True)
class _Graph:
    replay_forward: Callable[[], Any]
    hidden: Tensor
    replay_draw: Callable[[], Any]
    tokens: Tensor


class GraphRunner:
    """Owner of the recordings; the largest is made first, so that the others fit its memory."""

    def __init__(self, forward: Forward, draw: Draw, slots: Tensor, capture: Capture) -> None:
        """``slots`` [max_batch_size] int32 keeps its address; now it holds padding only."""
        self._sizes = bucket_sizes(len(slots))
        self._graphs: dict[int, _Graph] = {}
        for size in reversed(self._sizes):
            replay_forward, hidden = capture(partial(forward, slots[:size]))
            replay_draw, tokens = capture(partial(draw, slots[:size], hidden))
            self._graphs[size] = _Graph(replay_forward, hidden, replay_draw, tokens)

    @property
    def num_graphs(self) -> int:
        """Sizes of steps that are recorded."""
        return len(self._graphs)

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

    def _find(self, num_rows: int) -> _Graph:
        return self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]


def unless_refused(what: str, record: Callable[[], Runner]) -> Runner | None:
    """What ``record`` gives; None, and a line in the log about ``what``, where a capture fails."""
    try:
        return record()
    except RuntimeError as error:  # it contains no request, so it may be quoted
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


MixedForward: TypeAlias = Callable[[MixedWords], Tensor]
"""Words at fixed addresses -> hidden states [num_draws, hidden_size]."""


@dataclass(frozen=True, slots=True)
class _MixedGraph:
    sizes: MixedSizes
    replay: Callable[[], Any]
    hidden: Tensor


class MixedRunner:
    """Owner of the recordings; the largest is made first, so that the others fit its memory."""

    def __init__(
        self,
        forward: MixedForward,
        sizes: list[MixedSizes],
        generation_slots: Tensor,
        device: str,
        capture: Capture,
    ) -> None:
        """``sizes`` ascend. ``generation_slots`` [max_batch_size] int32 keeps its address; now it
        holds padding only."""
        self._buffer = MixedBuffer(sizes[-1], generation_slots, device)
        self._graphs: list[_MixedGraph] = []
        self._buffer.send(ScheduledBatch(0), sizes[-1])
        for each in reversed(sizes):
            replay, hidden = capture(partial(forward, self._buffer.words(each)))
            self._graphs.insert(0, _MixedGraph(each, replay, hidden))

    @property
    def num_graphs(self) -> int:
        """Sizes of steps that are recorded."""
        return len(self._graphs)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return self._buffer.pinned_bytes

    def forward(self, batch: ScheduledBatch) -> Tensor | None:
        """Replay the smallest size that holds ``batch``: the hidden states of all that draw
        [num_samples, hidden_size], in plan order, until the next replay. None if there is none."""
        wanted = sizes_of(batch)
        for recording in self._graphs:
            if recording.sizes.hold(wanted):
                self._buffer.send(batch, recording.sizes)
                recording.replay()
                return recording.hidden[: wanted.num_draws]
        return None


@dataclass(frozen=True, slots=True)
class GraphCache:
    """Of steps of generations alone and of mixed ones; None where such steps run eagerly."""

    steps: GraphRunner | None = None
    mixed: MixedRunner | None = None

    @property
    def num_steps(self) -> int:
        """Sizes of generation steps that are recorded."""
        return 0 if self.steps is None else self.steps.num_graphs

    @property
    def num_mixed(self) -> int:
        """Sizes of mixed steps that are recorded."""
        return 0 if self.mixed is None else self.mixed.num_graphs

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return 0 if self.mixed is None else self.mixed.pinned_bytes


class GraphCapturer:
    """Records steps over the memory of one pool after the other."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        slots: SlotTable,
        generation_slots: Tensor,
        draw: Callable[[Tensor, SamplingInputs], Tensor],
        make_capture: Callable[[], Capture] | None,
    ) -> None:
        """``generation_slots`` [num_slots] int32: where the device finds those of every step.
        ``make_capture``: each pool's recordings are another one's; None: nothing is recorded."""
        self._decoder, self._slots, self._draw = decoder, slots, draw
        self._generation_slots = generation_slots
        self._device = config.device
        self._make_capture = make_capture if config.cuda_graph_mode else None
        most = min(config.cuda_graph_mixed_tokens, config.num_tokens_limit)
        self._mixed_sizes = mixed_sizes(most, config.num_slots)

    def record(self, attention: AttentionBackend) -> GraphCache:
        """What can be recorded; of what cannot, one line in the log, and no second attempt."""
        if self._make_capture is None or not isinstance(attention, CapturableBackend):
            return GraphCache()
        capture = self._make_capture()

        def forward(slots: Tensor) -> Tensor:
            return self.forward(slots, attention)

        def forward_mixed(words: MixedWords) -> Tensor:
            step = self._slots.begin_mixed(words)
            attending = attention.begin_mixed(step.attention)
            return self._decoder.forward(step.tokens, attending, step.sample_rows)

        slots = self._generation_slots
        steps = unless_refused(
            "generation steps", lambda: GraphRunner(forward, self.draw, slots, capture)
        )
        if steps is None:
            self._make_capture = None
        if steps is None or not self._mixed_sizes:
            return GraphCache(steps)
        sizes, device = self._mixed_sizes, self._device
        mixed = unless_refused(
            "mixed steps", lambda: MixedRunner(forward_mixed, sizes, slots, device, capture)
        )
        if mixed is None:
            self._mixed_sizes = []
        return GraphCache(steps, mixed)

    def measure(self, attention: AttentionBackend, memory: DeviceMemory) -> int:
        """Bytes that recordings keep for themselves: they are made, and forgotten again."""
        if self._make_capture is None or not isinstance(attention, CapturableBackend):
            return 0
        free_before = memory.free_bytes()
        recordings = self.record(attention)
        num_bytes = free_before - memory.free_bytes()
        del recordings
        return max(num_bytes, 0)

    def forward(self, slots: Tensor, attention: AttentionBackend) -> Tensor:
        """What is recorded of generations in ``slots`` [B] int32: the decoder."""
        step = self._slots.begin_generation(slots)
        return self._decoder.forward(step.tokens, attention.begin(step.attention), None)

    def draw(self, slots: Tensor, hidden: Tensor) -> Tensor:
        """What is recorded behind it: the draw of requests without features, whose end need not
        wait (the host knows whose must; ten small launches would look after it in every step)."""
        return self._draw(hidden, self._slots.sampling(slots.long(), may_forbid_end=False))
