"""Requests without text: made-up tokens that agree where the recorded ones did.

With block reuse a recording may begin in the middle; then what was cached is rebuilt from what it
says about the texts (`CacheStart`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import SupportsIndex, overload

from inflight_recorder.beams import RecordedBeams
from inflight_recorder.errors import RecordingError
from inflight_recorder.likeness import Likeness
from inflight_recorder.records import Arrival, CacheStart, RequestState
from inflight_recorder.text_book import TextBook
from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.kv.prefix_cache import CacheContent
from inflight_scheduler.request import PENDING_TOKEN, LlmRequest

MAX_CACHED_TOKENS = 2**27
"""Tokens of all texts of which something was cached, beginnings that they share counted once, and
a block as 16 at least; about a minute."""

_MIN_BLOCK_TOKENS = 16
_MAX_HOPS = 64


class MadeUpText(list[int]):
    """The tokens of a request without tokens: constant memory, whatever the length.

    Without a book all are 0. With one, texts agree where the book says so (block reuse).
    The last ``num_pending`` of them are `PENDING_TOKEN`. ``is_broken``: the last one before these
    says that the model's numbers failed.
    """

    __slots__ = ("book", "is_broken", "length", "num_pending", "number")

    def __init__(self, length: int, book: TextBook | None = None, number: int = 0) -> None:
        super().__init__()
        self.length = length
        self.number = number
        self.num_pending = 0
        self.is_broken = False
        self.book = book

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> None:
        """One token more; a negative one that is not pending breaks the text."""
        self.length += 1
        self.num_pending += token == PENDING_TOKEN
        self.is_broken |= token < 0 and token != PENDING_TOKEN

    def __setitem__(self, index: object, token: object) -> None:
        """A token that was expected has come; which one does not matter."""
        self.num_pending -= 1

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        """The last tokens are not wanted any more."""
        assert isinstance(index, slice)
        num_dropped = len(range(*index.indices(self.length)))
        self.length -= num_dropped
        self.num_pending = max(self.num_pending - num_dropped, 0)

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        if not isinstance(index, slice):
            place = range(self.length)[index]
            if place >= self.length - self.num_pending:
                return PENDING_TOKEN
            if self.is_broken:
                return -1
            return 0 if self.book is None else self.book.tokens(self.number, place, place + 1)[0]
        start, end, _ = index.indices(self.length)
        if self.book is None:
            return [0] * max(end - start, 0)
        return self.book.tokens(self.number, start, end)


def make_request(facts: Arrival | RequestState, prompt_len: int, max_new_tokens: int) -> LlmRequest:
    """A request with these lengths, whose text is like no other."""
    request = LlmRequest(
        facts.request_id,
        MadeUpText(0),
        max_new_tokens,
        beam_width=facts.beam_width,
        beams=RecordedBeams(facts.beam_width, max_new_tokens) if facts.beam_width > 1 else None,
        priority=facts.priority,
    )
    request.tokens = MadeUpText(prompt_len)
    request.prompt_len = request.orig_prompt_len = request.context_chunk_size = prompt_len
    request.max_num_tokens = prompt_len + max_new_tokens
    return request


def make_book(cache: CacheStart) -> TextBook:
    """The texts as they were known at the start."""
    book = TextBook(cache.num_texts)
    for number, source, length, start in cache.parts:
        book.extend(number, Likeness(source, length), start)
    return book


def restore_cache(
    block_manager: BlockManager, book: TextBook, cache: CacheStart, active: Sequence[LlmRequest]
) -> None:
    """Rebuild what was cached; `RecordingError` if it contradicts itself or ``active``."""
    tables = {}
    for request, table in zip(active, cache.tables, strict=True):
        num_cached = 0
        if request.seq_slot is not None:
            num_cached = max(request.prompt_len, request.num_cached_tokens)
        if len(table) < -(-num_cached // block_manager.tokens_per_block):
            raise RecordingError(f"cache: request {request.request_id} holds {len(table)} blocks")
        if len(set(table)) != len(table):
            raise RecordingError(f"cache: request {request.request_id} holds a block twice")
        tables[request.request_id] = table
    kept = _kept(book, cache, block_manager.tokens_per_block)
    try:
        block_manager.restore_cache(CacheContent(tables, kept, cache.idle, cache.beginnings))
    except ValueError as error:
        raise RecordingError(f"cache: {error}") from None


def _kept(
    book: TextBook, cache: CacheStart, tokens_per_block: int
) -> Iterator[tuple[int, LlmRequest, int]]:
    """Each kept block with a request that has its text, which is hashed once: also what very many
    texts begin with."""
    num_tokens = 0
    keys: dict[int, list[bytes]] = {}
    by_text = sorted(cache.kept, key=attrgetter("text_number", "place"))
    for number, group in groupby(by_text, key=attrgetter("text_number")):
        blocks = list(group)
        num_blocks = blocks[-1].place + 1
        length = num_blocks * tokens_per_block
        known = _known_keys(book, keys, number, num_blocks, tokens_per_block)
        num_tokens += (num_blocks - len(known)) * max(tokens_per_block, _MIN_BLOCK_TOKENS)
        if num_tokens > MAX_CACHED_TOKENS:
            raise RecordingError(f"cache: its texts have more than {MAX_CACHED_TOKENS} tokens")
        request = LlmRequest(0, (), 1)
        request.text_number = number
        request.tokens = MadeUpText(length, book, number)
        request.block_keys = keys[number] = known
        for block in blocks:
            yield block.block_id, request, block.place


def _known_keys(
    book: TextBook,
    keys: dict[int, list[bytes]],
    number: int,
    num_blocks: int,
    tokens_per_block: int,
) -> list[bytes]:
    """The keys of its first blocks, at most ``num_blocks``, that texts before it have as well."""
    best: list[bytes] = []
    for _ in range(_MAX_HOPS):
        number, length = book.beginning(number)
        num_blocks = min(num_blocks, length // tokens_per_block)
        if num_blocks <= len(best):
            break
        known = keys.get(number, ())
        if len(known) > len(best):
            best = list(known[:num_blocks])
    return best
