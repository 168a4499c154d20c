"""What becomes of a decision that is simulated: a plan, then a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight_scheduler.batch import ScheduledBatch
from inflight_scheduler.recording.cost_model import Load
from inflight_scheduler.request import LlmRequest


class Plan(NamedTuple):
    """A decision that has its slots and blocks; ``load`` None: nobody knows any more."""

    batch: ScheduledBatch
    load: Load | None

    @classmethod
    def of(cls, batch: ScheduledBatch, generation: Sequence[LlmRequest]) -> Plan:
        """With the work of ``batch``, which is planned and does not run yet."""
        num_cached = sum(request.num_cached_tokens for request in generation)
        num_contexts = len(batch.context_chunks)
        load = Load(batch.num_context_tokens, num_contexts, len(generation), num_cached)
        return cls(batch, load)


NO_PLAN = Plan(ScheduledBatch(iteration=0), None)


class Step(NamedTuple):
    """What running a plan did: who got a token, who ended, and the work that was waited for.

    Overlapped, all of it is of the step before. ``load`` None: there was none, or it was lost.
    """

    advanced: list[LlmRequest]
    ended: list[LlmRequest]
    load: Load | None = None
