"""What the decisions of a recording depend on besides its requests.

This module and `recorder` need the standard library and the scheduler only, so that a server can
record into memory on any machine; whatever reads or writes recordings needs msgspec (`schema`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.kv.prefix_cache import CacheState
from inflight_scheduler.planning.active_requests import DEFAULT_PRIORITY_SPAN
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.policies.capacity import POLICIES, ReservingScheduler
from inflight_scheduler.policies.check_decision import check_decision
from inflight_scheduler.policies.micro_batch import ContextChunking
from inflight_scheduler.policies.resources import (
    KEPT_STEPS,
    AnswerRoom,
    CrossBlocks,
    PeftPages,
    Resource,
)
from inflight_scheduler.policies.scheduler import (
    CapacitySchedulerPolicy,
    SimpleScheduler,
    make_scheduler,
    policy_name,
)
from inflight_scheduler.request import LlmRequest

Lists = tuple[list[LlmRequest], list[LlmRequest], list[LlmRequest]]
"""Context, generation and paused requests: a decision."""

ERROR = "error"
"""How a request ended that was answered with an error; the others are names of `FinishReason`."""

NOT_FINITE = "not_finite"
"""The model's logits were not finite; nothing of such a request is kept for reuse."""


class RecordingError(Exception):
    """A recording that cannot be read or cannot have happened; the message names the place."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything besides the requests that a decision depends on.

    ``is_overlapped``: a step was decided while the one before it ran, so what its tokens ended was
    known one decision later. ``scheduler_class`` names a scheduler of the user; it is never
    imported from here. ``priority_span``: see `ActiveRequests`. ``max_drafting_batch``: drafts are
    guessed while at most so many are active; None if they never are. ``num_adapter_pages``: None
    where requests have no adapters. ``windows`` and ``max_drafts`` (told where there are windows):
    see `BlockManager`, and so ``num_snapshots``.
    """

    policy: CapacitySchedulerPolicy | str
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
    num_adapter_pages: int | None = None
    windows: tuple[int | None, ...] = (None,)
    max_drafts: int = 0
    num_cross_blocks: int = 0
    num_snapshots: int | None = None

    @property
    def max_chunk_tokens(self) -> int | None:
        """The longest context chunk, as `BlockManager` wants it."""
        return None if self.chunking is None else self.max_num_tokens

    @property
    def may_pause(self) -> bool:
        """True where a request may have to compute its text again."""
        is_reserving = issubclass(POLICIES[self.policy_name], ReservingScheduler)
        return self.scheduler_class is not None or not is_reserving

    def make_cross_blocks(self) -> BlockManager | None:
        """Fresh blocks for an encoder's answers; None without an encoder."""
        if self.num_cross_blocks == 0:
            return None
        return BlockManager(self.num_cross_blocks, self.tokens_per_block)

    def resources(self, planner: BatchPlanner) -> tuple[Resource, ...]:
        """What requests need besides KV blocks."""
        found: list[Resource] = []
        if self.num_adapter_pages is not None:
            found.append(PeftPages(self.num_adapter_pages))
        if (answers := planner.answers) is not None:
            assert self.max_num_tokens is not None, "an encoder needs a bound of its step"
            room = KEPT_STEPS * self.max_num_tokens
            found.append(CrossBlocks(answers.blocks))
            found.append(AnswerRoom(room, lambda: answers.num_kept_tokens))
        return tuple(found)

    @property
    def policy_name(self) -> str:
        """The name under which the policy is registered."""
        return policy_name(self.policy)


@dataclass(frozen=True, slots=True)
class StartState:
    """Where everything stood when a chunk began; see `schema.format_header`.

    ``requests`` are the fields of each `RequestState` up to its hashes, packed, and ``hashes`` are
    those of each of these requests. ``cache`` None: without block reuse. ``windows``: what
    `BlockManager.window_tables` says, packed.
    """

    requests: bytes
    hashes: tuple[bytes, ...]
    is_running: bool
    cache: CacheState | None
    windows: bytes


def scheduler_of(
    policy: CapacitySchedulerPolicy | str, settings: Settings, planner: BatchPlanner
) -> SimpleScheduler:
    """Our scheduler for ``policy``, with the other settings.

    `ValueError` if these contradict one another.
    """
    return make_scheduler(
        policy,
        planner.block_manager,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        chunking=settings.chunking,
        resources=settings.resources(planner),
    )


def fallback_scheduler(settings: Settings, planner: BatchPlanner) -> SimpleScheduler:
    """Our scheduler that decides where the user's cannot.

    A user's scheduler may have admitted more than any reservation holds, so the one that takes over
    from it must be able to pause.
    """
    return scheduler_of(CapacitySchedulerPolicy.MAX_UTILIZATION, settings, planner)


def check_possible(
    decision: object,
    active_requests: Sequence[LlmRequest],
    settings: Settings,
    planner: BatchPlanner,
    inflight_request_ids: Collection[int] = (),
) -> Lists:
    """`check_decision` with these settings, and what ``planner`` has free now."""
    return check_decision(
        decision,
        active_requests,
        inflight_request_ids,
        block_manager=planner.block_manager,
        num_free_slots=planner.num_free_slots,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        may_chunk=settings.chunking is not None,
        resources=settings.resources(planner),
    )
