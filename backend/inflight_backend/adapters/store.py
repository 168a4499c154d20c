"""Adapters in the memory of the host and their places on the device; no torch.

Both forget the adapter that was used least recently, always a whole one, and never one that a
request in flight uses. Names and rules of the host's are those of TensorRT-LLM's PEFT cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from inflight_backend.errors import CapacityExceeded, InvalidRequest

FULL = "Cache is full. There are no done tasks to evict"
"""What clients of TensorRT-LLM look for."""


class Storable(Protocol):
    """An adapter as the stores see it."""

    @property
    def digest(self) -> bytes: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...


@dataclass(slots=True)
class _Entry:
    adapter: Storable
    is_kept: bool
    num_users: int = 0


class AdapterStore:
    """The adapters on the host by task id, ``max_bytes`` at most; any thread may call it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the next to be evicted first
        self.num_bytes = self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, task_id: int) -> Storable | None:
        """The adapter of that id, which counts as used now."""
        with self._lock:
            entry = self._entries.get(task_id)
            if entry is None:
                return None
            self._entries.move_to_end(task_id)
            return entry.adapter

    def put(self, task_id: int, adapter: Storable, *, is_kept: bool = False) -> Storable:
        """Keep ``adapter`` under that id, others give way to it; ``is_kept``: until `remove`.

        The adapter that is there if another thread was faster. `InvalidRequest` if that has other
        weights, `CapacityExceeded` if there is no room.
        """
        with self._lock:
            known = self._entries.get(task_id)
            if known is None:
                self._make_room(adapter.num_bytes)
                known = self._entries[task_id] = _Entry(adapter, is_kept)
                self.num_bytes += adapter.num_bytes
            elif known.adapter.digest != adapter.digest:
                raise other_weights(task_id)
            self._entries.move_to_end(task_id)
            return known.adapter

    def acquire(self, task_id: int, adapter: Storable) -> None:
        """A request becomes active that uses ``adapter``, which `put` or `find` has given: it is
        not evicted until `release`. If it was meanwhile, it comes back."""
        self.put(task_id, adapter)
        with self._lock:
            self._entries[task_id].num_users += 1

    def release(self, task_id: int) -> None:
        """A request that used it has ended."""
        with self._lock:
            entry = self._entries[task_id]
            entry.num_users -= 1
            self._entries.move_to_end(task_id)

    def release_all(self) -> None:
        """No request is active."""
        with self._lock:
            for entry in self._entries.values():
                entry.num_users = 0

    def get_used(self, task_id: int) -> Storable:
        """The adapter of an active request."""
        return self._entries[task_id].adapter

    def remove(self, task_id: int) -> None:
        """It may be evicted from now on; at once, if no request uses it."""
        with self._lock:
            entry = self._entries[task_id]
            entry.is_kept = False
            if entry.num_users == 0:
                self._drop(task_id)

    def _make_room(self, num_bytes: int) -> None:
        """Evict until so many bytes fit. Nothing is evicted in vain."""
        done = [
            (task_id, entry.adapter.num_bytes)
            for task_id, entry in self._entries.items()
            if entry.num_users == 0 and not entry.is_kept
        ]
        if self.num_bytes - sum(size for _, size in done) + num_bytes > self._max_bytes:
            raise CapacityExceeded(
                f"{FULL}: an adapter of {num_bytes} bytes does not fit beside those in use, "
                f"lora_cache_host_memory_bytes is {self._max_bytes}"
            )
        for task_id, _ in done:
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            self._drop(task_id)
            self.num_evictions += 1

    def _drop(self, task_id: int) -> None:
        self.num_bytes -= self._entries.pop(task_id).adapter.num_bytes


def other_weights(task_id: int) -> InvalidRequest:
    """The refusal of an id that is sent again with other weights."""
    return InvalidRequest(
        f"'lora_task_id' {task_id} is in the cache with other weights; send these under another id"
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """``task_id`` is loaded to ``place``; None: what is there is not needed any more."""

    task_id: int | None
    place: int


class DevicePlaces:
    """Which adapter is where on the device, in pages; the owner is the loop's thread.

    Adapters are told apart by their digests: an id may come again with other weights.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._resident: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # place, pages
        self._free = list(range(num_pages - 1, -1, -1))  # no adapter takes less than a page
        self.num_used_pages = self.num_loads = self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._resident)

    def has(self, digest: bytes) -> bool:
        """Whether an adapter with these weights is there."""
        return digest in self._resident

    def place(
        self, wanted: Mapping[int, Storable], pages_of: Callable[[int], int]
    ) -> tuple[dict[int, int], list[Placement]]:
        """Places of the adapters that the coming step needs, by task id, and what must be done
        before, in this order. They fit: the scheduler has counted them."""
        for adapter in wanted.values():
            if adapter.digest in self._resident:
                self._resident.move_to_end(adapter.digest)
        needed = {adapter.digest for adapter in wanted.values()}
        places, loads = {}, []
        for task_id, adapter in wanted.items():
            if adapter.digest not in self._resident:
                num_pages = pages_of(adapter.rank)
                evicted = self._evict(self.num_pages - num_pages, needed)
                loads += [Placement(None, place) for place in evicted]
                self._resident[adapter.digest] = (self._free.pop(), num_pages)
                self.num_used_pages += num_pages
                self.num_loads += 1
                loads.append(Placement(task_id, self._resident[adapter.digest][0]))
            places[task_id] = self._resident[adapter.digest][0]
        return places, loads

    def clear(self) -> None:
        """Nothing is known of the device any more."""
        self._evict(0, ())

    def _evict(self, num_left: int, but: Collection[bytes]) -> list[int]:
        """Until at most ``num_left`` pages are used; the places."""
        evicted = []
        for digest in list(self._resident):
            if self.num_used_pages <= num_left:
                break
            if digest not in but:
                place, num_pages = self._resident.pop(digest)
                self._free.append(place)
                evicted.append(place)
                self.num_used_pages -= num_pages
                self.num_evictions += 1
        assert self.num_used_pages <= num_left, "a step needs more adapters than there is room for"
        return evicted
