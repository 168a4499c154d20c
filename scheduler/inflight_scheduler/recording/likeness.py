"""Which texts begin alike: all that block reuse needs to know of a text, and no token of it.

With block reuse a decision depends on which prompts share a beginning. The recorder notes, for each
text, how far it agrees with which earlier one (`TextIndex`), and a reader makes up texts that agree
in the same way (`TextBook`)::

    text 0   a b c d e f g         recorded: nothing (its own)
    text 1   a b c d x y           recorded: like text 0 for 4 tokens
    text 2   a b c d x y z         recorded: like text 1 for 6 tokens

Texts are numbered by arrival. What a request generates belongs to its text as soon as it gives its
blocks back.

The scheduler's thread waits for all this, and of a long prompt the walk over its tokens is all that
costs: they are packed once (`pack`), and packed texts are compared in one go.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from inflight_scheduler.recording.errors import RecordingError

MAX_STEPS = 10_000
STEPS_PER_TOKEN = 64
"""Pieces that are looked at for one answer, and for each token in it: where one leans on the next
a way through all texts there may be takes fewer. A recording that needs more was not made by us."""

_INT32 = "i"
TOKEN_BYTES = struct.calcsize(_INT32)
"""Of a packed token."""

_MIN_TOKENS = 2**20
_MIN_TEXTS = 2**10
_NUM_DISMANTLED = 4  # nodes with each new text, which makes half as many


class Likeness(NamedTuple):
    """The first ``length`` tokens are those of the text ``number``."""

    number: int
    length: int


NO_LIKENESS = Likeness(0, 0)


def pack(tokens: Sequence[int]) -> bytes:
    """The tokens as a `TextIndex` wants them; packed texts can be put together."""
    return struct.pack(f"{len(tokens)}{_INT32}", *tokens)  # half the time that an `array` takes


def num_packed(text: bytes) -> int:
    """How many tokens a packed text has."""
    return len(text) // TOKEN_BYTES


class _Tree:
    """Texts by their beginnings, one tree per salt.

    A node is a number: the packed text ``_edges[number]`` leads to it, and ``_owners[number]`` was
    the first with that. ``_children`` by the number of the parent and the first token behind it. So
    there is no object for a node, and the garbage collector, which would stop everybody to look at
    hundreds of thousands, never looks into dictionaries of bytes and numbers.

    ``_ends`` are the nodes at which texts end that are like no other from there on: these go on
    without a walk (`go_on`).
    """

    __slots__ = (
        "_children",
        "_edges",
        "_ends",
        "_owners",
        "_roots",
        "named",
        "num_texts",
        "num_tokens",
    )

    def __init__(self) -> None:
        self._roots: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._edges: dict[int, bytes] = {}
        self._owners = array("q")
        self._ends: dict[int, int] = {}
        self.named: dict[int, None] = {}  # everybody who was the first with some tokens
        self.num_tokens = 0
        self.num_texts = 0  # with tokens of their own; each makes two nodes at most

    def owners_along(self, salt: bytes, text: bytes) -> list[tuple[int, int]]:
        """Who was the first with ``text`` up to where: byte and owner, the shortest first."""
        found: list[tuple[int, int]] = []
        node = self._roots.get(salt)
        place = 0
        while node is not None and place < len(text):
            child = self._children.get(_child_key(node, text, place))
            if child is None:
                break
            edge = self._edges[child]
            common = _common_size(edge, text, place)
            place += common
            found.append((place, self._owners[child]))
            node = child if common == len(edge) else None
        return found

    def add(
        self, salt: bytes, text: bytes, owner: int, inherited: Sequence[tuple[int, int]] = ()
    ) -> Likeness:
        """Enter a text and say how far it agrees with which one of another owner.

        What is there already keeps its owner; of the rest, ``inherited`` (as `owners_along` tells
        it) has others than ``owner``.
        """
        if salt not in self._roots:
            self._roots[salt] = self._new(b"", owner)
        node = self._roots[salt]
        place, best, length = 0, 0, 0
        while place < len(text):
            key = _child_key(node, text, place)
            child = self._children.get(key)
            if child is None:
                self._append(node, text, place, owner, inherited)
                break
            edge = self._edges[child]
            common = _common_size(edge, text, place)
            place += common
            if self._owners[child] != owner:
                best, length = self._owners[child], place
            node = child if common == len(edge) else self._split(key, child, common)
        return Likeness(best, length // TOKEN_BYTES) if length else NO_LIKENESS

    def go_on(self, owner: int, tokens: bytes) -> bool:
        """The text of ``owner``, as it was entered here, goes on with ``tokens``.

        False, and nothing is done, if another one may go on likewise.
        """
        node = self._ends.get(owner)
        if node is None:
            return False
        self._edges[node] += tokens
        self.num_tokens += len(tokens) // TOKEN_BYTES
        return True

    def dismantle(self, num_nodes: int) -> bool:
        """Give up so many nodes of a tree that is not used any more; False if it had none."""
        for _ in range(min(num_nodes, len(self._edges))):
            self._edges.popitem()
            for others in (self._children, self._ends):
                if others:
                    others.popitem()
        return bool(self._edges)

    def _append(
        self, node: int, text: bytes, place: int, owner: int, inherited: Iterable[tuple[int, int]]
    ) -> None:
        """``text`` goes on behind ``node`` from ``place`` as no other did.

        Up to where those ``inherited`` come it is theirs. If that is not up to its end, from there
        on it is like no other one.
        """
        if self._ends.get(self._owners[node]) == node:
            del self._ends[self._owners[node]]
        for end, other in inherited:
            if end > place:
                node = self._add_child(node, text, place, end, other)
                place = end
        if len(text) > place:
            self._ends[owner] = self._add_child(node, text, place, len(text), owner)

    def _add_child(self, node: int, text: bytes, place: int, end: int, owner: int) -> int:
        child = self._new(text[place:end], owner)
        self._children[_child_key(node, text, place)] = child
        self.named[owner] = None
        self.num_tokens += (end - place) // TOKEN_BYTES
        self.num_texts += 1
        return child

    def _new(self, edge: bytes, owner: int) -> int:
        node = len(self._owners)
        self._owners.append(owner)
        self._edges[node] = edge
        return node

    def _split(self, key: bytes, child: int, size: int) -> int:
        """Cut the edge to ``child``, which ``key`` finds, after ``size`` bytes; the new node."""
        edge = self._edges[child]
        middle = self._new(edge[:size], self._owners[child])
        self._children[key] = middle
        self._edges[child] = edge[size:]
        self._children[_child_key(middle, edge, size)] = child
        return middle


def _child_key(node: int, text: bytes, place: int) -> bytes:
    """Where the child of ``node`` is found with which ``text`` goes on at ``place``."""
    return node.to_bytes(4, "little") + text[place : place + TOKEN_BYTES]


def _common_size(edge: bytes, text: bytes, place: int) -> int:
    """Bytes of the tokens with which ``edge`` begins and ``text`` goes on at ``place``."""
    if text.startswith(edge, place):
        return len(edge)
    low, high = 0, min(len(edge), len(text) - place) // TOKEN_BYTES  # tokens: at least, at most
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(
            edge[low * TOKEN_BYTES : middle * TOKEN_BYTES], place + low * TOKEN_BYTES
        ):
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES


class Texts(NamedTuple):
    """Packed tokens by number, and the salts of those that have one.

    Not a pair for each text: that would be one more object for the garbage collector to visit.
    """

    tokens: dict[int, bytes]
    salts: dict[int, bytes]


def _no_texts() -> Texts:
    return Texts({}, {})


class TextIndex:
    """Finds how far a text agrees with earlier ones.

    It remembers four times as many tokens as the KV pool holds, or four times as many texts as that
    has blocks, whichever are fewer, and forgets from twice that on: memory is bounded also where
    texts are short. What can still matter then, since it waits or is cached, comes from
    ``texts_in_use``. One of them is entered again with each new text, and a little of what is
    forgotten is given back, since nobody shall wait for all; until the next time all are known from
    before. A text that is entered again is named by whom it was like before: otherwise a beginning
    that is used for weeks would be a chain of names that never ends.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        texts_in_use: Callable[[], Texts] = _no_texts,
    ) -> None:
        self._limits = (
            max(4 * num_blocks * tokens_per_block, _MIN_TOKENS),
            max(4 * num_blocks, _MIN_TEXTS),
        )
        self._max_tokens, self._max_texts = self._limits
        self._texts_in_use = texts_in_use
        self._young, self._old = _Tree(), _Tree()
        self._forgotten: _Tree | None = None
        self._moving = _no_texts()  # in use, and maybe only in `_old`

    def add(self, salt: bytes, text: bytes, number: int) -> Likeness:
        """Enter the packed text ``number`` (again, when it has grown); say whom it is like."""
        found = self._enter(salt, text, number)
        self._tidy()
        return found

    def grow(self, salt: bytes, text: bytes, number: int, old_size: int) -> Likeness:
        """As `add`, if the first ``old_size`` bytes were entered before under this number.

        Nothing is found where no other text is like this one beyond those.
        """
        found = NO_LIKENESS
        if not self._young.go_on(number, text[old_size:]):
            found = self._enter(salt, text, number)
        self._tidy()
        return found if found.length * TOKEN_BYTES > old_size else NO_LIKENESS

    def _enter(self, salt: bytes, text: bytes, number: int) -> Likeness:
        before = self._old.owners_along(salt, text)
        found = self._young.add(salt, text, number, before)
        for end, owner in reversed(before):
            if owner != number:
                if end > found.length * TOKEN_BYTES:
                    found = Likeness(owner, end // TOKEN_BYTES)
                break
        return found

    def _tidy(self) -> None:
        """A little of what is to be done, with each text that is entered."""
        if self._moving.tokens:
            self._move()
        if self._forgotten is not None and not self._forgotten.dismantle(_NUM_DISMANTLED):
            self._forgotten = None
        if self._young.num_tokens > self._max_tokens or self._young.num_texts > self._max_texts:
            self._turn()

    def _turn(self) -> None:
        while self._moving.tokens:
            self._move()
        self._forgotten, self._old, self._young = self._old, self._young, _Tree()
        self._max_tokens, self._max_texts = self._limits
        self._moving = self._texts_in_use()

    def _move(self) -> None:
        """Enter one text again; the limits are for new ones."""
        num_tokens, num_texts = self._young.num_tokens, self._young.num_texts
        number, text = self._moving.tokens.popitem()
        salt = self._moving.salts.get(number, b"")
        self._young.add(salt, text, number, self._old.owners_along(salt, text))
        self._max_tokens += self._young.num_tokens - num_tokens
        self._max_texts += self._young.num_texts - num_texts

    def is_named(self, number: int) -> bool:
        """Whether a later text can be found to be like this one."""
        trees = self._young, self._old
        return number in self._moving.tokens or any(number in tree.named for tree in trees)


class _Piece:
    """From ``start`` to ``end`` a text goes on as the text ``source`` does, or (None) as no other.

    ``time`` orders the pieces of all texts: a piece leans on earlier ones only. The ``parent`` is
    the one of the source that this one mostly leans on, and ``far`` one some parents on, such that
    a way through very many takes a few steps. It leads there for places in the ``window``.
    """

    __slots__ = ("depth", "end", "far", "parent", "source", "start", "time", "window")

    def __init__(
        self, start: int, end: int, source: int | None, time: int, parent: _Piece | None = None
    ) -> None:
        self.start, self.end, self.source, self.time = start, end, source, time
        self.parent = parent
        self.depth, self.far, self.window = 0, self, (start, end)
        if parent is None:
            return
        self.depth, self.far = parent.depth + 1, parent
        windows = [(start, end), (parent.start, parent.end)]
        middle = parent.far
        if parent.depth - middle.depth == middle.depth - middle.far.depth:
            self.far = middle.far
            windows += [parent.window, middle.window]
        starts, ends = zip(*windows, strict=True)
        self.window = max(starts), min(ends)

    def next_for(self, first: int, last: int) -> _Piece | None:
        """Where the tokens of these places come from in turn, if that is one piece we know of."""
        parent = self.parent
        if parent is not None and self.window[0] <= first and last <= self.window[1]:
            return self.far
        return parent if parent and parent.start <= first and last <= parent.end else None


_end = attrgetter("end")


class TextBook:
    """Texts made up so that they agree as far as they are said to, and no further."""

    def __init__(self, num_texts: int = 0) -> None:
        """``num_texts`` were there before; of those nothing is known unless it is told."""
        self._num_texts = num_texts
        self._pieces: dict[int, list[_Piece]] = {}
        self._time = 0

    def add(self, likeness: Likeness = NO_LIKENESS) -> int:
        """A new text; its number."""
        number, self._num_texts = self._num_texts, self._num_texts + 1
        self.extend(number, likeness, 0)
        return number

    def extend(self, number: int, likeness: Likeness, start: int) -> None:
        """From ``start`` on the text goes on like the other one, and behind that like none.

        `RecordingError` if there is no such text.
        """
        if likeness.length <= start:
            return
        if not 0 <= likeness.number < self._num_texts:
            raise RecordingError(f"there is no text {likeness.number} to be like")
        pieces = self._pieces.setdefault(number, [])
        place = pieces[-1].end if pieces else 0
        if start > place:
            pieces.append(_Piece(place, start, None, self._tick()))
            place = start
        if likeness.length > place:  # else all of it was known before
            parent = self._parent(likeness.number, place, likeness.length)
            time = self._tick()
            pieces.append(_Piece(place, likeness.length, likeness.number, time, parent))

    def beginning(self, number: int) -> Likeness:
        """Whose tokens the text begins with, and how many of them that one still has there."""
        first = next(iter(self._pieces.get(number, ())), None)
        if first is None or first.source is None:
            return NO_LIKENESS
        others = self._pieces.get(first.source, ())
        later = (piece.start for piece in others if piece.time > first.time)
        return Likeness(first.source, min(first.end, next(later, first.end)))

    def _parent(self, number: int, start: int, end: int) -> _Piece | None:
        """Of the first and the last pieces of a text the one that has most of these places."""
        pieces = self._pieces.get(number, ())
        best, longest = None, 0
        for piece in (*pieces[:4], *pieces[max(len(pieces) - 4, 4) :]):
            num_common = min(piece.end, end) - max(piece.start, start)
            if piece.source is not None and num_common > longest:
                best, longest = piece, num_common
        return best

    def tokens(self, number: int, start: int, end: int) -> list[int]:
        """Tokens ``start .. end - 1``; equal numbers are equal tokens."""
        result: list[int] = []
        pending = [(number, start, end, self._time + 1)] if start < end else []
        num_steps = -STEPS_PER_TOKEN * (end - start)
        while pending:
            text, first, last, before = pending.pop()
            pieces = self._pieces.get(text, ())
            index = bisect_right(pieces, first, key=_end)
            num_steps += 1
            if index == len(pieces) or pieces[index].time >= before:
                result += [_own_token(text)] * (last - first)
                continue
            piece = pieces[index]
            until = min(piece.end, last)
            if until < last:
                pending.append((text, until, last, before))
            if piece.source is None:
                result += [_own_token(text)] * (until - first)
                continue
            while (following := piece.next_for(first, until)) is not None:
                piece = following
                num_steps += 1
            if num_steps > MAX_STEPS:
                raise RecordingError("the texts lean on one another in too many pieces")
            assert piece.source is not None, "it would be nobody's parent"
            pending.append((piece.source, first, until, piece.time))
        return result

    def _tick(self) -> int:
        self._time += 1
        return self._time


def _own_token(number: int) -> int:
    """Tokens are compared at the same place of texts that agree up to there, so one token does for
    all places of a text; 31 bits of it, for a `TextIndex` that gets made-up texts."""
    return number & 0x7FFFFFFF
