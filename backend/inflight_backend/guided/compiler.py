"""Compiles grammars on threads of its own, each once, and hands out matchers.

A compiled grammar is a matcher of llguidance that has seen nothing yet; every answer gets a copy.
The copies share what they have found out about the texts so far, and its limits: once one of them
meets one, none of them can go on. So a grammar that is worn is compiled anew for those to come, and
each answer under way may have a matcher of its own, once.

So many grammars wait at most, and only as long as somebody waits for them: the queue knows them
weakly, so one whose requests were stopped or refused is passed over.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inflight_backend.errors import CapacityExceeded, InvalidRequest, ServingError
from inflight_backend.guided.bounds import check_schema, check_unrolled, pattern_size
from inflight_backend.guided.ebnf import to_lark
from inflight_backend.guided.guide import GUIDE_FIELD, Guide, GuideType
from inflight_backend.log import get_logger

_logger = get_logger(__name__)

COMPILE_SECONDS = 10.0
"""How long a request waits for its grammar, the queue of grammars included."""

MAX_CACHED = 64
"""Grammars kept for requests to come."""

MAX_WAITING = 256
"""Grammars that wait to be compiled, 256 KiB each at most."""

_NUM_THREADS = 2
# llguidance calls itself for every reference, and a stack that is full ends the process. A chain of
# as many as a schema holds takes some 30 MB; what is not used takes no memory.
_STACK_BYTES = 128 * 2**20
_stack_size_lock = threading.Lock()
_JSON = '{"type":["object","array"]}'  # what xgrammar, TensorRT-LLM's default, calls JSON
# Without a bound some models write blanks until their tokens run out.
_BLANKS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,20}"}
# What cannot be otherwise is not found in advance: that walks through all of it at every token, in
# the loop (60,000 bytes take 70 ms; of brackets that a recursion has opened there is no end).
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_MAX_ERROR_LENGTH = 300
_ONE_OF = (  # the library's own words name an option that no request has
    "of the choices of 'oneOf' two may fit one value; write 'anyOf', or tell them apart by their "
    "types or by a required string with a 'const' of its own"
)
_LINE_OF_OURS = re.compile(r"\n *\d+ \| ")
# A step of a guided row costs the loop some 40 ms with the heaviest grammars that were found, up to
# 0.2 s behind hundreds of tokens that can be understood in hundreds of ways ("root ::= root root |
# ..."), and 1.7 s without limits; a grammar takes at most some 40 MB (as LLParserLimits says).
_LIMITS = LLParserLimits(
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


_MAX_SECONDS_ANEW = 0.05  # of the loop's time, for an answer that others have left no room


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """A grammar that answers can be matched with; ``seconds`` is what compiling it took."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    grammar: str
    seconds: float

    @property
    def is_worn(self) -> bool:
        """True once an answer has met a limit that all of them share."""
        probe = self.matcher.deep_copy()
        probe.compute_bitmask()
        return bool(probe.is_error())

    def compile_anew(self) -> LLMatcher | None:
        """A matcher that shares nothing; None if the loop cannot wait for it, or if no limit that
        is shared was met: it would meet the same one again, at the price of the whole answer."""
        if self.seconds > _MAX_SECONDS_ANEW or not self.is_worn:
            return None
        made: list[LLMatcher] = []
        _run(lambda: made.append(_match(self.tokenizer, self.grammar)))
        return made[0] if made and not made[0].is_error() else None


class PendingGuide:
    """A grammar that may still be compiled."""

    __slots__ = ("_deadline", "_future")

    def __init__(self, future: Future[CompiledGuide]) -> None:
        self._future = future
        self._deadline = time.monotonic() + COMPILE_SECONDS

    @property
    def is_settled(self) -> bool:
        """True when `take` answers at once."""
        return self._future.done() or time.monotonic() > self._deadline

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once it is compiled or refused, on the thread that does it; at once
        if that is done. Not called for one whose time is up."""
        self._future.add_done_callback(lambda _: call())

    def take(self) -> LLMatcher:
        """A matcher of its own for one answer.

        Else `InvalidRequest` if the grammar is at fault, `CapacityExceeded` if its turn did not
        come, and another `ServingError` if the server is.
        """
        if self._future.running():
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' was not compiled within {COMPILE_SECONDS:g} s; simplify it"
            )
        if not self._future.done():
            raise CapacityExceeded(
                f"'{GUIDE_FIELD}' could not be begun within {COMPILE_SECONDS:g} s: other grammars "
                "were compiled; try again later"
            )
        if isinstance(refusal := self._future.exception(), InvalidRequest):
            # One of its own: an exception keeps every frame that it has been raised through.
            raise InvalidRequest(str(refusal))
        try:
            return self._future.result().matcher.deep_copy()
        except BaseException:  # our bug, or a panic of the library
            _logger.exception("a grammar could not be compiled")
            raise ServingError(
                f"'{GUIDE_FIELD}' could not be compiled: the server failed"
            ) from None

    def take_again(self) -> LLMatcher | None:
        """A matcher that shares nothing with those of other answers, if it is made soon enough; for
        one answer that could not go on with the first."""
        return self._future.result().compile_anew()


class GuideCompiler:
    """Owner of the threads and of the grammars compiled last. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_id: int) -> None:
        """``tokenizer_json``: a tokenizer's serialised form, read when a grammar needs it first.

        ``vocab_size`` is the model's, ``end_id`` what ends answers by default (-1: nothing).
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Guide, weakref.ref[Future[CompiledGuide]]] = OrderedDict()
        self._compiled: OrderedDict[Guide, Future[CompiledGuide]] = OrderedDict()
        self._num_workers = 0
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="GuideCompiler")

    def start(self, guide: Guide) -> PendingGuide:
        """Compile ``guide``, unless that was done lately or is being done; returns at once.

        `CapacityExceeded` if too many wait. Who drops the answer does not wait any longer.
        """
        with self._lock:
            return PendingGuide(self._find(guide) or self._enqueue(guide))

    def load_tokenizer(self) -> LLTokenizer:
        """The tokenizer, made once. ValueError if llguidance cannot use it."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=max(self._end_id, 0)
                )
            return self._tokenizer

    def close(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(wait=False)

    def _find(self, guide: Guide) -> Future[CompiledGuide] | None:
        compiled = self._compiled.pop(guide, None)
        if compiled is not None and not _is_worn(compiled):
            self._compiled[guide] = compiled  # the last that was asked for
            return compiled
        waiting = self._waiting.get(guide)
        return None if waiting is None else waiting()

    def _enqueue(self, guide: Guide) -> Future[CompiledGuide]:
        self._waiting.pop(guide, None)  # nobody waited for it any longer
        if len(self._waiting) >= MAX_WAITING:
            wanted = [each for each in self._waiting.items() if each[1]() is not None]
            self._waiting = OrderedDict(wanted)
        if len(self._waiting) >= MAX_WAITING:
            raise CapacityExceeded(
                f"'{GUIDE_FIELD}' cannot be compiled now: {MAX_WAITING} grammars wait for that, "
                "which is the limit; try again later"
            )
        future: Future[CompiledGuide] = Future()
        self._waiting[guide] = weakref.ref(future)
        if self._num_workers < _NUM_THREADS:
            with _large_stacks():
                self._pool.submit(self._work)
            self._num_workers += 1
        return future

    def _work(self) -> None:
        """On a thread of the pool: compile until nothing waits."""
        while (job := self._take()) is not None:
            guide, future = job
            try:
                future.set_result(self._compile(guide))
            except BaseException as error:
                if not isinstance(error, InvalidRequest):  # the grammar is not at fault
                    with self._lock:
                        self._compiled.pop(guide, None)
                future.set_exception(error)

    def _take(self) -> tuple[Guide, Future[CompiledGuide]] | None:
        """The next one that somebody waits for; None ends the thread's work."""
        with self._lock:
            while self._waiting:
                guide, waiting = self._waiting.popitem(last=False)
                future = waiting()
                if future is not None:
                    future.set_running_or_notify_cancel()
                    self._compiled[guide] = future
                    if len(self._compiled) > MAX_CACHED:
                        self._compiled.popitem(last=False)
                    return guide, future
            self._num_workers -= 1
            return None

    def _compile(self, guide: Guide) -> CompiledGuide:
        try:
            tokenizer = self.load_tokenizer()
        except Exception as error:  # the library raises whatever a bad tokenizer makes it raise
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' cannot be used with the tokenizer of this model: {_short(error)}"
            ) from None
        grammar = to_grammar(guide)
        began = time.perf_counter()
        matcher = _match(tokenizer, grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one is dear, and shows what is too much
        if matcher.is_error():
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' is no {guide.type.value} that can be used: "
                f"{_short(_explain(matcher.get_error()))}"
            )
        return CompiledGuide(matcher, tokenizer, grammar, time.perf_counter() - began)


def _match(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def _is_worn(future: Future[CompiledGuide]) -> bool:
    return future.done() and future.exception() is None and future.result().is_worn


@contextmanager
def _large_stacks() -> Iterator[None]:
    """For the threads that are started meanwhile."""
    with _stack_size_lock:
        size_of_others = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(size_of_others)


def _run(work: Callable[[], None]) -> None:
    """Do ``work`` on a large stack; a failure is logged."""

    def guarded() -> None:
        try:
            work()
        except BaseException:  # our bug, or a panic of the library
            _logger.exception("a grammar could not be compiled again")

    thread = threading.Thread(target=guarded, name="GuideAgain", daemon=True)
    try:
        with _large_stacks():
            thread.start()
    except RuntimeError:  # the machine has no more of them
        _logger.exception("no thread could be started to compile a grammar again")
        return
    thread.join()


def to_grammar(guide: Guide) -> str:
    """``guide`` as llguidance takes it; `InvalidRequest` for what is wrong or too much."""
    return _OPTIONS + _to_lark(guide)


def _to_lark(guide: Guide) -> str:
    if guide.type is GuideType.EBNF_GRAMMAR:
        return to_lark(guide.text)
    if guide.type is GuideType.REGEX:
        check_unrolled(pattern_size(guide.text))
        return str(_only_grammar(LLMatcher.grammar_from_regex(guide.text))["lark_grammar"])
    schema = _JSON if guide.type is GuideType.JSON else guide.text
    check_schema(schema)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, _BLANKS, {"lenient": False})
    except ValueError as error:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is no JSON schema: {_short(error)}") from None
    return f"start: %json {json.dumps(_only_grammar(grammar)['json_schema'])}"


def _only_grammar(grammars: str) -> dict[str, Any]:
    (grammar,) = json.loads(grammars)["grammars"]
    return dict(grammar)


def _explain(error: str) -> str:
    """What llguidance says, without the grammar that we made and the places in it."""
    if error.startswith("NoExtensionBias"):
        return "there is no text that it allows"
    text = _LINE_OF_OURS.split(error)[0].removesuffix("<non-verbose/>")
    place, separator, rest = text.partition("): ")
    is_place = place.removeprefix("at ").replace("(", "").isdecimal()
    text = rest if separator and is_place else text
    text = text.removeprefix("failed to compile JSON schema: ")
    return _ONE_OF if text.startswith("oneOf constraints are not supported") else text


def _short(error: object) -> str:
    """One line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_ERROR_LENGTH else text[:_MAX_ERROR_LENGTH] + " ..."
