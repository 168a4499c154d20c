"""Schedulers as users might write them, good and bad; named in the configuration by tests."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from inflight_scheduler import (
    BlockManager,
    CapacityResult,
    CapacityScheduler,
    ContextChunking,
    LlmRequest,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    SimpleScheduler,
)

Requests = list[LlmRequest]
Decision = tuple[Requests, Requests, Requests]


class UserScheduler(RequestScheduler):
    """Calls `decide` with the requests in their context and those that generate."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        self.block_manager = block_manager

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        return self.decide(
            [r for r in active_requests if r.is_context_init_state],
            [r for r in active_requests if r.is_generation_in_progress_state],
        )

    def decide(self, context: Requests, generation: Requests) -> Decision:
        """All at once, whether blocks are there or not."""
        return context, generation, []


class Greedy(UserScheduler):
    """Decides as its base class."""


class OneAtATime(UserScheduler):
    """The shortest request runs alone."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        if generation:
            return [], generation, []
        return [min(context, key=lambda r: r.num_remaining_tokens)], [], []


class Raises(UserScheduler):
    """Has a bug."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        raise RuntimeError("a bug in the user's code")


class Exits(UserScheduler):
    """Tries to end the process."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        raise SystemExit(3)


class PausesAll(UserScheduler):
    """Runs contexts, and then pauses every request that generates."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        return ([], [], generation) if generation else (context[:2], [], [])


class CutsAnyway(UserScheduler):
    """Cuts contexts whether that is enabled or not."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        for request in context[:1]:
            request.context_chunk_size = 1
        return context[:1], generation, []


class Lazy(UserScheduler):
    """Never runs a request."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        return [], [], []


class TakesOut(UserScheduler):
    """Takes the three shortest requests out of the list it is given, and runs them."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        assert isinstance(active_requests, list)
        active_requests.sort(key=lambda r: r.max_num_tokens)
        chosen = active_requests[:3]
        del active_requests[:3]
        return super().schedule_request(chosen, inflight_request_ids)


class BadChunks(UserScheduler):
    """Writes a chunk size for which its decision is refused."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        for request in context:
            request.context_chunk_size = 1_000_000
        return context, generation, []


class RaisesAtFirst(UserScheduler):
    """Raises in its first decision only; it cuts no context."""

    has_raised = False

    def decide(self, context: Requests, generation: Requests) -> Decision:
        """From the second on: all that generate, and the last context."""
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError("a bug in the user's code")
        return context[-1:], generation, []


class EveryOtherTime(UserScheduler):
    """Starts a request at every other call."""

    num_calls = 0

    def decide(self, context: Requests, generation: Requests) -> Decision:
        self.num_calls += 1
        return context[: self.num_calls % 2 == 0 or not generation], generation, []


class StuckAt13(UserScheduler):
    """Hangs once a request asks for 13 tokens."""

    def decide(self, context: Requests, generation: Requests) -> Decision:
        while any(request.max_new_tokens == 13 for request in (*context, *generation)):
            time.sleep(1.0)
        return context, generation, []


class WholeContexts(UserScheduler):
    """Does not take the setting of chunked context."""

    def __init__(
        self, block_manager: BlockManager, max_batch_size: int, max_num_tokens: int
    ) -> None:
        super().__init__(block_manager, max_batch_size, max_num_tokens)
        self.micro_batch = MicroBatchScheduler(max_batch_size, max_num_tokens)

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
        context, generation = self.micro_batch.schedule(active_requests, inflight_request_ids)
        return context, generation, []


class FirstTwo(CapacityScheduler):
    """A capacity scheduler without a constructor: only the first two requests may hold cache."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        return list(active_requests[:2]), []


class FirstOne(FirstTwo):
    """Only the first request may hold cache."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest]
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        return list(active_requests[:1]), []


class ShortestFits(MaxUtilizationScheduler):
    """Pauses the longest requests first."""

    def schedule_request(self, active_requests: Sequence[LlmRequest]) -> CapacityResult:
        return super().schedule_request(sorted(active_requests, key=lambda r: r.max_num_tokens))


class ThreeAtOnce(MicroBatchScheduler):
    """Runs only the first three that fit."""

    def schedule(
        self, fitting_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int] = ()
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        return super().schedule(fitting_requests[:3], inflight_request_ids)


class AsksForMore(ThreeAtOnce):
    """Its constructor needs an argument that the server does not have."""

    def __init__(self, max_batch_size: int, max_num_tokens: int, friend: object) -> None:
        super().__init__(max_batch_size, max_num_tokens)


class ExitsWhenMade(ThreeAtOnce):
    """Its constructor tries to end the process."""

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        raise SystemExit("no")


class GenerationAlone(SimpleScheduler):
    """Runs no context beside generation."""

    def schedule_request(
        self, active_requests: Sequence[LlmRequest], inflight_request_ids: Collection[int]
    ) -> Decision:
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
        context, generation = self.micro_batch.schedule(active_requests, inflight_request_ids)
        return context, generation, []
