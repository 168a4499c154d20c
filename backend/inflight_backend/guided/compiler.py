"""Compiles guides on threads of its own, each once, and hands out matchers.

A guide of llguidance is compiled to a matcher that has read nothing; every answer gets a copy. The
copies share the lexer states they found so far, and the limit on these: once one of them meets it,
none can continue. Such a guide is compiled again for later requests, and each answer in progress
may get a matcher of its own, once. Matchers of xgrammar share nothing that changes.

Some guides take more time or memory than any machine has, and some end the process: 16 patterns in
one ``allOf`` of llguidance, ``a ::= (a){0,2}`` of xgrammar. So each guide is first compiled in a
forked child with limits.

The queue holds guides by weak references: one whose requests were stopped or refused is skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_backend.errors import (
    CapacityExceeded,
    ConfigurationError,
    InvalidRequest,
    ServingError,
    UnsupportedRequest,
)
from inflight_backend.guided.guide import (
    GUIDE_FIELD,
    TYPE_FIELD,
    Guide,
    GuideType,
)
from inflight_backend.guided.masks import EbnfMatcher, Matcher
from inflight_backend.log import get_logger
from inflight_backend.models.checkpoint_files import find_file

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_logger = get_logger(__name__)

BACKENDS = ("auto", "llguidance", "none")

COMPILE_SECONDS = 10.0
"""How long a request waits for its guide, the time in the queue included."""

MAX_CACHED = 64
"""Compiled guides that are kept for later requests."""

MAX_WAITING = 256
"""Guides that wait to be compiled, 256 KiB each at most."""

MAX_COMPILED_BYTES = 64 * 2**20
"""Size of a compiled EBNF grammar; a guide of llguidance takes at most some 40 MB."""

_NUM_THREADS = 2
_CHILD_CPU_SECONDS = 4  # 256 KiB of properties take 1.5 s
_CHILD_BYTES = 2**29  # beyond what the server has: what is compiled in the child grows here, too
# Both libraries call themselves for every reference, and a full stack ends the process. A chain of
# as many as a schema holds takes some 30 MB; what is not used takes no memory.
_STACK_BYTES = 128 * 2**20
_stack_size_lock = threading.Lock()
_JSON = '{"type":["object","array"]}'  # what xgrammar, TensorRT-LLM's default, calls JSON
# Without a bound some models write blanks until their tokens run out.
_BLANKS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,20}"}
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
_TOO_MUCH = f"'{GUIDE_FIELD}' takes too much time or memory to compile; simplify it"
_NO_TEXT = "there is no text that it allows"
_ONE_OF = (  # llguidance names an option that no request has
    "of the choices of 'oneOf' two may fit one value; write 'anyOf', or tell them apart by their "
    "types or by a required string with a 'const' of its own"
)
_SHOWN_GRAMMAR = re.compile(r"\n *\d+ \| ")
_XGRAMMAR_PLACE = re.compile(r"^\[[\d:]+\] \S+ (?:Check failed: .* is false: )?")


@dataclass(frozen=True, slots=True)
class GuidedDecodingConfig:
    """``backend``: llguidance (with xgrammar for EBNF grammars), none, or auto for llguidance where
    it is installed and the model has a tokenizer. ``tokenizer_dir`` is the folder of
    tokenizer.json, None for the checkpoint."""

    backend: str = "auto"
    tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(
                f"guided_decoding_backend is {self.backend!r}: choose one of {', '.join(BACKENDS)}"
            )


class GuideService:
    """Compiles the guides of requests, or says why it does not."""

    def __init__(
        self,
        config: GuidedDecodingConfig,
        checkpoint: Path | None,
        vocab_size: int,
        *,
        can_mask: bool,
    ) -> None:
        """``can_mask``: the engine can. `ConfigurationError` if llguidance is asked for in vain."""
        self.end_id = -1
        self.more_end_ids: tuple[int, ...] = ()
        self._compiler: GuideCompiler | None = None
        folder = Path(config.tokenizer_dir) if config.tokenizer_dir else checkpoint
        self._refusal = _refusal(config, folder, can_mask=can_mask)
        if self._refusal and config.backend == "llguidance":
            raise ConfigurationError(f"guided_decoding_backend is llguidance: {self._refusal}")
        if self._refusal or folder is None:
            return
        from inflight_backend.text.tokenizer import TextCodec  # needs tokenizers

        codec = TextCodec(folder, checkpoint)
        self.end_id = codec.end_id
        self.more_end_ids = tuple(each for each in codec.more_end_ids if each < vocab_size)
        self._compiler = GuideCompiler(codec.to_json, vocab_size, codec.end_id)
        if config.backend == "llguidance":
            try:
                self._compiler.load_tokenizer()
            except Exception as error:  # the library raises whatever a bad tokenizer makes it raise
                raise ConfigurationError(
                    f"guided_decoding_backend is llguidance: the tokenizer cannot be used: {error}"
                ) from None

    def start(self, guide: Guide, on_compiled: Callable[[], None]) -> PendingGuide:
        """Compile ``guide`` on another thread, which calls ``on_compiled`` at the end;
        `UnsupportedRequest` if this server does not guide answers."""
        if self._compiler is None:
            raise UnsupportedRequest(
                f"'{TYPE_FIELD}' is not supported by this server: {self._refusal}"
            )
        if guide.type is GuideType.EBNF_GRAMMAR and find_spec("xgrammar") is None:
            raise UnsupportedRequest(
                f"'{TYPE_FIELD}' ebnf_grammar needs xgrammar, which is not installed on this "
                "server (in a clone of inflight: pip install '.[guided]')"
            )
        pending = self._compiler.start(guide)
        pending.on_compiled(on_compiled)
        return pending

    def close(self) -> None:
        """Start no more compilations."""
        if self._compiler is not None:
            self._compiler.close()


def _refusal(config: GuidedDecodingConfig, folder: Path | None, *, can_mask: bool) -> str:
    """Why this server guides no answers; empty if it does."""
    if config.backend == "none":
        return "guided_decoding_backend is none"
    if not can_mask:
        return "its engine takes no token masks"
    if folder is None or find_file(folder, "tokenizer.json") is None:
        return "the checkpoint has no tokenizer.json; set tokenizer_dir"
    if find_spec("llguidance") is None:
        return "llguidance is not installed (in a clone of inflight: pip install '.[server]')"
    return ""


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """Makes the matchers of one guide."""

    new_matcher: Callable[[], Matcher]
    is_worn: Callable[[], bool] = lambda: False
    """True once an answer has met a limit that all answers of this guide share."""
    recompile: Callable[[], Matcher | None] = lambda: None
    """A matcher that shares nothing with the others; None if the loop cannot wait for it, or if no
    shared limit was met."""


class PendingGuide:
    """A guide that may still be compiled."""

    __slots__ = ("_deadline", "_future")

    def __init__(self, future: Future[CompiledGuide]) -> None:
        self._future = future
        self._deadline = time.monotonic() + COMPILE_SECONDS

    @property
    def is_settled(self) -> bool:
        """True when `take` answers at once."""
        return self._future.done() or time.monotonic() > self._deadline

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once the guide is compiled or refused, on the thread that does it;
        at once if that is done. Not called when the time is up."""
        self._future.add_done_callback(lambda _: call())

    def take(self) -> Matcher:
        """A matcher for one answer.

        Else `InvalidRequest` if the guide is at fault, `CapacityExceeded` if its turn did not come,
        and another `ServingError` if the server is at fault.
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
            # A new one for each request: an exception keeps every frame it was raised through.
            raise InvalidRequest(str(refusal))
        try:
            return self._future.result().new_matcher()
        except BaseException:  # our bug, or a panic of the library
            _logger.exception("a guide could not be compiled")
            raise ServingError(
                f"'{GUIDE_FIELD}' could not be compiled: the server failed"
            ) from None

    def recompile(self) -> Matcher | None:
        """A matcher that shares nothing with those of other answers, if it is made soon enough; for
        one answer that could not continue with the first."""
        return self._future.result().recompile()


class GuideCompiler:
    """Owner of the threads and of the guides compiled last. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_id: int) -> None:
        """``tokenizer_json``: a tokenizer's serialised form, read when a guide needs it first.

        ``vocab_size`` is the model's, ``end_id`` what ends answers by default (-1: nothing).
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._end_id = max(end_id, 0)
        self._tokenizer: LLTokenizer | None = None
        self._ebnf_tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[Guide, weakref.ref[Future[CompiledGuide]]] = OrderedDict()
        self._compiled: OrderedDict[Guide, Future[CompiledGuide]] = OrderedDict()
        self._num_workers = 0

    def start(self, guide: Guide) -> PendingGuide:
        """Compile ``guide``, unless that was done lately or is being done; returns at once.

        `CapacityExceeded` if too many wait. Dropping the result ends the waiting.
        """
        with self._lock:
            return PendingGuide(self._find(guide) or self._enqueue(guide))

    def load_tokenizer(self) -> LLTokenizer:
        """The tokenizer, made once. ValueError if llguidance cannot use it."""
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._end_id
                )
            return self._tokenizer

    def close(self) -> None:
        """Start no more compilations."""
        with self._lock:
            self._waiting.clear()

    def _find(self, guide: Guide) -> Future[CompiledGuide] | None:
        compiled = self._compiled.pop(guide, None)
        if compiled is not None and not _is_worn(compiled):
            self._compiled[guide] = compiled  # at the end: the cache drops the first
            return compiled
        waiting = self._waiting.get(guide)
        return None if waiting is None else waiting()

    def _enqueue(self, guide: Guide) -> Future[CompiledGuide]:
        self._waiting.pop(guide, None)  # no request waits for it any longer
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
            _start_thread(self._work)
            self._num_workers += 1
        return future

    def _work(self) -> None:
        """On a thread: compile guides until none waits."""
        while (job := self._take()) is not None:
            guide, future = job
            try:
                future.set_result(self._compile(guide))
            except BaseException as error:
                if not isinstance(error, InvalidRequest):  # the guide is not at fault
                    with self._lock:
                        self._compiled.pop(guide, None)
                future.set_exception(error)

    def _take(self) -> tuple[Guide, Future[CompiledGuide]] | None:
        """The next guide that a request waits for; None ends the thread's work."""
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
        work: Callable[[], CompiledGuide]
        if guide.type is GuideType.EBNF_GRAMMAR:
            work = partial(_compile_ebnf, guide, self._load_ebnf_tokenizer(tokenizer))
        else:
            work = partial(_compile_grammar, guide, to_grammar(guide), tokenizer)
        _try_in_child(work)
        return work()

    def _load_ebnf_tokenizer(self, tokenizer: LLTokenizer) -> Any:
        """xgrammar's, with the texts of llguidance's tokens, so that both follow the same ones."""
        import xgrammar

        with self._tokenizer_lock:
            if self._ebnf_tokenizer is None:
                texts = [
                    b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
                    for token in range(self._vocab_size)
                ]
                self._ebnf_tokenizer = xgrammar.TokenizerInfo(texts, stop_token_ids=[self._end_id])
            return self._ebnf_tokenizer


def _compile_grammar(guide: Guide, grammar: str, tokenizer: LLTokenizer) -> CompiledGuide:
    began = time.perf_counter()
    matcher = _match(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first takes longest, and shows what is too much
    if matcher.is_error():
        raise _invalid(guide, _explain(matcher.get_error()))
    seconds = time.perf_counter() - began
    is_worn = partial(_meets_limit, matcher)
    recompile = partial(_recompile, tokenizer, grammar, seconds, is_worn)
    return CompiledGuide(matcher.deep_copy, is_worn, recompile)


def _compile_ebnf(guide: Guide, tokenizer: Any) -> CompiledGuide:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    try:
        compiled = compiler.compile_grammar(guide.text)
    except RuntimeError as error:
        raise _invalid(guide, _XGRAMMAR_PLACE.sub("", str(error))) from None
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        raise InvalidRequest(_TOO_MUCH)

    def new_matcher() -> EbnfMatcher:
        return EbnfMatcher(xgrammar.GrammarMatcher(compiled), tokenizer.vocab_size)

    if not new_matcher().next_mask().any():
        raise _invalid(guide, _NO_TEXT)
    return CompiledGuide(new_matcher)


def _match(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _is_worn(future: Future[CompiledGuide]) -> bool:
    return future.done() and future.exception() is None and future.result().is_worn()


def _meets_limit(matcher: LLMatcher) -> bool:
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    return bool(probe.is_error())


def _recompile(
    tokenizer: LLTokenizer, grammar: str, seconds: float, is_worn: Callable[[], bool]
) -> LLMatcher | None:
    """See `CompiledGuide.recompile`; ``seconds`` is what the first compilation took. A limit that
    is not shared would be met again, at the price of reading the whole answer."""
    if seconds > _MAX_RECOMPILE_SECONDS or not is_worn():
        return None
    made: list[LLMatcher] = []

    def compile_again() -> None:
        try:
            made.append(_match(tokenizer, grammar))
        except BaseException:  # our bug, or a panic of the library
            _logger.exception("a guide could not be compiled again")

    try:
        _start_thread(compile_again).join()
    except RuntimeError:  # the machine has no more threads
        _logger.exception("no thread could be started to compile a guide again")
    return made[0] if made and not made[0].is_error() else None


def _try_in_child(work: Callable[[], object]) -> None:
    """Do ``work`` in a forked child process within limits on CPU time and memory.

    `InvalidRequest` if ``work`` raises it, or if the child meets a limit or ends by a fault. The
    child uses neither the device nor any lock of the server, so a fork of a process with threads is
    safe; one that hangs all the same is killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_error, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    try:
        error = receiver.recv() if receiver.poll(COMPILE_SECONDS) else InvalidRequest(_TOO_MUCH)
    except EOFError:
        error = InvalidRequest(_TOO_MUCH)
    finally:
        child.kill()
        child.join()
        receiver.close()
    if error is not None:
        raise error


def _send_error(work: Callable[[], object], sender: Any) -> None:
    """In the child: do ``work``, and send None or what it raises."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the libraries' last words may quote the guide
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _CHILD_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_CHILD_CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    error: BaseException | None = None
    try:
        work()
    except InvalidRequest as refusal:
        error = refusal
    except MemoryError:
        error = InvalidRequest(_TOO_MUCH)
    except BaseException as failure:  # without its text, which may quote the guide
        error = RuntimeError(type(failure).__name__)
    sender.send(error)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """Run ``work`` on a thread with a large stack."""
    thread = threading.Thread(target=work, name="GuideCompiler", daemon=True)
    with _stack_size_lock:
        size_of_others = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(size_of_others)
    return thread


def to_grammar(guide: Guide) -> str:
    """``guide`` in llguidance's own syntax; `InvalidRequest` if it is wrong or too large."""
    from llguidance import LLMatcher

    if guide.type is GuideType.REGEX:
        grammar = LLMatcher.grammar_from_regex(guide.text)
        return _OPTIONS + str(_only_grammar(grammar)["lark_grammar"])
    schema = _JSON if guide.type is GuideType.JSON else guide.text
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, _BLANKS, {"lenient": False})
    except ValueError as error:
        raise InvalidRequest(f"'{GUIDE_FIELD}' is no JSON schema: {_short(error)}") from None
    return f"{_OPTIONS}start: %json {json.dumps(_only_grammar(grammar)['json_schema'])}"


def _only_grammar(grammars: str) -> dict[str, Any]:
    (grammar,) = json.loads(grammars)["grammars"]
    return dict(grammar)


def _invalid(guide: Guide, error: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{GUIDE_FIELD}' is no {guide.type.value} that can be used: {_short(error)}"
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


def _short(error: object) -> str:
    """One line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_ERROR_LENGTH else text[:_MAX_ERROR_LENGTH] + " ..."
