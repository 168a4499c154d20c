"""Whom the texts in flight are like: the memory that a recorder with block reuse needs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inflight_recorder.likeness import (
    NO_LIKENESS,
    TOKEN_BYTES,
    Likeness,
    TextIndex,
    Texts,
    num_packed,
    pack,
)
from inflight_recorder.part_log import PartLog, PartMark
from inflight_recorder.records import CacheStart, Iteration, KeptBlock
from inflight_scheduler.kv.prefix_cache import CacheState
from inflight_scheduler.request import LlmRequest

_NUM_POOLS = 2  # as many tokens have texts that may be cached, before a look at which of them are

StateSource = Callable[[], CacheState | None]
"""What the cache holds now; None without a cache."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A moment: ``parts`` were known, of ``num_texts`` texts, and this was cached.

    ``request_ids`` and ``text_numbers`` are those of the active requests, in order.
    """

    parts: PartMark
    num_texts: int
    request_ids: array[int]
    text_numbers: array[int]
    state: CacheState

    def start(self, iterations: Iterable[Iteration]) -> CacheStart:
        """What a recording of ``iterations``, which follow this moment, must begin with."""
        kept = tuple(KeptBlock(*block) for block in self.state.kept())
        needed = {*self.text_numbers, *(block.text_number for block in kept)}
        for iteration in iterations:
            needed.update(arrival.likeness.number for arrival in iteration.arrivals)
            needed.update(growth.likeness.number for growth in iteration.growths)
        tables = self.state.tables
        return CacheStart(
            num_texts=self.num_texts,
            parts=self.parts.needed(needed),
            text_numbers=tuple(self.text_numbers),
            tables=tuple(tables.get(request_id, ()) for request_id in self.request_ids),
            kept=kept,
            idle=tuple(self.state.idle),
            beginnings=tuple(self.state.beginnings),
        )


class RecordedTexts:
    """Owner of the numbers of texts; the request ids are those of active requests."""

    def __init__(
        self, num_blocks: int, tokens_per_block: int, cache_state: StateSource | None = None
    ) -> None:
        """``cache_state``: without it, a text may be forgotten that is still cached."""
        self._index = TextIndex(num_blocks, tokens_per_block, self._texts_in_use)
        self._parts = PartLog(self._index.is_named)
        self._tokens_per_block = tokens_per_block
        self._cache_state = cache_state
        self._num_texts = 0
        self._numbers: dict[int, int] = {}  # of active requests, by their ids
        # Packed tokens, by number. Of each active request: its prompt, with what was generated
        # before a pause. What it has generated since belongs to no text before `grow`.
        self._prompts: dict[int, bytes] = {}
        self._cached: dict[int, bytes] = {}  # those that may be cached
        self._salts: dict[int, bytes] = {}  # of all these that have one
        self._num_cached_bytes = 0
        self._max_cached_bytes = _NUM_POOLS * TOKEN_BYTES * num_blocks * tokens_per_block
        self._look_at = self._max_cached_bytes
        self._likenesses: dict[int, Likeness] = {}
        self._growths: list[int] = []

    def add(self, request: LlmRequest) -> None:
        """A prompt, as it came."""
        number, self._num_texts = self._num_texts, self._num_texts + 1
        request.text_number = number
        self._numbers[request.request_id] = number
        text = pack(request.tokens[: request.prompt_len])
        self._prompts[number] = text
        if request.cache_salt:
            self._salts[number] = request.cache_salt
        found = self._index.add(request.cache_salt, text, number)
        self._likenesses[number] = found
        self._parts.add(number, found, 0)
        self._parts.walk_on()

    def likeness(self, request: LlmRequest) -> Likeness:
        """What was found when the prompt came; to be asked once."""
        return self._likenesses.pop(request.text_number, NO_LIKENESS)

    def grow(self, request: LlmRequest, *, is_last: bool = False) -> None:
        """``request`` gives its blocks back; everything it has generated belongs to its text."""
        number = self._numbers.get(request.request_id)
        if number is None:
            return  # it ended before it was registered
        text = self._prompts[number]
        if is_last:
            del self._numbers[request.request_id], self._prompts[number]
            self._salts.pop(number, None)
        has_failed = request.tokens[-1] < 0  # then its prompt may be cached, and no more
        old_size = len(text)
        # Of a search only the prompt is kept; a pause begins it anew.
        if request.beams is None and not has_failed:
            text += pack(request.tokens[num_packed(text) :])
        self._keep(request, number, text)
        if has_failed or request.beams is not None or request.num_tokens == request.prompt_len:
            return
        if not is_last:
            self._prompts[number] = text
        found = self._index.grow(request.cache_salt, text, number, old_size)
        if found.length > request.prompt_len:
            self._growths += (request.request_id, *found)
            self._parts.add(number, found, request.prompt_len)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These have ended before anything was decided about them."""
        for request_id in request_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                del self._prompts[number]
                self._salts.pop(number, None)

    def take_growths(self) -> tuple[int, ...]:
        """The fields of each `Growth` since the last call, one after another."""
        growths, self._growths = tuple(self._growths), []
        return growths

    def mark(self, requests: Sequence[LlmRequest], state: CacheState) -> CacheMark:
        """This moment, with ``requests`` active."""
        if self._parts.wants_walk:
            self._parts.begin_walk(state.kept_texts().union(self._prompts))
        return CacheMark(
            self._parts.mark(),
            self._num_texts,
            array("Q", [request.request_id for request in requests]),
            array("q", [request.text_number for request in requests]),
            state,
        )

    def _texts_in_use(self) -> Texts:
        """Cached ones, and the prompts of active requests."""
        self._forget_what_is_not_cached()
        return Texts(self._cached | self._prompts, self._salts.copy())

    def _keep(self, request: LlmRequest, number: int, text: bytes) -> None:
        """Its full blocks may be cached from now on, however many texts come before they are used.

        Short texts take no block of their own, so any number of them evicts nothing.
        """
        if self._cache_state is None or request.num_tokens < self._tokens_per_block:
            return
        self._num_cached_bytes += len(text) - len(self._cached.get(number, b""))
        self._cached[number] = text
        if request.cache_salt:
            self._salts[number] = request.cache_salt
        if self._num_cached_bytes > self._look_at:
            self._forget_what_is_not_cached()
            self._look_at = max(self._max_cached_bytes, 2 * self._num_cached_bytes)

    def _forget_what_is_not_cached(self) -> None:
        state = None if self._cache_state is None else self._cache_state()
        if state is not None:
            numbers = state.kept_texts()
            self._cached = {n: text for n, text in self._cached.items() if n in numbers}
            self._num_cached_bytes = sum(map(len, self._cached.values()))
            texts = self._cached, self._prompts
            salts = self._salts.items()
            self._salts = {n: salt for n, salt in salts if any(n in known for known in texts)}
