"""What the batch manager needs of an engine: to run plans, and to say how large it is."""

from __future__ import annotations

from typing import Protocol

from inflight_backend.iteration_stats import MemoryUsage
from inflight_scheduler import ScheduledBatch


class PendingStep(Protocol):
    """A step that may still run."""

    def read(self) -> list[int]:
        """Wait for it; its tokens as `StepEngine.execute` returns them."""


class StepEngine(Protocol):
    """What the batch manager needs of an engine; `inflight_backend.engine.Engine` is one."""

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV, for people."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one block."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def max_seq_len(self) -> int:
        """Prompt plus new tokens of a request, at most."""

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one plan, at most."""

    @property
    def is_asynchronous(self) -> bool:
        """True when `submit` returns before the step has run."""

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """Run a plan; one token per last context chunk, then one per generation slot."""

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step; at most two may be unread, and they are read in order."""

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use now; cheap enough for every iteration."""
