"""What becomes of a decision that is simulated: a plan, then a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from inflight_recorder.cost_model import Load
from inflight_recorder.errors import RecordingError
from inflight_recorder.records import Drafts
from inflight_scheduler.batch import ScheduledBatch
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.request import LlmRequest

MIN_PROMPT_BLOCKS = 2**24
"""Blocks of all prompts that begin, at most: half a minute."""

PROMPT_BLOCKS_PER_PLAN = 2**16
"""So many more for each plan. No server spends a tenth of a second of each iteration on that."""


class PromptBound:
    """Bounds the work of a simulation: a few bytes can tell of a prompt that begins again and
    again, after a pause in each second iteration."""

    __slots__ = ("_num_left", "_tokens_per_block")

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._num_left = MIN_PROMPT_BLOCKS

    def begin(self, contexts: Sequence[LlmRequest]) -> None:
        """A plan with these; `RecordingError` if there have been too many blocks."""
        fresh = (request for request in contexts if request.seq_slot is None)
        num_blocks = sum(-(-request.prompt_len // self._tokens_per_block) for request in fresh)
        self._num_left += PROMPT_BLOCKS_PER_PLAN - num_blocks
        if self._num_left < 0:
            raise RecordingError(
                f"prompts of more than {MIN_PROMPT_BLOCKS:,} blocks, and "
                f"{PROMPT_BLOCKS_PER_PLAN:,} for each iteration, have begun"
            )


class Plan(NamedTuple):
    """A decision that has its slots and blocks; ``load`` None: nobody knows any more."""

    batch: ScheduledBatch
    load: Load | None

    @classmethod
    def of(cls, batch: ScheduledBatch, generation: Sequence[LlmRequest]) -> Plan:
        """With the work of ``batch``, which is planned and does not run yet."""
        num_tokens = sum(chunk.num_tokens for chunk in batch.context_chunks)
        num_cached = sum(request.num_cached_tokens * request.num_rows for request in generation)
        num_rows = batch.num_tokens - num_tokens
        return cls(batch, Load(num_tokens, len(batch.context_chunks), num_rows, num_cached))


def drawn_tokens(
    batch: ScheduledBatch,
    drafts: Sequence[Drafts],
    planner: BatchPlanner,
    failed: Collection[int] = (),
) -> list[int]:
    """What the engine may have drawn: drafts are 0, and so are the draws that confirm them.

    The last token of a request in ``failed`` is -1: its numbers have failed.
    """
    if batch.num_drafts == 0 and not failed:
        return [0] * batch.num_drawn
    owners = planner.token_owners(batch)
    gained = {each.request_id: each.num_gained for each in drafts}
    tokens: list[int] = []
    for run in batch.runs:
        if run.num_drawn > 0:
            owner = owners[len(tokens)].request_id
            num_right = min(max(gained.get(owner, 0), 1), run.num_drawn) - 1
            drawn = [0] * num_right + [1] * (run.num_drawn - num_right)
            if owner in failed:
                drawn[num_right] = -1
            tokens += drawn
    return tokens + [-(owner.request_id in failed) for owner in owners[len(tokens) :]]


NO_PLAN = Plan(ScheduledBatch(iteration=0), None)


class Step(NamedTuple):
    """What running a plan did: who got a token, who ended, and the work that was waited for.

    Overlapped, all of it is of the step before. ``load`` None: there was none, or it was lost, or
    it was waited for before the decision (`Simulation.load_before`).
    """

    advanced: list[LlmRequest]
    ended: list[LlmRequest]
    load: Load | None = None
