"""The slots of the engine: which are free."""

from __future__ import annotations

from collections.abc import Sequence


class SlotPool:
    """Owner of ``num_slots`` slots: one for each request that runs.

    A slot is named by its first row in the engine; it has ``num_rows``, one for each beam.
    """

    __slots__ = ("_free", "num_rows", "num_slots")

    def __init__(self, num_slots: int, num_rows: int = 1) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        self.num_slots = num_slots
        self.num_rows = num_rows
        self._free = list(range((num_slots - 1) * num_rows, -1, -num_rows))

    @property
    def num_free_slots(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def assign(self) -> int:
        """Hand out a slot (the one freed last); there must be one."""
        assert self._free, f"all {self.num_slots} slots are taken"
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Take a slot back."""
        assert slot in range(0, self.num_slots * self.num_rows, self.num_rows), f"slot {slot}"
        self._free.append(slot)

    def check_integrity(self, owned: Sequence[int]) -> None:
        """Raise `AssertionError` unless ``owned`` and the free slots are all slots, each once."""
        expected = range(0, self.num_slots * self.num_rows, self.num_rows)
        assert sorted([*owned, *self._free]) == list(expected), (
            f"owned {sorted(owned)} and free {sorted(self._free)} of {self.num_slots} slots"
        )
