"""KV block reuse: the index from the text of full blocks to the blocks that hold its KV.

The key of a full block is a keyed cryptographic hash over the key of the block before it and its
own tokens, so equal keys mean equal text from the very beginning::

    root(salt) -> H(root, t0..t3) -> H(., t4..t7) -> ...

The hash key is random for each process, so no client can make blocks of two texts collide;
requests with different salts start from different roots, so tenants do not share (nor measure) a
cache. The same holds for requests with different adapters, whose KV of the same text differs.
Only full blocks whose KV is computed enter, so an entry is never written again.

A `CacheState` is a snapshot for the flight recorder. Taking it copies whole tables (some 20 bytes
per block of the pool, and every block table) and reads none of them: about a millisecond for 50,000
blocks. The reader does the work.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress, islice
from struct import calcsize, pack, unpack_from
from types import MappingProxyType
from typing import NamedTuple, Protocol

from inflight_scheduler.kv.block_pool import follow_links
from inflight_scheduler.kv.state_snapshots import SnapshotState, StateSnapshots
from inflight_scheduler.kv.window_group import WindowGroup
from inflight_scheduler.request import NO_MATCH, LlmRequest, PrefixMatch

_KEY_SIZE = 32
_BEGINNING_SIZE = _KEY_SIZE + calcsize("q")

HASH_SIZE = 8
"""Bytes of a key that a recording tells: enough to tell the blocks of one recording apart."""

PartialMatch = Callable[[LlmRequest, int], int]
"""Of a prompt and the first of its blocks that is not cached: how many tokens of that block are."""


class CacheListener(Protocol):
    """Is told every change of what is cached, at once, so it must not wait for anything.

    Of equal texts one block is kept, and a block is told after the one before it in its text: only
    the blocks of layers that see all are told.
    """

    def stored(self, request: LlmRequest, index: int, key: bytes) -> None:
        """Full block ``index`` of the text of ``request`` is cached now, under ``key``."""

    def removed(self, key: bytes) -> None:
        """The block under ``key`` is not cached any more."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class ReuseIndex:
    """Finds kept blocks by the text they hold. It owns no block. ``listener`` hears of changes.

    With ``may_copy`` it also finds blocks that only begin like the text asked for. A replay, which
    knows no text, gives a ``partial_match`` instead: what was found so when it was recorded.

    The owner sets ``window_groups``, if there are some. A prefix is found in such a group if the
    blocks are that its next token sees. With ``num_snapshots`` it is found where there is one
    behind it (`StateSnapshots`).
    """

    __slots__ = (
        "_beginnings",
        "_block_to_key",
        "_group_of",
        "_hash_key",
        "_keys_to_blocks",
        "_listener",
        "_packed_block",
        "_partial_match",
        "_starts",
        "_version",
        "may_copy",
        "snapshots",
        "tokens_per_block",
        "window_groups",
    )

    def __init__(
        self,
        tokens_per_block: int,
        may_copy: bool = False,
        partial_match: PartialMatch | None = None,
        listener: CacheListener | None = None,
        num_snapshots: int | None = None,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.snapshots: StateSnapshots | None = None
        if num_snapshots is not None:
            self.snapshots = StateSnapshots(num_snapshots, tokens_per_block, self._key)
        self._listener = listener
        self.may_copy = may_copy and partial_match is None
        self._partial_match = partial_match
        self._packed_block = f"{tokens_per_block}q"
        self._hash_key = secrets.token_bytes(_KEY_SIZE)
        self.window_groups: tuple[WindowGroup, ...] = ()
        self._keys_to_blocks: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # by group
        self._group_of: dict[int, int] = {}  # of blocks that are not in group 0
        self._block_to_key: dict[int, bytes] = {}
        # For partial matches: block -> its content (see `_content`), and the beginning of that, one
        # token long -> the last block stored with it. As bytes, since garbage collections would
        # look into each tuple of hundreds of thousands.
        self._starts: dict[int, bytes] = {}
        self._beginnings: dict[bytes, int] = {}
        self._version = 0

    def add(
        self, request: LlmRequest, block_ids: Sequence[int], first: int = 0, group: int = 0
    ) -> dict[int, bytes]:
        """The text of ``request`` is in ``block_ids``, block for block, from block ``first`` on.

        Returns those that have been entered, with their keys: of the others the text is known.
        """
        end = first + len(block_ids)
        self._compute_keys(request, end)
        known, keys = self._keys_to_blocks[group], request.block_keys[first:end]
        pairs = zip(block_ids, keys, strict=True)
        entered = {block_id: key for block_id, key in pairs if key not in known}
        if entered:
            self._enter(entered, group)
        if group == 0 and (self._listener is not None or self.may_copy):
            for index, block_id in enumerate(block_ids, start=first):
                if block_id in entered:
                    self._follow(request, index, block_id, entered[block_id])
        return entered

    def enter(self, key: bytes, block_id: int, group: int = 0) -> bool:
        """``block_id`` holds the text with this key; False if a block with it is known already."""
        if key in self._keys_to_blocks[group]:
            return False
        self._enter({block_id: key}, group)
        return True

    def _enter(self, keys: Mapping[int, bytes], group: int) -> None:
        """These blocks hold the texts with these keys, none of which is known."""
        self._version += 1
        known = self._block_to_key
        if not known.keys().isdisjoint(keys):
            # A block that is held and kept has the text of its holder, unless a recording says so.
            self.forget([block_id for block_id in keys if block_id in known])
        known.update(keys)
        self._keys_to_blocks[group].update(zip(keys.values(), keys, strict=True))
        if group:
            self._group_of.update(dict.fromkeys(keys, group))

    def _follow(self, request: LlmRequest, index: int, block_id: int, key: bytes) -> None:
        """Block ``index`` of the text, of group 0, has been entered: tell it, and where partial
        matches are looked for what it holds."""
        if self._listener is not None:
            self._listener.stored(request, index, key)
        if self.may_copy:
            parent = self._parent(request, index)
            content = self._starts[block_id] = parent + self._pack(request, index, index + 1)
            self._beginnings[content[:_BEGINNING_SIZE]] = block_id

    def hashes(self, request: LlmRequest, start: int, end: int) -> bytes:
        """The first `HASH_SIZE` bytes of the keys of blocks ``start .. end - 1`` of the text."""
        self._compute_keys(request, end)
        return b"".join([key[:HASH_SIZE] for key in request.block_keys[start:end]])

    def forget(self, block_ids: Iterable[int]) -> None:
        """The content of these blocks is given up."""
        self._version += 1
        for block_id in block_ids:
            group, key = self._group_of.pop(block_id, 0), self._block_to_key.pop(block_id)
            del self._keys_to_blocks[group][key]
            if self.snapshots is not None:
                self.snapshots.forget(key)
            if self._listener is not None and group == 0:
                self._listener.removed(key)
            if self.may_copy and group == 0:
                beginning = self._starts.pop(block_id)[:_BEGINNING_SIZE]
                if self._beginnings.get(beginning) == block_id:
                    del self._beginnings[beginning]

    def forget_all(self) -> None:
        """The content of all blocks is given up."""
        self._version += 1
        for blocks in self._keys_to_blocks.values():
            blocks.clear()
        for table in (self._block_to_key, self._group_of, self._starts, self._beginnings):
            table.clear()
        if self.snapshots is not None:
            self.snapshots.forget_all()
        if self._listener is not None:
            self._listener.cleared()

    def match(self, request: LlmRequest) -> PrefixMatch:
        """The longest cached beginning of the prompt, without its last token.

        That token is always computed, since the first new token is drawn from its result.
        """
        # Deciding and planning ask several times about one request, and nothing changes meanwhile.
        version = self._version + (0 if self.snapshots is None else self.snapshots.version)
        question = (version, request.prompt_len)
        if request.prefix_match is None or request.prefix_match[0] != question:
            request.prefix_match = (question, self._match(request))
        return request.prefix_match[1]

    def first_missing(self, request: LlmRequest) -> bytes | None:
        """Key of the first full prompt block that is not cached; None if there is none."""
        index = self.match(request).num_tokens // self.tokens_per_block
        return self._key(request, index) if index < self._num_prompt_blocks(request) else None

    def groups(self) -> bytes:
        """Of each block in the index that is not in group 0: its id and its group, as pairs of an
        ``array("i")``."""
        return array("i", [number for pair in self._group_of.items() for number in pair]).tobytes()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all tables say the same."""
        found: dict[int, dict[bytes, int]] = {group: {} for group in self._keys_to_blocks}
        for block_id, key in self._block_to_key.items():
            found[self._group_of.get(block_id, 0)][key] = block_id
        assert found == self._keys_to_blocks, "the keys and the blocks disagree"
        assert self._group_of.keys() <= self._block_to_key.keys(), "a group of forgotten blocks"
        first_group = set(self._keys_to_blocks[0].values())
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        assert self._starts.keys() == (first_group if self.may_copy else set())
        for beginning, block_id in self._beginnings.items():
            assert self._starts[block_id][:_BEGINNING_SIZE] == beginning, f"block {block_id}"

    @property
    def block_ids(self) -> frozenset[int]:
        """All blocks in the index."""
        return frozenset(self._block_to_key)

    def _match(self, request: LlmRequest) -> PrefixMatch:
        if self.window_groups:
            return self._match_windows(request)
        block_ids = self._leading_blocks(request)
        if self.snapshots is not None:
            return self._match_states(request, block_ids, self.snapshots)
        num_tokens = len(block_ids) * self.tokens_per_block
        source, num_common = self._find_partial(request, len(block_ids))
        if num_common == 0 and not block_ids:
            return NO_MATCH
        return PrefixMatch(tuple(block_ids), source, num_tokens + num_common)

    def _match_states(
        self, request: LlmRequest, block_ids: Sequence[int], snapshots: StateSnapshots
    ) -> PrefixMatch:
        """The longest beginning of ``block_ids``, which are cached, with a snapshot behind it."""
        for end in range(len(block_ids), 0, -1):
            snapshot = snapshots.find(self._key(request, end - 1))
            if snapshot is not None:
                return PrefixMatch(
                    tuple(block_ids[:end]),
                    num_tokens=end * self.tokens_per_block,
                    snapshot=snapshot,
                    num_stored_blocks=len(block_ids),
                )
        return PrefixMatch(num_stored_blocks=len(block_ids))

    def _match_windows(self, request: LlmRequest) -> PrefixMatch:
        """The longest prefix that is cached in the group that sees all, if there is one, and of
        which all other groups have the blocks that the token behind it sees."""
        groups, size = self.window_groups, self.tokens_per_block
        has_full = groups[0].number > 0
        leading = self._leading_blocks(request) if has_full else []
        longest = len(leading) if has_full else self._num_prompt_blocks(request)
        known = [self._keys_to_blocks[group.number] for group in groups]
        runs, num_blocks = [0] * len(groups), 0
        for end in range(1, longest + 1):
            key = self._key(request, end - 1)
            runs = [run + 1 if key in keys else 0 for run, keys in zip(runs, known, strict=True)]
            if all(
                run >= end - group.first_seen(end * size)
                for run, group in zip(runs, groups, strict=True)
            ):
                num_blocks = end
        source, num_common = self._find_partial(request, num_blocks)
        keys = [self._key(request, index) for index in range(num_blocks)]
        if source is not None:
            keys.append(self._block_to_key[source])
            if not all(keys[-1] in blocks for blocks in known):
                source, num_common = None, 0
                del keys[-1]
        num_tokens = num_blocks * size + num_common
        if num_tokens == 0:
            return NO_MATCH
        sources = []
        for group, blocks in zip(groups, known, strict=True):
            first = group.first_seen(num_tokens)
            sources.append((group.number, first, tuple([blocks[key] for key in keys[first:]])))
        source = source if has_full else None
        return PrefixMatch(tuple(leading[:num_blocks]), source, num_tokens, tuple(sources))

    def _leading_blocks(self, request: LlmRequest) -> list[int]:
        """The blocks of group 0 with the beginning of the prompt, as far as all of it is there."""
        known, block_ids = self._keys_to_blocks[0], []
        num_blocks = self._num_prompt_blocks(request)
        self._compute_keys(request, num_blocks)
        for key in islice(request.block_keys, num_blocks):
            block_id = known.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _find_partial(self, request: LlmRequest, index: int) -> tuple[int | None, int]:
        """What `_partial` finds, or what was found when it was recorded."""
        if self.may_copy:
            return self._partial(request, index)
        if self._partial_match is not None:
            return None, self._partial_match(request, index)
        return None, 0

    def _num_prompt_blocks(self, request: LlmRequest) -> int:
        return (request.prompt_len - 1) // self.tokens_per_block

    def _partial(self, request: LlmRequest, index: int) -> tuple[int | None, int]:
        """A block that starts like block ``index`` of the prompt, and how many tokens agree."""
        start = index * self.tokens_per_block
        rest = request.tokens[start : min(start + self.tokens_per_block, request.prompt_len - 1)]
        if not rest:
            return None, 0
        source = self._beginnings.get(self._parent(request, index) + pack("q", rest[0]))
        if source is None:
            return None, 0
        tokens = unpack_from(self._packed_block, self._starts[source], _KEY_SIZE)
        return source, _num_common(rest, tokens)

    def _parent(self, request: LlmRequest, index: int) -> bytes:
        if index > 0:
            return self._key(request, index - 1)
        if request.lora_task_id is None:
            return self._root(request.cache_salt, b"salt")
        # An id may come again with other weights, once they were evicted.
        adapter = request.lora_digest or b"%d:" % request.lora_task_id
        return self._root(adapter + request.cache_salt, b"adapter")

    def _key(self, request: LlmRequest, index: int) -> bytes:
        """Key of block ``index``."""
        if index >= len(request.block_keys):
            self._compute_keys(request, index + 1)
        return request.block_keys[index]

    def _compute_keys(self, request: LlmRequest, end: int) -> None:
        """Those of the first ``end`` blocks; kept with the request, whose text only ever grows."""
        keys = request.block_keys
        if end <= len(keys):
            return
        packed = self._pack(request, len(keys), end)
        key = self._parent(request, len(keys))
        size = calcsize(self._packed_block)
        empty_hasher = _keyed_hasher(self._hash_key, b"block")
        for start in range(0, len(packed), size):
            hasher = empty_hasher.copy()
            hasher.update(key + packed[start : start + size])
            key = hasher.digest()
            keys.append(key)

    def _pack(self, request: LlmRequest, first: int, end: int) -> bytes:
        """The tokens of blocks ``first .. end - 1``, eight bytes each."""
        tokens = request.tokens[first * self.tokens_per_block : end * self.tokens_per_block]
        return pack(f"{len(tokens)}q", *tokens)

    def _root(self, content: bytes, person: bytes) -> bytes:
        """What stands for the key of the block before the first one."""
        hasher = _keyed_hasher(self._hash_key, person).copy()
        hasher.update(content)
        return hasher.digest()


@lru_cache(maxsize=8)
def _keyed_hasher(key: bytes, person: bytes) -> hashlib.blake2b:
    """A hash that has read nothing but its key: a copy of it is cheaper than another one."""
    return hashlib.blake2b(digest_size=_KEY_SIZE, key=key, person=person)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


class CacheState(NamedTuple):
    """A copy of the budgets. ``hashes[k]`` are the first bytes of the key of what block k holds.

    ``is_kept[k]`` says whether that is still kept. ``table_blocks`` are the block tables of
    ``holders`` one after another, ``table_lengths`` long. ``groups``: see `ReuseIndex.groups`. They
    are arrays: into lists and tuples, however plain, garbage collections look.
    """

    holders: array[int]
    table_lengths: array[int]
    table_blocks: array[int]
    is_kept: bytes
    hashes: array[int]
    idle_links: array[int]
    groups: bytes = b""
    snapshots: SnapshotState = SnapshotState()

    @property
    def tables(self) -> dict[int, tuple[int, ...]]:
        """The block table of each request that holds blocks."""
        blocks = iter(self.table_blocks)
        lengths = zip(self.holders, self.table_lengths, strict=True)
        return {request_id: tuple(islice(blocks, length)) for request_id, length in lengths}

    @property
    def idle(self) -> list[int]:
        """Cached blocks that no request holds, the next one to evict first."""
        return follow_links(self.idle_links)

    @property
    def kept(self) -> list[int]:
        """The kept blocks, in ascending order."""
        return list(compress(range(len(self.is_kept)), self.is_kept))


def array_of(typecode: str, numbers: Collection[int]) -> array[int]:
    """In half the time that ``array(typecode, numbers)`` takes for thousands of them."""
    return array(typecode, struct.pack(f"{len(numbers)}{typecode}", *numbers))


WindowTables = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
"""Of a request, for each group with a window: blocks that it has given back, and those it holds."""


class CacheContent(NamedTuple):
    """What is needed to rebuild it: the tables, key by kept block, and the order of idleness.

    ``groups`` of kept blocks that are not in group 0, and ``windows``, where groups have windows.
    """

    tables: Mapping[int, Sequence[int]]
    kept: Mapping[int, bytes]
    idle: Sequence[int]
    groups: Mapping[int, int] = MappingProxyType({})
    windows: WindowTables = MappingProxyType({})
    snapshots: SnapshotState = SnapshotState()
