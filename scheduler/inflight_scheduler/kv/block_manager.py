"""Which request holds which KV blocks, and how many it will need.

The arithmetic is that of TensorRT-LLM's KV cache manager (``getNeededBlocksOneStep``,
``getRemainingBlocksToCompletion``), the newer generation: what a fresh context finds cached while
another request holds it is not needed again. All estimates are upper bounds: what is allocated
for a request never exceeds them. Tokens in the cache::

    after the context phase        prompt_len        (the first token drawn is not cached yet)
    after generation step k        prompt_len + k    (with drafts: + those that were right)

A step with draft tokens may write all of them, so room is taken for all; what rejected ones leave
over stays with the request, which is where the published rule (it counts from the tokens) is
stricter.

**Groups of layers.** Layers that see the whole text and layers that see a window of it are groups
with block tables of their own, in one pool: a block holds the tokens of one group, and a request
takes some for each. In a group with a window (`WindowGroup`) what lies behind it is given back when
the table grows. The published rule cuts a table at the window and writes it again in turn; here
it holds up to a block more, and while its context is computed what the longest chunk needs, too.

With block reuse a full block is kept when its KV is computed: prompt blocks when the context phase
ends (those that fall behind a window before that: then), all others when the request gives them
back. A block that is kept and not held counts as free, since it is evicted when room is needed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from struct import Struct

from inflight_scheduler.kv.block_pool import BlockPool
from inflight_scheduler.kv.prefix_cache import (
    CacheContent,
    CacheListener,
    CacheState,
    PartialMatch,
    ReuseIndex,
    array_of,
)
from inflight_scheduler.kv.state_snapshots import SnapshotState
from inflight_scheduler.kv.window_group import WindowGroup
from inflight_scheduler.request import NO_MATCH, LlmRequest, PrefixMatch

FREE, KEPT, SHARED = -1, -2, -3
"""Of a block that no request holds, of such a one whose content is kept, and of one that several
hold: what `BlockManager.owners` says in the place of a request."""

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
    must be able to do. ``num_snapshots``: of states, where the engine has recurrences (see
    `StateSnapshots`; without windows, and blocks are used whole). ``partial_match`` is for replays
    (see `ReuseIndex`). ``listener`` hears of every change of what is kept.

    ``windows``: for each group of layers how many tokens it looks back on; None, for all, may be
    the first only. What a table with a window may hold depends on ``max_chunk_tokens``, the
    longest context chunk (None: contexts are computed whole), and on ``max_drafts`` of a step.
    A request with an encoder neither shares nor leaves any block: its KV depends on the encoder's
    input, not on its text alone.
    """

    __slots__ = (
        "_beam_tables",
        "_has_full",
        "_hashes",
        "_index",
        "_num_held",
        "_num_missed",
        "_num_reused",
        "_pool",
        "_tables",
        "max_chunk_tokens",
        "max_drafts",
        "snapshots",
        "tokens_per_block",
        "window_groups",
        "windows",
    )

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        *,
        enable_reuse: bool = False,
        may_copy_blocks: bool = False,
        windows: Sequence[int | None] = (None,),
        max_chunk_tokens: int | None = None,
        max_drafts: int = 0,
        num_snapshots: int | None = None,
        partial_match: PartialMatch | None = None,
        listener: CacheListener | None = None,
    ) -> None:
        if tokens_per_block < 1:
            raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
        if not windows or any(window is not None and window < 1 for window in windows):
            raise ValueError(f"windows must each be at least 1 or None, not {list(windows)}")
        if None in windows[1:]:
            raise ValueError("layers that see all are one group, the first one of windows")
        if num_snapshots and any(window is not None for window in windows):
            raise ValueError("num_snapshots: a prefix of layers with a window has none")
        self.tokens_per_block = tokens_per_block
        self.windows = tuple(windows)
        self.max_chunk_tokens, self.max_drafts = max_chunk_tokens, max_drafts
        self._index: ReuseIndex | None = None
        if enable_reuse:
            told = listener if windows[0] is None else None
            may_copy = may_copy_blocks and num_snapshots is None
            self._index = ReuseIndex(tokens_per_block, may_copy, partial_match, told, num_snapshots)
        on_evict = None if self._index is None else self._index.forget
        self.snapshots = None if self._index is None else self._index.snapshots
        self._pool = BlockPool(num_blocks, on_evict)
        self.window_groups = tuple(
            WindowGroup(number, window, tokens_per_block, self._pool)
            for number, window in enumerate(windows)
            if window is not None
        )
        if self._index is not None:
            self._index.window_groups = self.window_groups
        # Of group 0: if that has a window, its own tables, of which only the lengths are read here.
        self._has_full = windows[0] is None
        self._tables: dict[int, list[int]] = {} if self._has_full else self.window_groups[0].tables
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
        """Grow the block table of ``request_id`` until it holds ``num_tokens`` tokens: that of the
        layers that see all; for the others see `allocate_windows`.

        Returns the ids of the new blocks, in table order (empty if the table is long enough), or
        ``None`` when there is no room and nothing was changed.
        """
        if not self._has_full:
            return []
        num_needed = self._num_blocks_for(num_tokens) - self.num_blocks_of(request_id)
        if num_needed <= 0:
            return []
        if num_needed > self._pool.num_free_blocks:
            return None
        new_blocks = self._pool.take(num_needed)
        self._tables.setdefault(request_id, []).extend(new_blocks)
        self._num_held += num_needed
        return new_blocks

    def allocate_windows(
        self, request: LlmRequest, num_tokens: int
    ) -> Sequence[tuple[int, int, Sequence[int]]]:
        """Grow the tables with a window as `allocate` does, for the next step of ``request``.

        What lies behind the window is given back first. There must be room. A context, which may
        be cut into chunks, gets what the longest one of these needs. Returns group, index of the
        first new block, and the ids.
        """
        if not self.window_groups:
            return []
        request_id, grown = request.request_id, []
        position, num_blocks = request.num_cached_tokens, self._num_blocks_for(num_tokens)
        is_context = request.is_context_init_state
        if is_context:
            position = request.context_current_position
            if request_id in self._tables:
                self.store(request)
        for group in self.window_groups:
            end = num_blocks
            if is_context and self.max_chunk_tokens is not None:
                end = min(end, group.first_seen(position) + group.span(self.max_chunk_tokens))
            self._num_held -= group.drop_passed(request_id, position)
            first_index, block_ids = group.extend(request_id, position, end)
            self._num_held += len(block_ids)
            grown.append((group.number, first_index, block_ids))
        return grown

    def end_context(self, request: LlmRequest) -> None:
        """The context of ``request`` is computed: its full blocks are entered for reuse, and those
        behind windows are given back."""
        self.store(request)
        for group in self.window_groups:
            self._num_held -= group.drop_passed(request.request_id, request.prompt_len)

    def append_blocks(self, request_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Grow the table of each of these, which hold blocks, by one; ``(index, block_id)`` of it.

        ``None`` when there is no room. It is `allocate` for a step in which they open a block.
        """
        if not request_ids or len(request_ids) > self._pool.num_free_blocks:
            return None if request_ids else []
        tables = [self._tables[request_id] for request_id in request_ids]
        block_ids = self._pool.take(len(tables))
        appended = list(zip(map(len, tables), block_ids, strict=True))
        for table, block_id in zip(tables, block_ids, strict=True):
            table.append(block_id)
        self._num_held += len(block_ids)
        return appended

    def open_beams(self, request: LlmRequest) -> None:
        """Give each further beam of a context that holds its whole prompt a table.

        Full blocks are shared with the first one; of those behind them each gets its own.
        """
        assert not self.window_groups, (
            "beams share blocks, and those behind a window are given back"
        )
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
        num_freed = 0
        if self.snapshots is not None:
            self.snapshots.drop(request_id)
        for group in self.window_groups:
            num_held, num_now_free = group.free(request_id)
            self._num_held -= num_held
            num_freed += num_now_free
        table = self._tables.pop(request_id, None)
        if not table:
            return num_freed
        self._num_held -= len(table)
        rows = self._beam_tables.pop(request_id, ())
        return num_freed + sum(self._pool.drop(row) for row in rows) + self._pool.drop(table)

    def release(self, request: LlmRequest) -> int:
        """As `free`, but full blocks whose KV is computed are kept for reuse."""
        self.store(request)
        if self.snapshots is not None and request.tokens[-1] >= 0:
            self.snapshots.keep(request)
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
            if self.window_groups:  # blocks that it gave back may be kept
                self.forget_all()
            if self.snapshots is not None:
                self.snapshots.forget_all()
            return
        if _keeps_to_itself(request):
            return
        num_full = min(request.num_cached_tokens // self.tokens_per_block, len(table))
        if request.beams is not None:  # what follows the prompt changes with every step
            num_full = min(num_full, request.prompt_len // self.tokens_per_block)
        if self._has_full:
            self._keep(self._index.add(request, table[:num_full]))
        for group in self.window_groups:
            first, held = group.held(request.request_id)
            self._keep(
                self._index.add(request, held[: max(num_full - first, 0)], first, group.number)
            )

    def _keep(self, entered: Mapping[int, bytes]) -> None:
        self._pool.keep(entered)
        hashes, unpack = self._hashes, _HASH.unpack_from
        for block_id, key in entered.items():
            (hashes[block_id],) = unpack(key)

    def forget(self, request_id: int) -> None:
        """Keep nothing of what the request holds now: its numbers have turned out to be wrong.

        With windows it may have given wrong ones back already, and nothing at all is kept.
        """
        if self._index is None:
            return
        if self.window_groups:
            self.forget_all()
            return
        if self.snapshots is not None:
            self.snapshots.forget_all()
        for block_id in self._tables.get(request_id, ()):
            if self._pool.unkeep(block_id):
                self._index.forget([block_id])

    def forget_all(self) -> None:
        """Keep nothing at all; O(blocks)."""
        if self._index is None:
            return
        for block_id in self._pool.kept_blocks():
            self._pool.unkeep(block_id)
        self._index.forget_all()

    def match_prefix(self, request: LlmRequest) -> PrefixMatch:
        """What of the prompt is cached, for a context that holds nothing yet; O(prompt blocks)."""
        if self._index is None or not request.is_context_init_state:
            return NO_MATCH
        if request.context_current_position > 0 or request.request_id in self._tables:
            return NO_MATCH
        return NO_MATCH if _keeps_to_itself(request) else self._index.match(request)

    def count_reusable_tokens(self, request: LlmRequest) -> int:
        """Prompt tokens of a fresh context that need not be computed."""
        return self.match_prefix(request).num_tokens

    def snapshot_points(self, request: LlmRequest) -> Sequence[int]:
        """After how many tokens of its prompt a context keeps a state, in ascending order."""
        return () if self.snapshots is None else self.snapshots.points(request)

    def first_missing_key(self, request: LlmRequest) -> bytes | None:
        """What the context of ``request`` will add to the cache first, None for nothing."""
        if self._index is None or _keeps_to_itself(request):
            return None
        return self._index.first_missing(request)

    def attach_prefix(self, request: LlmRequest) -> PrefixMatch:
        """Share the cached full blocks of a fresh context and count what was found; those of groups
        with a window are for the caller to copy.

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
        if self.snapshots is not None:
            self.snapshots.begin(request, match)
        return match

    def snapshots_of_chunk(self, request: LlmRequest, num_tokens: int) -> Sequence[tuple[int, int]]:
        """What `StateSnapshots.of_chunk` says of the next chunk."""
        if self.snapshots is None or _keeps_to_itself(request):
            return ()
        start = request.context_current_position
        return self.snapshots.of_chunk(request, start, start + num_tokens)

    def snapshot_of_generation(self, request: LlmRequest) -> int | None:
        """What `StateSnapshots.of_generation` says of a request that opens a block."""
        if self.snapshots is None or request.beams is not None or _keeps_to_itself(request):
            return None
        return self.snapshots.of_generation(request)

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """Copy of the request's block ids in token order; empty when it holds none."""
        return tuple(self.table_of(request_id))

    def owners(self) -> list[int]:
        """Of each block the request that holds it, or one of those named below; O(blocks)."""
        flags = self._pool.kept_flags()
        owners = [KEPT if is_kept else FREE for is_kept in flags]
        tables = [*self._tables.items()] if self._has_full else []
        for request_id, rows in self._beam_tables.items():
            tables += [(request_id, row) for row in rows]
        for group in self.window_groups:
            tables += [(request_id, group.held(request_id)[1]) for request_id in group.tables]
        for request_id, table in tables:
            for block_id in table:
                if owners[block_id] in (FREE, KEPT, request_id):
                    owners[block_id] = request_id
                else:
                    owners[block_id] = SHARED
        return owners

    def num_blocks_of(self, request_id: int) -> int:
        """Length of the request's block table, with entries of blocks that it has given back."""
        table = self._tables.get(request_id)
        return len(table) if table else 0

    def num_distinct_blocks_of(self, request_id: int) -> int:
        """Blocks the request holds in all groups, those that its beams share counted once."""
        if request_id in self._beam_tables:
            rows = self._beam_tables[request_id]
            return len(set(chain(self._tables[request_id], *rows)))
        if not self.window_groups:
            return self.num_blocks_of(request_id)
        num_blocks = self.num_blocks_of(request_id) if self._has_full else 0
        return num_blocks + self.num_window_blocks_of(request_id)

    def num_window_blocks_of(self, request_id: int) -> int:
        """Blocks the request holds in groups with a window; nobody shares them."""
        return sum([group.num_held(request_id) for group in self.window_groups])

    def ref_count(self, block_id: int) -> int:
        """How many tables hold ``block_id``."""
        return self._pool.ref_count(block_id)

    def num_releasable_blocks(self, request_id: int) -> int:
        """How many blocks `free` would free: those without another holder."""
        if self._index is None:
            return self.num_distinct_blocks_of(request_id)
        num_own = Counter(chain(self.table_of(request_id), *self.beam_tables_of(request_id)))
        num_blocks = sum(self._pool.ref_count(block_id) == num for block_id, num in num_own.items())
        return num_blocks + self.num_window_blocks_of(request_id)

    def num_places_left(self, request: LlmRequest) -> int:
        """Tokens that fit behind the cached ones of ``request`` before it needs another block.

        What it holds counts, also what wrong drafts have left over.
        """
        num_cached = request.num_cached_tokens
        num_places = len(self._tables.get(request.request_id, ())) * self.tokens_per_block
        if self.window_groups:
            tables = [group.tables.get(request.request_id, ()) for group in self.window_groups]
            num_places = min(num_places, min(map(len, tables)) * self.tokens_per_block)
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
        if request.is_generation_in_progress_state:
            num_tokens = self.num_tokens_after_step(request, 2 if two_step_lookahead else 1)
            num_after = self._num_blocks_for(num_tokens)
            if self.window_groups:
                return self._num_needed_with_windows(request, num_after)
            num_held = self.num_blocks_of(request.request_id)
            if num_after <= num_held:
                return 0
            num_before = self._num_blocks_for(request.num_cached_tokens)
            return request.beam_width * (num_after - max(num_held, num_before))
        if request.context_current_position > 0 or request.is_encoder_init_state:
            return 0
        num_tokens = self.num_tokens_after_step(request)
        num_needed = 0
        for group in self.window_groups:
            num_needed += self._context_blocks(group, num_tokens)
        if self._has_full:
            num_full, num_partial = divmod(num_tokens, self.tokens_per_block)
            num_needed += num_full + (request.beam_width if num_partial else 0)
        return num_needed if self._index is None else num_needed - self._num_shared(request)

    def get_blocks_at_completion(self, request: LlmRequest, *, has_context: bool = True) -> int:
        """Blocks ``request`` holds at its last token, at most: full prompt blocks are shared.

        In groups with a window that is what it holds at any time; ``has_context`` False: from the
        end of its context on.
        """
        total = self._num_blocks_for(request.prompt_len + request.max_new_tokens)
        if request.beam_width > 1:  # there are no windows then
            shared = request.prompt_len // self.tokens_per_block
            return shared + (total - shared) * request.beam_width
        if not self.window_groups:
            return total
        num_blocks = total if self._has_full else 0
        for group in self.window_groups:
            num_most = min(total, group.span(1 + self.max_drafts))
            if has_context:
                num_drafts = min(self.max_drafts, request.max_new_tokens)
                num_context = self._context_blocks(group, request.prompt_len + num_drafts)
                num_most = max(num_most, num_context)
            num_blocks += num_most
        return num_blocks

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks ``request`` may still take until its last token.

        What it holds is subtracted, or, of a fresh context, what it will share. The encoder takes
        nothing; the context that follows does.
        """
        if request.is_encoder_init_state:
            return 0
        if self.window_groups and request.is_generation_in_progress_state:
            num_remaining = self.get_blocks_at_completion(request, has_context=False)
        else:
            num_remaining = self.get_blocks_at_completion(request)
        num_held = self.num_distinct_blocks_of(request.request_id)
        if num_held == 0 and self._index is not None:
            return num_remaining - self._num_shared(request)
        return num_remaining - num_held

    def get_context_blocks(self, num_tokens: int) -> int:
        """Blocks that a context of ``num_tokens`` holds at most, in all groups."""
        num_blocks = self._num_blocks_for(num_tokens) if self._has_full else 0
        return num_blocks + sum(
            self._context_blocks(each, num_tokens) for each in self.window_groups
        )

    def num_needed_alone(self, request: LlmRequest, *, may_pause: bool = False) -> int:
        """Blocks that ``request`` needs at most while it holds nothing. ``may_pause``: what it has
        generated may have to be computed again, as a context."""
        num_blocks = self.get_blocks_at_completion(request)
        if may_pause and self.window_groups:
            longest = self.get_context_blocks(request.prompt_len + request.max_new_tokens)
            num_blocks = max(num_blocks, longest)
        return num_blocks

    def can_ever_fit(self, request: LlmRequest, *, may_pause: bool = False) -> bool:
        """True unless ``request`` alone needs more blocks than there are."""
        return self.num_needed_alone(request, may_pause=may_pause) <= self._pool.num_blocks

    def cache_state(self) -> CacheState | None:
        """What is cached now, copied; None without block reuse. See `CacheState` for the cost.

        What requests hold in groups with a window: `window_tables`.
        """
        if self._index is None:
            return None
        tables = self._tables if self._has_full else {}
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
            groups=self._index.groups() if self.window_groups else b"",
            snapshots=SnapshotState() if self.snapshots is None else self.snapshots.state(),
        )

    def window_tables(self) -> list[tuple[int, list[tuple[int, list[int]]]]]:
        """For each holder, in each group with a window, how many blocks it has given back and those
        that it holds; nothing where no group has one."""
        if not self.window_groups:
            return []
        return [
            (request_id, [group.held(request_id) for group in self.window_groups])
            for request_id in self._tables
        ]

    def restore_windows(self, tables: Mapping[int, Sequence[tuple[int, Sequence[int]]]]) -> bool:
        """Hold, in groups with a window, as many blocks as `window_tables` says; False if there are
        not as many. For a manager without block reuse (with it: `restore_cache`)."""
        for request_id, parts in tables.items():
            for group, (num_behind, held) in zip(self.window_groups, parts, strict=True):
                if len(held) > self._pool.num_free_blocks:
                    return False
                block_ids = self._pool.take(len(held)) if held else []
                group.restore(request_id, num_behind, block_ids)
                self._num_held += len(held)
        return True

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
            if not self._index.enter(key, block_id, content.groups.get(block_id, 0)):
                raise ValueError(f"the text of block {block_id} is kept twice")
            (self._hashes[block_id],) = _HASH.unpack_from(key)
        holders: list[Sequence[int]] = []
        if self._has_full:
            self._tables = {key: list(table) for key, table in content.tables.items() if table}
            holders += self._tables.values()
        for request_id, parts in content.windows.items():
            for group, (num_behind, held) in zip(self.window_groups, parts, strict=True):
                group.restore(request_id, num_behind, list(held))
                holders.append(held)
        self._num_held = sum(map(len, holders))
        if self.snapshots is not None:
            self.snapshots.restore(content.snapshots)
        self._pool.restore(holders, content.kept, content.idle)

    def check_integrity(self) -> None:
        """Raise `AssertionError` with the reason unless all counts agree; O(blocks).

        free + kept and idle + referenced = total; reference counts, tables and index match.
        """
        tables: list[Sequence[int]] = list(self._tables.values()) if self._has_full else []
        for request_id, table in self._tables.items():
            assert table, f"request {request_id} has an empty block table"
        for group in self.window_groups:
            group.check_integrity()
            assert group.tables.keys() == self._tables.keys(), "the groups have other holders"
            tables += [group.held(request_id)[1] for request_id in group.tables]
        assert sum(map(len, tables)) == self._num_held, "the sum of the tables has drifted"
        self._pool.check_integrity([*tables, *chain.from_iterable(self._beam_tables.values())])
        for request_id, rows in self._beam_tables.items():
            _check_beams(request_id, [self._tables[request_id], *rows])
        if self._index is not None:
            self._index.check_integrity()
            assert self._index.block_ids == self._pool.kept_blocks(), "kept is not what is indexed"

    def table_of(self, request_id: int) -> Sequence[int]:
        """The request's block ids in token order, without a copy: read it and let it go. None of
        groups with a window."""
        return self._tables.get(request_id, ()) if self._has_full else ()

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Length of a table that holds ``num_tokens`` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def _context_blocks(self, group: WindowGroup, num_tokens: int) -> int:
        """Blocks that a context of ``num_tokens`` tokens holds in ``group``, at most."""
        num_blocks = self._num_blocks_for(num_tokens)
        if self.max_chunk_tokens is None:
            return num_blocks
        return min(num_blocks, group.span(self.max_chunk_tokens))

    def _num_needed_with_windows(self, request: LlmRequest, num_after: int) -> int:
        """What a generation step takes until its tables have ``num_after`` entries."""
        request_id, position = request.request_id, request.num_cached_tokens
        num_before = self._num_blocks_for(position)
        num_needed = 0
        if self._has_full:
            num_needed = max(num_after - max(self.num_blocks_of(request_id), num_before), 0)
        for group in self.window_groups:
            num_most = group.span(1 + self.max_drafts)
            num_needed += group.num_needed(request_id, position, num_after, num_before, num_most)
        return num_needed

    def _num_shared(self, request: LlmRequest) -> int:
        """Cached blocks of a fresh context that have a holder, so that they cost nothing."""
        matched = self.match_prefix(request).block_ids
        return sum(self._pool.ref_count(block_id) > 0 for block_id in matched)


def _keeps_to_itself(request: LlmRequest) -> bool:
    return request.encoder_length > 0


def _check_beams(request_id: int, rows: Sequence[Sequence[int]]) -> None:
    """Raise `AssertionError` unless all are as long and share a beginning and nothing else."""
    assert len(set(map(len, rows))) == 1, f"request {request_id} has rows of several lengths"
    for row, other in combinations(rows, 2):
        num_equal = sum(a == b for a, b in zip(row, other, strict=True))
        assert row[:num_equal] == other[:num_equal], f"rows of request {request_id}"
        shared = set(row[num_equal:]) & set(other[num_equal:])
        assert not shared, f"request {request_id}: {sorted(shared)} in two places"
