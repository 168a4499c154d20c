"""Where symbols of a grammar would be read on although another text is meant.

llguidance reads a symbol on as long as one that may begin here can go on, and only then asks which
have ended: beside "<=" it never ends "<" before "=", though a rule may have "=" behind "<". So this
looks for two symbols that may begin together, of which one may end where the other goes on with a
character that may also come behind the first. A literal that goes on there is cut at this place:
what is common is read first and the rest is a symbol of its own, which only the grammar tells from
others. A regex that goes on has to be taken apart. Where neither is left, every symbol ends where
all that have begun with it end, and what is read is what the grammar derives.

What calls a rule is not remembered, so some may seem to begin together that never do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from llguidance import gbnf_to_lark as gbnf

from inflight_backend.guided.characters import Characters, characters_of
from inflight_backend.guided.flow import Count, Flow, all_parts, target_of, union

MAX_PLACES = 8_000
"""Characters of a grammar: the search takes some MB for so many."""

Cuts = Mapping[str, set[int]]
"""Of literals, as they are written, the places at which they are cut."""

_Value = TypeVar("_Value", bound=Hashable)
_Ends = tuple[int, int, bool]
"""Where a part begins, where it ends, and whether it may be empty."""


class TooMuchWork(Exception):
    """The grammar is too large for this."""


class Lexing:
    """The places of a grammar, one for each of its characters, and which are read together.

    Sets of places are the bits of a number.
    """

    def __init__(
        self,
        bodies: Mapping[str, gbnf.ASTNode],
        regexes: Mapping[int, Sequence[gbnf.ASTNode]],
        characters: Characters,
        count: Count,
    ) -> None:
        """``bodies``: of the rules, by name, of which ``start`` is the answer; ``regexes``: what
        those stand for that are more than a class, by the id of their nodes."""
        self.cuts: dict[str, set[int]] = {}
        self.wrong: set[str] = set()
        self._read = characters.read
        self._with_first_bytes = characters.with_first_bytes
        self._count = count
        self._sets: list[int] = []  # of characters, of each place
        self._symbols: list[str] = []  # that it is in
        self._offsets: list[int] = []  # characters of a literal up to here; else 0
        self._inner: list[int] = []  # places behind it in the same symbol
        self._outer: list[int] = []  # places where another symbol may begin behind it
        self._leaves: dict[int, _Ends] = {}
        self._characters: dict[int, int] = {}
        for leaf in (leaf for body in bodies.values() for leaf in all_parts(body)):
            if isinstance(leaf, gbnf.LiteralNode | gbnf.RegexNode):
                run = regexes.get(id(leaf), [leaf])
                self._leaves[id(leaf)] = self._expand_run(run, str(leaf))
        flow = Flow(bodies, lambda leaf: self._leaves[id(leaf)][0], count)
        for name, body in bodies.items():
            self._connect(body, flow.follow[name], flow)
        self._weight = 1 + len(self._sets) // 1000  # of a look, for the sets are as long
        self._alike = _Places(self._sets, count).sharing
        self._of_symbol = _where(self._symbols)
        self._mates = _where(zip(self._symbols, self._offsets, strict=True))
        self._going_on = union(1 << place for place, to in enumerate(self._inner) if to)
        self._in_literals = union(
            1 << place for place, offset in enumerate(self._offsets) if offset
        )
        self._cut = 0  # places in literals behind which these are cut
        self._ending = union(1 << place for place, to in enumerate(self._outer) if to)
        self._taken_with = _Places(map(self._next, self._inner), count).sharing
        while self._mends(flow.first(bodies["start"])) and not self.wrong:
            pass

    def _expand(self, node: gbnf.ASTNode, symbol: str) -> _Ends:
        """Places for ``node``, a part of ``symbol``."""
        if isinstance(node, gbnf.RuleRefNode):
            return self._expand(target_of(node).alternatives, symbol)
        if isinstance(node, gbnf.SequenceNode):
            return self._expand_run(node.nodes, symbol)
        if isinstance(node, gbnf.RepetitionNode):
            first, last, may_be_empty = self._expand(node.node, symbol)
            if node.max_times is None or node.max_times > 1:
                self._lead(last, first)
            return first, last, may_be_empty or node.min_times == 0
        if children := node.children():
            ends = [self._expand(child, symbol) for child in children]
            firsts, lasts, empties = zip(*ends, strict=True)
            return union(firsts), union(lasts), any(empties)
        return self._add(node, symbol)

    def _expand_run(self, nodes: Sequence[gbnf.ASTNode], symbol: str) -> _Ends:
        first, last, may_be_empty = 0, 0, True
        for node in nodes:
            first_here, last_here, may_be_empty_here = self._expand(node, symbol)
            self._lead(last, first_here)
            first |= first_here if may_be_empty else 0
            last = last_here | (last if may_be_empty_here else 0)
            may_be_empty = may_be_empty and may_be_empty_here
        return first, last, may_be_empty

    def _add(self, leaf: gbnf.ASTNode, symbol: str) -> _Ends:
        start = len(self._sets)
        sets = self._read(leaf)
        for offset, found in enumerate(sets, start=1):
            place = len(self._sets)
            if place >= MAX_PLACES:
                raise TooMuchWork
            self._sets.append(found)
            self._symbols.append(symbol)
            self._offsets.append(offset if symbol.startswith('"') else 0)
            self._inner.append(1 << place + 1 if offset < len(sets) else 0)
            self._outer.append(0)
        return (1 << start, 1 << start + len(sets) - 1, False) if sets else (0, 0, True)

    def _lead(self, places: int, to: int) -> None:
        for place in _bits(places):
            self._inner[place] |= to

    def _connect(self, node: gbnf.ASTNode, follow: int, flow: Flow) -> None:
        """Lead from the ends of the symbols in ``node`` to what may come behind them."""
        self._count(1)
        if id(node) in self._leaves:
            for place in _bits(self._leaves[id(node)][1]):
                self._outer[place] |= follow
        for child, behind in flow.parts(node, follow):
            self._connect(child, behind, flow)

    def _mends(self, start: int) -> bool:
        """Find what is read together, from the first character on, and mend what is wrong there;
        True if something was: what was read before that may go on in more ways."""
        self._together = [0] * len(self._sets)
        self._waiting: dict[int, int] = {}
        self._done: dict[int, int] = {}
        is_mended = False
        self._meet(start, start)
        while self._waiting:
            place = next(iter(self._waiting))
            new = self._waiting.pop(place)
            for other in _bits(self._mistaken(place, new)):
                is_mended = self._mend(other) or is_mended
            self._meet(self._inner[place], self._inside(new & self._going_on))
            if behind := self._outer[place]:
                met = self._done.get(behind, 0)
                more = self._outside(new) & ~met
                self._done[behind] = met | more
                self._meet(behind, more)
        return is_mended

    def _meet(self, places: int, others: int) -> None:
        """Note which of ``places`` and of ``others`` can be one character."""
        if others.bit_count() < places.bit_count():  # most of these have other characters
            places &= union(self._alike(self._sets[other]) for other in _bits(others))
        for place in _bits(places):
            self._count(self._weight)
            new = others & self._alike(self._sets[place]) & ~self._together[place]
            if new:
                self._together[place] |= new
                self._waiting[place] = self._waiting.get(place, 0) | new

    def _inside(self, places: int) -> int:
        """Those behind ``places`` in the same symbols; in literals that is the next one each."""
        found = (places & self._in_literals) << 1
        for place in _bits(places & ~self._in_literals):
            self._count(self._weight)
            found |= self._inner[place]
        return found

    def _outside(self, places: int) -> int:
        """Those behind ``places`` where other symbols begin."""
        found = (places & self._cut) << 1
        for place in _bits(places & self._ending):
            self._count(self._weight)
            found |= self._outer[place]
        return found

    def _mistaken(self, place: int, others: int) -> int:
        """Those of ``others`` at which a symbol goes on with what may come behind one that ends at
        ``place``. Of one regex that is not so: `terminals` makes no such one."""
        if not self._outer[place]:
            return 0
        found = others & self._going_on & self._taken_with(self._next(self._outer[place]))
        return found if self._offsets[place] else found & ~self._of_symbol[self._symbols[place]]

    def _mend(self, place: int) -> bool:
        """Cut the literal that ``place`` is in behind it; a regex is noted, for another search."""
        symbol, offset = self._symbols[place], self._offsets[place]
        if not offset:
            self.wrong.add(symbol)
            return False
        self.cuts.setdefault(symbol, set()).add(offset)
        mates = self._mates[symbol, offset] & self._going_on  # else they are cut already
        self._going_on &= ~mates
        self._cut |= mates
        for each in _bits(mates):
            self._outer[each], self._inner[each] = self._inner[each], 0
        return True

    def _next(self, places: int) -> int:
        """The characters of these places, and those that begin with the same byte."""
        if places not in self._characters:
            found = union(self._sets[place] for place in _bits(places))
            self._characters[places] = self._with_first_bytes(found)
        return self._characters[places]


class _Places:
    """The places of sets of characters."""

    def __init__(self, sets: Iterable[int], count: Count) -> None:
        """``sets``: of each place."""
        self._count = count
        self._all = _where(sets)
        self._wide = {each: places for each, places in self._all.items() if each & (each - 1)}
        self._sharing: dict[int, int] = {}

    def sharing(self, found: int) -> int:
        """Those whose sets have one of these characters."""
        if found not in self._sharing:
            is_wide = found & (found - 1) > 0
            others = self._all if is_wide else self._wide
            self._count(len(others))
            places = union(each for other, each in others.items() if other & found)
            self._sharing[found] = places if is_wide else places | self._all.get(found, 0)
        return self._sharing[found]


def cut_literals(node: gbnf.ASTNode, cuts: Cuts) -> gbnf.ASTNode:
    """``node`` with its literals in pieces."""
    if isinstance(node, gbnf.LiteralNode) and (places := cuts.get(str(node))):
        characters = characters_of(node.value)
        bounds = [0, *sorted(places), len(characters)]
        texts = ["".join(characters[a:b]) for a, b in pairwise(bounds)]
        return gbnf.SequenceNode([gbnf.LiteralNode(text) for text in texts])
    if isinstance(node, gbnf.RepetitionNode):
        made = cut_literals(node.node, cuts)
        return gbnf.RepetitionNode(made, node.min_times, node.max_times)
    if isinstance(node, gbnf.SequenceNode):
        return gbnf.SequenceNode([cut_literals(each, cuts) for each in node.nodes])
    if isinstance(node, gbnf.AlternativeNode):
        return gbnf.AlternativeNode([cut_literals(each, cuts) for each in node.alternatives])
    return node


def _where(values: Iterable[_Value]) -> dict[_Value, int]:
    """The places of each value."""
    found: dict[_Value, int] = {}
    for place, value in enumerate(values):
        found[value] = found.get(value, 0) | 1 << place
    return found


def _bits(found: int) -> Iterator[int]:
    while found:
        low = found & -found
        yield low.bit_length() - 1
        found ^= low
