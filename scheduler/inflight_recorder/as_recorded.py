"""What a prediction takes from the recording, since only the text could tell it.

Behind the same token the rows of a search go on as they did, and where a request had drafts it has
as many, and as many come true. Whether drafts are guessed at all, and whether there is room for
them, depends on the others: that follows the rules of the server (`Drafter` in the backend).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight_recorder.beams import Moves
from inflight_recorder.records import Drafts
from inflight_recorder.simulation import Simulation
from inflight_recorder.workload import Job
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

_GENERATION = LlmRequestState.GENERATION_IN_PROGRESS


def num_expected_tokens(request: LlmRequest) -> int:
    """Tokens generated, with those that a running step draws."""
    return request.num_tokens - request.orig_prompt_len


@dataclass(slots=True)
class _Known:
    """An active request of which something was recorded.

    ``moved_at``: the pauses and tokens it had when its beams moved last.
    """

    request: LlmRequest
    job: Job
    moved_at: tuple[int, int] = (0, 0)


class AsRecorded:
    """Knows the active requests of a prediction that search or have drafts."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._limit = simulation.settings.max_drafting_batch
        self._known: dict[int, _Known] = {}

    def add(self, request: LlmRequest, job: Job) -> None:
        """``request``, which is ``job``, is active now."""
        if job.moves or job.drafts:
            self._known[request.request_id] = _Known(request, job)

    def forget(self, request: LlmRequest) -> None:
        """It is not active any more."""
        self._known.pop(request.request_id, None)

    def take_moves(self) -> tuple[Moves, ...]:
        """How beams go on before the decision that comes now."""
        moves = []
        for known in self._known.values():
            request, num_tokens = known.request, num_expected_tokens(known.request)
            place = request.num_pauses, num_tokens
            if request.state is not _GENERATION or place == known.moved_at:
                continue
            known.moved_at = place
            if num_tokens in known.job.moves:
                moves.append(Moves(request.request_id, known.job.moves[num_tokens]))
        return tuple(moves)

    def drafts(self) -> tuple[Drafts, ...]:
        """Who has drafts at the decision that comes now."""
        if not self._known:
            return ()
        contexts = [k for k in self._known.values() if k.request.is_context_init_state]
        found = [drafts for known in contexts if (drafts := self._sent(known))]
        return (*found, *(self._guessed() if self._is_guessing else ()))

    @property
    def wants_drafts(self) -> bool:
        """True when the next step may have drafts, so that it is awaited."""
        return (self._limit is not None and self._is_guessing) or bool(self.drafts())

    @property
    def _is_guessing(self) -> bool:
        active = self._simulation.active
        is_few = self._limit is None or len(active) <= self._limit
        return is_few and len(active) > 0 and all(r.state is _GENERATION for r in active)

    def _sent(self, known: _Known) -> Drafts | None:
        """Those that came with a request and run with the end of its context."""
        request, budget = known.request, self._simulation.settings.max_num_tokens
        if request.num_pauses or 0 not in known.job.drafts:
            return None
        num_drafts, num_gained = known.job.drafts[0]
        if budget is not None:
            may_chunk = self._simulation.settings.chunking is not None
            num_drafts = min(num_drafts, budget - (1 if may_chunk else request.prompt_len))
        if num_drafts <= 0:
            return None
        return Drafts(request.request_id, num_drafts, num_drafts, num_gained)

    def _guessed(self) -> list[Drafts]:
        """Those of the requests that generate, as far as there are tokens and blocks to spare."""
        manager, active = self._simulation.block_manager, self._simulation.active
        budget = self._simulation.settings.max_num_tokens
        num_spare_tokens = None if budget is None else budget - sum(r.num_rows for r in active)
        num_spare_blocks = manager.num_free_blocks - self._num_blocks(active)
        found = []
        for known in self._known.values():
            request = known.request
            told = known.job.drafts.get(num_expected_tokens(request))
            if told is None:
                continue
            num_drafts = min(told[0], request.num_remaining_tokens - 1)
            if num_spare_tokens is not None:
                num_drafts = min(num_drafts, num_spare_tokens)
            num_tokens = request.num_cached_tokens + 1
            num_blocks = self._num_holding(num_tokens + num_drafts) - max(
                self._num_holding(num_tokens), manager.num_blocks_of(request.request_id)
            )
            if num_drafts > 0 and num_blocks <= num_spare_blocks:
                found.append(Drafts(request.request_id, num_drafts, num_drafts, told[1]))
                num_spare_blocks -= max(num_blocks, 0)
                if num_spare_tokens is not None:
                    num_spare_tokens -= num_drafts
        return found

    def _num_blocks(self, requests: Sequence[LlmRequest]) -> int:
        """Blocks that a step without drafts takes."""
        return sum(map(self._simulation.block_manager.get_needed_blocks_one_step, requests))

    def _num_holding(self, num_tokens: int) -> int:
        return -(-num_tokens // self._simulation.settings.tokens_per_block)
