"""Adapters on the way to the device under every policy: what holds after any decision."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.overlapped_world import MixedWorld
from support.scheduler_world import make_request

from inflight_backend.adapters.placement import AdapterPlacement
from inflight_backend.adapters.store import AdapterStore
from inflight_backend.engine.interface import AdapterPages
from inflight_backend.errors import CapacityExceeded
from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    FinishReason,
    LlmRequest,
    PeftPages,
    ScheduledBatch,
    make_scheduler,
)

NUM_PAGES, NUM_SLOTS, ADAPTER_BYTES = 6, 8, 10


class Killed(Exception):
    """A load that does not end."""


@dataclass(frozen=True)
class Stored:
    """An adapter of ``rank`` pages."""

    digest: bytes
    rank: int
    num_bytes: int = ADAPTER_BYTES


class Device:
    """What lies in each place, and which place each slot was told."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.places, self.slots = dice, {}, {}  # type: ignore[var-annotated]
        self.num_killed = 0

    def load(self, place: int, adapter: Stored | None) -> None:
        self.places.pop(place, None)
        if adapter is None:
            return
        self.places[place] = None  # half written
        if self.dice.random() < 0.02:
            self.num_killed += 1
            raise Killed
        self.places[place] = adapter
        num_used = sum(each.rank for each in self.places.values() if each is not None)
        assert num_used <= NUM_PAGES, "pages are overdrawn"

    def run(self, batch: ScheduledBatch, wanted: dict[int, Stored | None]) -> None:
        """``wanted`` by slot: what rows of the step must find."""
        for each in batch.adapters:
            self.slots[each.slot] = each.place
        for slot, adapter in wanted.items():
            place = self.slots.get(slot, -1)
            found = None if place == -1 else self.places[place]
            assert found == adapter
            assert (place == -1) == (adapter is None), "half written"


class AdapterWorld(MixedWorld):
    """`MixedWorld` whose steps need their adapters on a device."""

    def set_up(self, dice: random.Random) -> None:
        self.device, self.store = Device(dice), AdapterStore(5 * ADAPTER_BYTES)
        service: Any = SimpleNamespace(store=self.store, pages=AdapterPages(NUM_PAGES, 1, 3))
        self.placement = AdapterPlacement(service, self.device.load)
        self.used: dict[int, Stored] = {}
        self.num_decisions = self.num_refused = self.num_sent_again = 0
        self.lost: list[LlmRequest] = []

    def arrive_with(self, request: LlmRequest, task_id: int | None) -> None:
        """With weights of its id; after an eviction these are others."""
        if task_id is not None:
            adapter = self.store.find(task_id)
            if adapter is None:
                self.num_sent_again += 1
                digest = b"%d %d" % (task_id, self.num_sent_again)
                try:
                    adapter = self.store.put(task_id, Stored(digest, 1 + task_id % 3))
                except CapacityExceeded:
                    self.num_refused += 1
                    return
            assert isinstance(adapter, Stored)
            request.lora_digest, request.lora_pages = adapter.digest, adapter.rank
            self.store.acquire(task_id, adapter)
            self.used[request.request_id] = adapter
        self.arrive(request)

    def end(self, request: LlmRequest) -> None:
        super().end(request)
        if request.lora_task_id is not None:
            self.store.release(request.lora_task_id)
            del self.used[request.request_id]

    def plan(self, decision: Any) -> ScheduledBatch:
        batch = super().plan(decision)
        self.num_decisions += 1
        for request in self.active:  # none that is held was evicted
            if request.lora_task_id is not None:
                held = self.store.get_used(request.lora_task_id)
                assert held == self.used[request.request_id]
        if batch.is_empty:
            return batch
        by_id = {request.request_id: request for request in self.active}
        placed = None
        while placed is None:
            try:
                placed = self.placement.prepare(batch, lambda each: by_id[each].lora_task_id)
            except Killed:
                self.placement.forget()
                assert not any(self.device.places.values())
        slots = {*batch.generation_slots, *(run.slot for run in batch.runs)}
        wanted = {
            request.seq_slot: self.used.get(request.request_id)
            for request in self.active
            if request.seq_slot in slots
        }
        self.device.run(placed, wanted)
        return batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda each: each.name)
def test_ten_thousand_decisions(policy: CapacitySchedulerPolicy) -> None:
    dice = random.Random(policy)
    manager = BlockManager(40, 3, enable_reuse=True)
    pages = PeftPages(NUM_PAGES)
    scheduler = make_scheduler(policy, manager, max_batch_size=NUM_SLOTS, resources=[pages])
    world = AdapterWorld(scheduler, manager, NUM_SLOTS, resources=[pages])
    world.dice, world.share_alone = dice, 0.5
    world.set_up(dice)
    number = 0
    while world.num_decisions < 3400:  # of each of three policies
        if dice.random() < 0.5 and len(world.active) < 14:
            task_id = dice.choice([None, *range(14), 2**64 - 1])
            request = make_request(
                number, dice.randint(1, 9), dice.randint(1, 9), lora_task_id=task_id
            )
            world.arrive_with(request, task_id)
            number += 1
        world.step()
        if world.active and dice.random() < 0.05:
            world.settle_running()
        if world.active and dice.random() < 0.05:
            request = dice.choice(list(world.active))
            request.finish(FinishReason.CANCELLED)
            world.end(request)
    world.drain()
    places, store = world.placement.places, world.store
    assert not world.used
    assert all(entry.num_users == 0 for entry in store._entries.values())
    assert places.num_evictions > 100
    assert store.num_evictions > 100
    assert world.device.num_killed > 10
    assert world.num_refused > 10
