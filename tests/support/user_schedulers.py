"""Schedulers as users might write them, good and bad; named in the configuration by tests."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from inflight_scheduler import (
    BlockForecast,
    BlockManager,
    CapacityResult,
    CapacityScheduler,
    ContextChunking,
    LlmRequest,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    ScheduleResult,
    SimpleScheduler,
)

Decision = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]


class OneAtATime(RequestScheduler):
    """A user's policy: the shortest request runs alone."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        self.block_manager = block_manager

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Whoever runs goes on; else the one with the least to do."""
        running = [r for r in active_requests if r.is_generation_in_progress_state]
        if running:
            return [], running, []
        return [min(active_requests, key=lambda r: r.num_remaining_tokens)], [], []


class Raises(OneAtATime):
    """Has a bug."""

    def schedule_request(self, *args: object) -> Decision:
        raise RuntimeError("a bug in the user's code")


class Exits(OneAtATime):
    """Wants to end the process."""

    def schedule_request(self, *args: object) -> Decision:
        raise SystemExit(3)


class Interrupts(OneAtATime):
    """Raises what is no `Exception` either."""

    def schedule_request(self, *args: object) -> Decision:
        raise KeyboardInterrupt


class PausesAll(OneAtATime):
    """Lets contexts run, and then pauses whoever generates."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        running = [r for r in active_requests if r.is_generation_in_progress_state]
        fresh = [r for r in active_requests if r.is_context_init_state]
        return ([], [], running) if running else (fresh[:2], [], [])


class PausesMidway(OneAtATime):
    """Cuts contexts, and then pauses whoever is in the middle of one."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        fresh = [r for r in active_requests if r.is_context_init_state]
        started = [r for r in fresh if r.seq_slot is not None]
        if started:
            return [], [], started
        for request in fresh[:1]:
            request.context_chunk_size = 1
        running = [r for r in active_requests if r.is_generation_in_progress_state]
        return fresh[:1], running, []


class CutsAnyway(OneAtATime):
    """Cuts contexts whether that is enabled or not."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        fresh = [r for r in active_requests if r.is_context_init_state]
        for request in fresh:
            request.context_chunk_size = 1
        return fresh[:1], [r for r in active_requests if r.is_generation_in_progress_state], []


class Greedy(OneAtATime):
    """Takes everybody at once, whether blocks are there or not."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        context = [r for r in active_requests if r.is_context_init_state]
        return context, [r for r in active_requests if r.is_generation_in_progress_state], []


class Lazy(OneAtATime):
    """Never lets anybody run."""

    def schedule_request(self, *args: object) -> Decision:
        return [], [], []


class Repeats(OneAtATime):
    """Names a request twice."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """The decision, with everybody in it once more."""
        context, generation, _ = super().schedule_request(active_requests, inflight_request_ids)
        return context * 2, generation * 2, []


class Invents(OneAtATime):
    """Names a request that nobody has sent, beside one that somebody has."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """The decision, with one more to begin."""
        context, generation, _ = super().schedule_request(active_requests, inflight_request_ids)
        return [*context, LlmRequest(99, [1], 5)], generation, []


class Empties(OneAtATime):
    """Takes everybody out of the list it is given, and lets nobody run."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """As one that looks for whoever fits, and finds that nobody does."""
        assert isinstance(active_requests, list)
        while active_requests:
            active_requests.pop()
        return [], [], []


class TakesOut(OneAtATime):
    """Takes each request that it lets run out of the list it is given."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """The shortest ones first, three at most."""
        assert isinstance(active_requests, list)
        context: list[LlmRequest] = []
        generation: list[LlmRequest] = []
        while active_requests and len(context) + len(generation) < 3:
            shortest = min(active_requests, key=lambda r: r.max_num_tokens)
            active_requests.remove(shortest)
            (context if shortest.is_context_init_state else generation).append(shortest)
        return context, generation, []


class BadChunks(OneAtATime):
    """Writes a chunk size that its decision is refused for."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Everybody, in chunks of a million."""
        context = [r for r in active_requests if r.is_context_init_state]
        for request in context:
            request.context_chunk_size = 1_000_000
        return context, [r for r in active_requests if r.is_generation_in_progress_state], []


class RaisesAtFirst(OneAtATime):
    """Has a bug that shows in its first decision alone; it cuts no context."""

    has_raised = False

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """From the second on: whoever generates, and the last context."""
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError("a bug in the user's code")
        context = [r for r in active_requests if r.is_context_init_state]
        return context[-1:], [r for r in active_requests if r.is_generation_in_progress_state], []


class EveryOtherTime(OneAtATime):
    """Counts how often it is asked: every other time somebody new may start."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        super().__init__(block_manager, max_batch_size, max_num_tokens)
        self.num_calls = 0

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Whoever runs goes on; the next one joins at an even call."""
        self.num_calls += 1
        running = [r for r in active_requests if r.is_generation_in_progress_state]
        fresh = [r for r in active_requests if r.is_context_init_state]
        return fresh[: self.num_calls % 2 == 0 or not running], running, []


class StuckAt13(OneAtATime):
    """Never comes back once somebody wants 13 tokens."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Everybody runs until then."""
        while any(request.max_new_tokens == 13 for request in active_requests):
            time.sleep(1.0)
        context = [r for r in active_requests if r.is_context_init_state]
        return context, [r for r in active_requests if r.is_generation_in_progress_state], []


class WholeContexts(OneAtATime):
    """Does not take the setting of chunked context."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        super().__init__(block_manager, max_batch_size, max_num_tokens)
        self.micro_batch = MicroBatchScheduler(max_batch_size, max_num_tokens)

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Whoever is there."""
        context, generation = self.micro_batch.schedule(active_requests, inflight_request_ids)
        return context, generation, []


class LeastServed(WholeContexts):
    """Those with the fewest tokens so far first, as FastServe's levels; others pause for them."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Its books are those of the page for such as this one."""
        books = BlockForecast(self.block_manager)
        order = sorted(active_requests, key=lambda r: r.num_generated_tokens.bit_length())
        order = [r for r in order if r.request_id not in inflight_request_ids]
        holders = [r for r in order if r.seq_slot is not None]
        chosen: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        for request in order:
            while (
                books.needed_one_step(request) > books.num_available
                and holders
                and holders[-1] is not request
                and holders[-1] not in chosen
            ):
                paused.append(holders.pop())
                books.release(paused[-1])
            num_needed = books.needed_one_step(request)
            if request in paused or num_needed > books.num_available:
                break
            books.claim(request, num_needed)
            chosen.append(request)
        context, generation = self.micro_batch.schedule(chosen, inflight_request_ids)
        return context, generation, paused


class FirstTwo(CapacityScheduler):
    """A capacity scheduler without a constructor: nobody but the first two may hold cache."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Never pauses."""
        return list(active_requests[:2]), []


class FirstOne(FirstTwo):
    """Nobody but the first."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Never pauses."""
        return list(active_requests[:1]), []


class ShortestFits(MaxUtilizationScheduler):
    """Pauses whoever has the most to do."""

    def schedule_request(self, active_requests: Sequence[LlmRequest]) -> CapacityResult:
        """The walk of max_utilization, in another order."""
        return super().schedule_request(sorted(active_requests, key=lambda r: r.max_num_tokens))


class ThreeAtOnce(MicroBatchScheduler):
    """Half of what the server would run."""

    def schedule(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Only the first three that fit."""
        return super().schedule(fitting_requests[:3], inflight_request_ids)


class AsksForMore(ThreeAtOnce):
    """Its constructor wants what nobody gives."""

    def __init__(self, max_batch_size: int, max_num_tokens: int, friend: object) -> None:
        super().__init__(max_batch_size, max_num_tokens)


class ExitsWhenMade(ThreeAtOnce):
    """Its constructor wants to end the process."""

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        raise SystemExit("no")


class GenerationAlone(SimpleScheduler):
    """No context beside generation."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> ScheduleResult:
        """The default's decision, without its contexts where anybody generates."""
        result = super().schedule_request(active_requests, inflight_request_ids)
        context, generation, _ = result
        if generation:
            context.clear()
        return result


class OwnParts(SimpleScheduler):
    """Both parts are the user's."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        super().__init__(
            ShortestFits(max_batch_size, block_manager), ThreeAtOnce(max_batch_size, max_num_tokens)
        )


class CutsContexts(RequestScheduler):
    """Asks for the setting of chunked context."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_batch_size: int,
        max_num_tokens: int,
        *,
        chunking: ContextChunking | None,
    ) -> None:
        self.micro_batch = MicroBatchScheduler(max_batch_size, max_num_tokens, chunking=chunking)

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        """Whoever is there, as the default runs them."""
        context, generation = self.micro_batch.schedule(active_requests, inflight_request_ids)
        return context, generation, []
