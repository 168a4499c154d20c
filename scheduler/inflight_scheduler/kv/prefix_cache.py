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
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress, islice
from struct import calcsize, pack, unpack_from
from typing import NamedTuple

from inflight_scheduler.kv.block_pool import follow_links
from inflight_scheduler.request import NO_MATCH, LlmRequest, PrefixMatch

_KEY_SIZE = 32
_BEGINNING_SIZE = _KEY_SIZE + calcsize("q")

HASH_SIZE = 8
"""Bytes of a key that a recording tells: enough to tell the blocks of one recording apart."""

PartialMatch = Callable[[LlmRequest, int], int]
"""Of a prompt and the first of its blocks that is not cached: how many tokens of that block are."""


class ReuseIndex:
    """Finds kept blocks by the text they hold. It owns no block.

    With ``may_copy`` it also finds blocks that only begin like the text asked for. A replay, which
    knows no text, gives a ``partial_match`` instead: what was found so when it was recorded.
    """

    __slots__ = (
        "_beginnings",
        "_block_to_key",
        "_hash_key",
        "_key_to_block",
        "_last",
        "_packed_block",
        "_partial_match",
        "_starts",
        "_version",
        "may_copy",
        "tokens_per_block",
    )

    def __init__(
        self,
        tokens_per_block: int,
        may_copy: bool = False,
        partial_match: PartialMatch | None = None,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.may_copy = may_copy and partial_match is None
        self._partial_match = partial_match
        self._packed_block = f"{tokens_per_block}q"
        self._hash_key = secrets.token_bytes(_KEY_SIZE)
        self._key_to_block: dict[bytes, int] = {}
        self._block_to_key: dict[int, bytes] = {}
        # For partial matches: block -> its content (see `_content`), and the beginning of that, one
        # token long -> the last block stored with it. As bytes, since garbage collections would
        # look into each tuple of hundreds of thousands.
        self._starts: dict[int, bytes] = {}
        self._beginnings: dict[bytes, int] = {}
        self._version = 0
        self._last = b"", b""  # the key that was computed last, and of what content

    def add(self, request: LlmRequest, block_ids: Sequence[int]) -> list[tuple[int, bytes]]:
        """The text of ``request`` begins in ``block_ids``, block for block.

        Returns those that have been entered, with their keys: of the others the text is known.
        """
        keys, entered = request.block_keys, []
        for index, block_id in enumerate(block_ids):
            key = keys[index] if index < len(keys) else self._key(request, index)
            if key in self._key_to_block:
                continue
            self.enter(key, block_id)
            entered.append((block_id, key))
            if self.may_copy:
                last_key, content = self._last
                if last_key != key:
                    content = self._content(request, index, self._parent(request, index))
                self._starts[block_id] = content
                self._beginnings[content[:_BEGINNING_SIZE]] = block_id
        return entered

    def enter(self, key: bytes, block_id: int) -> bool:
        """``block_id`` holds the text with this key; False if a block with it is known already."""
        if key in self._key_to_block:
            return False
        self._version += 1
        if self._block_to_key.setdefault(block_id, key) is not key:
            # A block that is held and kept has the text of its holder, unless a recording says so.
            self.forget(block_id)
            self._block_to_key[block_id] = key
        self._key_to_block[key] = block_id
        return True

    def hashes(self, request: LlmRequest, start: int, end: int) -> bytes:
        """The first `HASH_SIZE` bytes of the keys of blocks ``start .. end - 1`` of the text."""
        if end > start:
            self._key(request, end - 1)
        return b"".join([key[:HASH_SIZE] for key in request.block_keys[start:end]])

    def forget(self, block_id: int) -> None:
        """The content of ``block_id`` is given up."""
        self._version += 1
        del self._key_to_block[self._block_to_key.pop(block_id)]
        if self.may_copy:
            beginning = self._starts.pop(block_id)[:_BEGINNING_SIZE]
            if self._beginnings.get(beginning) == block_id:
                del self._beginnings[beginning]

    def match(self, request: LlmRequest) -> PrefixMatch:
        """The longest cached beginning of the prompt, without its last token.

        That token is always computed, since the first new token is drawn from its result.
        """
        # Deciding and planning ask several times about one request, and nothing changes meanwhile.
        question = (self._version, request.prompt_len)
        if request.prefix_match is None or request.prefix_match[0] != question:
            request.prefix_match = (question, self._match(request))
        return request.prefix_match[1]

    def first_missing(self, request: LlmRequest) -> bytes | None:
        """Key of the first full prompt block that is not cached; None if there is none."""
        index = len(self.match(request).block_ids)
        return self._key(request, index) if index < self._num_prompt_blocks(request) else None

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all tables say the same."""
        by_key = {key: block_id for block_id, key in self._block_to_key.items()}
        assert by_key == self._key_to_block, "the keys and the blocks disagree"
        assert self._starts.keys() == (self._block_to_key.keys() if self.may_copy else set())
        for beginning, block_id in self._beginnings.items():
            assert self._starts[block_id][:_BEGINNING_SIZE] == beginning, f"block {block_id}"

    @property
    def block_ids(self) -> frozenset[int]:
        """All blocks in the index."""
        return frozenset(self._block_to_key)

    def _match(self, request: LlmRequest) -> PrefixMatch:
        block_ids: list[int] = []
        for index in range(self._num_prompt_blocks(request)):
            block_id = self._key_to_block.get(self._key(request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        num_tokens = len(block_ids) * self.tokens_per_block
        source, num_common = None, 0
        if self.may_copy:
            source, num_common = self._partial(request, len(block_ids))
        elif self._partial_match is not None:
            num_common = self._partial_match(request, len(block_ids))
        if num_common == 0 and not block_ids:
            return NO_MATCH
        return PrefixMatch(tuple(block_ids), source, num_tokens + num_common)

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
            return self._hash(request.cache_salt, b"salt")
        return self._hash(b"%d:%b" % (request.lora_task_id, request.cache_salt), b"adapter")

    def _key(self, request: LlmRequest, index: int) -> bytes:
        """Key of block ``index``; kept with the request, whose text only ever grows."""
        keys = request.block_keys
        while len(keys) <= index:
            parent = keys[-1] if keys else self._parent(request, 0)
            content = self._content(request, len(keys), parent)
            keys.append(self._hash(content, b"block"))
            self._last = keys[-1], content
        return keys[index]

    def _content(self, request: LlmRequest, index: int, parent: bytes) -> bytes:
        """What block ``index`` holds: the key of ``parent``, the block before, and its tokens."""
        start = index * self.tokens_per_block
        tokens = request.tokens[start : start + self.tokens_per_block]
        return parent + pack(self._packed_block, *tokens)

    def _hash(self, content: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(
            content, digest_size=_KEY_SIZE, key=self._hash_key, person=person
        ).digest()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


class CacheState(NamedTuple):
    """A copy of the budgets. ``hashes[k]`` are the first bytes of the key of what block k holds.

    ``is_kept[k]`` says whether that is still kept. ``table_blocks`` are the block tables of
    ``holders`` one after another, ``table_lengths`` long. All are arrays: into lists and tuples,
    however plain, garbage collections look.
    """

    holders: array[int]
    table_lengths: array[int]
    table_blocks: array[int]
    is_kept: bytes
    hashes: array[int]
    idle_links: array[int]

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


class CacheContent(NamedTuple):
    """What is needed to rebuild it: the tables, key by kept block, and the order of idleness."""

    tables: Mapping[int, Sequence[int]]
    kept: Mapping[int, bytes]
    idle: Sequence[int]
