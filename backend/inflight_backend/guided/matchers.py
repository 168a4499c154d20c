"""Guides compiled by llguidance (JSON, schemas, regular expressions) and xgrammar (EBNF grammars).

A compiled guide makes a matcher for each answer. Matchers of llguidance share the lexer states they
found so far, and the limit on these: once one of them meets it, none can continue. Such a guide is
compiled again for later requests, and each answer in progress may get a matcher of its own, once.
Matchers of xgrammar share nothing that changes.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inflight_backend.calls import settle
from inflight_backend.errors import InvalidRequest
from inflight_backend.guided.guide import GUIDE_FIELD, Guide, GuideType
from inflight_backend.guided.structural_tag import StructuralTagWriter
from inflight_backend.log import get_logger

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_logger = get_logger(__name__)

MAX_COMPILED_BYTES = 64 * 2**20
"""Size of a compiled EBNF grammar; a guide of llguidance takes at most some 40 MB."""

# Both libraries call themselves for every reference, and a full stack ends the process. A chain of
# as many as a schema holds takes some 30 MB; what is not used takes no memory.
_STACK_BYTES = 128 * 2**20
_stack_size_lock = threading.Lock()
_JSON = '{"type":["object","array"]}'  # what xgrammar, TensorRT-LLM's default, calls JSON
# Without a bound some models write blanks until their tokens run out, and small ones empty lines.
_BLANKS: Any = {"whitespace_pattern": r"[ \t]{1,20}|\r?\n[ \t]{0,20}"}
# Tokens that follow with certainty are not computed in advance: that would walk through all of them
# at every token, in the loop (60,000 bytes take 70 ms; behind a recursion there is no end).
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# A step of a guided row costs the loop some 40 ms with the heaviest patterns that were found, and
# 1.7 s without limits; a guide takes at most some 40 MB (see LLParserLimits).
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_MAX_RECOMPILE_SECONDS = 0.05  # the loop waits for it
_MAX_ERROR_LENGTH = 300
_NO_TEXT = "there is no text that it allows"
_ONE_OF = (  # llguidance names an option that no request has
    "of the choices of 'oneOf' two may fit one value; write 'anyOf', or tell them apart by their "
    "types or by a required string with a 'const' of its own"
)
_SHOWN_GRAMMAR = re.compile(r"\n *\d+ \| ")
_XGRAMMAR_PLACE = re.compile(r"^\[[\d:]+\] \S+ (?:Check failed: .* is false: )?")


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` on a thread with a stack on which a guide can be compiled."""
    thread = threading.Thread(target=work, name="GuideCompiler", daemon=True)
    with _stack_size_lock:
        size_of_others = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(size_of_others)
    return thread


@dataclass(frozen=True, slots=True)
class LlguidanceGuide:
    """A guide of llguidance; ``matcher`` has read nothing."""

    tokenizer: LLTokenizer
    grammar: str
    matcher: LLMatcher
    compile_seconds: float

    @classmethod
    def compile(cls, guide: Guide, grammar: str, tokenizer: LLTokenizer) -> LlguidanceGuide:
        """Compile ``grammar``, which is ``guide`` as `to_grammar` writes it; `InvalidRequest`."""
        began = time.perf_counter()
        matcher = _match(tokenizer, grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest, and shows what is too much
        if matcher.is_error():
            raise _invalid(guide, _explain(matcher.get_error()))
        return cls(tokenizer, grammar, matcher, time.perf_counter() - began)

    def new_matcher(self) -> LLMatcher:
        """For one answer."""
        return self.matcher.deep_copy()

    def is_worn(self) -> bool:
        """True once an answer has met a limit that all answers of this guide share."""
        probe = self.matcher.deep_copy()
        probe.compute_bitmask()
        return bool(probe.is_error())

    def recompile(self) -> LLMatcher | None:
        """A matcher that shares nothing, for an answer in progress; None if that takes too long
        for the loop, or if a limit was met that is not shared and would be met again."""
        if self.compile_seconds > _MAX_RECOMPILE_SECONDS or not self.is_worn():
            return None
        made: Future[LLMatcher] = Future()
        compile_again = partial(_match, self.tokenizer, self.grammar)
        try:
            start_thread(partial(settle, made, compile_again))
            matcher = made.result()
        except BaseException:  # a panic of the library, or the machine has no more threads
            _logger.exception("a guide could not be compiled again")
            return None
        return None if matcher.is_error() else matcher


@dataclass(frozen=True, slots=True)
class EbnfGuide:
    """A guide of xgrammar."""

    compiled: Any  # a ``CompiledGrammar``
    vocab_size: int

    @classmethod
    def compile(cls, guide: Guide, tokenizer: Any) -> EbnfGuide:
        """Compile ``guide`` for a ``TokenizerInfo`` of xgrammar; `InvalidRequest`."""
        import xgrammar

        compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
        try:
            compiled = compiler.compile_grammar(guide.text)
        except RuntimeError as error:
            raise _invalid(guide, _XGRAMMAR_PLACE.sub("", str(error))) from None
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' has {compiled.memory_size_bytes} bytes when compiled; the limit "
                f"is {MAX_COMPILED_BYTES}; simplify it"
            )
        made = cls(compiled, tokenizer.vocab_size)
        if not made.new_matcher().next_mask().any():
            raise _invalid(guide, _NO_TEXT)
        return made

    def new_matcher(self) -> EbnfMatcher:
        """For one answer."""
        import xgrammar

        return EbnfMatcher(xgrammar.GrammarMatcher(self.compiled), self.vocab_size)

    def is_worn(self) -> bool:
        """False: answers share no limit."""
        return False

    def recompile(self) -> LLMatcher | None:
        """None: a limit that is not shared would be met again."""
        return None


class EbnfMatcher:
    """Follows one answer with xgrammar, with the methods of an ``LLMatcher``. `consume_tokens` only
    notes the tokens, since each may take long: `next_mask` reads them, on a thread that a step need
    not wait for."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """``matcher`` is a ``GrammarMatcher`` of xgrammar."""
        self._matcher = matcher
        self._mask: npt.NDArray[np.int32] = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self._unread: list[int] = []
        self._error = ""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Note tokens that `next_mask` is to read."""
        self._unread += sampled_tokens
        return True

    def next_mask(self) -> npt.NDArray[np.int32]:
        """Read the new tokens; one bit per token that may come next, [words]."""
        unread, self._unread = self._unread, []
        if not all(map(self._matcher.accept_token, unread)):
            self.fail("a token of the answer is not allowed")
        self._matcher.fill_next_token_bitmask(self._mask)
        row: npt.NDArray[np.int32] = self._mask[0]
        return row

    def is_accepting(self) -> bool:
        """True where the answer may end."""
        return bool(self._matcher.is_completed())

    def fail(self, error: str) -> None:
        """Let the answer end with an error."""
        self._error = error

    def is_error(self) -> bool:
        """True after `fail`."""
        return bool(self._error)

    def get_error(self) -> str:
        """Why it failed."""
        return self._error


if TYPE_CHECKING:
    CompiledGuide = LlguidanceGuide | EbnfGuide
    Matcher = LLMatcher | EbnfMatcher


def make_ebnf_tokenizer(tokenizer: LLTokenizer, vocab_size: int, end_id: int) -> Any:
    """xgrammar's, with the texts of llguidance's tokens, so that both follow the same ones."""
    import xgrammar

    texts = [
        b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
        for token in range(vocab_size)
    ]
    return xgrammar.TokenizerInfo(texts, stop_token_ids=[end_id])


def special_ids(tokenizer_json: str, tokenizer: LLTokenizer) -> dict[str, int]:
    """The tokens of tokenizer.json, by text, that ``tokenizer`` takes for no text: special ones,
    and all that are added in angle brackets."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    return {
        each["content"]: each["id"]
        for each in added
        if each["id"] < tokenizer.vocab_size and tokenizer.is_special_token(each["id"])
    }


def to_grammar(guide: Guide, special: Mapping[str, int] = MappingProxyType({})) -> str:
    """``guide`` in llguidance's own syntax; `InvalidRequest` if it is wrong or too large.

    ``special``: ids of the tokenizer's special tokens by text, for structural tags."""
    from llguidance import LLMatcher

    if guide.type is GuideType.REGEX:
        grammar = LLMatcher.grammar_from_regex(guide.text)
        return _OPTIONS + str(_only_grammar(grammar)["lark_grammar"])
    if guide.type is GuideType.STRUCTURAL_TAG:
        writer = StructuralTagWriter(special, lambda schema: _json_rule(json.dumps(schema)))
        return _OPTIONS + writer.write(json.loads(guide.text))
    schema = _JSON if guide.type is GuideType.JSON else guide.text
    return f"{_OPTIONS}start: {_json_rule(schema)}"


def _json_rule(schema: str) -> str:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, _BLANKS, {"lenient": False})
    except ValueError as error:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is no JSON schema: {in_short(error)}") from None
    return f"%json {json.dumps(_only_grammar(grammar)['json_schema'])}"


def in_short(error: object) -> str:
    """One line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_ERROR_LENGTH else text[:_MAX_ERROR_LENGTH] + " ..."


def _match(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _only_grammar(grammars: str) -> dict[str, Any]:
    (grammar,) = json.loads(grammars)["grammars"]
    return dict(grammar)


def _invalid(guide: Guide, error: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{GUIDE_FIELD}' is no {guide.type.value} that can be used: {in_short(error)}"
    )


def _explain(error: str) -> str:
    """The error of llguidance without the grammar that `to_grammar` made and the lines in it."""
    if error.startswith("NoExtensionBias"):
        return _NO_TEXT
    text = _SHOWN_GRAMMAR.split(error)[0].removesuffix("<non-verbose/>")
    place, separator, rest = text.partition("): ")
    is_place = place.removeprefix("at ").replace("(", "").isdecimal()
    text = rest if separator and is_place else text
    text = text.removeprefix("failed to compile JSON schema: ")
    return _ONE_OF if text.startswith("oneOf constraints are not supported") else text
