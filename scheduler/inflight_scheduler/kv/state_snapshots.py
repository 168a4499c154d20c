"""Snapshots of recurrent states, so that a prompt goes on where another text has been.

Where layers have a recurrence, a prefix can be reused only if the state behind it was kept: at the
end of a full block, in one of a fixed number of snapshots. They are taken

- at the end of the last full block of a prompt, for the same prompt and the next turn of a chat;
- where a prompt parts from blocks that are cached but without a state there: what two texts have in
  common a third one may have, too;
- of a request that generates at the end of its last full block, one after the other in the same
  snapshot. These are not found before the request gives back its blocks, and are half of all at
  most.

A snapshot belongs to the key of its block and goes with it. The one that was used least recently
makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inflight_scheduler.request import LlmRequest, PrefixMatch

KeyOf = Callable[[LlmRequest, int], bytes]
"""The key of a full block of the text of a request, by its index."""


class SnapshotState(NamedTuple):
    """What there is, for the flight recorder: keys, the one to go first in front; the blocks of
    text behind which requests that generate have one; and those behind which contexts that are
    computed will part from cached ones. The latter two by request id."""

    keys: Sequence[bytes] = ()
    held: Sequence[tuple[int, int]] = ()
    partings: Sequence[tuple[int, int]] = ()


class StateSnapshots:
    """Which snapshot holds the state behind which text. ``version`` grows with every change."""

    __slots__ = (
        "_by_key",
        "_free",
        "_held",
        "_key_of",
        "_partings",
        "_taken",
        "_tokens_per_block",
        "num_snapshots",
        "version",
    )

    def __init__(self, num_snapshots: int, tokens_per_block: int, key_of: KeyOf) -> None:
        self.num_snapshots, self.version = num_snapshots, 0
        self._tokens_per_block, self._key_of = tokens_per_block, key_of
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._held: dict[int, tuple[int, int]] = {}  # request id -> snapshot, blocks before it
        self._partings: dict[int, int] = {}  # request id -> blocks before it
        self._taken: set[bytes] = set()  # in the plan that is made: they are written in its step

    def find(self, key: bytes) -> int | None:
        """The snapshot behind the block with this key."""
        return self._by_key.get(key)

    def begin_plan(self) -> None:
        """What was taken so far may make room again."""
        self._taken.clear()

    def begin(self, request: LlmRequest, match: PrefixMatch) -> None:
        """A fresh context starts with ``match``, whose snapshot is used now."""
        num_blocks = len(match.block_ids)
        if match.snapshot is not None:
            self._by_key.move_to_end(self._key_of(request, num_blocks - 1))
        if match.num_stored_blocks > num_blocks:
            self._partings[request.request_id] = match.num_stored_blocks

    def of_chunk(self, request: LlmRequest, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The snapshots to be taken while the tokens ``start .. end - 1`` of the prompt are
        computed: after how many tokens of the text, in ascending order, and into which."""
        size = self._tokens_per_block
        found = [
            (point, self._take(self._key_of(request, point // size - 1)))
            for point in self.points(request)
            if start < point <= end
        ]
        return tuple((point, snapshot) for point, snapshot in found if snapshot is not None)

    def points(self, request: LlmRequest) -> list[int]:
        """After how many tokens of its prompt snapshots are taken, in ascending order; where it
        parts from cached blocks is known once its context has begun."""
        last = (request.prompt_len - 1) // self._tokens_per_block
        places = {last, min(self._partings.get(request.request_id, last), last)}
        return [place * self._tokens_per_block for place in sorted(places)]

    def of_generation(self, request: LlmRequest) -> int | None:
        """The snapshot for the state behind the tokens that are cached, which fill their blocks;
        None: there is no room."""
        num_blocks = request.num_cached_tokens // self._tokens_per_block
        if request.request_id in self._held:
            snapshot, _ = self._held[request.request_id]
        elif len(self._held) < self.num_snapshots // 2:
            made = self._make_room()
            if made is None:
                return None
            snapshot = made
        else:
            return None
        self._held[request.request_id] = snapshot, num_blocks
        return snapshot

    def keep(self, request: LlmRequest) -> None:
        """``request`` gives back its blocks, and its snapshot may be found from now on."""
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        snapshot, num_blocks = held
        key = self._key_of(request, num_blocks - 1)
        self.version += 1
        if key in self._by_key:
            self._free.append(self._by_key[key])
        self._by_key[key] = snapshot
        self._by_key.move_to_end(key)

    def drop(self, request_id: int) -> None:
        """Give up what the request holds, if it still does."""
        self._partings.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is not None:
            self._free.append(held[0])

    def forget(self, key: bytes) -> None:
        """The block with this key is not cached any more.

        Of one that the plan being made will write the state stays: its request caches the block
        anew, and another state written to the same snapshot would spoil both.
        """
        if key in self._taken:
            return
        snapshot = self._by_key.pop(key, None)
        if snapshot is not None:
            self.version += 1
            self._free.append(snapshot)

    def forget_all(self) -> None:
        """Keep nothing but what running requests hold."""
        self.version += 1
        self._free += self._by_key.values()
        self._by_key.clear()

    def state(self) -> SnapshotState:
        """A copy."""
        held = [(request_id, num_blocks) for request_id, (_, num_blocks) in self._held.items()]
        return SnapshotState(list(self._by_key), held, list(self._partings.items()))

    def restore(self, state: SnapshotState) -> None:
        """Become what ``state`` says; `ValueError` for more than there are, or one twice."""
        num_taken = len(state.keys) + len(state.held)
        if num_taken > self.num_snapshots or len(state.held) > self.num_snapshots // 2:
            raise ValueError(f"{num_taken} snapshots of {self.num_snapshots}")
        self._by_key = OrderedDict((key, self._free.pop()) for key in state.keys)
        self._held = {number: (self._free.pop(), num_blocks) for number, num_blocks in state.held}
        self._partings = dict(state.partings)
        if len(self._by_key) < len(state.keys) or len(self._held) < len(state.held):
            raise ValueError("a snapshot is named twice")

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless each snapshot is in one place."""
        held = [snapshot for snapshot, _ in self._held.values()]
        found = [*self._free, *self._by_key.values(), *held]
        assert sorted(found) == list(range(self.num_snapshots)), "snapshots are lost or shared"

    def _take(self, key: bytes) -> int | None:
        snapshot = self._by_key.get(key)
        if snapshot is None:
            snapshot = self._make_room()
            if snapshot is None:
                return None
            self._by_key[key] = snapshot
        self._by_key.move_to_end(key)
        self._taken.add(key)
        self.version += 1
        return snapshot

    def _make_room(self) -> int | None:
        """A free snapshot; None if all are held, or were taken in this plan."""
        if not self._free:
            oldest = next(iter(self._by_key), None)
            if oldest is None or oldest in self._taken:
                return None
            self.version += 1
            self._free.append(self._by_key.pop(oldest))
        return self._free.pop()
