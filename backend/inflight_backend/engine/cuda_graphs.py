"""Steps captured once per size and replayed: CUDA graphs of generation steps and of mixed ones.

What is captured must read its inputs from fixed addresses only: no number of the host may enter
it, since a replay would repeat the number of the capture. It reads its words from the head of the
packed copy (`StepBuffer.run_words`); rows up to the recording's size are the padding slot's, which
attends to nothing and keeps nothing.

Decoder and draw of a generation step are two graphs: a step whose requests want more done to their
logits than a graph holds replays the decoder only. Of a mixed step (contexts and drafts beside
generations) only the decoder is captured. A mixed step that fits no size, or whose context logits
are wanted, runs eagerly.

Capturing is a strategy (`Capture`): CUDA graphs on a GPU; in tests a function that runs again on
the same tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from inflight_backend.engine.adapters import SlotAdapters
from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.slot_table import SamplingInputs, SlotTable
from inflight_backend.engine.step_buffer import RunWords, StepBuffer, StepSizes
from inflight_backend.log import get_logger
from inflight_backend.models.attention import AttentionBackend
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.kv_cache import DeviceMemory
from inflight_scheduler import ScheduledBatch

_logger = get_logger(__name__)

_STEP = 64
_TOKENS_PER_CHUNK = 4
_FEW_CHUNKS = 8
_MANY_DRAWS = 256
_FEW_GENERATIONS, _SHORT_STEP = (8, 32), 512

Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Records a call: what replays it, and the tensor that holds its answer after each replay."""


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
        """What torch leaves undone where the device refuses a recording: for its allocator one is
        still under way, so that the next `torch.cuda.empty_cache` is an internal error, and the
        memory is kept."""
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


def mixed_sizes(max_tokens: int, num_slots: int) -> list[StepSizes]:
    """Sizes of recordings for steps of up to ``max_tokens`` tokens, small ones first.

    Tokens in steps of 64 up to 512, then of an eighth: up to some 180 tokens a step's products take
    as long as reading the weights, beyond them padding costs what it computes. Each with room for
    any number of generations, up to 512 tokens also for 8 and 32, since that decides into how many
    splits their attention is cut; for chunks of 4 tokens on average, since a program of the context
    attention leaves early for each that is not there; and for 256 draws or one per slot, whose rows
    alone pass the end of the last layer (every draft draws, too).
    """
    sizes, num_tokens = [], min(_STEP, max_tokens)
    while max_tokens > 0:
        most = min(num_tokens, num_slots)
        num_chunks = min(max(num_tokens // _TOKENS_PER_CHUNK, _FEW_CHUNKS), most)
        num_draws = min(num_tokens, max(num_slots, _MANY_DRAWS))
        few = _FEW_GENERATIONS if num_tokens <= _SHORT_STEP else ()
        sizes += [
            StepSizes(generations, num_tokens, num_chunks, num_draws)
            for generations in (*(number for number in few if number < most), most)
        ]
        if num_tokens == max_tokens:
            break
        step = max(_STEP, (1 << (num_tokens.bit_length() - 1)) // 8)
        num_tokens = min(num_tokens + step, max_tokens)
    return sizes


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A recorded step; the tensors hold its results until the next replay of any recording.

    ``hidden`` [num_draws, hidden_size] are the hidden states of all that draw, in plan order.
    ``replay_draw`` draws ``tokens`` [num_draws] int64 of them, for requests without features; of
    mixed steps there is none.
    """

    sizes: StepSizes
    replay: Callable[[], Any]
    hidden: Tensor
    replay_draw: Callable[[], Any] | None = None
    tokens: Tensor | None = None

    def get_num_generations(self) -> int:
        """Rows that generate."""
        return self.sizes.num_generations


@dataclass(frozen=True, slots=True)
class GraphCache:
    """Recordings of generation steps and of mixed ones, small ones first; empty where such steps
    run eagerly."""

    generations: tuple[StepGraph, ...] = ()
    mixed: tuple[StepGraph, ...] = ()

    def find(self, batch: ScheduledBatch) -> StepGraph | None:
        """The smallest recording that holds ``batch``, if there is one."""
        if batch.runs:
            wanted = StepSizes.of(batch)
            return next((graph for graph in self.mixed if graph.sizes.hold(wanted)), None)
        if not self.generations:
            return None
        num_rows = len(batch.generation_slots)
        place = bisect_left(self.generations, num_rows, key=StepGraph.get_num_generations)
        return self.generations[place]


class GraphCapturer:
    """Records steps over the memory of one pool after the other."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        slots: SlotTable,
        buffer: StepBuffer,
        draw: Callable[[Tensor, SamplingInputs], Tensor],
        make_capture: Callable[[], Capture] | None,
        adapters: SlotAdapters | None = None,
    ) -> None:
        """``make_capture``: each pool's recordings are another one's; None: nothing is recorded."""
        self._decoder, self._slots, self._buffer, self._draw = decoder, slots, buffer, draw
        self._adapters = adapters
        self._make_capture = make_capture if config.cuda_graph_mode else None
        most = min(config.cuda_graph_mixed_tokens, config.num_tokens_limit)
        self._sizes = {
            "generation": [StepSizes(size) for size in bucket_sizes(config.num_slots)],
            "mixed": mixed_sizes(most, config.num_slots),
        }

    def record(self, attention: AttentionBackend, *, has_adapters: bool = False) -> GraphCache:
        """What can be recorded, of steps in which a row ``has_adapters`` or none does; of what
        cannot, one line in the log, and no second attempt."""
        if self._make_capture is None or not attention.can_be_captured:
            return GraphCache()
        capture, found = self._make_capture(), []
        for kind, sizes in self._sizes.items():
            if kind == "mixed" and not attention.can_capture_chunks:
                break
            try:
                # The largest first, so that the others fit its memory.
                graphs = [
                    self._record(each, attention, capture, has_adapters) for each in reversed(sizes)
                ]
            except RuntimeError as error:  # it contains no request, so it may be quoted
                _logger.warning(
                    "%s steps cannot be recorded and run eagerly, which is slower: %s",
                    kind,
                    str(error).partition("\n")[0],
                    exc_info=True,
                )
                kinds = list(self._sizes)
                self._sizes = {each: self._sizes[each] for each in kinds[: kinds.index(kind)]}
                break
            found.append(tuple(reversed(graphs)))
        return GraphCache(*found)

    def measure(
        self,
        attention: AttentionBackend,
        memory: DeviceMemory,
        *,
        has_adapters: bool = False,
    ) -> int:
        """Bytes that recordings keep for themselves: they are made, and forgotten again."""
        if self._make_capture is None or not attention.can_be_captured:
            return 0
        free_before = memory.free_bytes()
        recordings = self.record(attention, has_adapters=has_adapters)
        num_bytes = free_before - memory.free_bytes()
        del recordings
        return max(num_bytes, 0)

    def _record(
        self,
        sizes: StepSizes,
        attention: AttentionBackend,
        capture: Capture,
        has_adapters: bool,
    ) -> StepGraph:
        words = self._buffer.send(ScheduledBatch(0), sizes).runs  # all padding
        replay, hidden = capture(partial(self.forward, words, attention, has_adapters))
        if sizes.num_tokens:
            return StepGraph(sizes, replay, hidden)
        replay_draw, tokens = capture(partial(self.draw, words, hidden))
        return StepGraph(sizes, replay, hidden, replay_draw, tokens)

    def forward(
        self, words: RunWords, attention: AttentionBackend, has_adapters: bool = False
    ) -> Tensor:
        """What is recorded of a step: the decoder."""
        step = self._slots.begin(words)
        if self._adapters is not None:
            self._adapters.begin_recorded(words if has_adapters else None)
        positions, begun = step.attention.positions, attention.begin(step.attention)
        return self._decoder.forward(step.tokens, positions, begun, step.sample_rows)

    def draw(self, words: RunWords, hidden: Tensor) -> Tensor:
        """What is recorded behind it: the draw of requests without features, whose end need not
        wait (the host knows whose must; ten small launches would look after it in every step)."""
        slots = words.generation_slots.long()
        return self._draw(hidden, self._slots.sampling(slots, may_forbid_end=False))
