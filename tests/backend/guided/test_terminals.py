"""Regexes in the place of parts of a grammar: the same texts, at a price vocabularies allow."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from support.context_free import CHARACTERS, Grammar, random_rules
from support.fuzzing import fuzzing
from tokenizers import Tokenizer

from inflight_backend.guided import terminals
from inflight_backend.guided.bounds import MAX_UNROLLED, pattern_size
from inflight_backend.guided.compiler import GuideCompiler
from inflight_backend.guided.ebnf import to_lark
from inflight_server.serve.settings import DEMO_MODEL

TOKENIZER = DEMO_MODEL / "tokenizer.json"
LISTS = """
root ::= "[" ws value (ws "," ws value)* ws "]"
value ::= root | string | number | "true" | "false" | "null"
string ::= "\\"" char* "\\""
char ::= [^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\/bfnrt] | "u" [0-9a-fA-F]{4})
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
ws ::= ([ \\n] ws)?
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GuideCompiler]:
    made = GuideCompiler(TOKENIZER.read_text, 270, 0)
    yield made
    made.close()


def match(compiler: GuideCompiler, grammar: str, limits: LLParserLimits | None = None) -> LLMatcher:
    text = '%llguidance {"no_forcing": true}\n' + to_lark(grammar)
    matcher = LLMatcher(compiler.load_tokenizer(), text, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def tokens(text: str) -> list[int]:
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids
    return list(ids)


NUMBERS = {each: tokens(each) for each in CHARACTERS}


def accepts(compiler: GuideCompiler, grammar: str, text: str) -> bool:
    matcher, ids = match(compiler, grammar), tokens(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_the_texts_of_a_vocabulary_are_followed_by_tables(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 128,256 tokens the parser met its limit of 20,000 at the first character of a string."""
    limits = LLParserLimits(step_max_items=40, verbose_errors=False)

    def follow() -> str:
        matcher = match(compiler, LISTS, limits)
        for token in tokens('[1, "ab\\n", ["c"]]'):
            matcher.compute_bitmask()
            matcher.consume_token(token)
        return str(matcher.get_error())

    assert follow() == ""
    monkeypatch.setattr(terminals, "_MAX_WORK", 0)
    assert "Too many items" in follow()


def test_names_beside_words_are_followed_by_tables(compiler: GuideCompiler) -> None:
    """What comes behind a word is no part of a name, so neither of them has to be taken apart: with
    128,256 tokens the parser met its limit in any name."""
    lines = """
    root ::= "{" (line ws?)* "}"
    line ::= "int" ws name ";" | "if" ws "(" name ")" ws? line | name ws? "=" name ";" | root
    name ::= [a-z] [a-z0-9]*
    ws ::= [ ]+
    """
    matcher = match(compiler, lines, LLParserLimits(step_max_items=40, verbose_errors=False))
    for token in tokens("{int interest; if (in) {inty =iffy;"):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()


def test_a_grammar_that_is_too_large_to_look_through_keeps_its_literals(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = 'root ::= "(" root ")" | "a" "bc" | "ab" "d"'
    for name in ("_MAX_WORK", "_MAX_CLOSE_READING", "_MAX_READING"):
        monkeypatch.setattr(terminals, name, 0)
    assert '"ab" "d"' in to_lark(grammar)
    assert accepts(compiler, grammar, "(abd)")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (LISTS, "[ [], 0.5]".replace("[]", "[null]"), "[ 01]"),
        (LISTS, '["\\"",-10,\n true]', '["\n"]'),
        # Without recursion all of it is one regex, and no choice is made too early.
        ('root ::= "a" "bc" | "ab" "d"', "abc", "ab"),
        ('root ::= x y\nx ::= [a-z]*\ny ::= "b" | "bb"', "aabb", "aa"),
        # In these the next character does not tell.
        ('root ::= "(" root ")" | w\nw ::= [a-z]* "z"', "(azaz)", "(aza)"),
        ('root ::= "(" root ")" | a b\na ::= "x"+\nb ::= "x" "y"', "(xxy)", "(xy)"),
        ('root ::= "(" root ")" | d ("." d)? "."\nd ::= [0-9]+', "(1.2.)", "(1.2)"),
        ('root ::= "(" root ")" | s s\ns ::= "a" s | "b"', "(abaab)", "(ab)"),
        ('root ::= "(" root ")" | [a-z]{2,3} "c"?', "(abc)", "(a)"),
        ('root ::= "(" root? ")" e\ne ::= "" | " " e', "(() ) ", "()("),
        ('root ::= "(" root ")" | "a" | x root\nx ::= "c" ("a" | "")', "ca", "cb"),
        ('root ::= "(" root ")" | "" [^b] "c"', "(cc)", "(c)"),
        ('root ::= "(" root ")" | x x root "c" | "b"\nx ::= ""', "(bc)", "(c)"),
        ('root ::= "(" root ")" | x "b"? y\nx ::= "a"+\ny ::= "a" root | "c"', "aa(ac)", "a(ac)"),
        ('root ::= ("a" "(" root ")" "a"+)* "c"', "a(c)aa(c)ac", "a(c)c"),
        # Of texts that begin alike none is taken before it is sure.
        ('root ::= "(" root ")" | "if " root | [a-z]+ ";"', "(if iffy;)", "(if )"),
        ('root ::= "(" root ")" | "a" "bc" | "ab" "d"', "(abc)", "(ab)"),
        ('root ::= "(" root ")" | [a-z] ("<" "=x" | "<=" "y" | "<")', "(a<=x)", "(a<=)"),
        ('root ::= "(" root ")" | "function" ";" | [a-z] root?', "(functio)", "(function;;)"),
        ('root ::= "(" root ")" | "aab" "!" | "aaa"+ "b"? | "a" root', "(aaaaab)", "(ab)"),
        ('root ::= "(" root ")" | (a | "è") root | "b"\na ::= [é] | [é] "a"', "(éèéab)", "(éè)"),
        (
            'root ::= "(" root ")" | p* "ax"+ "a" q*\np ::= "ax" | "x"\nq ::= "x"',
            "xaxaxxaxa",
            "xa(",
        ),
        ('root ::= "(" root ")" | "éé" "!" | "é" "è"', "(éè)", "(éé)"),  # they have one first byte
        # One literal that stands twice, and is cut twice.
        ('root ::= "aaa" root [^b] root "c" | "aaa"', "a" * 10 + "c", "a" * 9 + "c"),
        # It told here, but of two that had begun before both go on.
        (
            'root ::= (("b" | [ ]) . "01" root root [b-c] [ab] "0")?',
            " )01bb01bb0cb0",
            " )01cb01bb0cb0",
        ),
        ('root ::= "a"? [bc] "b" | "a" ("b"+ "a"{2})+ ("c" root)?', "abb", "aba"),
        ('root ::= root "+" n | n\nn ::= [0-9]+ "!"?', "1+22!+3", "1!!"),
        ('root ::= "<" [^>]* ">" root? "</" [^>]+ ">"', "<a><b></b></a>", "<a></>"),
        ('root ::= "(" root ")" | "\x7f" root | [\x7f\x80] "\x80"', "(\x7f\x80\x80)", "(\x7f)"),
        ('root ::= "(" root ")" | [é-ü\\-\\]]+ | [^a-zé-ü()\\-\\]]{2}', "(é-]ü)", "(a)"),
    ],
)
def test_the_texts_are_the_same(compiler: GuideCompiler, grammar: str, good: str, bad: str) -> None:
    assert accepts(compiler, grammar, good)
    assert not accepts(compiler, grammar, bad)


def test_a_grammar_that_would_grow_too_large_stays_as_it_is(compiler: GuideCompiler) -> None:
    """Each rule twice the one before, or a chain as long as the rules that a grammar may have."""
    doubled = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(200)) + 'r200 ::= "a"'
    assert accepts(compiler, 'root ::= "b" | "(" root ")" r0\n' + doubled, "b")
    chain = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(250)) + 'r250 ::= "b"'
    assert accepts(compiler, "root ::= r0 | [0-9] root\n" + chain, "1" + "a" * 250 + "b")


def test_no_regex_is_made_that_a_client_could_not_send() -> None:
    """Each of five repetitions is small, and written out they are too much for one."""
    for start in ("root ::= ", 'root ::= "(" root ")" | '):
        grammar = to_lark(start + "x x x x x\nx ::= [a-z]{1,4900} [0-9]")
        sizes = [pattern_size(regex) for regex in re.findall("/(.*?)/", grammar)]
        assert 4900 < max(sizes) <= MAX_UNROLLED


def allowed(matcher: LLMatcher) -> set[str]:
    """The characters that may come next, and "" for the end."""
    bits = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    begun = {each for each, ids in NUMBERS.items() if bits[ids[0] // 8] >> ids[0] % 8 & 1}
    found = {each for each in begun if matcher.validate_tokens(NUMBERS[each]) == len(NUMBERS[each])}
    return found | {""} if matcher.is_accepting() else found


@fuzzing
@given(st.integers(0, 10**9), st.sampled_from(["", "_MAX_CLOSE_READING", "_MAX_WORK"]))
def test_what_a_grammar_derives_is_allowed_and_nothing_else(
    compiler: GuideCompiler, seed: int, spent: str
) -> None:
    """After every prefix, and also where there was no time for a close look (``spent``)."""
    source = random.Random(seed)
    rules = random_rules(source)
    grammar, text = Grammar(rules), "\n".join(f"{name} ::= {each}" for name, each in rules.items())
    assume(grammar.is_whole)
    with pytest.MonkeyPatch.context() as patch:
        if spent:
            patch.setattr(terminals, spent, 0)
        first = match(compiler, text)
    for _ in range(4):
        chart, matcher = grammar.begin(), first.deep_copy()
        for _ in range(8):
            derived = grammar.next(chart) | ({""} if grammar.may_end(chart) else set())
            assert allowed(matcher) == derived, text
            choices = sorted(derived - {""})
            if not choices:
                break
            character = source.choice(choices)
            chart = grammar.read(chart, character)
            assert matcher.consume_tokens(NUMBERS[character])
