"""Sets of characters as bits of a number: one for each group that no class of a grammar parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from llguidance import gbnf_to_lark as gbnf

_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = 0x10FFFF
# Where the first byte of a character's UTF-8 changes; below 0x80 each is one of its own.
_FIRST_BYTES = {0, *range(0x80, 0x800, 0x40), *range(0x800, 0x10000, 0x1000)}
_FIRST_BYTES |= {*range(0x10000, _LAST + 1, 0x40000)}


class Characters:
    """The groups of one grammar, those of each first byte of UTF-8 apart."""

    def __init__(self, leaves: Iterable[gbnf.ASTNode]) -> None:
        ranges = [each for leaf in leaves for each in _ranges(leaf)]
        bounds = {low for low, _ in ranges} | {high + 1 for _, high in ranges}
        self._starts = sorted(each for each in bounds | _FIRST_BYTES if each <= _LAST)
        self._place = {start: place for place, start in enumerate(self._starts)}
        self._read: dict[str, list[int]] = {}  # by how a leaf is written
        bounds_of_bytes = [*sorted(_FIRST_BYTES - {0}), _LAST + 1]
        self._of_first_bytes = [
            self._set_of([(low, high - 1)]) for low, high in pairwise(bounds_of_bytes)
        ]

    def read(self, leaf: gbnf.ASTNode) -> list[int]:
        """The characters of a literal one by one, or those of a class."""
        text = str(leaf)
        if text not in self._read:
            ranges = _ranges(leaf)
            is_literal = isinstance(leaf, gbnf.LiteralNode)
            self._read[text] = [
                *map(self._set_of, [[each] for each in ranges] if is_literal else [ranges])
            ]
        return self._read[text]

    def with_first_bytes(self, found: int) -> int:
        """``found``, and all characters whose first byte is one of theirs: a lexer reads bytes."""
        for group in self._of_first_bytes:
            if found & group:
                found |= group
        return found

    def _set_of(self, ranges: Sequence[tuple[int, int]]) -> int:
        found = 0
        for low, high in ranges:
            end = self._place.get(high + 1, len(self._starts))
            found |= (1 << end) - (1 << self._place[low])
        return found


def characters_of(value: str) -> list[str]:
    """A literal's value one character at a time, each as the converter wrote it."""
    return [text for text, _, _ in _read(value)]


def codes_of(value: str) -> list[int]:
    """The characters of a literal's value."""
    return [code for _, code, _ in _read(value)]


def _ranges(node: gbnf.ASTNode) -> list[tuple[int, int]]:
    """The characters of a class, or of a literal one by one."""
    if isinstance(node, gbnf.LiteralNode):
        return [(code, code) for code in codes_of(node.value)]
    if not isinstance(node, gbnf.RegexNode):
        return []
    if node.rx == ".":
        return _complement([(10, 10)])
    text = node.rx[1:-1]
    is_negative = text.startswith("^")
    codes = [(code, is_escaped) for _, code, is_escaped in _read(text[is_negative:])]
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(codes):
        code = codes[place][0]
        is_range = place + 2 < len(codes) and codes[place + 1] == (ord("-"), False)
        found.append((code, codes[place + 2][0] if is_range else code))
        place += 3 if is_range else 1
    return _complement(found) if is_negative else found


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, _LAST)] if start <= _LAST else found


def _read(text: str) -> Iterator[tuple[str, int, bool]]:
    """Characters as the converter wrote them, their codes, and whether each was escaped."""
    index = 0
    while index < len(text):
        end = index + 1
        if text[index] != "\\":
            code = ord(text[index])
        elif text[index + 1] == "x":
            end = index + 4
            code = int(text[index + 2 : end], 16)
        else:
            end = index + 2
            code = ord(_CONTROLS.get(text[index + 1], text[index + 1]))
        yield text[index:end], code, end > index + 1
        index = end
