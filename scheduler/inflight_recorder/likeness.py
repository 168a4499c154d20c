"""Which texts begin alike: all that block reuse needs to know of a text, and no token of it.

With block reuse a decision depends on which prompts share a beginning. The recorder notes, for each
text, how far it agrees with which earlier one (`TextIndex`), and a reader makes up texts that agree
in the same way (`text_book.TextBook`)::

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
from collections.abc import Callable, Sequence
from typing import NamedTuple

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

    A node is a number: the packed text ``_edges[number]`` leads to it, and that of
    ``_owners[number]`` begins so. ``_children`` by the number of the parent and the first token
    behind it. So there is no object for a node, and the garbage collector, which would stop
    everybody to look at hundreds of thousands, never looks into dictionaries of bytes and numbers.

    ``_ends`` are the nodes at which texts end that are like no other from there on: these go on
    without a walk (`go_on`). Whoever else goes on from there takes the node over, so a conversation
    is one edge, however many requests it took: the walk is as long as it has branches.
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
        self.named: dict[int, None] = {}  # whoever was the first with some tokens
        self.num_tokens = 0
        self.num_texts = 0  # with tokens of their own; each makes two nodes at most

    def owners_along(self, salt: bytes, text: bytes) -> list[tuple[int, int]]:
        """Who begins like ``text``, and up to where: byte and owner, the shortest first."""
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

        What others begin with as well keeps its owner; of the rest, ``inherited`` (as
        `owners_along` tells it) has others than ``owner``.
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
            if common < len(edge) and place < len(text):
                child = self._split(key, child, common)
            node = child
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
        self, node: int, text: bytes, place: int, owner: int, inherited: Sequence[tuple[int, int]]
    ) -> None:
        """``text`` goes on behind ``node`` from ``place`` as no other did.

        Up to where those ``inherited`` come it is theirs. If that is not up to its end, from there
        on it is like no other one.
        """
        before = self._owners[node]
        if self._ends.get(before) == node:  # which none of those ``inherited`` has reached
            del self._ends[before]
            self._owners[node], self._ends[owner] = owner, node
            self._edges[node] += text[place:]
            self._count(owner, len(text) - place)
            return
        for end, other in inherited:
            if end > place:
                node = self._add_child(node, text, place, end, other)
                place = end
        if len(text) > place:
            self._ends[owner] = self._add_child(node, text, place, len(text), owner)

    def _add_child(self, node: int, text: bytes, place: int, end: int, owner: int) -> int:
        child = self._new(text[place:end], owner)
        self._children[_child_key(node, text, place)] = child
        self._count(owner, end - place)
        return child

    def _count(self, owner: int, size: int) -> None:
        self.named[owner] = None
        self.num_tokens += size // TOKEN_BYTES
        self.num_texts += 1

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
