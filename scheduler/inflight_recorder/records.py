"""What a flight recording says: plain facts of scheduling, no token and no text.

Scheduling is a pure function of its recorded inputs, so a recording holds the inputs (arrivals,
ends) and the decision; reasons, blocks and states are derived by running the same rules again.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from inflight_recorder.beams import Moves
from inflight_recorder.likeness import NO_LIKENESS, Likeness
from inflight_scheduler.planning.active_requests import DEFAULT_PRIORITY_SPAN
from inflight_scheduler.policies.micro_batch import ContextChunking
from inflight_scheduler.policies.scheduler import CapacitySchedulerPolicy

MAX_NUM_BLOCKS = 2**22
"""Blocks of a pool that can be rebuilt; a larger number in a recording is refused."""

MAX_NUM_REQUESTS = 2**16
"""Requests in flight at once, at most (the bound of ``max_batch_size``)."""

MAX_NUM_TEXTS = 2**37
"""Texts numbered since the server started, at most."""

MAX_NUM_DRAFTS = 2**12
"""Drafts of one request in one step, at most."""

MAX_NUM_TOKENS = 2**24
"""Tokens of one request, at most (the bound of ``max_seq_len``)."""

ERROR = "error"
"""How a request ended that was answered with an error; the others are names of `FinishReason`."""

NOT_FINITE = "not_finite"
"""The model's logits were no numbers; nothing of such a request is kept for reuse."""

TOKEN_ENDS = frozenset({NOT_FINITE, "end_id", "stop_words"})
"""Ends that a token brings, in the order of the tokens; the others come after all tokens."""

BAD_ENDS = frozenset({NOT_FINITE, ERROR, "timed_out", "cancelled"})
"""Ends without the whole answer."""

END_REASONS = TOKEN_ENDS | BAD_ENDS


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything besides the requests that a decision depends on.

    ``is_overlapped``: a step was decided while the one before it ran, so what its tokens ended was
    known one decision later. ``scheduler_class`` names a scheduler of the user. It is told, never
    imported from here. ``priority_span``: see `ActiveRequests`. ``max_drafting_batch``: drafts are
    guessed while at most so many are active; None if they never are.
    """

    policy: CapacitySchedulerPolicy
    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int | None = None
    chunking: ContextChunking | None = None
    enable_reuse: bool = False
    may_copy_blocks: bool = False
    scheduler_class: str | None = None
    is_overlapped: bool = False
    priority_span: float = DEFAULT_PRIORITY_SPAN
    max_drafting_batch: int | None = None

    @property
    def may_pause(self) -> bool:
        """True where a request may have to compute its text again."""
        is_ours = self.scheduler_class is None
        return not is_ours or self.policy is CapacitySchedulerPolicy.MAX_UTILIZATION


class Arrival(NamedTuple):
    """A request that was accepted.

    ``waited_us``: how long before the decision it had come. ``place`` is its index among the
    active ones, None for last. ``likeness``: with block reuse, which text its prompt begins like.
    """

    request_id: int
    prompt_len: int
    max_new_tokens: int
    waited_us: int = 0
    priority: float = 0.5
    beam_width: int = 1
    place: int | None = None
    likeness: Likeness = NO_LIKENESS


class RequestState(NamedTuple):
    """Where an active request stood when the recording began.

    ``prompt_len`` includes what a pause has turned into prompt and ``max_new_tokens`` counts from
    there, as in `LlmRequest`. ``num_computed`` are the tokens of the context that were computed.
    ``pending_place``: the last token is that of a step which ran, at that place among its
    tokens, from 1; 0 if no step ran for the request. ``num_blocks`` it held, where drafts had taken
    more than its tokens need; else 0.
    """

    request_id: int
    orig_prompt_len: int
    prompt_len: int
    num_tokens: int
    max_new_tokens: int
    num_computed: int
    num_pauses: int
    priority: float = 0.5
    beam_width: int = 1
    pending_place: int = 0
    num_blocks: int = 0


standing = attrgetter(  # half the time that one after another takes, of thousands at once
    "request_id",
    "orig_prompt_len",
    "prompt_len",
    "num_tokens",
    "max_new_tokens",
    "context_current_position",
    "num_pauses",
    "priority",
    "beam_width",
)
"""The first fields of a `RequestState`, of a request now."""


class TextPart(NamedTuple):
    """From ``start`` to ``length`` the text ``number`` goes on like the earlier text ``source``."""

    number: int
    source: int
    length: int
    start: int


class KeptBlock(NamedTuple):
    """The block ``block_id`` holds block ``place`` of the text ``text_number``."""

    block_id: int
    text_number: int
    place: int


@dataclass(frozen=True, slots=True)
class CacheStart:
    """With block reuse: what was cached when the recording began, and with which texts.

    ``num_texts`` had been numbered; ``parts`` say which of those that still matter agree, in the
    order in which that became known. ``text_numbers`` and ``tables`` (block ids in token order)
    have one entry per active request. ``kept`` are the blocks whose content is kept, ``idle`` those
    of them that nobody held, the one to be given up first in front, and ``beginnings`` those that
    are found by their first token.
    """

    num_texts: int
    parts: tuple[TextPart, ...]
    text_numbers: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    kept: tuple[KeptBlock, ...]
    idle: tuple[int, ...]
    beginnings: tuple[int, ...]


class Chunk(NamedTuple):
    """At most ``num_tokens`` of the context of a request run: what is cached of them does not."""

    request_id: int
    num_tokens: int


class Decision(NamedTuple):
    """Who ran, in order, and who was paused."""

    context: tuple[Chunk, ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]

    @property
    def num_requests(self) -> int:
        """Requests that ran."""
        return len(self.context) + len(self.generation)


class End(NamedTuple):
    """A request ended for another reason than its length, which needs no telling."""

    request_id: int
    reason: str


class Growth(NamedTuple):
    """With block reuse: what a request generated goes on like another text."""

    request_id: int
    likeness: Likeness


class Drafts(NamedTuple):
    """A request had ``num_drafts`` when it was decided, of which ``num_kept`` had room.

    ``num_gained`` tokens came of its step; 0 if it did not run, or not to the end of its context.
    """

    request_id: int
    num_drafts: int
    num_kept: int
    num_gained: int


class Iteration(NamedTuple):
    """One pass of the loop: arrivals, then the decision, the step, then the ends.

    ``decision`` is None when there was none (deciding failed, or requests ended beside it), and
    ``has_failed`` tells of a step that brought no tokens, ``has_lost`` (overlapped) of the step
    before, which took this one with it. ``is_by_default``: the decision of the user's scheduler was
    refused, and the default made this one. ``drafts`` are of all who had some, and ``is_settled``
    (overlapped) says that no step ran on after this iteration. ``moves``: how beams went on before
    the decision. ``has_forgotten`` (overlapped): somebody had left whose numbers have failed in the
    step before, so nothing stayed cached. ``growths`` are known when requests
    give their blocks back in this iteration: after ``arrivals`` were compared with other texts, but
    before where there is no decision. Times are microseconds, ``start_us`` since the
    recording was started; ``num_free_blocks`` is after the decision was carried out.
    """

    number: int
    start_us: int
    step_us: int
    arrivals: tuple[Arrival, ...]
    decision: Decision | None
    num_free_blocks: int
    ends: tuple[End, ...]
    has_failed: bool = False
    growths: tuple[Growth, ...] = ()
    is_by_default: bool = False
    has_lost: bool = False
    drafts: tuple[Drafts, ...] = ()
    is_settled: bool = False
    moves: tuple[Moves, ...] = ()
    has_forgotten: bool = False
