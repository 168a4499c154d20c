"""What it costs to find out which symbols of a grammar are read together."""

from __future__ import annotations

import pytest
from llguidance import gbnf_to_lark as gbnf

from inflight_backend.guided.characters import Characters
from inflight_backend.guided.lexing import Lexing

_NUM_LEAVES = 300
_FIRST = 0x4E00


class _Seen(int):
    """A set of characters that counts how often one of them is held against another."""

    num_looks = 0

    def __and__(self, other: int) -> int:
        _Seen.num_looks += 1
        return int(self) & int(other)

    __rand__ = __and__


class _SeenCharacters(Characters):
    def read(self, leaf: gbnf.ASTNode) -> list[int]:
        return [*map(_Seen, super().read(leaf))]


@pytest.mark.parametrize("written", ['"{}"', "[{}!]"])
def test_every_look_at_the_characters_of_a_grammar_is_counted(
    monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Of 7,000 characters that all differ it took 20 s which no limit knew of."""
    monkeypatch.setattr(_Seen, "num_looks", 0)
    characters = map(chr, range(_FIRST, _FIRST + 2 * _NUM_LEAVES, 2))
    rules = gbnf.GrammarParser().parse("root ::= " + " | ".join(map(written.format, characters)))
    body = rules["root"].alternatives.simplify()
    costs: list[int] = []
    Lexing({"start": body}, {}, _SeenCharacters(body.children()), costs.append)
    assert 0 < _Seen.num_looks <= sum(costs)
