"""Which request holds which KV blocks, and how many it will need.

The arithmetic is the one of TensorRT-LLM's KV cache manager (``getNeededBlocksOneStep``,
``getRemainingBlocksToCompletion``). All estimates are upper bounds: what `BlockManager.allocate`
takes for a request never exceeds them. Tokens in the cache::

    after the context phase        prompt_len        (the first token drawn is not cached yet)
    after generation step k        prompt_len + k
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight_scheduler.blocks import BlockPool
from inflight_scheduler.request import LlmRequest


class BlockManager:
    """Owner of the KV blocks and of one block table for each request that holds any.

    "No room" is a return value; nothing here waits or evicts.
    """

    __slots__ = ("_pool", "_tables", "tokens_per_block")

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        if tokens_per_block < 1:
            raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
        self.tokens_per_block = tokens_per_block
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    def allocate(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Grow the block table of ``request_id`` until it holds ``num_tokens`` tokens.

        Returns the ids of the new blocks, in table order (empty if the table is long enough), or
        ``None`` when there is no room and nothing was changed.
        """
        num_needed = -(-num_tokens // self.tokens_per_block) - self.num_blocks_of(request_id)
        if num_needed <= 0:
            return []
        if num_needed > self._pool.num_free_blocks:
            return None
        new_blocks = self._pool.take(num_needed)
        self._tables.setdefault(request_id, []).extend(new_blocks)
        return new_blocks

    def free(self, request_id: int) -> int:
        """Give back everything the request holds; return how many blocks became free."""
        table = self._tables.pop(request_id, None)
        return self._pool.drop(table) if table else 0

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """Copy of the request's block ids in token order; empty when it holds none."""
        return tuple(self._tables.get(request_id, ()))

    def num_blocks_of(self, request_id: int) -> int:
        """Length of the request's block table."""
        table = self._tables.get(request_id)
        return len(table) if table else 0

    def num_releasable_blocks(self, request_id: int) -> int:
        """How many blocks `free` would make free; without shared blocks, the whole table."""
        return self.num_blocks_of(request_id)

    def get_needed_blocks_one_step(
        self, request: LlmRequest, two_step_lookahead: bool = False
    ) -> int:
        """Blocks the next step of ``request`` takes from the free ones, at most.

        The first context chunk takes those of the whole prompt (full ones shared by the beams, a
        partial one per beam), later chunks none; a generation step takes one per beam when the
        token (with look-ahead: either of the next two) opens a block.
        """
        tokens_per_block = self.tokens_per_block
        if request.is_context_init_state:
            if request.context_current_position > 0:
                return 0
            num_full, num_partial = divmod(request.prompt_len, tokens_per_block)
            return num_full + (request.beam_width if num_partial else 0)
        num_cached = request.num_cached_tokens
        num_steps = 2 if two_step_lookahead else 1
        num_places = -num_cached % tokens_per_block  # left in the last block
        if num_places >= num_steps:
            return 0
        num_tokens = min(num_steps, request.num_remaining_tokens) - num_places
        return request.beam_width * -(-num_tokens // tokens_per_block)

    def get_blocks_at_completion(self, request: LlmRequest) -> int:
        """Blocks ``request`` holds at its last token, at most: full prompt blocks are shared."""
        num_total = request.prompt_len + request.max_new_tokens
        total = -(-num_total // self.tokens_per_block)
        if request.beam_width == 1:
            return total
        shared = request.prompt_len // self.tokens_per_block
        return shared + (total - shared) * request.beam_width

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks ``request`` may still take until its last token; what it holds is subtracted."""
        return self.get_blocks_at_completion(request) - self.num_blocks_of(request.request_id)

    def can_ever_fit(self, request: LlmRequest) -> bool:
        """True unless ``request`` alone needs more blocks than there are."""
        return self.get_blocks_at_completion(request) <= self._pool.num_blocks

    def check_integrity(self) -> None:
        """Raise `AssertionError` with the reason unless free + referenced = total; O(blocks)."""
        tables: Sequence[Sequence[int]] = list(self._tables.values())
        for request_id, table in self._tables.items():
            assert table, f"request {request_id} has an empty block table"
        self._pool.check_integrity(tables)
