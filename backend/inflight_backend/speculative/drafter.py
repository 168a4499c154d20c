"""Drafts of the server for requests that generate.

Drafts are worth their cost where the device has room to spare, so only while few requests are
active and all of them generate. They take the rest of the token budget and of the free blocks after
every request's next token. The number of drafts of a request doubles once all were accepted and
halves once none was; when a single one was wrong, there are none for some steps.

A request whose samples depend on more of the text than its logits do (penalties, no-repeat n-grams,
bad words of several tokens, a decaying top-p), one that is guided, and one with beams get none:
their state is kept for one token per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight_backend.errors import ConfigurationError
from inflight_backend.speculative.ngram import NgramIndex
from inflight_scheduler import ActiveRequests, BlockManager, LlmRequest, ScheduledBatch, can_verify

MODES = ("none", "ngram")


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingConfig:
    """Sources of drafts.

    ``max_draft_len`` bounds the drafts of a request in one step, those that a client sends
    (``draft_input_ids``) included; 0 allows none. With ``mode`` ngram the server drafts what came
    after an earlier occurrence of the last 2 to ``max_matching_ngram_size`` tokens, while at
    most ``disable_by_batch_size`` requests are active. (Names: TensorRT-LLM's
    `NGramDecodingConfig`, vLLM's `SpeculativeConfig`.)
    """

    mode: str = "none"
    max_draft_len: int = 8
    max_matching_ngram_size: int = 4
    disable_by_batch_size: int = 16

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"speculative_decoding_mode must be one of {', '.join(MODES)}, not {self.mode!r}"
            )
        for name, minimum in (
            ("max_draft_len", 0),
            ("max_matching_ngram_size", 2),
            ("disable_by_batch_size", 1),
        ):
            if getattr(self, name) < minimum:
                raise ConfigurationError(
                    f"{name} must be at least {minimum}, not {getattr(self, name)}"
                )
        if self.mode == "ngram" and self.max_draft_len == 0:
            raise ConfigurationError(
                "speculative_decoding_mode is ngram, but max_draft_len is 0: no draft could be "
                "verified; raise max_draft_len or set the mode to none"
            )


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
    """The requests with drafts in the iteration with drafts that was planned last."""

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


_NUM_QUIET_STEPS = 8


@dataclass(slots=True)
class _Guessing:
    request: LlmRequest
    index: NgramIndex
    num_drafts: int
    num_quiet_steps: int = 0  # to come
    num_verified: int = 0
    num_accepted: int = 0

    def take_result(self, max_draft_len: int) -> None:
        """Adapt the number of drafts to those that were accepted since the last call."""
        num_verified = self.request.num_verified_drafts - self.num_verified
        num_accepted = self.request.num_accepted_drafts - self.num_accepted
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        if num_verified == 0:
            self.num_quiet_steps = max(self.num_quiet_steps - 1, 0)
        elif num_accepted == num_verified:
            self.num_drafts = min(2 * self.num_drafts, max_draft_len)
        elif num_accepted == 0 and self.num_drafts > 1:
            self.num_drafts //= 2
        elif num_accepted == 0:
            self.num_quiet_steps = _NUM_QUIET_STEPS


class Drafter:
    """Drafts for the requests that generate; keeps the indexes of the last ones."""

    def __init__(
        self,
        config: SpeculativeDecodingConfig,
        block_manager: BlockManager,
        max_num_tokens: int,
        is_guided: Callable[[LlmRequest], bool],
    ) -> None:
        self._config = config
        self._block_manager = block_manager
        self._max_num_tokens = max_num_tokens
        self._is_guided = is_guided
        self._guessing: dict[int, _Guessing] = {}

    def is_on(self, active: ActiveRequests) -> bool:
        """True while drafts are worth their cost."""
        return 0 < len(active) <= self._config.disable_by_batch_size and (
            len(active.generation) == len(active)
        )

    def guess(self, active: ActiveRequests) -> None:
        """Give drafts to requests whose text repeats itself; nothing if not `is_on`.

        O(new tokens), but O(text) for a request that got none in the call before.
        """
        if not self.is_on(active):
            return
        manager, requests = self._block_manager, active.generation
        for request in requests:
            request.set_draft_tokens(())
        num_spare_tokens = self._max_num_tokens - len(requests)
        num_spare_blocks = manager.num_free_blocks
        num_spare_blocks -= sum(map(manager.get_needed_blocks_one_step, requests))
        guessing: dict[int, _Guessing] = {}
        for request in requests:
            if not can_verify(request) or self._is_guided(request):
                continue
            known = guessing[request.request_id] = self._find(request)
            num_drafts = min(known.num_drafts, request.num_remaining_tokens - 1, num_spare_tokens)
            may_guess = num_drafts > 0 and known.num_quiet_steps == 0
            drafts = known.index.guess(num_drafts) if may_guess else []
            num_blocks = _num_more_blocks(manager, request, drafts)
            if drafts and num_blocks <= num_spare_blocks:
                request.set_draft_tokens(drafts)
                num_spare_tokens -= len(drafts)
                num_spare_blocks -= num_blocks
        self._guessing = guessing

    def _find(self, request: LlmRequest) -> _Guessing:
        """The index of ``request``, with the result of its last drafts."""
        known = self._guessing.get(request.request_id)
        if known is None or known.request is not request:
            known = _Guessing(
                request,
                NgramIndex(request.tokens, self._config.max_matching_ngram_size),
                self._config.max_draft_len,
                num_verified=request.num_verified_drafts,
                num_accepted=request.num_accepted_drafts,
            )
        known.take_result(self._config.max_draft_len)
        return known


def _num_more_blocks(manager: BlockManager, request: LlmRequest, drafts: list[int]) -> int:
    """Blocks that a step with ``drafts`` takes and one without does not."""
    num_plain = manager.get_needed_blocks_one_step(request)
    request.set_draft_tokens(drafts)
    num_needed = manager.get_needed_blocks_one_step(request)
    request.set_draft_tokens(())
    return num_needed - num_plain
