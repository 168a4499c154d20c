"""Parts of a grammar that a single regular expression can stand for.

llguidance follows a regex by a table, rules by a parser: where every [class] is a symbol of its
own, the texts of a large vocabulary are more than it may look at in a step. But it ends a regex
only where that cannot go on, and waits while any that has begun can. So a part becomes a regex
where its next character tells at every place whether it goes on (as in LL(1)), and where nothing
else that may be possible there is lost by it; for the same reason literals are cut (see `lexing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llguidance import gbnf_to_lark as gbnf

from inflight_backend.guided.bounds import MAX_UNROLLED, pattern_size
from inflight_backend.guided.characters import Characters, codes_of
from inflight_backend.guided.flow import Flow, all_parts, target_of
from inflight_backend.guided.lexing import Cuts, Lexing, TooMuchWork, cut_literals

_MAX_RUN = 12
_MAX_REGEX = 2000
"""Characters of a regex that is made here."""

_MAX_WORK = 150_000
"""Looks at parts of a grammar, some 0.3 s; one that takes more stays as it is."""

_MAX_READING = 500_000
"""Looks at what is read together, some 0.5 s; of a larger grammar the literals stay whole."""

_MAX_CLOSE_READING = 220_000
"""Of these to find out which regexes have to go; then more of them do."""

_MAX_PASSES = 40
_CLOSE_PASSES = 8


def join_terminals(rules: Sequence[gbnf.RuleNode]) -> list[gbnf.RuleNode]:
    """The rules that are left once regexes are in the place of what they can stand for, and pieces
    in that of literals which would be read on too far. References have their targets; the rule
    called ``start`` is the answer."""
    for rule in rules:
        rule.alternatives = _split_optional(_without_tail_calls(rule))
    try:
        return _Joiner(rules).join()
    except (RecursionError, TooMuchWork):
        pass
    try:
        return _cut(rules)
    except (RecursionError, TooMuchWork):
        return list(rules)


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
    return any(
        isinstance(each, gbnf.RuleRefNode) and each.target is rule for each in all_parts(node)
    )


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


class _Budget:
    """Raises `TooMuchWork` at the end of it."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, cost: int) -> None:
        """For one look at a part."""
        self._left -= cost
        if self._left < 0:
            raise TooMuchWork


class _Joiner:
    """Sets of characters are those of `Characters`."""

    def __init__(self, rules: Sequence[gbnf.RuleNode]) -> None:
        self._rules = rules
        self._bodies = {rule.name: rule.alternatives for rule in rules}
        self._work = _Budget(_MAX_WORK)
        self._characters = _characters_of(rules)
        self._flow = Flow(self._bodies, self._begin, self._count)
        self._sizes = {id(rule): _MAX_REGEX + 1 for rule in rules}  # as regexes, if they are any
        self._plain: dict[tuple[int, int], bool] = {}
        self._could_join: dict[tuple[tuple[int, ...], int], bool] = {}
        self._rejected: set[tuple[int, ...]] = set()
        self._apart: set[int] = set()
        self._is_open = False
        self._joined: dict[int, Sequence[gbnf.ASTNode]] = {}

    def join(self) -> list[gbnf.RuleNode]:
        """See `join_terminals`."""
        self._measure()
        (start,) = (rule for rule in self._rules if rule.name == "start")
        if self._sizes[id(start)] <= _MAX_REGEX:  # nothing else is there that may begin alike
            regex = _regex(start.alternatives)
            if pattern_size(regex) <= MAX_UNROLLED:
                start.alternatives = _top(gbnf.RegexNode(regex))
                return [start]
        try:
            return self._settle(start, is_close=True)
        except TooMuchWork:
            self._rejected, self._apart = set(), set()
            self._work = _Budget(_MAX_WORK)
            return self._settle(start, is_close=False)

    def _settle(self, start: gbnf.RuleNode, *, is_close: bool) -> list[gbnf.RuleNode]:
        """Reject regexes until none is wrong. ``is_close``: those that the search has found, else
        first all beside which another symbol begins alike, which is sooner done."""
        budget = _Budget(_MAX_CLOSE_READING if is_close else _MAX_READING)
        for number in range(_MAX_PASSES):
            made = self._rewrite_rules(start)
            cuts: Cuts = {}
            wrong: set[str] = set()
            if self._is_open:
                wrong = set() if is_close else self._crowded(made.values())
            if self._is_open and not wrong:
                try:
                    lexing = Lexing(made, self._joined, self._characters, budget.take)
                    wrong, cuts = lexing.wrong, lexing.cuts
                except TooMuchWork:
                    if is_close:
                        raise
            if not wrong:
                return _with_bodies(self._rules, made, cuts)
            self._reject(made.values(), wrong, with_parts=is_close and number >= _CLOSE_PASSES)
        raise TooMuchWork

    def _reject(self, bodies: Iterable[gbnf.ASTNode], wrong: set[str], *, with_parts: bool) -> None:
        """Make these regexes no more; ``with_parts``: nor any of a part of them."""
        for node in (node for body in bodies for node in all_parts(body)):
            if id(node) in self._joined and str(node) in wrong:
                nodes = self._joined[id(node)]
                self._rejected |= {
                    _key(nodes[:end]) for end in range(len(nodes) // 2 + 1, len(nodes) + 1)
                }
                if with_parts:
                    self._apart |= {id(part) for each in nodes for part in all_parts(each)}

    def _crowded(self, bodies: Iterable[gbnf.ASTNode]) -> set[str]:
        """Regexes beside which another symbol begins alike. Of two the longer one goes: a part of
        it may turn out to be the other."""
        firsts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for leaf in (each for body in bodies for each in all_parts(body)):
            if isinstance(leaf, gbnf.LiteralNode | gbnf.RegexNode):
                nodes, text = self._joined.get(id(leaf), [leaf]), str(leaf)
                firsts[text] = self._flow.first(gbnf.SequenceNode([*nodes]))
                sizes[text] = len(text) if id(leaf) in self._joined else 0
        wrong = set()
        for text in (text for text, size in sizes.items() if size):
            for other, first in firsts.items():
                self._count(1)
                if first & firsts[text] and other != text and sizes[other] <= sizes[text]:
                    wrong.add(text)
                    break
        return wrong

    def _rewrite_rules(self, start: gbnf.RuleNode) -> dict[str, gbnf.ASTNode]:
        """What is left of the rules, with regexes; notes these, and whether a choice stays open."""
        self._is_open, self._joined = False, {}
        made: dict[str, gbnf.ASTNode] = {}
        waiting = [start]
        while waiting:
            rule = waiting.pop()
            if rule.name not in made:
                node = self._rewrite(rule.alternatives, self._flow.follow[rule.name])
                made[rule.name] = node
                waiting += _targets(node)
        return made

    def _count(self, cost: int) -> None:
        self._work.take(cost)

    def _measure(self) -> None:
        """The sizes of rules as regexes, until nothing changes."""
        last_first = self._rules[::-1]  # they are what others are made of
        before: object = None
        while before != (sizes := dict(self._sizes)):
            before = sizes
            for rule in last_first:
                self._sizes[id(rule)] = self._size(rule.alternatives)

    def _size(self, node: gbnf.ASTNode) -> int:
        """As a regex; above the limit if it is none."""
        self._count(1)
        if isinstance(node, gbnf.RuleRefNode):
            return self._sizes[id(node.target)]
        if isinstance(node, gbnf.RepetitionNode):
            return min(self._size(node.node) + 16, _MAX_REGEX + 1)
        if isinstance(node, gbnf.LiteralNode | gbnf.RegexNode):
            return len(str(node))
        return min(sum(map(self._size, node.children())) + 4, _MAX_REGEX + 1)

    def _begin(self, leaf: gbnf.ASTNode) -> int:
        """What a literal or a class begins with."""
        return next(iter(self._characters.read(leaf)), 0)

    def _doubts(self, node: gbnf.ASTNode, follow: int) -> int:
        """Characters at which it cannot be told how to go on here."""
        doubts = 0
        if isinstance(node, gbnf.AlternativeNode):
            seen = follow if self._flow.may_be_empty(node) else 0
            for choice in node.alternatives:
                first = self._flow.first(choice)
                doubts, seen = doubts | seen & first, seen | first
        elif isinstance(node, gbnf.RepetitionNode) and node.min_times != node.max_times:
            doubts = self._flow.first(node.node) & follow
        return doubts

    def _is_plain(self, node: gbnf.ASTNode, follow: int) -> bool:
        """True where the next character always tells how to go on."""
        self._count(1)
        key = (id(node), follow)
        if key not in self._plain:
            self._plain[key] = self._find_plain(node, follow)
        return self._plain[key]

    def _find_plain(self, node: gbnf.ASTNode, follow: int) -> bool:
        if isinstance(node, gbnf.RuleRefNode):
            return node.target is not None and self._is_plain(node.target.alternatives, follow)
        if isinstance(node, gbnf.RepetitionNode) and self._flow.may_be_empty(node.node):
            return False
        if isinstance(node, gbnf.AlternativeNode) and (
            sum(map(self._flow.may_be_empty, node.alternatives)) > 1
        ):
            return False  # there would be two ways to nothing
        return not self._doubts(node, follow) and all(
            self._is_plain(*part) for part in self._flow.parts(node, follow)
        )

    def _can_join(self, nodes: Sequence[gbnf.ASTNode], follow: int) -> bool:
        """True if a regex can stand for ``nodes``, one behind the other."""
        if len(nodes) == 1 and isinstance(nodes[0], gbnf.LiteralNode | gbnf.RegexNode):
            return False
        key = _key(nodes)
        if key in self._rejected or not self._apart.isdisjoint(key):
            return False
        if (key, follow) not in self._could_join:
            behind = self._characters.with_first_bytes(follow)
            self._could_join[key, follow] = self._is_regex(gbnf.SequenceNode([*nodes]), behind)
        return self._could_join[key, follow]

    def _is_regex(self, run: gbnf.SequenceNode, follow: int) -> bool:
        return (
            self._size(run) <= _MAX_REGEX
            and not self._flow.may_be_empty(run)
            and all(self._is_plain(*part) for part in self._flow.parts(run, follow))
            and pattern_size(_regex(run)) <= MAX_UNROLLED
        )

    def _rewrite(self, node: gbnf.ASTNode, follow: int) -> gbnf.ASTNode:
        """``node`` with regexes; notes them, and whether a choice stays open beside them."""
        if isinstance(node, gbnf.SequenceNode):
            return gbnf.SequenceNode(self._rewrite_run(node, follow))
        if self._can_join([node], follow):
            return self._join([node])
        if isinstance(node, gbnf.AlternativeNode | gbnf.RepetitionNode):
            self._is_open = self._is_open or self._doubts(node, follow) > 0
            made = [self._rewrite(*part) for part in self._flow.parts(node, follow)]
            if isinstance(node, gbnf.AlternativeNode):
                return gbnf.AlternativeNode(made)
            return gbnf.RepetitionNode(made[0], node.min_times, node.max_times)
        return node

    def _rewrite_run(self, node: gbnf.SequenceNode, follow: int) -> list[gbnf.ASTNode]:
        behind = [each for _, each in self._flow.parts(node, follow)][::-1]
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
        made = gbnf.RegexNode(_regex(gbnf.SequenceNode([*nodes])))
        self._joined[id(made)] = nodes
        return made


def _cut(rules: Sequence[gbnf.RuleNode]) -> list[gbnf.RuleNode]:
    """``rules`` as they are, with their literals cut."""
    bodies = {rule.name: rule.alternatives for rule in rules}
    lexing = Lexing(bodies, {}, _characters_of(rules), _Budget(_MAX_READING).take)
    return _with_bodies(rules, bodies, lexing.cuts)


def _characters_of(rules: Sequence[gbnf.RuleNode]) -> Characters:
    return Characters(node for rule in rules for node in all_parts(rule))


def _with_bodies(
    rules: Sequence[gbnf.RuleNode], bodies: Mapping[str, gbnf.ASTNode], cuts: Cuts
) -> list[gbnf.RuleNode]:
    """Those of ``rules`` that have a body, with that, and with their literals cut."""
    kept = [rule for rule in rules if rule.name in bodies]
    for rule in kept:
        rule.alternatives = _top(cut_literals(bodies[rule.name], cuts))
    return kept


def _key(nodes: Sequence[gbnf.ASTNode]) -> tuple[int, ...]:
    return tuple(map(id, nodes))


def _targets(node: gbnf.ASTNode) -> list[gbnf.RuleNode]:
    return [target_of(each) for each in all_parts(node) if isinstance(each, gbnf.RuleRefNode)]


def _top(node: gbnf.ASTNode) -> gbnf.AlternativeNode:
    return node if isinstance(node, gbnf.AlternativeNode) else gbnf.AlternativeNode([node])


def _regex(node: gbnf.ASTNode) -> str:
    if isinstance(node, gbnf.LiteralNode):
        return "".join(_escaped(code) for code in codes_of(node.value))
    if isinstance(node, gbnf.RegexNode):
        return str(node.rx)
    if isinstance(node, gbnf.RuleRefNode):
        return _regex(target_of(node).alternatives)
    if isinstance(node, gbnf.RepetitionNode):
        most = "" if node.max_times is None else node.max_times
        return f"(?:{_regex(node.node)}){{{node.min_times},{most}}}"
    parts = map(_regex, node.children())
    return "".join(parts) if isinstance(node, gbnf.SequenceNode) else f"(?:{'|'.join(parts)})"


def _escaped(code: int) -> str:
    character = chr(code)
    return character if code > 0x7F or character.isalnum() else f"\\x{code:02X}"
