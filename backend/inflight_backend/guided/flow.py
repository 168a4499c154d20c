"""What the parts of a grammar begin with and what may come behind them, as in LL(1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from llguidance import gbnf_to_lark as gbnf

Count = Callable[[int], None]
"""Called for every look at a part, with what it costs; may raise."""


class Flow:
    """Sets are the bits of a number; what each bit stands for is the owner's affair.

    References to rules have their targets.
    """

    def __init__(
        self,
        bodies: Mapping[str, gbnf.ASTNode],
        begin: Callable[[gbnf.ASTNode], int],
        count: Count,
    ) -> None:
        """``bodies``: of the rules, by name; ``begin``: what a literal or a regex begins with."""
        self.follow = dict.fromkeys(bodies, 0)
        self._begin = begin
        self._count = count
        self._first = dict.fromkeys(bodies, 0)
        self._may_be_empty = dict.fromkeys(bodies, False)
        self._found: dict[int, tuple[int, bool]] = {}
        last_first = [*bodies.items()][::-1]  # they are what others are made of
        before: object = None
        while before != (state := (dict(self._first), dict(self._may_be_empty))):
            before = state
            for name, body in last_first:
                self._first[name] = self.first(body)
                self._may_be_empty[name] = self.may_be_empty(body)
        for node in (node for body in bodies.values() for node in all_parts(body)):
            self._found[id(node)] = (self.first(node), self.may_be_empty(node))
        before = None
        while before != (follow := dict(self.follow)):
            before = follow
            for name, body in bodies.items():
                self._spread(body, self.follow[name])

    def _spread(self, node: gbnf.ASTNode, follow: int) -> None:
        """Tell the rules in ``node`` what may come behind them."""
        self._count(1)
        if type(node) is gbnf.RuleRefNode:
            self.follow[target_of(node).name] |= follow
        for child, behind in self.parts(node, follow):
            self._spread(child, behind)

    def parts(self, node: gbnf.ASTNode, follow: int) -> Iterator[tuple[gbnf.ASTNode, int]]:
        """Those of ``node``, the last first, each with what may come behind it."""
        if type(node) is gbnf.SequenceNode:
            for child in reversed(node.nodes):
                yield child, follow
                follow = self.first(child) | (follow if self.may_be_empty(child) else 0)
        elif type(node) is gbnf.RepetitionNode:
            is_loop = node.max_times is None or node.max_times > 1
            yield node.node, follow | (self.first(node.node) if is_loop else 0)
        else:
            for child in node.children():
                yield child, follow

    def first(self, node: gbnf.ASTNode) -> int:
        """What it begins with."""
        if id(node) in self._found:
            return self._found[id(node)][0]
        self._count(1)
        if type(node) is gbnf.RuleRefNode:
            return self._first[target_of(node).name]
        if type(node) is gbnf.SequenceNode:
            found = 0
            for child in node.nodes:
                found |= self.first(child)
                if not self.may_be_empty(child):
                    break
            return found
        children = node.children()
        return union(map(self.first, children)) if children else self._begin(node)

    def may_be_empty(self, node: gbnf.ASTNode) -> bool:
        """True if nothing is one of its texts."""
        if id(node) in self._found:
            return self._found[id(node)][1]
        self._count(1)
        if type(node) is gbnf.RuleRefNode:
            return self._may_be_empty[target_of(node).name]
        if type(node) is gbnf.SequenceNode:
            return all(map(self.may_be_empty, node.nodes))
        if type(node) is gbnf.AlternativeNode:
            return any(map(self.may_be_empty, node.alternatives))
        if type(node) is gbnf.RepetitionNode:
            return node.min_times == 0 or self.may_be_empty(node.node)
        return type(node) is gbnf.LiteralNode and not node.value


def target_of(node: gbnf.RuleRefNode) -> gbnf.RuleNode:
    """The rule that a reference leads to."""
    assert node.target is not None
    return node.target


def all_parts(node: gbnf.ASTNode) -> Iterator[gbnf.ASTNode]:
    """``node`` and all that it is made of, without what references lead to."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        waiting += each.children()
        yield each


def union(sets: Iterable[int]) -> int:
    """What is in any of them."""
    found = 0
    for each in sets:
        found |= each
    return found
