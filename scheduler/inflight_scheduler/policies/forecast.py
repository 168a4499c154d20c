"""What the blocks would look like if a decision were carried out.

Capacity schedulers decide request by request, and each choice changes what is free for the next.
With shared blocks that is more than a sum: a block of a victim may be one that a request accepted
before it counts on. The forecast keeps these budgets without touching a block. It is the `Forecast`
(see `resources`) of a `BlockManager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest


class BlockForecast:
    """Free blocks after everything claimed and released so far; constructed for each decision."""

    __slots__ = ("_claimed", "_dropped", "_manager", "_promised_keys", "num_available")

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.num_available = manager.num_free_blocks
        self._claimed: set[int] = set()  # cached blocks that accepted contexts will share
        self._dropped: Counter[int] = Counter()  # holders that victims took away from a block
        self._promised_keys: set[bytes] = set()  # blocks of text that a request will compute

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """Blocks that the next step of ``request`` would take."""
        num_needed = self._manager.get_needed_blocks_one_step(request, two_step_lookahead)
        return num_needed + self._correction(request)

    def needed_to_completion(self, request: LlmRequest) -> int:
        """Blocks that ``request`` would take until its last token."""
        num_needed = self._manager.get_remaining_blocks_to_completion(request)
        return num_needed + self._correction(request)

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        """``request`` is accepted and takes ``num_needed``; others may wait for its context."""
        self.num_available -= num_needed
        if self._manager.enable_reuse and _is_fresh(request):
            self._claimed.update(self._manager.match_prefix(request).block_ids)
            self.promise([request])

    def release(self, request: LlmRequest) -> None:
        """``request`` is paused and releases what no other request holds or counts on."""
        manager = self._manager
        if not manager.enable_reuse:
            self.num_available += manager.num_releasable_blocks(request.request_id)
            return
        if manager.window_groups:
            self.num_available += manager.num_window_blocks_of(request.request_id)
        rows = manager.beam_tables_of(request.request_id)
        for block_id in chain(manager.table_of(request.request_id), *rows):
            self._dropped[block_id] += 1
            is_last = self._dropped[block_id] == manager.ref_count(block_id)
            if is_last and block_id not in self._claimed:
                self.num_available += 1

    def promise(self, requests: Iterable[LlmRequest]) -> None:
        """These run their contexts already; what they compute is worth waiting for."""
        if self._manager.enable_reuse:
            for request in requests:
                key = self._manager.first_missing_key(request)
                if key is not None:
                    self._promised_keys.add(key)

    def is_beneficial_to_skip(self, request: LlmRequest) -> bool:
        """True for a fresh context whose next missing block another request is about to compute.

        One iteration later (or a few, if that context is cut) it can share the block instead of
        computing it again.
        """
        if not self._promised_keys or not _is_fresh(request):
            return False
        return self._manager.first_missing_key(request) in self._promised_keys

    def _correction(self, request: LlmRequest) -> int:
        """Cached blocks of a fresh context: +1 if their last holder goes, -1 if one is coming."""
        if not (self._claimed or self._dropped) or not _is_fresh(request):
            return 0
        correction = 0
        for block_id in self._manager.match_prefix(request).block_ids:
            num_holders = self._manager.ref_count(block_id)
            will_be_held = block_id in self._claimed or num_holders > self._dropped[block_id]
            correction += (num_holders > 0) - will_be_held
        return correction


def _is_fresh(request: LlmRequest) -> bool:
    return request.is_context_init_state and request.is_first_context_chunk
