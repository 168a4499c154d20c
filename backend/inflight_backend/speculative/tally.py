"""What became of the drafts of an iteration, for its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight_scheduler import LlmRequest, ScheduledBatch


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Drafts verified in one iteration (`specDecodingStats` of the Executor API)."""

    num_draft_tokens: int
    num_accepted_tokens: int
    num_requests: int

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request with drafts got, on average: those accepted and one more."""
        return (self.num_accepted_tokens + self.num_requests) / self.num_requests


class DraftTally:
    """Remembers who verifies drafts in the iteration with drafts that was planned last."""

    def __init__(self) -> None:
        self._num_drafts = 0
        self._verifying: list[tuple[LlmRequest, int]] = []

    def planned(self, batch: ScheduledBatch, owners: Sequence[LlmRequest]) -> None:
        """``batch``, which has drafts, will run; the tokens it draws belong to ``owners``."""
        self._num_drafts = batch.num_drafts
        drafting = {id(owner): owner for owner in owners if owner.draft_tokens}
        self._verifying = [(each, each.num_accepted_drafts) for each in drafting.values()]

    def count(self) -> DraftStats:
        """The numbers of that iteration once it has run."""
        num_accepted = sum(each.num_accepted_drafts - before for each, before in self._verifying)
        return DraftStats(self._num_drafts, num_accepted, len(self._verifying))
