"""The scheduler run again: requests without text, the same rules, the same books of blocks.

`Simulation` stands in for the loop of the batch manager. Its steps must come in the order of the
recorded ones: `arrivals`, `begin`, `draft`, `decide` (or `follow`), `plan`, `run`, then `end`.
What a decision computes is known between `plan` and `run`: what is cached of a prompt is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight_recorder.beams import BeamEntries, Moves, RecordedBeams, is_possible
from inflight_recorder.cost_model import Load
from inflight_recorder.errors import RecordingError
from inflight_recorder.in_force import Lists, check_possible, scheduler_of
from inflight_recorder.made_up import MadeUpText, make_book, make_request, restore_cache
from inflight_recorder.records import (
    MAX_NUM_REQUESTS,
    NOT_FINITE,
    TOKEN_ENDS,
    Arrival,
    CacheStart,
    Decision,
    Iteration,
    RequestState,
    Settings,
)
from inflight_recorder.steps import NO_PLAN, Plan, PromptBound, Step, drawn_tokens
from inflight_recorder.text_book import TextBook
from inflight_scheduler.batch import ScheduledBatch
from inflight_scheduler.beam_search import BeamStep
from inflight_scheduler.errors import InvalidDecision, SchedulerError
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.policies.scheduler import RequestScheduler
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.states import LlmRequestState

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


class Simulation:
    """Scheduler, blocks and slots with requests that have lengths only.

    `RecordingError` for whatever cannot have happened.
    """

    def __init__(
        self,
        settings: Settings,
        active: Sequence[RequestState] = (),
        scheduler: MakeScheduler | None = default_scheduler,
        cache: CacheStart | None = None,
        book: TextBook | None = None,
        *,
        is_running: bool = False,
    ) -> None:
        """``scheduler`` None: nothing is decided here, decisions come from elsewhere.

        ``book``: the texts of those who arrive with a number, with block reuse. ``is_running``: a
        step runs of which the tokens, if it draws any, are to come (overlapped).
        """
        self.settings = settings
        self.block_manager = BlockManager(
            settings.num_blocks,
            settings.tokens_per_block,
            enable_reuse=settings.enable_reuse,
            may_copy_blocks=settings.may_copy_blocks,
        )
        self.planner = BatchPlanner(self.block_manager, settings.max_batch_size)
        try:
            self.scheduler = scheduler(settings, self.planner) if scheduler else None
        except ValueError as error:
            raise RecordingError(f"these settings contradict one another: {error}") from None
        self._prompt_bound = PromptBound(settings.tokens_per_block)
        self._drafting: set[int] = set()  # who had drafts at the last decision
        self.book: TextBook | None = None
        if settings.enable_reuse:
            self.book = book or (TextBook() if cache is None else make_book(cache))
        if active and settings.enable_reuse and cache is None:
            raise RecordingError(
                "the recording begins in the middle and does not say what was cached then; with "
                "block reuse that is needed: record to a file from the start (record_file)"
            )
        self.active: list[LlmRequest] = []
        self._by_id: dict[int, LlmRequest] = {}
        self._beam_entries = BeamEntries(settings.tokens_per_block)
        for index, state in enumerate(active):
            self._restore(state, None if cache is None else cache.text_numbers[index])
        # Overlapped: the step whose tokens come next.
        self._running = self._resume(active, is_running)
        self._settled: list[LlmRequest] = []  # who got them before the decision
        if cache is not None and self.book is not None:
            restore_cache(self.block_manager, self.book, cache, self.active)

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
        """Make those of ``iteration`` active.

        Where nothing was decided, texts had grown before these were compared with them.
        """
        if iteration.decision is None:
            self._grow(iteration)
        return [self.arrive(arrival) for arrival in iteration.arrivals]

    def arrive(self, arrival: Arrival, text_number: int | None = None) -> LlmRequest:
        """Make a request active, at its place; its text is in the book already, or a new one."""
        request = make_request(arrival, arrival.prompt_len, arrival.max_new_tokens)
        if self.book is not None:
            number = self.book.add(arrival.likeness) if text_number is None else text_number
            request.tokens = MadeUpText(arrival.prompt_len, self.book, number)
        if not self.block_manager.can_ever_fit(request):
            raise RecordingError(f"request {arrival.request_id} is larger than the whole pool")
        self._add(request, arrival.place)
        return request

    def begin(self, iteration: Iteration | None = None) -> None:
        """What comes between the arrivals and the decision of ``iteration``: how beams went on."""
        running = self._running
        if running is not None and self.must_settle:
            if iteration is not None and iteration.has_lost:
                raise RecordingError("a decision, though the step it needs was lost")
            self._running = None
            ends = {} if iteration is None else dict(iteration.ends)
            self._settled = self._settle(running.batch, ends, iteration)
            for request in self._settled:
                reason = ends.get(request.request_id)
                has_ended = reason == "end_id" or (reason in TOKEN_ENDS and request.beams)
                if has_ended or request.is_finished:  # it holds its slot
                    raise RecordingError(f"request {request.request_id} ended before this decision")
        for moves in () if iteration is None else iteration.moves:
            self._move(moves)

    def _move(self, moves: Moves) -> None:
        request = self._known(moves.request_id)
        step = None if request.beams is None else request.beams.step
        is_running = request.is_generation_in_progress_state and not request.num_pending_tokens
        if request.beams is None or step is None or not is_running:
            raise RecordingError(f"request {moves.request_id} moves beams that do not run")
        if not is_possible(moves.parents, request.beam_width):
            raise RecordingError(f"request {moves.request_id}: its beams cannot have moved so")
        request.beams.step = BeamStep(moves.parents, step.tokens)
        self.block_manager.follow_beams(request, moves.parents)

    def draft(self, iteration: Iteration) -> None:
        """Who has drafts when ``iteration`` is decided."""
        drafts = {each.request_id: each for each in iteration.drafts}
        for request_id in self._drafting - drafts.keys():
            if request_id in self._by_id:
                self._by_id[request_id].set_draft_tokens(())
        for each in iteration.drafts:
            request = self._by_id.get(each.request_id)
            if request is None:
                raise RecordingError(f"request {each.request_id} has drafts, but it is not active")
            self._set_drafts(request, each.num_drafts)
            request.num_chunk_drafts = each.num_kept
        self._drafting = set(drafts)

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
        is_put_off = lists[2] and self._running is not None  # nobody is paused while a step runs
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

    def plan(self, lists: Lists, iteration: Iteration | None = None) -> Plan:
        """Give slots, blocks and what is cached; the sizes of chunks are those computed then."""
        if iteration is not None:
            self._grow(iteration)
        self._prompt_bound.begin(lists[0])
        return Plan.of(self.planner.plan(*lists), lists[1])

    def run(self, plan: Plan, iteration: Iteration | None = None) -> Step:
        """Run what was planned.

        Whoever has all its tokens ends, and of ``iteration`` those that a token ended; requests end
        in the order in which they got their tokens. A step that failed gives no tokens.
        """
        batch = plan.batch
        ends = {} if iteration is None else dict(iteration.ends)
        is_settled = iteration is not None and iteration.is_settled
        if is_settled and self._running is not None:
            raise RecordingError("nothing runs on after this iteration, but a step ran before it")
        is_overlapped = self.settings.is_overlapped and not is_settled
        if is_overlapped and batch.num_drafts > 0:
            raise RecordingError("drafts run in a step that runs on after this iteration")
        is_hurt = iteration is not None and (iteration.has_failed or iteration.has_lost)
        is_before = is_overlapped or batch.is_empty
        awaited = (self._running or NO_PLAN) if is_before else plan
        load = None if is_hurt else awaited.load
        run = self._run_overlapped if is_overlapped else self._run
        advanced = self._settled + run(plan, iteration, ends)
        self._settled = []
        return Step(*self._end_by_tokens(advanced, ends), load)

    def settle(self, iteration: Iteration) -> Step:
        """An iteration without a decision, in which the tokens of the step that ran have come."""
        load = None
        if self._running is not None and not self.must_settle and not iteration.has_lost:
            load = self._running.load
        ends = dict(iteration.ends)
        advanced = self._run_overlapped(NO_PLAN, iteration, ends)
        return Step(*self._end_by_tokens(advanced, ends), load)

    def _end_by_tokens(
        self, advanced: list[LlmRequest], ends: dict[int, str]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """``advanced``, and those of them that end with it."""
        ended = [r for r in advanced if r.is_finished or ends.get(r.request_id) in TOKEN_ENDS]
        for request in ended:
            is_broken = ends.get(request.request_id) == NOT_FINITE
            if is_broken and isinstance(request.tokens, MadeUpText):
                request.tokens.is_broken = True
        self.forget(ended)
        return advanced, ended

    def _run(
        self, plan: Plan, iteration: Iteration | None, ends: dict[int, str]
    ) -> list[LlmRequest]:
        """Who got a token of the step."""
        batch = plan.batch
        if iteration is not None and iteration.has_failed:
            self._discard(batch, ends)
            return []
        drafts = () if iteration is None else iteration.drafts
        failed = self._without_token(batch, ends)
        return self.planner.update(batch, drawn_tokens(batch, drafts, self.planner, failed))

    def _run_overlapped(
        self, plan: Plan, iteration: Iteration | None, ends: dict[int, str]
    ) -> list[LlmRequest]:
        """Who got a token of the step before, which ran until now."""
        batch = plan.batch
        before, self._running = self._running, None
        has_failed = iteration is not None and iteration.has_failed
        if not batch.is_empty and not has_failed:
            self.planner.assume_step(batch)
            self._running = plan
        advanced: list[LlmRequest] = []
        if before is not None and iteration is not None and iteration.has_lost:
            self._discard(before.batch, ends)
            if self._running is not None:
                self._discard(self._running.batch, ends)
                self._running = None
        elif before is not None:
            advanced = self._settle(before.batch, ends, iteration)
        if has_failed:
            self._discard(batch, ends)
        return advanced

    def _settle(
        self, batch: ScheduledBatch, ends: dict[int, str], iteration: Iteration | None
    ) -> list[LlmRequest]:
        if iteration is not None and iteration.has_forgotten:
            self.block_manager.forget_all()
        failed = self._without_token(batch, ends)
        tokens = [-(request.request_id in failed) for request in self.planner.token_owners(batch)]
        return self.planner.apply_tokens(batch, tokens)

    def _without_token(self, batch: ScheduledBatch, ends: dict[int, str]) -> set[int]:
        """Whose numbers have failed; of those that search, nothing follows the last token."""
        failed = {request_id for request_id, reason in ends.items() if reason == NOT_FINITE}
        for request in self.planner.token_owners(batch) if failed else ():
            if request.request_id in failed and isinstance(request.beams, RecordedBeams):
                request.beams.is_broken = True
        return failed

    def _discard(self, batch: ScheduledBatch, ends: dict[int, str]) -> None:
        for request in self.planner.discard(batch):
            is_told = request.is_finished or request.request_id in ends
            # Another request may have its id by now.
            if self._by_id.get(request.request_id) is request and not is_told:
                raise RecordingError(f"request {request.request_id} survives a failed step")

    def end(self, iteration: Iteration) -> list[LlmRequest]:
        """The other ends of ``iteration``; returns the requests."""
        is_bare = iteration.decision is None and not iteration.is_settled
        if is_bare and iteration.has_forgotten:
            self.block_manager.forget_all()
        ended = [self._by_id[i] for i, _ in iteration.ends if i in self._by_id]
        self.forget(ended)
        return ended

    def forget(self, requests: Sequence[LlmRequest]) -> None:
        """These are not active any more and hold nothing."""
        if not requests:
            return
        for request in requests:
            self.planner.release(request)
            if self._by_id.pop(request.request_id, None) is not None:
                self._beam_entries.remove(request)
        self.active = [r for r in self.active if r.request_id in self._by_id]

    def _grow(self, iteration: Iteration) -> None:
        """Texts that go on like others, told before their blocks are kept."""
        if self.book is None:
            return
        for request_id, likeness in iteration.growths:
            request = self._known(request_id)
            if isinstance(request.tokens, MadeUpText):
                self.book.extend(request.tokens.number, likeness, request.prompt_len)

    def _known(self, request_id: int) -> LlmRequest:
        request = self._by_id.get(request_id)
        if request is None:
            raise RecordingError(f"request {request_id} runs, but it is not active")
        return request

    def _add(self, request: LlmRequest, place: int | None) -> None:
        if request.request_id in self._by_id:
            raise RecordingError(f"request {request.request_id} arrives while it is active")
        if len(self._by_id) >= MAX_NUM_REQUESTS:
            raise RecordingError(f"more than {MAX_NUM_REQUESTS} requests are active")
        self._beam_entries.add(request)
        self._by_id[request.request_id] = request
        self.active.insert(len(self.active) if place is None else place, request)

    def _restore(self, state: RequestState, text_number: int | None) -> None:
        """A request in the middle of its life, with the blocks it held then.

        With a ``text_number`` the blocks come from elsewhere, since some may be shared.
        """
        request = make_request(state, state.prompt_len, state.max_new_tokens)
        if not self.block_manager.can_ever_fit(request):
            raise RecordingError(f"request {state.request_id} is larger than the whole pool")
        if state.beam_width > 1 and state.num_computed > 0:
            raise RecordingError(
                "the recording begins in the middle of a search with beams and does not say how "
                "they share blocks: record to a file from the start (record_file)"
            )
        self._add(request, None)
        request.orig_prompt_len = state.orig_prompt_len
        request.num_pauses = state.num_pauses
        request.tokens = MadeUpText(state.num_tokens)
        if text_number is not None:
            request.tokens = MadeUpText(state.num_tokens, self.book, text_number)
        if state.num_computed == 0:
            return
        request.context_chunk_size = state.num_computed
        request.move_to_next_context_chunk()
        has_room = self.planner.num_free_slots > 0
        if text_number is None:
            num_cached = max(state.prompt_len, request.num_cached_tokens)
            num_tokens = max(num_cached, state.num_blocks * self.settings.tokens_per_block)
            blocks = self.block_manager.allocate(state.request_id, num_tokens)
            has_room = has_room and state.num_blocks <= (
                self.block_manager.get_blocks_at_completion(request)
            )
            has_room = has_room and blocks is not None
        if not has_room:
            raise RecordingError("the requests at the start hold more than there is")
        request.seq_slot = self.planner.slots.assign()

    def _resume(self, active: Sequence[RequestState], is_running: bool) -> Plan | None:
        """The step that ran when the recording began, of which only the tokens are to come.

        It may draw none: then it has only chunks that are not the last of their contexts.
        """
        places = {s.pending_place: s.request_id for s in active if s.pending_place}
        if not places and not is_running:
            return None
        if not self.settings.is_overlapped or len(places) < sum(
            s.pending_place > 0 for s in active
        ):
            raise RecordingError("active: the places of pending tokens contradict one another")
        owners = [self._by_id[places[place]] for place in sorted(places)]
        for request in owners:
            if not request.is_generation_in_progress_state:
                raise RecordingError(f"request {request.request_id} expects a token in its context")
            assert isinstance(request.tokens, MadeUpText)
            request.tokens.num_pending = 1
            if request.num_remaining_tokens == 0:
                request.state = LlmRequestState.GENERATION_TO_COMPLETE
        return Plan(self.planner.resume(owners), None)
