"""Random EBNF grammars, and what they derive by Earley's algorithm: a character at a time, without
regexes, and told of nothing but the grammar."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

CHARACTERS = "abc()éè"
"""Of the last two the first byte is the same."""

_CLASSES = {
    "[ab]": "ab",
    "[a-c]": "abc",
    "[^a()]": "bcéè",
    "[^b]": "ac()éè",
    "[c]": "c",
    "[éa]": "éa",
    r"[^\n]": CHARACTERS,
}
_LITERALS = (
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "abc",
    "aa",
    "aab",
    "cab",
    "(",
    ")",
    "()",
    "é",
    "éa",
    "è",
    "",
)
_TIMES: dict[str, tuple[int, int | None]] = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
    "{0,2}": (0, 2),
    "{2}": (2, 2),
    "{1,3}": (1, 3),
    "{2,}": (2, None),
}


@dataclass(frozen=True)
class Node:
    """A part of a grammar: a ``kind`` of `_TIMES` repeats its only part; ``text`` is what a
    literal, a class or a reference to a rule is."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()

    def __str__(self) -> str:
        if not self.parts:
            return f'"{self.text}"' if self.kind == "literal" else self.text
        joined = (" | " if self.kind == "choice" else " ").join(map(str, self.parts))
        return f"({joined}){self.kind if self.kind in _TIMES else ''}"


def random_rules(source: random.Random) -> dict[str, Node]:
    """A recursive grammar of a few rules, many of whose parts begin alike."""
    names = ["root", *(f"r{i}" for i in range(source.randint(1, 3)))]

    def make(depth: int) -> Node:
        leaves, inner = ["literal", "class", "rule"], ["sequence", "choice"]
        kind = source.choice(leaves if depth == 0 else [*leaves, *inner * 3, *_TIMES])
        if kind == "literal":
            return Node(kind, source.choice(_LITERALS))
        if kind in ("class", "rule"):
            return Node(kind, source.choice([*_CLASSES] if kind == "class" else names))
        num_parts = 1 if kind in _TIMES else source.randint(2, 4)
        return Node(kind, parts=tuple(make(depth - 1) for _ in range(num_parts)))

    rules = {name: make(source.randint(1, 3)) for name in names}
    opening, closing = Node("literal", "("), Node("literal", ")")
    nested = Node("sequence", parts=(opening, Node("rule", "root"), closing))
    return {**rules, "root": Node("choice", parts=(nested, rules["root"]))}


_Symbol = int | frozenset[str]
_Item = tuple[int, tuple[_Symbol, ...], int, int]
"""What is derived, as which symbols, how many of them are read, and where it began."""


class Grammar:
    """Productions of symbols: a number is derived further, a set is one of its characters."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._made: dict[int, list[tuple[_Symbol, ...]]] = {}
        self._names = {name: self._new() for name in rules}
        for name, node in rules.items():
            self._made[self._names[name]].append((self._convert(node),))
        self._start = self._names["root"]
        has_texts = self._closed_under(lambda symbol: isinstance(symbol, frozenset))
        self.is_whole = set(self._made) == has_texts
        self._may_be_empty = self._closed_under(lambda symbol: False)

    def begin(self) -> list[set[_Item]]:
        """The chart of a text that has not begun."""
        return self._grown([], {(self._start, each, 0, 0) for each in self._made[self._start]})

    def read(self, chart: list[set[_Item]], character: str) -> list[set[_Item]]:
        """The chart with one more character, which must be one that may be `next`."""
        moved = {
            (head, body, num_read + 1, start)
            for head, body, num_read, start in chart[-1]
            if num_read < len(body)
            and isinstance(symbol := body[num_read], frozenset)
            and character in symbol
        }
        return self._grown(chart, moved)

    def next(self, chart: list[set[_Item]]) -> set[str]:
        """The characters that may follow, if the grammar `is_whole`."""
        following = (body[n] for _, body, n, _ in chart[-1] if n < len(body))
        return {each for symbol in following if isinstance(symbol, frozenset) for each in symbol}

    def may_end(self, chart: list[set[_Item]]) -> bool:
        """True if the text is one."""
        ended = ((head, start) for head, body, n, start in chart[-1] if n == len(body))
        return (self._start, 0) in ended

    def _new(self) -> int:
        number = len(self._made)
        self._made[number] = []
        return number

    def _convert(self, node: Node) -> _Symbol:
        if node.kind == "rule":
            return self._names[node.text]
        if node.kind == "class":
            return frozenset(_CLASSES[node.text])
        number, parts = self._new(), tuple(map(self._convert, node.parts))
        if node.kind == "literal":
            self._made[number].append(tuple(frozenset(each) for each in node.text))
        elif node.kind == "sequence":
            self._made[number].append(parts)
        elif node.kind == "choice":
            self._made[number] += [(each,) for each in parts]
        else:
            least, most = _TIMES[node.kind]
            more = self._new()
            self._made[more] += [(), parts if most is not None else (more, *parts)]
            behind = (more,) * (1 if most is None else most - least)
            self._made[number].append(parts * least + behind)
        return number

    def _closed_under(self, is_known: Callable[[_Symbol], bool]) -> set[int]:
        """What derives a sequence of what is known."""
        found: set[int] = set()
        while True:
            more = {
                head
                for head, bodies in self._made.items()
                if any(all(each in found or is_known(each) for each in body) for body in bodies)
            }
            if more == found:
                return found
            found = more

    def _grown(self, chart: list[set[_Item]], items: set[_Item]) -> list[set[_Item]]:
        """``chart`` with one more set, all that follows from ``items``."""
        here, waiting, sets = len(chart), list(items), [*chart, items]
        while waiting:
            head, body, num_read, start = waiting.pop()
            made: list[_Item] = []
            if num_read == len(body):
                for each in sets[start]:
                    if each[2] < len(each[1]) and each[1][each[2]] == head:
                        made.append((each[0], each[1], each[2] + 1, each[3]))
            elif isinstance(symbol := body[num_read], int):
                made += [(symbol, each, 0, here) for each in self._made[symbol]]
                if symbol in self._may_be_empty:
                    made.append((head, body, num_read + 1, start))
            waiting += [each for each in made if each not in items]
            items.update(made)
        return sets
