"""What of an engine's steps is recorded, and the recordings themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inflight_backend.engine.config import EngineConfig
from inflight_backend.engine.device_memory import DeviceMemory
from inflight_backend.engine.graph_runner import Capture, GraphRunner, unless_refused
from inflight_backend.engine.mixed_runner import MixedRunner
from inflight_backend.engine.mixed_step import MixedWords, mixed_sizes
from inflight_backend.engine.slots import SamplingInputs, SlotTable
from inflight_backend.models.attention import AttentionBackend, CapturableBackend
from inflight_backend.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Recordings:
    """Of steps of generations alone and of mixed ones; None where such steps run eagerly."""

    steps: GraphRunner | None = None
    mixed: MixedRunner | None = None

    @property
    def num_steps(self) -> int:
        """Sizes of generation steps that are recorded."""
        return 0 if self.steps is None else self.steps.num_recordings

    @property
    def num_mixed(self) -> int:
        """Sizes of mixed steps that are recorded."""
        return 0 if self.mixed is None else self.mixed.num_recordings

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return 0 if self.mixed is None else self.mixed.pinned_bytes


class StepRecorder:
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

    def record(self, attention: AttentionBackend) -> Recordings:
        """What can be recorded; of what cannot, one line in the log, and no second attempt."""
        if self._make_capture is None or not isinstance(attention, CapturableBackend):
            return Recordings()
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
            return Recordings(steps)
        sizes, device = self._mixed_sizes, self._device
        mixed = unless_refused(
            "mixed steps", lambda: MixedRunner(forward_mixed, sizes, slots, device, capture)
        )
        if mixed is None:
            self._mixed_sizes = []
        return Recordings(steps, mixed)

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
