"""Whom the texts in flight are like: the memory that a recorder with block reuse needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inflight_scheduler.cache_state import CacheState
from inflight_scheduler.recording.likeness import (
    NO_LIKENESS,
    Likeness,
    TextIndex,
    num_packed,
    pack,
)
from inflight_scheduler.recording.part_log import PartLog, PartMark
from inflight_scheduler.recording.records import CacheStart, Growth, Iteration, KeptBlock
from inflight_scheduler.request import LlmRequest

_MIN_CACHED = 64  # texts that may be cached, before a look at which of them are

StateSource = Callable[[], CacheState | None]
"""What the cache holds now; None without a cache."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A moment: ``parts`` were known, of ``num_texts`` texts, and this was cached.

    ``request_ids`` and ``text_numbers`` are those of the active requests, in order.
    """

    parts: PartMark
    num_texts: int
    request_ids: tuple[int, ...]
    text_numbers: tuple[int, ...]
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
            text_numbers=self.text_numbers,
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
        # Salt and packed tokens, by number. Of each active request: its prompt, with what was
        # generated before a pause. What it has generated since belongs to no text before `grow`.
        self._prompts: dict[int, tuple[bytes, bytes]] = {}
        self._cached: dict[int, tuple[bytes, bytes]] = {}  # those that may be cached
        self._look_at = _MIN_CACHED
        self._likenesses: dict[int, Likeness] = {}
        self._growths: list[Growth] = []

    def add(self, request: LlmRequest) -> None:
        """A prompt, as it came."""
        number, self._num_texts = self._num_texts, self._num_texts + 1
        request.text_number = number
        self._numbers[request.request_id] = number
        text = pack(request.tokens[: request.prompt_len])
        self._prompts[number] = request.cache_salt, text
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
        salt, text = self._prompts[number]
        if is_last:
            del self._numbers[request.request_id], self._prompts[number]
        if request.tokens[-1] < 0:
            return
        if request.beams is None:  # of a search only the prompt is kept; a pause begins it anew
            text += pack(request.tokens[num_packed(text) :])
        self._keep(request, number, text)
        if request.beams is not None or request.num_tokens == request.prompt_len:
            return
        if not is_last:
            self._prompts[number] = salt, text
        found = self._index.add(salt, text, number)
        if found.length > request.prompt_len:
            self._growths.append(Growth(request.request_id, found))
            self._parts.add(number, found, request.prompt_len)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These have ended before anything was decided about them."""
        for request_id in request_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                del self._prompts[number]

    def take_growths(self) -> tuple[Growth, ...]:
        """Those since the last call."""
        growths, self._growths = tuple(self._growths), []
        return growths

    def mark(self, requests: Sequence[LlmRequest], state: CacheState) -> CacheMark:
        """This moment, with ``requests`` active."""
        if self._parts.wants_walk:
            self._parts.begin_walk(state.kept_texts().union(self._prompts))
        return CacheMark(
            self._parts.mark(),
            self._num_texts,
            tuple([request.request_id for request in requests]),
            tuple([request.text_number for request in requests]),
            state,
        )

    def _texts_in_use(self) -> dict[int, tuple[bytes, bytes]]:
        """Cached ones, and the prompts of active requests."""
        self._forget_what_is_not_cached()
        return self._cached | self._prompts

    def _keep(self, request: LlmRequest, number: int, text: bytes) -> None:
        """Its full blocks may be cached from now on, however many texts come before they are used.

        Short texts take no block of their own, so any number of them evicts nothing.
        """
        if self._cache_state is None or request.num_tokens < self._tokens_per_block:
            return
        self._cached[number] = request.cache_salt, text
        if len(self._cached) > self._look_at:
            self._forget_what_is_not_cached()
            self._look_at = max(_MIN_CACHED, 2 * len(self._cached))

    def _forget_what_is_not_cached(self) -> None:
        state = None if self._cache_state is None else self._cache_state()
        if state is not None:
            numbers = state.kept_texts()
            self._cached = {n: text for n, text in self._cached.items() if n in numbers}
