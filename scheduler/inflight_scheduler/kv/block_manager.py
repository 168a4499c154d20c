"""Which request holds which KV blocks, and how many it will need.

The arithmetic is that of TensorRT-LLM's KV cache manager (``getNeededBlocksOneStep``,
``getRemainingBlocksToCompletion``), the newer generation: what a fresh context finds cached while
another request holds it is not needed again. All estimates are upper bounds: what is allocated
for a request never exceeds them. Tokens in the cache::

    after the context phase        prompt_len        (the first token drawn is not cached yet)
    after generation step k        prompt_len + k    (with drafts: + those that were right)

A step with draft tokens may write all of them, so room is taken for all; what rejected ones leave
over stays with the request, which is where the published rule (it counts from the tokens) is
stricter. With an attention window a table ends at the window, and the blocks in it are written
again in turn (no sink tokens); the published rule asks for 0 as soon as a step reaches beyond the
window, which is too little when drafts cross the border, so here the step is cut at it.

With block reuse a full block is kept when its KV is computed: prompt blocks when the context phase
ends, all others when the request gives them back. A block that is kept and not held counts as
free, since it is evicted when room is needed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from struct import Struct

from inflight_scheduler.kv.block_pool import BlockPool
from inflight_scheduler.kv.prefix_cache import (
    CacheContent,
    CacheState,
    PartialMatch,
    ReuseIndex,
    array_of,
)
from inflight_scheduler.request import NO_MATCH, LlmRequest, PrefixMatch

_HASH = Struct("<Q")  # the first `prefix_cache.HASH_SIZE` bytes of a key, as a number


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """Prompt blocks since the start: found in the cache (shared or copied), or not."""

    num_reused_blocks: int = 0
    num_missed_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt blocks that was found, 0 before the first one."""
        num_blocks = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / num_blocks if num_blocks else 0.0


class BlockManager:
    """Owner of the KV blocks and of one block table for each request that holds any.

    "No room" is a return value; nothing here waits. ``enable_reuse`` keeps computed blocks for
    later requests; ``may_copy_blocks`` also uses part of a block by copying it, which the engine
    must be able to do. ``partial_match`` is for replays (see `ReuseIndex`).

    ``window_size``: tokens that a layer looks back on; None for all. A request that may outgrow the
    window writes over its own blocks, so it neither shares nor leaves any. Nor does one with an
    encoder: its KV depends on the encoder's input, not on its text alone.
    """

    __slots__ = (
        "_beam_tables",
        "_hashes",
        "_index",
        "_num_held",
        "_num_missed",
        "_num_reused",
        "_pool",
        "_tables",
        "tokens_per_block",
        "window_size",
    )

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        enable_reuse: bool = False,
        may_copy_blocks: bool = False,
        window_size: int | None = None,
        partial_match: PartialMatch | None = None,
    ) -> None:
        if tokens_per_block < 1:
            raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size must be at least 1 or None, not {window_size}")
        self.tokens_per_block = tokens_per_block
        self.window_size = window_size
        self._index: ReuseIndex | None = None
        if enable_reuse:
            self._index = ReuseIndex(tokens_per_block, may_copy_blocks, partial_match)
        on_evict = None if self._index is None else self._index.forget
        self._pool = BlockPool(num_blocks, on_evict)
        self._tables: dict[int, list[int]] = {}
        self._beam_tables: dict[int, list[list[int]]] = {}  # of rows 1 and up
        # What text each block holds, as far as it is kept: the first bytes of its key.
        self._hashes = array("Q", [0]) * (num_blocks if enable_reuse else 0)
        self._num_held = 0  # sum of the lengths of all tables
        self._num_reused = self._num_missed = 0

    @property
    def enable_reuse(self) -> bool:
        """True when computed blocks are kept for later requests."""
        return self._index is not None

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those kept for reuse included."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    @property
    def num_idle_blocks(self) -> int:
        """Free blocks whose content is kept for reuse."""
        return self._pool.num_idle_blocks

    @property
    def num_held_blocks(self) -> int:
        """Entries of all block tables; a block shared by two counts twice."""
        return self._num_held

    @property
    def num_holders(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    @property
    def reuse_stats(self) -> ReuseStats:
        """How often prompt blocks were found."""
        return ReuseStats(self._num_reused, self._num_missed)

    def allocate(self, request_id: int, num_tokens: int) -> list[int] | None:
        """Grow the block table of ``request_id`` until it holds ``num_tokens`` tokens (at most
        those of the window).

        Returns the ids of the new blocks, in table order (empty if the table is long enough), or
        ``None`` when there is no room and nothing was changed.
        """
        num_needed = self._num_blocks_for(num_tokens) - self.num_blocks_of(request_id)
        if num_needed <= 0:
            return []
        if num_needed > self._pool.num_free_blocks:
            return None
        new_blocks = self._pool.take(num_needed)
        self._tables.setdefault(request_id, []).extend(new_blocks)
        self._num_held += num_needed
        return new_blocks

    def append_block(self, request_id: int) -> tuple[int, int] | None:
        """Grow the table of a request that holds blocks by one; ``(index, block_id)`` of it.

        ``None`` when there is no room. It is `allocate` for the step that opens a block.
        """
        if self._pool.num_free_blocks == 0:
            return None
        table = self._tables[request_id]
        table.append(self._pool.take_one())
        self._num_held += 1
        return len(table) - 1, table[-1]

    def open_beams(self, request: LlmRequest) -> None:
        """Give each further beam of a context that holds its whole prompt a table.

        Full blocks are shared with the first one; of those behind them each gets its own.
        """
        assert self.window_size is None, "beams share blocks, and a window is written over"
        first = self._tables[request.request_id]
        shared = first[: request.prompt_len // self.tokens_per_block]
        num_own = len(first) - len(shared)
        rows = []
        for _ in range(1, request.beam_width):
            for block_id in shared:
                self._pool.share(block_id)
            rows.append([*shared, *(self._pool.take(num_own) if num_own else ())])
        self._beam_tables[request.request_id] = rows

    def append_beam_blocks(self, request_id: int) -> list[int]:
        """A new block at the end of every row but the first, for which there must be room."""
        rows = self._beam_tables[request_id]
        block_ids = self._pool.take(len(rows))
        for row, block_id in zip(rows, block_ids, strict=True):
            row.append(block_id)
        return block_ids

    def follow_beams(self, request: LlmRequest, parents: Sequence[int]) -> None:
        """Make the table of each row of ``request`` that of its parent; parents are their own.

        Unless the last block is full, a row keeps its own, for a copy of its parent's.
        """
        is_last_full = request.num_cached_tokens % self.tokens_per_block == 0
        rows = [self._tables[request.request_id], *self._beam_tables[request.request_id]]
        for row, parent in zip(rows, parents, strict=True):
            if rows[parent] is row:
                continue
            place = len(row) - (0 if is_last_full else 1)
            while place > 0 and row[place - 1] != rows[parent][place - 1]:
                place -= 1
                self._pool.share(rows[parent][place])
                self._pool.drop((row[place],))
                row[place] = rows[parent][place]

    def beam_tables_of(self, request_id: int) -> Sequence[Sequence[int]]:
        """The tables of every row but the first; none for a request without beams."""
        return self._beam_tables.get(request_id, ())

    def free(self, request_id: int) -> int:
        """Give back everything the request holds; return how many blocks became free."""
        table = self._tables.pop(request_id, None)
        if not table:
            return 0
        self._num_held -= len(table)
        rows = self._beam_tables.pop(request_id, ())
        return sum(self._pool.drop(row) for row in rows) + self._pool.drop(table)

    def release(self, request: LlmRequest) -> int:
        """As `free`, but full blocks whose KV is computed are kept for reuse."""
        self.store(request)
        return self.free(request.request_id)

    def store(self, request: LlmRequest) -> None:
        """Enter the full, computed blocks of ``request`` for reuse; it still holds them.

        A negative last token marks a request whose numbers failed; nothing of it is kept. That of
        a running step is no such mark.
        """
        table = self._tables.get(request.request_id)
        if self._index is None or table is None:
            return
        if request.tokens[request.num_drawn_tokens - 1] < 0:
            return
        if self._keeps_to_itself(request):
            return
        num_full = min(request.num_cached_tokens // self.tokens_per_block, len(table))
        if request.beams is not None:  # what follows the prompt changes with every step
            num_full = min(num_full, request.prompt_len // self.tokens_per_block)
        for block_id, key in self._index.add(request, table[:num_full]):
            self._pool.keep(block_id)
            (self._hashes[block_id],) = _HASH.unpack_from(key)

    def forget(self, request_id: int) -> None:
        """Keep nothing of what the request holds now: its numbers have turned out to be wrong."""
        if self._index is None:
            return
        for block_id in self._tables.get(request_id, ()):
            if self._pool.unkeep(block_id):
                self._index.forget(block_id)

    def forget_all(self) -> None:
        """Keep nothing at all; O(blocks)."""
        if self._index is None:
            return
        for block_id in self._pool.kept_blocks():
            self._pool.unkeep(block_id)
            self._index.forget(block_id)

    def match_prefix(self, request: LlmRequest) -> PrefixMatch:
        """What of the prompt is cached, for a context that holds nothing yet; O(prompt blocks)."""
        if self._index is None or not request.is_context_init_state:
            return NO_MATCH
        if request.context_current_position > 0 or request.request_id in self._tables:
            return NO_MATCH
        return NO_MATCH if self._keeps_to_itself(request) else self._index.match(request)

    def count_reusable_tokens(self, request: LlmRequest) -> int:
        """Prompt tokens of a fresh context that need not be computed."""
        return self.match_prefix(request).num_tokens

    def first_missing_key(self, request: LlmRequest) -> bytes | None:
        """What the context of ``request`` will add to the cache first, None for nothing."""
        if self._index is None or self._keeps_to_itself(request):
            return None
        return self._index.first_missing(request)

    def attach_prefix(self, request: LlmRequest) -> PrefixMatch:
        """Share the cached full blocks of a fresh context and count what was found.

        Attach all contexts of an iteration before any of them allocates: that may evict.
        """
        match = self.match_prefix(request)
        if self._index is not None:
            num_prompt_blocks = -(-request.prompt_len // self.tokens_per_block)
            self._num_reused += match.num_blocks
            self._num_missed += num_prompt_blocks - match.num_blocks
        for block_id in match.block_ids:
            self._pool.share(block_id)
        if match.block_ids:
            self._tables[request.request_id] = list(match.block_ids)
            self._num_held += len(match.block_ids)
        return match

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """Copy of the request's block ids in token order; empty when it holds none."""
        return tuple(self._tables.get(request_id, ()))

    def num_blocks_of(self, request_id: int) -> int:
        """Length of the request's block table."""
        table = self._tables.get(request_id)
        return len(table) if table else 0

    def num_distinct_blocks_of(self, request_id: int) -> int:
        """Blocks the request holds, those that its beams share counted once."""
        rows = self.beam_tables_of(request_id)
        if not rows:
            return self.num_blocks_of(request_id)
        return len(set(chain(self._tables[request_id], *rows)))

    def ref_count(self, block_id: int) -> int:
        """How many tables hold ``block_id``."""
        return self._pool.ref_count(block_id)

    def num_releasable_blocks(self, request_id: int) -> int:
        """How many blocks `free` would free: those without another holder."""
        if self._index is None:
            return self.num_distinct_blocks_of(request_id)
        num_own = Counter(chain(self.table_of(request_id), *self.beam_tables_of(request_id)))
        return sum(self._pool.ref_count(block_id) == num for block_id, num in num_own.items())

    def num_places_left(self, request: LlmRequest) -> int:
        """Tokens that fit behind the cached ones of ``request`` before it needs another block.

        Without a window; what it holds counts, also what wrong drafts have left over.
        """
        num_cached = request.num_cached_tokens
        num_places = self.num_blocks_of(request.request_id) * self.tokens_per_block
        if num_places < num_cached:
            return -num_cached % self.tokens_per_block
        return num_places - num_cached

    def num_tokens_after_step(self, request: LlmRequest, num_steps: int = 1) -> int:
        """Tokens in the cache after the next ``num_steps`` steps, at most: all drafts are right.

        A context takes room for its whole prompt at once, whatever its first chunk is.
        """
        num_new = num_steps * (len(request.draft_tokens) + 1)
        if request.is_generation_in_progress_state:
            return request.num_cached_tokens + min(num_new, request.num_remaining_tokens)
        return request.prompt_len + min(len(request.draft_tokens), request.max_new_tokens)

    def get_needed_blocks_one_step(
        self, request: LlmRequest, two_step_lookahead: bool = False
    ) -> int:
        """Blocks the next step of ``request`` takes from the free ones, at most.

        The first context chunk takes those of the whole prompt and its drafts (full ones shared by
        the beams, a partial one per beam) without a holder, later chunks none; a generation step
        takes some per beam when the token and its drafts (with look-ahead: those of the next two
        steps) open blocks. The encoder takes none.
        """
        tokens_per_block, window_size = self.tokens_per_block, self.window_size
        if request.is_generation_in_progress_state:
            num_held = self.num_blocks_of(request.request_id)
            num_tokens = self.num_tokens_after_step(request, 2 if two_step_lookahead else 1)
            num_after = self._num_blocks_for(num_tokens)
            if num_after <= num_held:
                return 0
            num_before = self._num_blocks_for(request.num_cached_tokens)
            return request.beam_width * (num_after - max(num_held, num_before))
        if request.context_current_position > 0 or request.is_encoder_init_state:
            return 0
        num_tokens = self.num_tokens_after_step(request)
        if window_size is not None:
            num_tokens = min(num_tokens, window_size)
        num_full, num_partial = divmod(num_tokens, tokens_per_block)
        num_needed = num_full + (request.beam_width if num_partial else 0)
        return num_needed if self._index is None else num_needed - self._num_shared(request)

    def get_blocks_at_completion(self, request: LlmRequest) -> int:
        """Blocks ``request`` holds at its last token, at most: full prompt blocks are shared."""
        total = self._num_blocks_for(request.prompt_len + request.max_new_tokens)
        if request.beam_width == 1:
            return total
        shared = request.prompt_len // self.tokens_per_block
        if self.window_size is not None:
            shared = min(shared, self.window_size // self.tokens_per_block)
        return shared + (total - shared) * request.beam_width

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks ``request`` may still take until its last token.

        What it holds is subtracted, or, of a fresh context, what it will share. The encoder takes
        nothing; the context that follows does.
        """
        if request.is_encoder_init_state:
            return 0
        num_remaining = self.get_blocks_at_completion(request)
        num_held = self.num_distinct_blocks_of(request.request_id)
        if num_held == 0 and self._index is not None:
            return num_remaining - self._num_shared(request)
        return num_remaining - num_held

    def can_ever_fit(self, request: LlmRequest) -> bool:
        """True unless ``request`` alone needs more blocks than there are."""
        return self.get_blocks_at_completion(request) <= self._pool.num_blocks

    def cache_state(self) -> CacheState | None:
        """What is cached now, copied; None without block reuse. See `CacheState` for the cost."""
        if self._index is None:
            return None
        tables = self._tables
        blocks: list[int] = []
        for table in tables.values():
            blocks += table
        return CacheState(
            holders=array_of("Q", tables),
            table_lengths=array_of("i", list(map(len, tables.values()))),
            table_blocks=array_of("i", blocks),
            is_kept=self._pool.kept_flags(),
            hashes=self._hashes[:],
            idle_links=self._pool.idle_links(),
        )

    def block_hashes(self, request: LlmRequest, start: int, end: int) -> bytes:
        """The hashes (see `prefix_cache`) of the full blocks ``start .. end - 1`` of the text.

        They are equal for texts that are equal from the very beginning up to the end of the block.
        Nothing without block reuse.
        """
        return b"" if self._index is None else self._index.hashes(request, start, end)

    def restore_cache(self, content: CacheContent) -> None:
        """Become what ``content`` says; for a manager with block reuse that holds nothing yet.

        `ValueError` when it contradicts itself; then this manager is of no use any more.
        """
        assert self._index is not None, "there is no cache without block reuse"
        for block_id, key in content.kept.items():
            if not self._index.enter(key, block_id):
                raise ValueError(f"the text of block {block_id} is kept twice")
            (self._hashes[block_id],) = _HASH.unpack_from(key)
        self._tables = {key: list(table) for key, table in content.tables.items() if table}
        self._num_held = sum(map(len, self._tables.values()))
        self._pool.restore(self._tables.values(), content.kept, content.idle)

    def check_integrity(self) -> None:
        """Raise `AssertionError` with the reason unless all counts agree; O(blocks).

        free + kept and idle + referenced = total; reference counts, tables and index match.
        """
        tables: Sequence[Sequence[int]] = list(self._tables.values())
        for request_id, table in self._tables.items():
            assert table, f"request {request_id} has an empty block table"
        assert sum(map(len, tables)) == self._num_held, "the sum of the tables has drifted"
        self._pool.check_integrity([*tables, *chain.from_iterable(self._beam_tables.values())])
        for request_id, rows in self._beam_tables.items():
            _check_beams(request_id, [self._tables[request_id], *rows])
        if self._index is not None:
            self._index.check_integrity()
            assert self._index.block_ids == self._pool.kept_blocks(), "kept is not what is indexed"

    def table_of(self, request_id: int) -> Sequence[int]:
        """The request's block ids in token order, without a copy: read it and let it go."""
        return self._tables.get(request_id, ())

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Length of a table that holds ``num_tokens`` tokens."""
        if self.window_size is not None and num_tokens > self.window_size:
            num_tokens = self.window_size
        return -(-num_tokens // self.tokens_per_block)

    def _keeps_to_itself(self, request: LlmRequest) -> bool:
        may_outgrow = self.window_size is not None and request.max_num_tokens > self.window_size
        return may_outgrow or request.encoder_length > 0

    def _num_shared(self, request: LlmRequest) -> int:
        """Cached blocks of a fresh context that have a holder, so that they cost nothing."""
        matched = self.match_prefix(request).block_ids
        return sum(self._pool.ref_count(block_id) > 0 for block_id in matched)


def _check_beams(request_id: int, rows: Sequence[Sequence[int]]) -> None:
    """Raise `AssertionError` unless all are as long and share a beginning and nothing else."""
    assert len(set(map(len, rows))) == 1, f"request {request_id} has rows of several lengths"
    for row, other in combinations(rows, 2):
        num_equal = sum(a == b for a, b in zip(row, other, strict=True))
        assert row[:num_equal] == other[:num_equal], f"rows of request {request_id}"
        shared = set(row[num_equal:]) & set(other[num_equal:])
        assert not shared, f"request {request_id}: {sorted(shared)} in two places"
