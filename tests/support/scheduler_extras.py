"""What worlds may have besides requests of one beam: windows, further pools, adapters, guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from support.fake_engine import VOCAB_SIZE, beams_alone, tokens_alone
from support.scheduler_world import World, make_request

from inflight_scheduler import (
    BeamParams,
    BeamSearch,
    BlockManager,
    CapacitySchedulerPolicy,
    CrossBlocks,
    LlmRequest,
    PeftPages,
    Resource,
    WindowBlocks,
)

ADAPTERS = (1, 2, 3)
"""Task ids; adapter n has n pages."""

SEARCHES = (
    BeamParams(2, 1),
    BeamParams(2, 1, length_penalty=1.0, early_stopping=0),
    BeamParams(2, 1, length_penalty=0.5, early_stopping=2, diversity_rate=-0.5),
)
"""The widths are those of the requests."""


@dataclass(frozen=True)
class Extras:
    """Settings of a world; the pools are so small that requests wait for them.

    ``num_cross_blocks`` and ``num_pages`` None: no encoders, no adapters.
    """

    window_size: int | None = None
    further_windows: tuple[int | None, ...] = ()
    num_cross_blocks: int | None = None
    num_pages: int | None = None
    max_drafts: int = 0
    max_beams: int = 1

    @property
    def searches(self) -> bool:
        """Whether beams are carried out, not only counted."""
        return self.window_size is None and self.max_drafts == 0

    def possible(self, policy: CapacitySchedulerPolicy, enable_reuse: bool) -> Extras:
        """Without what the policy or block reuse rule out."""
        cross = self.num_cross_blocks
        if policy == CapacitySchedulerPolicy.MAX_UTILIZATION:
            cross = None
        windows = () if enable_reuse else self.further_windows
        return replace(self, num_cross_blocks=cross, further_windows=windows)

    def resources(self, num_blocks: int, tokens_per_block: int) -> list[Resource]:
        """Real block managers behind all of them."""
        found: list[Resource] = [
            WindowBlocks(BlockManager(num_blocks, tokens_per_block, window_size=window_size))
            for window_size in self.further_windows
        ]
        if self.num_cross_blocks is not None:
            found.append(CrossBlocks(BlockManager(self.num_cross_blocks, tokens_per_block)))
        if self.num_pages is not None:
            found.append(PeftPages(self.num_pages, lambda task_id: task_id))
        return found


@dataclass(frozen=True)
class Spec:
    """One request to come."""

    num_prompt: int
    max_new: int
    end_id: int = -1
    min_length: int = 0
    priority: float = 0.5
    family: int = 0
    cache_salt: bytes = b""
    beam_width: int = 1
    lora_task_id: int | None = None
    encoder_length: int = 0
    num_drafts: int = 0
    search: BeamParams | None = None

    def within(self, extras: Extras) -> Spec:
        """Without what a world of ``extras`` does not have."""
        width = min(self.beam_width, extras.max_beams)
        return replace(
            self,
            beam_width=width,
            search=replace(SEARCHES[self.num_prompt % len(SEARCHES)], width=width)
            if extras.searches and width > 1
            else None,
            lora_task_id=None if extras.num_pages is None else self.lora_task_id,
            encoder_length=0 if extras.num_cross_blocks is None else self.encoder_length,
            num_drafts=min(self.num_drafts, extras.max_drafts),
        )

    def smaller(self) -> Spec:
        """Less of everything; in the end a request that every world takes."""
        is_smallest = self.num_prompt == self.max_new == 1
        return replace(
            self,
            num_prompt=max(1, self.num_prompt - 1),
            max_new=max(1, self.max_new - 1),
            beam_width=1 if is_smallest else self.beam_width,
            search=None if is_smallest else self.search,
            encoder_length=max(0, self.encoder_length - 1),
            num_drafts=max(0, self.num_drafts - 1),
        )

    def make(self, request_id: int) -> LlmRequest:
        """The request."""
        return make_request(
            request_id,
            self.num_prompt,
            self.max_new,
            end_id=self.end_id,
            min_length=self.min_length,
            beam_width=self.beam_width,
            priority=self.priority,
            family=self.family,
            cache_salt=self.cache_salt,
            lora_task_id=self.lora_task_id,
            encoder_length=self.encoder_length,
            num_drafts=self.num_drafts,
            search=self.search,
        )

    def alone(self, window_size: int | None, prompt: Sequence[int]) -> list[int]:
        """Prompt and output when nobody else is there."""
        if self.search is not None:
            search = BeamSearch(self.search, self.max_new, self.end_id)
            return beams_alone(prompt, search, self.min_length)
        return tokens_alone(prompt, self.max_new, self.end_id, self.min_length, window_size)


def admit(
    spec: Spec, request_id: int, refusal_reason: Callable[[LlmRequest], str | None]
) -> tuple[LlmRequest, Spec]:
    """The request of ``spec``, cut until it is admitted, and what it was cut to."""
    request = spec.make(request_id)
    while refusal_reason(request) is not None:
        spec = spec.smaller()
        request = spec.make(request_id)
    return request, spec


def guess(world: World, dice: random.Random, alone: Mapping[int, Sequence[int]]) -> None:
    """Some requests get draft tokens, many of them right, as many as an iteration can hold."""
    micro_batch = world.scheduler.micro_batch_scheduler
    budget = micro_batch.max_num_tokens
    for request in world.active:
        is_fresh = request.is_context_init_state and request.seq_slot is None
        if not (is_fresh or request.is_generation_in_progress_state) or dice.random() < 0.4:
            continue
        limit = world.max_drafts
        if budget is not None:
            limit = min(limit, budget - request.beam_width)
            if is_fresh and micro_batch.chunking is None:
                limit = min(limit, budget - request.prompt_len)
        right = alone[request.request_id][request.num_tokens :]
        tokens = [
            right[i] if i < len(right) and dice.random() < 0.7 else dice.randrange(VOCAB_SIZE)
            for i in range(dice.randint(0, max(0, limit)))
        ]
        request.set_draft_tokens(tokens)
