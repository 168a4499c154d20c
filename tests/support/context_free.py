"""Random EBNF grammars, and what they derive, by trying every rule: a character at a time, without
regexes, and told of nothing but the grammar."""

from __future__ import annotations

import random
from collections.abc import Mapping
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
_LITERALS = ["", "a", "b", "c", "ab", "bc", "abc", "aa", "aab", "cab", "(", ")", "()", "é", "éa"]
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
    """A part of a grammar: a ``kind`` of `_TIMES` repeats its only part; ``text`` is that of a
    literal, a class or a reference to a rule."""

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


def has_texts(rules: Mapping[str, Node]) -> bool:
    """True if every rule derives a text."""
    known: set[str] = set()

    def derives(node: Node) -> bool:
        if node.kind == "rule":
            return node.text in known
        if node.kind in _TIMES and _TIMES[node.kind][0] == 0:
            return True
        return (any if node.kind == "choice" else all)(map(derives, node.parts or ()))

    while more := {name for name, node in rules.items() if name not in known and derives(node)}:
        known |= more
    return known == set(rules)


class Derivation:
    """Whether ``text`` is derived from the root of ``rules``, which all have texts, and which
    characters may come behind it."""

    def __init__(self, rules: Mapping[str, Node], text: str) -> None:
        self.next: set[str] = set()
        self._rules = rules
        self._text = text
        self._ends: dict[tuple[str, int], set[int]] = {}  # of what a rule derives from a place on
        while True:  # a rule that begins with itself needs what is found last
            before = {key: set(ends) for key, ends in self._ends.items()}
            self._tried: set[tuple[str, int]] = set()
            self.is_whole = len(text) in self._match(Node("rule", "root"), 0)
            if self._ends == before:
                break

    def _match(self, node: Node, start: int) -> set[int]:
        """The places where a text of ``node`` that begins at ``start`` may end."""
        if node.kind == "rule":
            return self._match_rule(node.text, start)
        if node.kind in ("literal", "class"):
            classes = [*node.text] if node.kind == "literal" else [_CLASSES[node.text]]
            return self._read(classes, start)
        if node.kind == "choice":
            return set().union(*(self._match(each, start) for each in node.parts))
        if node.kind == "sequence":
            ends = {start}
            for part in node.parts:
                ends = set().union(*(self._match(part, end) for end in ends))
            return ends
        return self._repeat(node, start)

    def _match_rule(self, name: str, start: int) -> set[int]:
        key = (name, start)
        ends = self._ends.setdefault(key, set())
        if key not in self._tried:
            self._tried.add(key)
            ends |= self._match(self._rules[name], start)
        return set(ends)

    def _read(self, classes: list[str], start: int) -> set[int]:
        for place, characters in enumerate(classes, start):
            if place == len(self._text):
                self.next |= set(characters)
            if self._text[place : place + 1] not in [*characters]:
                return set()
        return {start + len(classes)}

    def _repeat(self, node: Node, start: int) -> set[int]:
        least, most = _TIMES[node.kind]
        found: set[int] = set()
        ends, count = {start}, 0
        while ends and not (count >= least and ends <= found):
            if count >= least:
                found |= ends
            if count == most:
                break
            ends = set().union(*(self._match(node.parts[0], end) for end in ends))
            count += 1
        return found
