"""Random worlds: settings, requests and whatever may happen to them, in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.fake_engine import VOCAB_SIZE, beams_alone, sight_of, tokens_alone
from support.overlapped_world import MixedWorld
from support.scheduler_world import Decision, make_request

from inflight_scheduler import (
    BeamParams,
    BeamSearch,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    CrossBlocks,
    FinishReason,
    InvalidDecision,
    LlmRequest,
    PeftPages,
    Resource,
    make_scheduler,
    refusal_reason,
)

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
SEARCHES = (
    BeamParams(2, 1),
    BeamParams(2, 1, length_penalty=1.0, early_stopping=0),
    BeamParams(2, 1, length_penalty=0.5, early_stopping=2, diversity_rate=-0.5),
)
"""The widths are those of the requests."""


@dataclass(frozen=True)
class Extras:
    """Settings of a world that are seldom there: worlds without them take the fast path.

    Further pools are so small that requests wait for them. ``num_cross_blocks`` and ``num_pages``
    None: no encoders, no adapters.
    """

    windows: tuple[int | None, ...] = (None,)
    num_cross_blocks: int | None = None
    num_pages: int | None = None
    max_drafts: int = 0
    max_beams: int = 1
    num_snapshots: int | None = None

    @classmethod
    def drawn(cls, dice: random.Random, policy: CapacitySchedulerPolicy) -> Extras:
        """At random, without what the policy rules out."""
        size = dice.randint(1, 12)
        windows: list[tuple[int | None, ...]] = [
            (size,),
            (None, size),
            (None, 3, 3, size),
            (2, size),
        ]
        cross = dice.choice([None] * 3 + [dice.randint(2, 8)])
        max_beams = dice.choice([1, 1, 1, 2, 4])
        return cls(
            windows=dice.choice([(None,)] * 4 + windows) if max_beams == 1 else (None,),
            num_cross_blocks=None if policy == MAX_UTILIZATION else cross,
            num_pages=dice.choice([None] * 3 + [dice.randint(3, 6)]),
            max_drafts=dice.choice([0, 0, 1, 4]),
            max_beams=max_beams,
        ).with_snapshots(dice)

    def with_snapshots(self, dice: random.Random) -> Extras:
        """Perhaps, where there can be some."""
        num_snapshots = dice.choice([None, 1, 2, 5])
        can = self.windows == (None,) and self.max_drafts == 0
        return replace(self, num_snapshots=num_snapshots) if can else self

    def resources(self, tokens_per_block: int) -> list[Resource]:
        """Real block managers behind all of them; adapter n has n pages."""
        found: list[Resource] = []
        if self.num_cross_blocks is not None:
            found.append(CrossBlocks(BlockManager(self.num_cross_blocks, tokens_per_block)))
        if self.num_pages is not None:
            found.append(PeftPages(self.num_pages, lambda task_id: task_id))
        return found


Spec = dict[str, Any]
"""What `make_request` is told of a request to come, besides its id."""


def draw_spec(dice: random.Random, extras: Extras) -> Spec:
    """At random, without what a world of ``extras`` does not have."""
    width = min(dice.choice([1, 1, 2, 3, 4]), extras.max_beams)
    searches = width > 1 and extras.max_drafts == 0
    adapter = dice.choice([None, None, 1, 2, 3])
    return {
        "num_prompt": dice.randint(1, 14),
        "max_new": dice.randint(1, 12),
        "end_id": dice.choice([-1, dice.randint(0, 10)]),
        "min_length": dice.randint(0, 3),
        "priority": dice.choice([0.0, 0.5, 0.5, 0.5, 1.0]),
        "family": dice.randint(0, 3),
        "cache_salt": dice.choice([b"", b"", b"tenant"]),
        "beam_width": width,
        "lora_task_id": None if extras.num_pages is None else adapter,
        "encoder_length": 0 if extras.num_cross_blocks is None else dice.choice([0, 0, 1, 3, 5]),
        "num_drafts": min(dice.randint(0, 3), extras.max_drafts),
        "search": replace(dice.choice(SEARCHES), width=width) if searches else None,
    }


def smaller(spec: Spec) -> Spec:
    """Less of everything; in the end a request that every world takes."""
    less = {name: max(1, spec[name] - 1) for name in ("num_prompt", "max_new")}
    less |= {name: max(0, spec[name] - 1) for name in ("encoder_length", "num_drafts")}
    if spec["num_prompt"] == spec["max_new"] == 1:
        less |= {"beam_width": 1, "search": None}
    return spec | less


class Soak:
    """One world with settings, arrivals, stops and failures drawn from ``dice``.

    Its steps run alone, overlap, or do either at random.
    """

    def __init__(self, dice: random.Random, policy: CapacitySchedulerPolicy) -> None:
        self.dice = dice
        self.policy = policy
        max_batch_size = dice.randint(1, 6)
        num_slots = max_batch_size + dice.randint(0, 2)
        self.max_num_tokens = dice.choice([None, dice.randint(4, 30)])
        self.chunking = dice.choice([None, self._chunking()])
        num_blocks, tokens_per_block = dice.randint(3, 14), dice.randint(1, 4)
        enable_reuse = dice.random() < 0.6
        self.extras = Extras.drawn(dice, policy)
        num_blocks *= len(self.extras.windows)
        resources = self.extras.resources(tokens_per_block)
        manager = BlockManager(
            num_blocks,
            tokens_per_block,
            enable_reuse=enable_reuse,
            may_copy_blocks=dice.random() < 0.5,
            windows=self.extras.windows,
            max_chunk_tokens=None if self.chunking is None else self.max_num_tokens,
            max_drafts=self.extras.max_drafts,
            num_snapshots=self.extras.num_snapshots,
        )
        scheduler = make_scheduler(
            policy,
            manager,
            max_batch_size=max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_num_requests=num_slots,
            chunking=self.chunking,
            two_step_lookahead=dice.random() < 0.2,
            resources=resources,
        )
        self.world = MixedWorld(
            scheduler,
            manager,
            num_slots,
            dice.choice([0, 3, 1000]),
            resources,
            self.extras.max_drafts,
            self.extras.max_beams,
        )
        self.world.dice, self.world.share_alone = dice, dice.choice([1.0, 0.3, 0.0])
        self.alone: dict[int, list[int]] = {}
        self.searches: dict[int, BeamSearch] = {}
        self.num_arrivals = 0
        self.num_iterations = 0

    def run(self, num_iterations: int) -> None:
        """That many iterations, then all requests finish and everything is free."""
        for _ in range(num_iterations):
            self.run_one(self.dice.random() < 0.4)
        self.world.drain()
        self._check_finished()
        assert not self.alone

    def run_one(self, may_arrive: bool) -> None:
        """One iteration, before it perhaps an arrival."""
        self.num_iterations += 1
        if may_arrive and len(self.world.active) < 12:
            self._arrive()
        if self.extras.max_drafts and self.dice.random() < 0.25:
            self.world.settle_running()  # a guess is at what comes after the last known token
            self._guess()
        self._step()
        self._check_finished()

    def _step(self) -> None:
        world, luck = self.world, self.dice.random()
        if not world.active:
            world.step()
        elif luck > 0.14 or (luck > 0.08 and self.policy != MAX_UTILIZATION):
            world.step()
            assert world.num_running > 0, "active requests and nothing runs"
        elif luck > 0.08:
            self._step_of_foreign_scheduler()
        elif luck > 0.05:  # while its step may run
            world.stop(self.dice.choice(world.active))
            world.step()
        elif luck > 0.02:  # between plan and update
            world.settle_running()
            if world.active:
                batch = world.plan(world.decide())
                world.stop(self.dice.choice(world.active))
                world.complete(batch)
        else:
            self._fail(luck < 0.01)

    def _fail(self, is_running_lost: bool) -> None:
        """The step planned now is lost; so may be the one that runs."""
        world = self.world
        running = world.running
        if world.active.num_with_drafts or (
            running is not None and world.planner.must_apply_first(running[0])
        ):
            world.settle_running()
        for request in world.fail(is_running_lost=is_running_lost):
            if world.active.get(request.request_id) is request:
                request.finish(FinishReason.CANCELLED)
                world.end(request)
        world.check_invariants()

    def _step_of_foreign_scheduler(self) -> None:
        """What the guard lets pass can be carried out; what it refuses changes nothing.

        Only where the policy that goes on can pause what was admitted.
        """
        world = self.world
        world.settle_running()
        decision = self._random_decision()
        num_free = world.manager.num_free_blocks
        if self._passes(decision):
            world.complete(world.plan(decision))
        else:
            assert world.manager.num_free_blocks == num_free
            world.check_invariants()

    def _random_decision(self) -> Decision:
        """As much as the guard lets pass, in any order; or careless, and sometimes nonsense."""
        dice = self.dice
        decision: Decision = ([], [], [])
        context, generation, paused = decision
        is_careful = dice.random() < 0.7
        for request in dice.sample(list(self.world.active), len(self.world.active)):
            right = context if request.is_context_init_state else generation
            chosen = dice.choice([right, right, paused, None])
            if chosen is not None:
                chosen.append(request)
                if is_careful and not self._passes(decision):
                    chosen.pop()
        return decision

    def _passes(self, decision: Decision) -> bool:
        try:
            self.world.check(decision)
        except InvalidDecision:
            return False
        return True

    def _arrive(self) -> None:
        """What is too large for this world is cut until it is admitted."""
        request_id = self.num_arrivals
        self.num_arrivals += 1
        spec = draw_spec(self.dice, self.extras)
        while self._refusal_reason(request := make_request(request_id, **spec)) is not None:
            spec = smaller(spec)
        self.alone[request_id] = self._answer_alone(spec, request_id, request.tokens)
        self.world.arrive(request)

    def _answer_alone(self, spec: Spec, request_id: int, prompt: Sequence[int]) -> list[int]:
        """Prompt and output when no other request is there."""
        max_new, end_id, min_length = (spec[name] for name in ("max_new", "end_id", "min_length"))
        if spec["search"] is not None:
            search = self.searches[request_id] = BeamSearch(spec["search"], max_new, end_id)
            return beams_alone(prompt, search, min_length)
        sight = sight_of(self.extras.windows)
        return tokens_alone(prompt, max_new, end_id, min_length, sight)

    def _guess(self) -> None:
        """Some requests get draft tokens, many of them right, as many as an iteration can hold."""
        dice, budget = self.dice, self.max_num_tokens
        for request in self.world.active:
            is_fresh = request.is_context_init_state and request.seq_slot is None
            if not (is_fresh or request.is_generation_in_progress_state) or dice.random() < 0.4:
                continue
            limit = self.extras.max_drafts
            if budget is not None:
                limit = min(limit, budget - request.beam_width)
                if is_fresh and self.chunking is None:
                    limit = min(limit, budget - request.prompt_len)
            right = self.alone[request.request_id][request.num_tokens :]
            tokens = [
                right[i] if i < len(right) and dice.random() < 0.7 else dice.randrange(VOCAB_SIZE)
                for i in range(dice.randint(0, max(0, limit)))
            ]
            request.set_draft_tokens(tokens)

    def _refusal_reason(self, request: LlmRequest) -> str | None:
        return refusal_reason(
            request,
            block_manager=self.world.manager,
            max_num_tokens=self.max_num_tokens,
            may_pause=self.policy == MAX_UTILIZATION,
            may_chunk=self.chunking is not None,
            resources=self.world.resources,
        )

    def _check_finished(self) -> None:
        """Each got the tokens it would have got alone, or, stopped, the beginning of them."""
        for request in self.world.finished:
            alone = self.alone.pop(request.request_id)
            if request.finish_reason is not FinishReason.CANCELLED:
                assert request.tokens == alone
                is_cut = request.num_remaining_tokens == 0
                assert is_cut or request.finish_reason is FinishReason.END_ID
                if isinstance(request.beams, BeamSearch):
                    search = self.searches[request.request_id]
                    assert request.beams.hypotheses() == search.hypotheses()
            elif request.beams is None:  # else its best beam may still have changed
                assert request.tokens == alone[: request.num_tokens]
        self.world.finished.clear()

    def _chunking(self) -> ContextChunking:
        unit_size = self.dice.randint(1, 4)
        return ContextChunking(
            self.dice.choice(list(ContextChunkingPolicy)),
            unit_size,
            self.dice.choice([None, unit_size + self.dice.randint(0, 4)]),
        )
