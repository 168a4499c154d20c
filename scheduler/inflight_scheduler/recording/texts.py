"""Whom the texts in flight are like: the memory that a recorder with block reuse needs.

What is known of the texts is a list of parts that only grows, so the knowledge of a moment is a
place in that list. When it has doubled, parts that can never matter again are left out of a new
one; whoever remembers a place keeps the old one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from inflight_scheduler.cache_state import CacheState
from inflight_scheduler.recording.likeness import (
    NO_LIKENESS,
    Likeness,
    Text,
    TextIndex,
    num_packed,
    pack,
)
from inflight_scheduler.recording.records import CacheStart, Growth, Iteration, KeptBlock, TextPart
from inflight_scheduler.request import LlmRequest

MIN_PARTS = 4096
"""Parts that are remembered before any is left out."""

_PART_SIZE = len(TextPart._fields)
_MIN_CACHED = 64  # texts that may be cached, before a look at which of them are

StateSource = Callable[[], CacheState | None]
"""What the cache holds now; None without a cache."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A moment: the first ``len_parts`` numbers of ``parts`` were known, and this was cached.

    ``request_ids`` and ``text_numbers`` are those of the active requests, in order.
    """

    parts: array[int]
    len_parts: int
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
        return CacheStart(
            num_texts=self.num_texts,
            parts=tuple(_needed(self.parts[: self.len_parts], needed)),
            text_numbers=self.text_numbers,
            tables=tuple(tuple(self.state.tables.get(i, ())) for i in self.request_ids),
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
        self._tokens_per_block = tokens_per_block
        self._cache_state = cache_state
        self._cached: dict[int, tuple[bytes, bytes]] = {}  # those that may be: salt and text
        self._look_at = _MIN_CACHED
        self._num_texts = 0
        self._active: dict[int, LlmRequest] = {}
        # Of each, packed: the prompt, with what was generated before a pause.
        self._packed: dict[int, bytes] = {}
        self._likenesses: dict[int, Likeness] = {}
        self._growths: list[Growth] = []
        # The fields of each `TextPart`, one after another: no objects for the garbage collector.
        self._parts = array("q")
        self._sweep_at = MIN_PARTS

    def add(self, request: LlmRequest) -> None:
        """A prompt, as it came."""
        number, self._num_texts = self._num_texts, self._num_texts + 1
        request.text_number = number
        text = pack(request.tokens[: request.prompt_len])
        self._active[request.request_id] = request
        self._packed[request.request_id] = text
        found = self._index.add(request.cache_salt, text, number)
        self._likenesses[request.request_id] = found
        self._remember(number, found, 0)

    def likeness(self, request: LlmRequest) -> Likeness:
        """What was found when the prompt came; to be asked once."""
        return self._likenesses.pop(request.request_id, NO_LIKENESS)

    def grow(self, request: LlmRequest, *, is_last: bool = False) -> None:
        """``request`` gives its blocks back; everything it has generated belongs to its text."""
        request_id = request.request_id
        if request_id not in self._active:
            return  # it ended before it was registered
        text = self._packed[request_id]
        if is_last:
            del self._active[request_id], self._packed[request_id]
        if request.tokens[-1] < 0:
            return
        text += pack(request.tokens[num_packed(text) :])
        self._keep(request, text)
        if request.beams is not None or request.num_tokens == request.prompt_len:
            return
        if not is_last:
            self._packed[request_id] = text
        found = self._index.add(request.cache_salt, text, request.text_number)
        if found.length > request.prompt_len:
            self._growths.append(Growth(request_id, found))
            self._remember(request.text_number, found, request.prompt_len)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These have ended before anything was decided about them."""
        for request_id in request_ids:
            if self._active.pop(request_id, None) is not None:
                del self._packed[request_id]

    def take_growths(self) -> tuple[Growth, ...]:
        """Those since the last call."""
        growths, self._growths = tuple(self._growths), []
        return growths

    def mark(self, requests: Sequence[LlmRequest], state: CacheState) -> CacheMark:
        """This moment, with ``requests`` active. It costs little, but for a sweep now and then."""
        if len(self._parts) >= _PART_SIZE * self._sweep_at:
            self._sweep(state)
        return CacheMark(
            self._parts,
            len(self._parts),
            self._num_texts,
            tuple([request.request_id for request in requests]),
            tuple([request.text_number for request in requests]),
            state,
        )

    def _texts_in_use(self) -> Iterator[Text]:
        """Cached ones, and the prompts of active requests.

        What those have generated belongs to no text before it is told (`grow`).
        """
        self._forget_what_is_not_cached()
        for number, (salt, text) in self._cached.items():
            yield salt, text, number
        for request_id, request in self._active.items():
            yield request.cache_salt, self._packed[request_id], request.text_number

    def _keep(self, request: LlmRequest, text: bytes) -> None:
        """Its full blocks may be cached from now on, however many texts come before they are used.

        Short texts take no block of their own, so any number of them evicts nothing.
        """
        if self._cache_state is None or request.num_tokens < self._tokens_per_block:
            return
        self._cached[request.text_number] = request.cache_salt, text
        if len(self._cached) > self._look_at:
            self._forget_what_is_not_cached()
            self._look_at = max(_MIN_CACHED, 2 * len(self._cached))

    def _forget_what_is_not_cached(self) -> None:
        state = None if self._cache_state is None else self._cache_state()
        if state is not None:
            numbers = state.kept_texts()
            self._cached = {n: text for n, text in self._cached.items() if n in numbers}

    def _remember(self, number: int, found: Likeness, start: int) -> None:
        if found.length > start:
            self._parts.extend((number, found.number, found.length, start))

    def _sweep(self, state: CacheState) -> None:
        needed = self._index.numbers()
        needed.update(request.text_number for request in self._active.values())
        needed |= state.kept_texts()
        parts = _needed(self._parts, needed)
        self._parts = array("q", chain.from_iterable(parts))
        self._sweep_at = max(MIN_PARTS, 2 * len(parts))


def _needed(parts: array[int], numbers: set[int]) -> list[TextPart]:
    """The parts of the texts ``numbers`` and of all texts that those lean on, in their order.

    What leans on a text that has it from another one leans on that one instead: otherwise a
    beginning that is used for weeks would be a chain that never ends.
    """
    by_number: dict[int, list[TextPart]] = {}
    fields = zip(*[iter(parts)] * _PART_SIZE, strict=True)
    short = [_shortened(TextPart._make(part), by_number) for part in fields]
    found: set[int] = set()
    pending = [number for number in numbers if number in by_number]
    while pending:
        number = pending.pop()
        if number in found:
            continue
        found.add(number)
        pending.extend(p.source for p in by_number[number] if p.source in by_number)
    return [part for part in short if part.number in found]


def _shortened(part: TextPart, by_number: dict[int, list[TextPart]]) -> TextPart:
    """``part`` with its source where that has the tokens from; entered in ``by_number``.

    What can be leant on has been computed and never changes, so earlier or later is the same.
    """
    for other in by_number.get(part.source, ()):
        if other.start <= part.start and part.length <= other.length:
            part = part._replace(source=other.source)
            break
    by_number.setdefault(part.number, []).append(part)
    return part
