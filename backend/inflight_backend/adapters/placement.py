"""Sees to it that every step finds the adapters of its requests on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from inflight_backend.adapters.service import AdapterService
from inflight_backend.adapters.store import DevicePlaces
from inflight_scheduler import AdapterAssignment, LlmRequest, ScheduledBatch

_NONE, _UNKNOWN = -1, -2


@dataclass(frozen=True, slots=True)
class AdaptersInUse:
    """Of active requests: names, or ids in decimal, sorted; of those whose requests hold a slot,
    and of others."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class AdapterPlacement:
    """Owner of the places of one engine; the loop's thread only."""

    def __init__(self, service: AdapterService, load: Callable[[int, Any], None]) -> None:
        """``load``: see `StepEngine.load_adapter`."""
        self.service, self._load = service, load
        self.places = DevicePlaces(service.pages.num_pages)
        self._task_of_slot: dict[int, int] = {}
        self._written: set[int] = set()  # places that may hold something
        self._told: dict[int, int] = {}  # the place of each slot that ever had an adapter
        self.load_seconds = self.wait_seconds = 0.0
        self.in_use = AdaptersInUse()
        self._num_waiting, self._measured_at = 0, time.monotonic()

    def prepare(
        self, batch: ScheduledBatch, task_of: Callable[[int], int | None]
    ) -> ScheduledBatch:
        """``batch`` with the adapters of its slots, which are loaded where they are not yet.

        ``task_of`` a request, by its id. If this or the step fails, call `forget`.
        """
        for setup in batch.setups:
            task_id = task_of(setup.request_id)
            if task_id is None:
                self._task_of_slot.pop(setup.slot, None)
            else:
                self._task_of_slot[setup.slot] = task_id
        if not self._task_of_slot and not self._told:
            return batch
        slots = [*batch.generation_slots, *(run.slot for run in batch.runs)]
        tasks = {slot: self._task_of_slot[slot] for slot in slots if slot in self._task_of_slot}
        wanted = {task_id: self.service.store.get_used(task_id) for task_id in set(tasks.values())}
        places, loads = self.places.place(wanted, self.service.pages.pages_of)
        started = time.monotonic()
        for each in loads:
            self._carry_out(each.place, None if each.task_id is None else wanted[each.task_id])
        if loads:
            self.load_seconds += time.monotonic() - started
        changes = []
        for slot in slots:
            place = places[tasks[slot]] if slot in tasks else _NONE
            if self._told.get(slot, _NONE) != place:
                self._told[slot] = place
                changes.append(AdapterAssignment(slot, place))
        return replace(batch, adapters=tuple(changes)) if changes else batch

    def _carry_out(self, place: int, adapter: Any) -> None:
        self._written.add(place)  # also by a load that fails
        self._load(place, adapter)
        if adapter is None:
            self._written.remove(place)

    def forget(self) -> None:
        """It is not known how much of the last plans the engine has carried out."""
        self.places.clear()
        for place in sorted(self._written):
            self._carry_out(place, None)
        self._told = dict.fromkeys(self._told, _UNKNOWN)

    def lacks_any(self, active: Iterable[LlmRequest]) -> bool:
        """Whether a request that waits has an adapter that is not on the device."""
        return any(
            request.lora_task_id is not None
            and request.seq_slot is None
            and not self.places.has(request.lora_digest)
            for request in active
        )

    def measure(self, active: Iterable[LlmRequest], num_waiting: int) -> dict[str, float]:
        """Statistics of the iteration; counts and seconds since the server started. ``num_waiting``
        requests wait for pages now."""
        now = time.monotonic()
        self.wait_seconds += self._num_waiting * (now - self._measured_at)
        self._num_waiting, self._measured_at = num_waiting, now
        self.in_use = self._in_use(active)
        places, store = self.places, self.service.store
        return {
            "LoRA adapter evictions": places.num_evictions,
            "LoRA adapter load time": self.load_seconds,
            "LoRA adapter loads": places.num_loads,
            "LoRA adapter wait time": self.wait_seconds,
            "LoRA adapters on the device": len(places),
            "LoRA adapters on the host": len(store),
            "LoRA host cache bytes": store.num_bytes,
            "LoRA host cache evictions": store.num_evictions,
            "LoRA requests waiting": num_waiting,
            "Max LoRA pages": places.num_pages,
            "Used LoRA pages": places.num_used_pages,
        }

    def _in_use(self, active: Iterable[LlmRequest]) -> AdaptersInUse:
        running: set[int] = set()
        waiting: set[int] = set()
        for request in active:
            if request.lora_task_id is not None:
                (waiting if request.seq_slot is None else running).add(request.lora_task_id)
        if not running and not waiting:
            return AdaptersInUse()
        names = [
            tuple(sorted(self.service.name_of(each) or str(each) for each in ids))
            for ids in (running, waiting - running)
        ]
        return AdaptersInUse(*names)
