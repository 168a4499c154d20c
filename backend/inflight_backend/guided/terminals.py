"""Parts of a grammar that a single regular expression can stand for.

llguidance follows a regex by a table, rules by a parser: where every [class] is a symbol of its
own, the texts of a large vocabulary are more than it may look at in a step. But it ends a regex
only where that cannot go on, and waits while any that has begun can. So a part becomes a regex
where its next character tells at every place whether it goes on (as in LL(1)), and where nothing
else that may be possible there begins as it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llguidance import gbnf_to_lark as gbnf

from inflight_backend.guided.bounds import MAX_UNROLLED, pattern_size

_MAX_RUN = 12
_MAX_REGEX = 2000
"""Characters of a regex that is made here."""

_MAX_WORK = 150_000
"""Looks at parts of a grammar, some 0.3 s; one that takes more stays as it is."""

_MAX_PASSES = 40
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = 0x10FFFF


def join_terminals(rules: Sequence[gbnf.RuleNode]) -> list[gbnf.RuleNode]:
    """The rules that are left once regexes are in the place of what they can stand for. References
    have their targets; the rule called ``start`` is the answer."""
    for rule in rules:
        rule.alternatives = _split_optional(_without_tail_calls(rule))
    try:
        return _Joiner(rules).join()
    except (RecursionError, _TooMuchWork):
        return list(rules)


class _TooMuchWork(Exception):
    """The grammar is too large for this."""


def _without_tail_calls(rule: gbnf.RuleNode) -> gbnf.ASTNode:
    """``a ::= x a | y`` as ``x* y``."""
    choices = _choices(rule.alternatives)
    tails = [each for each in choices if _ends_with(each, rule)]
    others = [each for each in choices if not _ends_with(each, rule)]
    bodies = [gbnf.SequenceNode(each.children()[:-1]) for each in tails]
    if not tails or not others or any(_mentions(each, rule) for each in (*bodies, *others)):
        return rule.alternatives
    loop = gbnf.RepetitionNode(gbnf.AlternativeNode([*bodies]), 0, None)
    return gbnf.SequenceNode([loop, gbnf.AlternativeNode(others)])


def _choices(node: gbnf.ASTNode) -> list[gbnf.ASTNode]:
    if isinstance(node, gbnf.AlternativeNode):
        return [choice for each in node.alternatives for choice in _choices(each)]
    if isinstance(node, gbnf.RepetitionNode) and (node.min_times, node.max_times) == (0, 1):
        return [*_choices(node.node), gbnf.LiteralNode("")]
    return [node]


def _ends_with(node: gbnf.ASTNode, rule: gbnf.RuleNode) -> bool:
    last = node.nodes[-1] if isinstance(node, gbnf.SequenceNode) and len(node.nodes) > 1 else None
    return isinstance(last, gbnf.RuleRefNode) and last.target is rule


def _mentions(node: gbnf.ASTNode, rule: gbnf.RuleNode) -> bool:
    return any(isinstance(each, gbnf.RuleRefNode) and each.target is rule for each in _all(node))


def _all(node: gbnf.ASTNode) -> Iterator[gbnf.ASTNode]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        waiting += each.children()
        yield each


def _split_optional(node: gbnf.ASTNode) -> gbnf.ASTNode:
    """``x*`` as ``(x+)?``: a regex of nothing is none."""
    if isinstance(node, gbnf.SequenceNode):
        node.nodes = [*map(_split_optional, node.nodes)]
    elif isinstance(node, gbnf.AlternativeNode):
        node.alternatives = [*map(_split_optional, node.alternatives)]
    elif isinstance(node, gbnf.RepetitionNode):
        if node.max_times == 0:
            return gbnf.LiteralNode("")
        node.node = _split_optional(node.node)
        if node.min_times == 0 and node.max_times != 1:
            some = gbnf.RepetitionNode(node.node, 1, node.max_times)
            return gbnf.RepetitionNode(some, 0, 1)
    return node


class _Joined(NamedTuple):
    """A regex: the nodes that it stands for, what it begins with, its length."""

    key: tuple[int, ...]
    first: int
    size: int


class _Joiner:
    """Sets of characters are the bits of a number, one for each group that no class parts."""

    def __init__(self, rules: Sequence[gbnf.RuleNode]) -> None:
        self._rules = rules
        ranges = [each for rule in rules for node in _all(rule) for each in _ranges(node)]
        starts = {0} | {low for low, _ in ranges} | {high + 1 for _, high in ranges}
        self._starts = sorted(each for each in starts if each <= _LAST)
        self._place = {start: place for place, start in enumerate(self._starts)}
        self._everything = (1 << len(self._starts)) - 1
        self._leaves: dict[int, int] = {}
        self._first = {id(rule): 0 for rule in rules}
        self._may_be_empty = {id(rule): False for rule in rules}
        self._follow = {id(rule): 0 for rule in rules}
        self._sizes = {id(rule): _MAX_REGEX + 1 for rule in rules}  # as regexes, if they are any
        self._plain: dict[tuple[int, int], bool] = {}
        self._found: dict[int, tuple[int, bool]] = {}
        self._work = 0
        self._rejected: set[tuple[int, ...]] = set()
        self._shared = 0
        self._joined: dict[int, _Joined] = {}

    def join(self) -> list[gbnf.RuleNode]:
        """See `join_terminals`."""
        self._solve()
        (start,) = (rule for rule in self._rules if rule.name == "start")
        if self._sizes[id(start)] <= _MAX_REGEX:  # nothing else is there that may begin alike
            regex = _regex(start.alternatives)
            if pattern_size(regex) <= MAX_UNROLLED:
                start.alternatives = _top(gbnf.RegexNode(regex))
                return [start]
        for _ in range(_MAX_PASSES):
            self._shared, self._joined = 0, {}
            made: dict[str, gbnf.ASTNode] = {}
            waiting = [start]
            while waiting:
                rule = waiting.pop()
                if rule.name not in made:
                    node = self._rewrite(rule.alternatives, self._follow[id(rule)])
                    made[rule.name] = node
                    waiting += _targets(node)
            wrong = self._crowded(made.values()) if self._shared else set()
            if not wrong:
                kept = [rule for rule in self._rules if rule.name in made]
                for rule in kept:
                    rule.alternatives = _top(made[rule.name])
                return kept
            self._rejected |= wrong
        raise _TooMuchWork

    def _solve(self) -> None:
        """What rules begin with and what comes behind them, until nothing changes."""
        last_first = self._rules[::-1]  # they are what others are made of
        before: object = None
        while before != (state := (dict(self._first), dict(self._may_be_empty), dict(self._sizes))):
            before = state
            for rule in last_first:
                self._first[id(rule)] = self.first(rule.alternatives)
                self._may_be_empty[id(rule)] = self.may_be_empty(rule.alternatives)
                self._sizes[id(rule)] = self._size(rule.alternatives)
        for node in (node for rule in self._rules for node in _all(rule.alternatives)):
            self._found[id(node)] = (self.first(node), self.may_be_empty(node))
        before = None
        while before != (follow := dict(self._follow)):
            before = follow
            for rule in self._rules:
                self._spread(rule.alternatives, self._follow[id(rule)])

    def _size(self, node: gbnf.ASTNode) -> int:
        """As a regex; above the limit if it is none."""
        self._count()
        if isinstance(node, gbnf.RuleRefNode):
            return self._sizes[id(node.target)]
        if isinstance(node, gbnf.RepetitionNode):
            return min(self._size(node.node) + 16, _MAX_REGEX + 1)
        if isinstance(node, gbnf.LiteralNode | gbnf.RegexNode):
            return len(str(node))
        return min(sum(map(self._size, node.children())) + 4, _MAX_REGEX + 1)

    def _count(self) -> None:
        self._work += 1
        if self._work > _MAX_WORK:
            raise _TooMuchWork

    def _spread(self, node: gbnf.ASTNode, follow: int) -> None:
        """Tell the rules in ``node`` what may come behind them."""
        self._count()
        if isinstance(node, gbnf.RuleRefNode):
            self._follow[id(node.target)] |= follow
        for child, behind in self._parts(node, follow):
            self._spread(child, behind)

    def _parts(self, node: gbnf.ASTNode, follow: int) -> Iterator[tuple[gbnf.ASTNode, int]]:
        """Those of ``node``, the last first, each with what may come behind it."""
        if isinstance(node, gbnf.SequenceNode):
            for child in reversed(node.nodes):
                yield child, follow
                follow = self.first(child) | (follow if self.may_be_empty(child) else 0)
        elif isinstance(node, gbnf.RepetitionNode):
            is_loop = node.max_times is None or node.max_times > 1
            yield node.node, follow | (self.first(node.node) if is_loop else 0)
        else:
            for child in node.children():
                yield child, follow

    def first(self, node: gbnf.ASTNode) -> int:
        """The characters that it begins with."""
        if id(node) in self._found:
            return self._found[id(node)][0]
        self._count()
        if isinstance(node, gbnf.RuleRefNode):
            return self._first[id(node.target)]
        if isinstance(node, gbnf.SequenceNode):
            found = 0
            for child in node.nodes:
                found |= self.first(child)
                if not self.may_be_empty(child):
                    break
            return found
        if children := node.children():
            return _union(map(self.first, children))
        if id(node) not in self._leaves:
            ranges = _ranges(node)
            is_text = isinstance(node, gbnf.LiteralNode)
            self._leaves[id(node)] = self._set_of(ranges[:1] if is_text else ranges)
        return self._leaves[id(node)]

    def may_be_empty(self, node: gbnf.ASTNode) -> bool:
        """True if nothing is one of its texts."""
        if id(node) in self._found:
            return self._found[id(node)][1]
        self._count()
        if isinstance(node, gbnf.RuleRefNode):
            return self._may_be_empty[id(node.target)]
        if isinstance(node, gbnf.SequenceNode):
            return all(map(self.may_be_empty, node.nodes))
        if isinstance(node, gbnf.AlternativeNode):
            return any(map(self.may_be_empty, node.alternatives))
        if isinstance(node, gbnf.RepetitionNode):
            return node.min_times == 0 or self.may_be_empty(node.node)
        return isinstance(node, gbnf.LiteralNode) and not node.value

    def _doubts(self, node: gbnf.ASTNode, follow: int) -> int:
        """Characters at which it cannot be told how to go on here."""
        doubts = 0
        if isinstance(node, gbnf.AlternativeNode):
            seen = follow if self.may_be_empty(node) else 0
            for choice in node.alternatives:
                first = self.first(choice)
                doubts, seen = doubts | seen & first, seen | first
        elif isinstance(node, gbnf.RepetitionNode) and node.min_times != node.max_times:
            doubts = self.first(node.node) & follow
        return doubts

    def _is_plain(self, node: gbnf.ASTNode, follow: int) -> bool:
        """True where the next character always tells how to go on."""
        self._count()
        key = (id(node), follow)
        if key not in self._plain:
            self._plain[key] = self._find_plain(node, follow)
        return self._plain[key]

    def _find_plain(self, node: gbnf.ASTNode, follow: int) -> bool:
        if isinstance(node, gbnf.RuleRefNode):
            return node.target is not None and self._is_plain(node.target.alternatives, follow)
        if isinstance(node, gbnf.RepetitionNode) and self.may_be_empty(node.node):
            return False
        if isinstance(node, gbnf.AlternativeNode) and (
            sum(map(self.may_be_empty, node.alternatives)) > 1
        ):
            return False  # there would be two ways to nothing
        return not self._doubts(node, follow) and all(
            self._is_plain(*part) for part in self._parts(node, follow)
        )

    def _can_join(self, nodes: Sequence[gbnf.ASTNode], follow: int) -> bool:
        """True if a regex can stand for ``nodes``, one behind the other."""
        if len(nodes) == 1 and isinstance(nodes[0], gbnf.LiteralNode | gbnf.RegexNode):
            return False
        run = gbnf.SequenceNode([*nodes])
        return (
            _key(nodes) not in self._rejected
            and self._size(run) <= _MAX_REGEX
            and not self.may_be_empty(run)
            and all(self._is_plain(*part) for part in self._parts(run, follow))
            and pattern_size(_regex(run)) <= MAX_UNROLLED
        )

    def _rewrite(self, node: gbnf.ASTNode, follow: int) -> gbnf.ASTNode:
        """``node`` with regexes; notes them, and what begins in more than one way beside them."""
        if isinstance(node, gbnf.SequenceNode):
            return gbnf.SequenceNode(self._rewrite_run(node, follow))
        if self._can_join([node], follow):
            return self._join([node])
        if isinstance(node, gbnf.AlternativeNode | gbnf.RepetitionNode):
            self._shared |= self._doubts(node, follow)
            made = [self._rewrite(*part) for part in self._parts(node, follow)]
            if isinstance(node, gbnf.AlternativeNode):
                return gbnf.AlternativeNode(made)
            return gbnf.RepetitionNode(made[0], node.min_times, node.max_times)
        return node

    def _rewrite_run(self, node: gbnf.SequenceNode, follow: int) -> list[gbnf.ASTNode]:
        behind = [each for _, each in self._parts(node, follow)][::-1]
        made: list[gbnf.ASTNode] = []
        start = 0
        while start < len(node.nodes):
            for end in range(min(len(node.nodes), start + _MAX_RUN), start, -1):
                nodes = node.nodes[start:end]
                if self._can_join(nodes, behind[end - 1]):
                    made.append(self._join(nodes))
                    break
            else:
                end = start + 1
                made.append(self._rewrite(node.nodes[start], behind[start]))
            start = end
        return made

    def _join(self, nodes: Sequence[gbnf.ASTNode]) -> gbnf.ASTNode:
        run = gbnf.SequenceNode([*nodes])
        made = gbnf.RegexNode(_regex(run))
        self._joined[id(made)] = _Joined(_key(nodes), self.first(run), len(made.rx))
        return made

    def _crowded(self, nodes: Iterable[gbnf.ASTNode]) -> set[tuple[int, ...]]:
        """Regexes beside which another symbol begins alike: where a choice was left open, both
        may be possible at once anywhere behind it. Of two regexes the longer one goes: a part of it
        may turn out to be the other."""
        firsts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        joined: list[tuple[str, _Joined]] = []
        for leaf in (each for node in nodes for each in _all(node)):
            if isinstance(leaf, gbnf.LiteralNode | gbnf.RegexNode):
                found, text = self._joined.get(id(leaf)), str(leaf)
                firsts[text] = self.first(leaf) if found is None else found.first
                sizes[text] = 0 if found is None else found.size
                joined += [] if found is None else [(text, found)]
        wrong = set()
        for text, each in joined:
            for other, first in firsts.items():
                self._count()
                if first & each.first and other != text and sizes[other] <= each.size:
                    wrong.add(each.key)
                    break
        return wrong

    def _set_of(self, ranges: Sequence[tuple[int, int]]) -> int:
        found = 0
        for low, high in ranges:
            end = self._place.get(high + 1, len(self._starts))
            found |= (1 << end) - (1 << self._place[low])
        return found


def _key(nodes: Sequence[gbnf.ASTNode]) -> tuple[int, ...]:
    return tuple(map(id, nodes))


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _targets(node: gbnf.ASTNode) -> list[gbnf.RuleNode]:
    found = (each.target for each in _all(node) if isinstance(each, gbnf.RuleRefNode))
    return [each for each in found if each is not None]


def _top(node: gbnf.ASTNode) -> gbnf.AlternativeNode:
    return node if isinstance(node, gbnf.AlternativeNode) else gbnf.AlternativeNode([node])


def _ranges(node: gbnf.ASTNode) -> list[tuple[int, int]]:
    """The characters of a class, or of a literal one by one."""
    if isinstance(node, gbnf.LiteralNode):
        return [(code, code) for code, _ in _codes(node.value)]
    if not isinstance(node, gbnf.RegexNode):
        return []
    if node.rx == ".":
        return _complement([(10, 10)])
    text = node.rx[1:-1]
    is_negative = text.startswith("^")
    codes = [*_codes(text[is_negative:])]
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


def _codes(text: str) -> Iterator[tuple[int, bool]]:
    """Characters as the converter wrote them, and whether each was escaped."""
    index = 0
    while index < len(text):
        if text[index] != "\\":
            yield ord(text[index]), False
            index += 1
        elif text[index + 1] == "x":
            yield int(text[index + 2 : index + 4], 16), True
            index += 4
        else:
            yield ord(_CONTROLS.get(text[index + 1], text[index + 1])), True
            index += 2


def _regex(node: gbnf.ASTNode) -> str:
    if isinstance(node, gbnf.LiteralNode):
        return "".join(_escaped(code) for code, _ in _codes(node.value))
    if isinstance(node, gbnf.RegexNode):
        return str(node.rx)
    if isinstance(node, gbnf.RuleRefNode):
        assert node.target is not None
        return _regex(node.target.alternatives)
    if isinstance(node, gbnf.RepetitionNode):
        most = "" if node.max_times is None else node.max_times
        return f"(?:{_regex(node.node)}){{{node.min_times},{most}}}"
    parts = map(_regex, node.children())
    return "".join(parts) if isinstance(node, gbnf.SequenceNode) else f"(?:{'|'.join(parts)})"


def _escaped(code: int) -> str:
    character = chr(code)
    return character if code > 0x7F or character.isalnum() else f"\\x{code:02X}"
