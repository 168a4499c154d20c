"""Random worlds that run for long: everything that may happen, in any order, from one seed."""

from __future__ import annotations

import argparse
import random
import sys
import time

from support.overlapped_world import MixedWorld
from support.scheduler_extras import ADAPTERS, Extras, Spec, admit, guess
from support.scheduler_world import World

from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    FinishReason,
    LlmRequest,
    make_scheduler,
    refusal_reason,
)


class Soak:
    """One world with settings, arrivals, stops and failures drawn from ``seed``.

    The engine finds a wrong block in every step; everything else is checked in every
    ``check_every``-th and in the end.
    """

    world_class: type[World] = World

    def __init__(self, seed: int, policy: CapacitySchedulerPolicy, check_every: int = 1) -> None:
        self.dice = dice = random.Random(seed)
        self.policy = policy
        max_batch_size = dice.randint(1, 6)
        num_slots = max_batch_size + dice.randint(0, 2)
        self.max_num_tokens = dice.choice([None, dice.randint(4, 30)])
        self.chunking = dice.choice([None, self._chunking()])
        num_blocks, tokens_per_block = dice.randint(3, 14), dice.randint(1, 4)
        enable_reuse = dice.random() < 0.6
        self.extras = self._draw_extras().possible(policy, enable_reuse)
        resources = self.extras.resources(num_blocks, tokens_per_block)
        manager = BlockManager(
            num_blocks,
            tokens_per_block,
            enable_reuse=enable_reuse,
            may_copy_blocks=dice.random() < 0.5,
            window_size=self.extras.window_size,
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
        span = dice.choice([0, 3, 1000])
        self.world = self.world_class(
            scheduler,
            manager,
            num_slots,
            span,
            resources,
            self.extras.max_drafts,
            check_every,
            self.extras.max_beams,
        )
        self.alone: dict[int, list[int]] = {}
        self.num_arrivals = 0
        self.num_iterations = 0

    def run(self, num_iterations: int) -> None:
        """That many iterations, then everybody finishes and everything is free."""
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
        if self.extras.max_drafts:
            self._guess()
        self._step()
        self._check_finished()

    def _guess(self) -> None:
        if self.dice.random() < 0.3:
            guess(self.world, self.dice, self.alone)

    def _step(self) -> None:
        world, luck = self.world, self.dice.random()
        if luck > 0.06 or not world.active:
            world.step()
            return
        batch = world.plan(world.decide())
        if luck < 0.02:
            for request in world.planner.discard(batch):
                request.finish(FinishReason.CANCELLED)
                world.end(request)
            world.check_invariants()
            return
        world.stop(self.dice.choice(world.active))
        world.complete(batch)

    def _arrive(self) -> None:
        dice = self.dice
        wish = Spec(
            num_prompt=dice.randint(1, 14),
            max_new=dice.randint(1, 12),
            end_id=dice.choice([-1, dice.randint(0, 10)]),
            min_length=dice.randint(0, 3),
            priority=dice.choice([0.0, 0.5, 0.5, 0.5, 1.0]),
            family=dice.randint(0, 3),
            cache_salt=dice.choice([b"", b"", b"tenant"]),
            beam_width=dice.choice([1, 1, 2]),
            lora_task_id=dice.choice([None, None, *ADAPTERS]),
            encoder_length=dice.choice([0, 0, dice.randint(1, 5)]),
            num_drafts=dice.randint(0, 2),
        )
        request_id = self.num_arrivals
        request, spec = admit(wish.within(self.extras), request_id, self._refusal_reason)
        self.num_arrivals += 1
        self.alone[request_id] = spec.alone(self.extras.window_size, request.tokens)
        self.world.arrive(request)

    def _refusal_reason(self, request: LlmRequest) -> str | None:
        return refusal_reason(
            request,
            block_manager=self.world.manager,
            max_num_tokens=self.max_num_tokens,
            may_pause=self.policy == CapacitySchedulerPolicy.MAX_UTILIZATION,
            may_chunk=self.chunking is not None,
            resources=self.world.resources,
        )

    def _check_finished(self) -> None:
        """Everybody got the tokens it would have got alone, or the beginning of them."""
        for request in self.world.finished:
            alone = self.alone.pop(request.request_id)
            if request.finish_reason == FinishReason.CANCELLED:
                if request.beams is not None:
                    continue  # the best beam so far need not be the beginning of the best one
                alone = alone[: request.num_tokens]
            assert request.tokens == alone
        self.world.finished.clear()

    def _draw_extras(self) -> Extras:
        """Each seldom, so that many worlds have one of them or none and take the short way."""
        dice = self.dice
        further = [(dice.randint(2, 8),), (3, None)]
        return Extras(
            window_size=dice.choice([None] * 4 + [dice.randint(2, 12)]),
            further_windows=dice.choice([()] * 6 + further),
            num_cross_blocks=dice.choice([None] * 3 + [dice.randint(2, 8)]),
            num_pages=dice.choice([None] * 3 + [dice.randint(3, 6)]),
            max_drafts=dice.choice([0, 0, 1, 4]),
            max_beams=dice.choice([1, 1, 1, 2]),
        )

    def _chunking(self) -> ContextChunking:
        unit_size = self.dice.randint(1, 4)
        return ContextChunking(
            self.dice.choice(list(ContextChunkingPolicy)),
            unit_size,
            self.dice.choice([None, unit_size + self.dice.randint(0, 4)]),
        )


class MixedSoak(Soak):
    """The same with steps that overlap and steps that do not, in one world."""

    world_class = MixedWorld
    world: MixedWorld

    def __init__(self, seed: int, policy: CapacitySchedulerPolicy, check_every: int = 1) -> None:
        super().__init__(seed, policy, check_every)
        self.world.dice = random.Random(seed) if self.dice.random() < 0.7 else None

    def _guess(self) -> None:
        """At what comes after the last known token."""
        if self.dice.random() < 0.2:
            self.world.settle_running()
            guess(self.world, self.dice, self.alone)

    def _step(self) -> None:
        world, luck = self.world, self.dice.random()
        if luck > 0.08 or not world.active:
            world.step()
        elif luck > 0.05:  # while its step may run
            world.stop(self.dice.choice(world.active))
            world.step()
        elif luck > 0.02:  # between plan and update
            world.settle_running()
            if world.active:
                batch = world.plan(world.decide())
                if world.active:
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


def main() -> None:
    """As many iterations as asked for, spread over policies and seeds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=1)
    args = parser.parse_args()
    start, num_left, seed = time.monotonic(), args.iterations, args.first_seed
    while num_left > 0:
        for policy in CapacitySchedulerPolicy:
            for kind in (Soak, MixedSoak):
                soak = kind(seed, policy, args.check_every)
                soak.run(300)
                num_left -= soak.num_iterations
        seed += 1
    seconds = time.monotonic() - start
    sys.stdout.write(f"{args.iterations - num_left} iterations in {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
