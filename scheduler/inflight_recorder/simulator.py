"""The scheduler run again: requests without text, the same rules, the same accounts of blocks.

`Simulation` stands in for the loop of the batch manager. For each iteration with a decision call
`arrivals`, `begin`, `decide` (or `follow`), `plan`, `run`, then `end`; for one without, `arrivals`,
`settle` if it says so, then `end`. Between `plan` and `run` the sizes of chunks are those computed:
what is cached of a prompt is left out.

With block reuse a request has the recorded hashes for the keys of its blocks, so it finds in the
cache what it found then. How much of a further block it found is taken from the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple, SupportsIndex, overload

from inflight_recorder.cost_model import Load
from inflight_recorder.schema import (
    MAX_NUM_REQUESTS,
    TOKEN_ENDS,
    BeamTrace,
    CacheStart,
    Decision,
    Drafts,
    Header,
    Iteration,
    PartialMatch,
    RequestState,
)
from inflight_recorder.settings import (
    NOT_FINITE,
    Lists,
    RecordingError,
    Settings,
    check_possible,
    scheduler_of,
)
from inflight_scheduler.batch import ScheduledBatch
from inflight_scheduler.beam_search import BeamStep, Candidate
from inflight_scheduler.errors import InvalidDecision, SchedulerError
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.kv.prefix_cache import HASH_SIZE, CacheContent
from inflight_scheduler.kv.state_snapshots import SnapshotState
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.policies.scheduler import CapacitySchedulerPolicy, RequestScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import FinishReason, LlmRequestState

MAX_BEAM_ENTRIES = 2**24
"""Entries of the block tables of all beams in flight, at most: these share blocks, so the size of
the pool does not bound them."""

MIN_PROMPT_BLOCKS = 2**24
"""Blocks of all prompts that begin, at most: half a minute."""

PROMPT_BLOCKS_PER_PLAN = 2**16
"""So many more for each plan. No server spends a tenth of a second of each iteration on that."""

MakeScheduler = Callable[[Settings, BatchPlanner], RequestScheduler]
"""A scheduler for the settings, over the blocks and slots of the planner."""


def default_scheduler(settings: Settings, planner: BatchPlanner) -> RequestScheduler:
    """The scheduler the settings name; `RecordingError` if it is one of the user."""
    if settings.scheduler_class is not None:
        raise RecordingError(
            f"the recording was made with the scheduler {settings.scheduler_class!r}; "
            "it is needed to decide again: give it with --scheduler-class"
        )
    return scheduler_of(settings.policy, settings, planner)


class Plan(NamedTuple):
    """A decision that has its slots and blocks; ``load`` None: not known any more."""

    batch: ScheduledBatch
    load: Load | None

    @classmethod
    def of(cls, batch: ScheduledBatch, generation: Sequence[LlmRequest]) -> Plan:
        """With the work of ``batch``, which is planned and does not run yet."""
        num_tokens = sum(chunk.num_tokens for chunk in batch.context_chunks)
        num_cached = sum(request.num_cached_tokens * request.num_rows for request in generation)
        num_rows = batch.num_tokens - num_tokens
        num_contexts = len(batch.context_chunks) + len(batch.encoder_runs)
        num_tokens += batch.num_encoder_tokens
        return cls(batch, Load(num_tokens, num_contexts, num_rows, num_cached))


NO_PLAN = Plan(ScheduledBatch(iteration=0), None)


class Step(NamedTuple):
    """What running a plan did: requests that got a token, that ended, and the work waited for.

    Overlapped, all of it is of the step before. ``load`` None: there was none, or it was lost, or
    it was waited for before the decision (`Simulation.load_before`).
    """

    advanced: list[LlmRequest]
    ended: list[LlmRequest]
    load: Load | None = None


_ANY_BLOCK = -1

_LOOK_AHEAD = 2
"""Tokens beyond those of a step that a policy may want room for."""


class Simulation:
    """Scheduler, blocks and slots with requests that have lengths only.

    `RecordingError` for whatever cannot have happened.
    """

    def __init__(
        self,
        settings: Settings,
        make_scheduler: MakeScheduler | None = default_scheduler,
        start: Header | None = None,
    ) -> None:
        """``make_scheduler`` None: nothing is decided here, recorded decisions are followed.

        ``start``: the header of the recording that is followed, if it begins in the middle.
        """
        self.settings = settings
        self.block_manager = BlockManager(
            settings.num_blocks,
            settings.tokens_per_block,
            enable_reuse=settings.enable_reuse,
            windows=settings.windows,
            max_chunk_tokens=settings.max_chunk_tokens,
            max_drafts=settings.max_drafts,
            num_snapshots=settings.num_snapshots,
            partial_match=self._partial_match,
        )
        self.planner = BatchPlanner(
            self.block_manager, settings.max_batch_size, cross_blocks=settings.make_cross_blocks()
        )
        try:
            self.scheduler = make_scheduler and make_scheduler(settings, self.planner)
        except ValueError as error:
            raise RecordingError(f"these settings contradict one another: {error}") from None
        self._num_prompt_blocks_left = MIN_PROMPT_BLOCKS
        self._num_beam_entries = 0  # of active requests, at their last tokens
        self._drafting: set[int] = set()  # the requests with drafts at the last decision
        # Of a request: tokens of a block that are found cached, by the index of the block in the
        # prompt (`_ANY_BLOCK`: whichever is the first that is not cached as a whole).
        self._partial_matches: dict[int, Mapping[int, int]] = {}
        self._num_told: dict[int, int] = {}  # block keys of a request that the recording told
        self.active: list[LlmRequest] = []
        self._by_id: dict[int, LlmRequest] = {}
        self._running: Plan | None = None  # overlapped: the step whose tokens come next
        self._settled: list[LlmRequest] = []  # requests that got them before the decision
        if start is not None:
            self._resume(start)

    @property
    def is_running(self) -> bool:
        """True while a step runs whose tokens are to come (overlapped)."""
        return self._running is not None

    @property
    def must_settle(self) -> bool:
        """True while such a step runs of which the next decision needs the tokens (beams)."""
        running = self._running
        return running is not None and self.planner.must_apply_first(running.batch)

    @property
    def load_before(self) -> Load | None:
        """The work of that step, which is waited for between the arrivals and `begin`."""
        return self._running.load if self._running is not None and self.must_settle else None

    def find(self, request_id: int) -> LlmRequest | None:
        """The active request with this id."""
        return self._by_id.get(request_id)

    def arrivals(self, iteration: Iteration) -> list[LlmRequest]:
        """Make those of ``iteration`` active."""
        arrived = [
            self.arrive(
                make_request(
                    a.request_id,
                    a.prompt_len,
                    a.max_new_tokens,
                    a.beam_width,
                    a.priority,
                    a.lora_task_id,
                    a.lora_pages,
                    a.encoder_length,
                ),
                a.place,
            )
            for a in iteration.arrivals
        ]
        for request_id, hashes in iteration.growths:
            request = self._known(request_id)
            num_told = self._num_told.get(request_id, 0)
            request.block_keys[num_told:] = split_hashes(hashes)
            self._num_told[request_id] = len(request.block_keys)
            request.prefix_match = None
        return arrived

    def arrive(
        self,
        request: LlmRequest,
        place: int | None = None,
        partial_matches: Mapping[int, int] = MappingProxyType({}),
    ) -> LlmRequest:
        """Make ``request`` active, at index ``place`` of the active ones (None: last).

        ``partial_matches``: tokens that are cached of blocks of the prompt, by their index.
        """
        request_id = request.request_id
        may_pause = self.settings.may_pause
        if not self.block_manager.can_ever_fit(request, may_pause=may_pause):
            raise RecordingError(f"request {request_id} is larger than the whole pool")
        room = self.settings.num_cross_blocks * self.settings.tokens_per_block
        if request.encoder_length > room:
            raise RecordingError(f"request {request_id} has no room for what its encoder says")
        if request.beam_width > 1 and self.block_manager.window_groups:
            raise RecordingError(f"request {request_id} has beams, and layers have windows")
        if request_id in self._by_id:
            raise RecordingError(f"request {request_id} arrives while it is active")
        if len(self._by_id) >= MAX_NUM_REQUESTS:
            raise RecordingError(f"more than {MAX_NUM_REQUESTS} requests are active")
        self._num_beam_entries += self._beam_entries_of(request)
        if self._num_beam_entries > MAX_BEAM_ENTRIES:
            raise RecordingError(
                f"the tables of all beams have more than {MAX_BEAM_ENTRIES} blocks"
            )
        self._partial_matches[request_id] = partial_matches
        self._by_id[request_id] = request
        self.active.insert(len(self.active) if place is None else place, request)
        return request

    def begin(self, iteration: Iteration) -> None:
        """What comes between the arrivals and the decision of ``iteration``.

        How beams went on, then the drafts and partial matches that it is decided with.
        """
        running = self._running
        if running is not None and self.must_settle:
            if iteration.has_lost:
                raise RecordingError("a decision, though the step it needs was lost")
            self._running = None
            self._settled = self._apply_tokens(running.batch, iteration)
            reasons = iteration.reasons
            for request in self._settled:
                reason = reasons.get(request.request_id)
                has_ended = reason == "end_id" or (reason in TOKEN_ENDS and request.beams)
                if has_ended or request.is_finished:  # it holds its slot
                    raise RecordingError(f"request {request.request_id} ended before this decision")
        for trace in iteration.beams:
            self._move(trace)
        self._match(iteration.partial_matches)
        self._draft(iteration.drafts)

    def _move(self, trace: BeamTrace) -> None:
        request = self._known(trace.request_id)
        step = None if request.beams is None else request.beams.step
        is_running = request.is_generation_in_progress_state and not request.num_pending_tokens
        if request.beams is None or step is None or not is_running:
            raise RecordingError(f"request {trace.request_id} moves beams that do not run")
        if not _is_possible(trace.parents, request.beam_width):
            raise RecordingError(f"request {trace.request_id}: its beams cannot have moved so")
        request.beams.step = BeamStep(trace.parents, step.tokens)
        self.block_manager.follow_beams(request, trace.parents)

    def _draft(self, drafts: Sequence[Drafts]) -> None:
        """These requests have drafts at this decision, and no others."""
        drafting = {each.request_id for each in drafts}
        for request_id in self._drafting - drafting:
            if request_id in self._by_id:
                self._by_id[request_id].set_draft_tokens(())
        for each in drafts:
            if each.num_kept > each.num_drafts:
                raise RecordingError(f"request {each.request_id} keeps more drafts than it has")
            request = self._by_id.get(each.request_id)
            if request is None:
                raise RecordingError(f"request {each.request_id} has drafts, but it is not active")
            self._set_drafts(request, each.num_drafts)
            request.num_chunk_drafts = each.num_kept
        self._drafting = drafting

    def _set_drafts(self, request: LlmRequest, num_drafts: int) -> None:
        if request.beams is not None:  # its rows would not all grow by as many blocks
            raise RecordingError(
                f"request {request.request_id} has drafts, but it searches with beams"
            )
        has_context_room = request.is_context_init_state and request.seq_slot is not None
        if has_context_room and num_drafts > request.num_draft_tokens:
            # Its first chunk, before the recording began, has taken room for them.
            num_tokens = request.prompt_len + min(num_drafts, request.max_new_tokens)
            num_blocks = self.block_manager.num_blocks_of(request.request_id)
            if num_blocks * self.settings.tokens_per_block < num_tokens:
                raise RecordingError(f"request {request.request_id} has no room for its drafts")
            request.draft_tokens = (0,) * num_drafts
        elif num_drafts != request.num_draft_tokens:
            request.set_draft_tokens((0,) * num_drafts)

    def decide(self) -> Lists:
        """What the scheduler decides now; nothing changes but the sizes of context chunks."""
        assert self.scheduler is not None, "this simulation only follows"
        if not self.active:
            return [], [], []
        try:
            lists = self.scheduler.schedule_request(self.active, ())
        except SchedulerError as error:
            raise RecordingError(f"this cannot be scheduled: {error}") from None
        is_put_off = lists[2] and self._running is not None  # no pause while a step runs
        return ([], [], []) if is_put_off else lists

    def follow(self, decision: Decision) -> Lists:
        """``decision`` with requests for ids, chunk sizes set; it must be one that can be."""
        for chunk in decision.context:
            self._known(chunk.request_id).context_chunk_size = chunk.num_tokens
        context = [self._known(chunk.request_id) for chunk in decision.context]
        generation = [self._known(request_id) for request_id in decision.generation]
        paused = [self._known(request_id) for request_id in decision.paused]
        try:
            lists = context, generation, paused
            return check_possible(lists, self.active, self.settings, self.planner)
        except InvalidDecision as error:
            raise RecordingError(f"this decision cannot have been made: {error}") from None

    def plan(self, lists: Lists, iteration: Iteration) -> Plan:
        """Give slots, blocks and what is cached; the sizes of chunks are those computed then."""
        self._match(iteration.late_matches)
        self._bound_prompts(lists[0])
        searching = [request for request in lists[2] if request.beams is not None]
        keys = [list(request.block_keys) for request in searching]
        batch = self.planner.plan(*lists)
        for request, known in zip(searching, keys, strict=True):
            request.block_keys[:] = known  # a pause has dropped them, but the prompt is the same
        return Plan.of(batch, lists[1])

    def run(self, plan: Plan, iteration: Iteration) -> Step:
        """Run what was planned.

        A request ends with its last token, or with the token that ended it in ``iteration``;
        requests end in the order of their tokens. A step that failed gives no tokens.
        """
        batch = plan.batch
        if iteration.is_settled and self._running is not None:
            raise RecordingError("nothing runs on after this iteration, but a step ran before it")
        advanced, self._settled = self._settled, []
        if self.settings.is_overlapped and not iteration.is_settled:
            if batch.num_drafts > 0:
                raise RecordingError("drafts run in a step that runs on after this iteration")
            load = None if self._running is None else self._running.load
            advanced += self._run_overlapped(plan, iteration)
        elif iteration.has_failed:
            load = None
            self._discard(batch, iteration)
        else:
            load = None if batch.is_empty else plan.load
            if not batch.is_empty:
                advanced += self.planner.update(batch, self._drawn_tokens(batch, iteration))
        return self._end_by_tokens(advanced, iteration, load)

    def settle(self, iteration: Iteration) -> Step:
        """An iteration without a decision, in which the tokens of the step that ran have come."""
        running = self._running
        load = None if running is None or self.must_settle else running.load
        advanced = self._run_overlapped(NO_PLAN, iteration)
        return self._end_by_tokens(advanced, iteration, load)

    @property
    def num_plain_turns(self) -> int:
        """How many turns can be skipped, since what they do is known: every active request
        generates one token in each, and none ends, is paused or waits. 0 if that is not sure.

        Only for the policies of TensorRT-LLM and ours, and where no drafts are to come.
        """
        settings, active, running = self.settings, self.active, self._running
        num_requests = len(active)
        has_known_policy = isinstance(settings.policy, CapacitySchedulerPolicy)
        if not active or settings.scheduler_class is not None or not has_known_policy:
            return 0
        if settings.windows != (None,):  # blocks behind a window are given back on the way
            return 0
        if settings.num_snapshots is not None:  # and states are saved
            return 0
        if num_requests > min(settings.max_num_tokens or num_requests, settings.max_batch_size):
            return 0
        if settings.is_overlapped and (
            running is None
            or running.load is None
            or running.batch.runs
            or len(running.batch.generation_slots) != num_requests
        ):
            return 0
        if not all(map(_is_plain, active)):
            return 0
        num_turns = min(request.max_num_tokens - request.num_tokens for request in active) - 1
        num_places = num_turns + _LOOK_AHEAD
        manager = self.block_manager
        num_blocks = sum(
            -(-(request.num_cached_tokens + num_places) // settings.tokens_per_block)
            - manager.num_blocks_of(request.request_id)
            for request in active
        )
        return num_turns if num_blocks <= manager.num_free_blocks else 0

    def plain_loads(self) -> Iterator[Load]:
        """The work that is waited for in one plain turn after the other, without an end."""
        if self._running is not None and self._running.load is not None:  # overlapped
            yield self._running.load
        num_requests = len(self.active)
        num_cached = sum(request.num_cached_tokens for request in self.active)
        while True:
            yield Load(0, 0, num_requests, num_cached)
            num_cached += num_requests

    def skip_plain_turns(self, num_turns: int) -> None:
        """Come to the state behind so many plain turns (see `num_plain_turns`)."""
        if self._running is not None:
            load = next(islice(self.plain_loads(), num_turns, None))
            self._running = self._running._replace(load=load)
        for request in self.active:
            num_tokens = request.num_cached_tokens + num_turns
            blocks = self.block_manager.allocate(request.request_id, num_tokens)
            assert blocks is not None, "a plain turn has no room"
            assert isinstance(request.tokens, SyntheticTokens)
            request.tokens.length += num_turns

    def _run_overlapped(self, plan: Plan, iteration: Iteration) -> list[LlmRequest]:
        """The requests that got a token of the step before, which ran until now."""
        batch = plan.batch
        before, self._running = self._running, None
        if not batch.is_empty and not iteration.has_failed:
            self.planner.assume_step(batch)
            self._running = plan
        advanced: list[LlmRequest] = []
        if before is not None and iteration.has_lost:
            self._discard(before.batch, iteration)
            if self._running is not None:
                self._discard(batch, iteration)
                self._running = None
        elif before is not None:
            advanced = self._apply_tokens(before.batch, iteration)
        if iteration.has_failed:
            self._discard(batch, iteration)
        return advanced

    def _apply_tokens(self, batch: ScheduledBatch, iteration: Iteration) -> list[LlmRequest]:
        """The tokens of a step that ran on have come; returns the requests that got one."""
        if iteration.has_forgotten:
            self.block_manager.forget_all()
        return self.planner.apply_tokens(batch, self._drawn_tokens(batch, iteration))

    def _drawn_tokens(self, batch: ScheduledBatch, iteration: Iteration) -> list[int]:
        """What the engine may have drawn: drafts are 0, and so are the draws that confirm them.

        The last token of a request whose logits were not finite is -1. Nothing follows the last
        token of a beam search then.
        """
        failed = {request_id for request_id, reason in iteration.ends if reason == NOT_FINITE}
        if batch.num_drafts == 0 and not failed:
            return [0] * batch.num_drawn
        owners = self.planner.token_owners(batch)
        for request in owners:
            if request.request_id in failed and isinstance(request.beams, RecordedBeams):
                request.beams.is_broken = True
        gained = {each.request_id: each.num_gained for each in iteration.drafts}
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

    def _end_by_tokens(
        self, advanced: list[LlmRequest], iteration: Iteration, load: Load | None
    ) -> Step:
        """The step that ``advanced`` these, of which some end with it."""
        reasons = iteration.reasons
        ended = [r for r in advanced if r.is_finished or reasons.get(r.request_id) in TOKEN_ENDS]
        for request in ended:
            is_broken = reasons.get(request.request_id) == NOT_FINITE
            if is_broken and isinstance(request.tokens, SyntheticTokens):
                request.tokens.is_broken = True
        self.forget(ended)
        return Step(advanced, ended, None if iteration.has_failed or iteration.has_lost else load)

    def _discard(self, batch: ScheduledBatch, iteration: Iteration) -> None:
        """The step failed, so its requests must have ended."""
        reasons = iteration.reasons
        for request in self.planner.discard(batch):
            is_told = request.is_finished or request.request_id in reasons
            # Another request may have its id by now.
            if self._by_id.get(request.request_id) is request and not is_told:
                raise RecordingError(f"request {request.request_id} survives a failed step")

    def end(self, iteration: Iteration) -> list[LlmRequest]:
        """The other ends of ``iteration``; returns the requests."""
        is_bare = iteration.decision is None and not iteration.is_settled
        if is_bare and iteration.has_forgotten:
            self.block_manager.forget_all()
        ended = [self._by_id[i] for i in iteration.reasons if i in self._by_id]
        self.forget(ended)
        return ended

    def forget(self, requests: Sequence[LlmRequest]) -> None:
        """These are not active any more and hold nothing."""
        if not requests:
            return
        for request in requests:
            self.planner.release(request)
            if self._by_id.pop(request.request_id, None) is not None:
                self._num_beam_entries -= self._beam_entries_of(request)
                self._partial_matches.pop(request.request_id, None)
                self._num_told.pop(request.request_id, None)
        self.active = [r for r in self.active if r.request_id in self._by_id]

    def _match(self, matches: Iterable[PartialMatch]) -> None:
        for request_id, num_tokens in matches:
            self._partial_matches[request_id] = {_ANY_BLOCK: num_tokens}
            if request_id in self._by_id:  # what was found before may be remembered
                self._by_id[request_id].prefix_match = None

    def _partial_match(self, request: LlmRequest, index: int) -> int:
        matches = self._partial_matches.get(request.request_id, {})
        num_tokens = matches.get(index, matches.get(_ANY_BLOCK, 0))
        tokens_per_block = self.settings.tokens_per_block
        num_left = request.prompt_len - 1 - index * tokens_per_block
        return min(num_tokens, num_left, tokens_per_block - 1)

    def _known(self, request_id: int) -> LlmRequest:
        request = self._by_id.get(request_id)
        if request is None:
            raise RecordingError(f"request {request_id} runs, but it is not active")
        return request

    def _beam_entries_of(self, request: LlmRequest) -> int:
        if request.beams is None:
            return 0
        return request.num_rows * -(-request.max_num_tokens // self.settings.tokens_per_block)

    def _bound_prompts(self, contexts: Sequence[LlmRequest]) -> None:
        """`RecordingError` where too many prompt blocks have begun: a few bytes can tell of a
        prompt that begins again and again, after a pause in each second iteration."""
        fresh = (request for request in contexts if request.seq_slot is None)
        num_blocks = sum(-(-r.prompt_len // self.settings.tokens_per_block) for r in fresh)
        self._num_prompt_blocks_left += PROMPT_BLOCKS_PER_PLAN - num_blocks
        if self._num_prompt_blocks_left < 0:
            raise RecordingError(
                f"prompts of more than {MIN_PROMPT_BLOCKS:,} blocks, and "
                f"{PROMPT_BLOCKS_PER_PLAN:,} for each iteration, have begun"
            )

    def _resume(self, start: Header) -> None:
        """Begin in the middle: with the requests, the step and the cache of then."""
        if start.active and self.settings.enable_reuse and start.cache is None:
            raise RecordingError(
                "the recording begins in the middle and does not say what was cached then; with "
                "block reuse that is needed: record to a file from the start (record_file)"
            )
        for state in start.active:
            self._restore(state, has_table=start.cache is not None)
        self._resume_step(start)
        if start.cache is not None:
            self._restore_cache(start.cache, start.active)

    def _restore(self, state: RequestState, *, has_table: bool) -> None:
        """A request in the middle of its life, with the blocks it held then.

        With ``has_table`` the blocks come later, since some may be shared.
        """
        request = make_request(
            state.request_id,
            state.prompt_len,
            state.max_new_tokens,
            state.beam_width,
            state.priority,
            state.lora_task_id,
            state.lora_pages,
            state.encoder_length,
        )
        if state.beam_width > 1 and state.num_computed > 0:
            raise RecordingError(
                "the recording begins in the middle of a search with beams and does not say how "
                "they share blocks: record to a file from the start (record_file)"
            )
        self.arrive(request)
        request.orig_prompt_len = state.orig_prompt_len
        request.num_pauses = state.num_pauses
        request.tokens = SyntheticTokens(state.num_tokens, state.request_id)
        request.block_keys = split_hashes(state.hashes)
        self._num_told[state.request_id] = len(request.block_keys)
        if state.is_encoded:
            request.finish_encoder()
            answers = self.planner.answers
            if answers is None or not answers.restore(request, is_read=state.num_computed > 0):
                raise RecordingError("the requests at the start hold more than there is")
        if state.num_computed == 0:
            return
        request.context_chunk_size = state.num_computed
        request.move_to_next_context_chunk()
        has_room = self.planner.num_free_slots > 0
        if not has_table:
            num_cached = max(state.prompt_len, request.num_cached_tokens)
            num_tokens = max(num_cached, state.num_blocks * self.settings.tokens_per_block)
            blocks = self.block_manager.allocate(state.request_id, num_tokens)
            most = -(-request.max_num_tokens // self.settings.tokens_per_block)
            has_room = has_room and state.num_blocks <= most
            has_room = has_room and blocks is not None
            windows = {state.request_id: self._window_tables(state, num_cached)}
            has_room = has_room and self.block_manager.restore_windows(windows)
        if not has_room:
            raise RecordingError("the requests at the start hold more than there is")
        request.seq_slot = self.planner.slots.assign()

    def _window_tables(
        self, state: RequestState, num_cached: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """What the request held in groups with a window, if it can have.

        In its context, of which a table need not hold all, ``num_cached`` is not asked for.
        """
        groups, size = self.block_manager.window_groups, self.settings.tokens_per_block
        if len(state.windows) != len(groups):
            raise RecordingError(
                f"windows: request {state.request_id} has {len(state.windows)} tables for "
                f"{len(groups)} groups"
            )
        num_tokens = state.num_computed if state.num_computed < state.prompt_len else num_cached
        for group, (num_behind, blocks) in zip(groups, state.windows, strict=True):
            num_entries = num_behind + len(blocks)
            is_seen = num_behind <= group.first_seen(num_tokens)
            if not is_seen or num_entries * size < num_tokens or num_entries > 2**20:
                raise RecordingError(f"windows: request {state.request_id} holds too few blocks")
        return [(each.num_behind, each.blocks) for each in state.windows]

    def _restore_cache(self, cache: CacheStart, active: Sequence[RequestState]) -> None:
        """Rebuild what was cached and held; it may contradict itself or ``active``."""
        tables, windows = {}, {}
        has_full = self.settings.windows[0] is None
        for request, state in zip(self.active, active, strict=True):
            num_cached = 0
            if request.seq_slot is not None:
                num_cached = max(request.prompt_len, request.num_cached_tokens)
                windows[request.request_id] = self._window_tables(state, num_cached)
            if has_full and len(state.table) < -(-num_cached // self.settings.tokens_per_block):
                raise RecordingError(
                    f"cache: request {request.request_id} holds {len(state.table)} blocks"
                )
            if len(set(state.table)) != len(state.table):
                raise RecordingError(f"cache: request {request.request_id} holds a block twice")
            tables[request.request_id] = state.table
        keys = split_hashes(cache.hashes)
        held = [held for parts in windows.values() for _, held in parts]
        own = [block for table in held for block in table]
        if len(set(own)) < len(own) or not set(own).isdisjoint(chain(*tables.values())):
            raise RecordingError("cache: a block of a group with a window is held twice")
        held += tables.values()
        ids = (*cache.kept, *cache.idle, *(block for table in held for block in table))
        if max(ids, default=0) >= self.settings.num_blocks:
            raise RecordingError(f"cache: block {max(ids)} of {self.settings.num_blocks}")
        if len(keys) != len(cache.kept) or len(set(cache.kept)) != len(keys):
            raise RecordingError("cache: kept must name each block once, and hashes what it holds")
        kept = dict(zip(cache.kept, keys, strict=True))
        groups = cache.groups or (0,) * len(cache.kept)
        if len(groups) != len(cache.kept) or max(groups, default=0) >= len(self.settings.windows):
            raise RecordingError("cache: groups must name that of each kept block")
        own_groups = dict(zip(cache.kept, groups, strict=True))
        known = self._snapshots(cache, active)
        content = CacheContent(tables, kept, cache.idle, own_groups, windows, known)
        try:
            self.block_manager.restore_cache(content)
        except ValueError as error:
            raise RecordingError(f"cache: {error}") from None

    def _snapshots(self, cache: CacheStart, active: Sequence[RequestState]) -> SnapshotState:
        """Those of states, if requests have the text that they are behind."""
        size = self.settings.tokens_per_block
        num_full = {each.request_id: each.num_tokens // size for each in active}
        for request_id, num_blocks in (*cache.held, *cache.partings):
            if num_blocks > num_full.get(request_id, 0):
                raise RecordingError(f"cache: request {request_id} has no {num_blocks} full blocks")
        return SnapshotState(split_hashes(cache.snapshots), cache.held, cache.partings)

    def _resume_step(self, start: Header) -> None:
        """The step that ran when the recording began, of which only the tokens are to come.

        It may draw none: then it has only chunks that are not the last of their contexts.
        """
        pending = [state for state in start.active if state.pending_place]
        places = {state.pending_place: state.request_id for state in pending}
        if not places and not start.is_running:
            return
        if not self.settings.is_overlapped or len(places) < len(pending):
            raise RecordingError("active: the places of pending tokens contradict one another")
        owners = [self._by_id[places[place]] for place in sorted(places)]
        for request in owners:
            if not request.is_generation_in_progress_state:
                raise RecordingError(f"request {request.request_id} expects a token in its context")
            del request.tokens[-1:]
            request.num_own_pending = 1
            if request.num_remaining_tokens == 0:
                request.state = LlmRequestState.GENERATION_TO_COMPLETE
        self._running = Plan(self.planner.resume(owners), None)


class SyntheticTokens(list[int]):
    """The tokens of a request without tokens: constant memory, whatever the length.

    All of them are ``token``. ``is_broken``: the last one says that the logits were not finite.
    """

    __slots__ = ("is_broken", "length", "token")

    def __init__(self, length: int, token: int = 0) -> None:
        super().__init__()
        self.length = length
        self.token = token & 0x7FFFFFFF
        self.is_broken = False

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> None:
        """One token more; a negative one breaks the text."""
        self.length += 1
        self.is_broken |= token < 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Some tokens more."""
        self.length += len(list(tokens))

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        """The last tokens are not wanted any more."""
        assert isinstance(index, slice)
        self.length -= len(range(*index.indices(self.length)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        if not isinstance(index, slice):
            range(self.length)[index]  # IndexError
            return -1 if self.is_broken else self.token
        start, end, _ = index.indices(self.length)
        return [self.token] * max(end - start, 0)


def _is_plain(request: LlmRequest) -> bool:
    """Whether its next turns only generate."""
    is_generating = request.state is LlmRequestState.GENERATION_IN_PROGRESS
    return is_generating and request.beams is None and not request.draft_tokens


def make_request(
    request_id: int,
    prompt_len: int,
    max_new_tokens: int,
    beam_width: int = 1,
    priority: float = 0.5,
    lora_task_id: int | None = None,
    lora_pages: int = 1,
    encoder_length: int = 0,
) -> LlmRequest:
    """A request that has lengths only."""
    request = LlmRequest(
        request_id,
        (),
        max_new_tokens,
        beam_width=beam_width,
        beams=RecordedBeams(beam_width, max_new_tokens) if beam_width > 1 else None,
        priority=priority,
        lora_task_id=lora_task_id,
        lora_pages=lora_pages,
        encoder_length=encoder_length,
    )
    request.tokens = SyntheticTokens(prompt_len, request_id)
    request.prompt_len = request.orig_prompt_len = request.context_chunk_size = prompt_len
    request.max_num_tokens = prompt_len + max_new_tokens
    return request


def split_hashes(hashes: bytes) -> list[bytes]:
    """The hash of each block; `RecordingError` if they are no whole number."""
    if len(hashes) % HASH_SIZE:
        raise RecordingError(f"hashes: {len(hashes)} bytes are not {HASH_SIZE} for each block")
    return [hashes[start : start + HASH_SIZE] for start in range(0, len(hashes), HASH_SIZE)]


class RecordedBeams:
    """Stands in for `BeamSearch`: it knows how many tokens there are, and that ends are told.

    By default each row continues itself. ``is_broken``: the model's numbers have
    failed, so nothing follows.
    """

    def __init__(self, width: int, max_new_tokens: int) -> None:
        self.step: BeamStep | None = None
        self.is_broken = False
        self._width = width
        self._max_new_tokens = max_new_tokens
        self._num_tokens = 0

    def reset(self) -> None:
        """Start again behind the prompt."""
        self.step, self._num_tokens = None, 0

    def advance(self, _: Sequence[Sequence[Candidate]]) -> bool:
        """One token more."""
        if self.is_broken:
            return False
        is_first = self.step is None
        parents = [0] * self._width if is_first else range(self._width)
        self.step = BeamStep(tuple(parents), (0,) * self._width)
        self._num_tokens += 1
        return True

    def write(self, text: list[int], prompt_len: int) -> None:
        """As many tokens as there are."""
        while len(text) < prompt_len + self._num_tokens:
            text.append(0)

    @property
    def finish_reason(self) -> FinishReason:
        """LENGTH at the last token; other ends are told."""
        is_last = self._num_tokens >= self._max_new_tokens
        return FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED


def _is_possible(moves: Iterable[int], width: int) -> bool:
    """Whether these moves are possible: a parent continues itself."""
    parents = tuple(moves)
    return len(parents) == width and all(
        0 <= parent < width and parents[parent] == parent for parent in parents
    )
