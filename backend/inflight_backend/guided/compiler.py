"""Compiles guides on threads of its own, each once, for all requests that send them.

Some guides take more time or memory than any machine has, and some end the process: 16 patterns in
one ``allOf`` of llguidance, ``a ::= (a){0,2}`` of xgrammar. So each guide is first compiled in a
forked child with limits.

The queue holds guides by weak references: one whose requests were stopped or refused is skipped.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from inflight_backend.errors import (
    CapacityExceeded,
    ConfigurationError,
    InvalidRequest,
    ServingError,
    UnsupportedRequest,
)
from inflight_backend.guided.guide import GUIDE_FIELD, TYPE_FIELD, Guide, GuideType
from inflight_backend.guided.matchers import (
    EbnfGuide,
    LlguidanceGuide,
    in_short,
    make_ebnf_tokenizer,
    special_ids,
    start_thread,
    to_grammar,
)
from inflight_backend.log import get_logger
from inflight_backend.text.tokenizer_files import find_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from inflight_backend.guided.matchers import CompiledGuide

_logger = get_logger(__name__)

BACKENDS = ("auto", "llguidance", "none")

COMPILE_SECONDS = 10.0
"""How long a request waits for its guide, the time in the queue included."""

MIN_COMPILE_SECONDS = 0.01
"""Of processor time that a guide may take at least: some ticks of the system's clock."""

MAX_CACHED = 64
"""Compiled guides that are kept for later requests."""

MAX_WAITING = 256
"""Guides that wait to be compiled, 256 KiB each at most."""

_NUM_THREADS = 2
_CHILD_BYTES = 2**29  # more than the server has now
_FAILED = (
    f"'{GUIDE_FIELD}' takes more than {_CHILD_BYTES // 2**20} MiB to compile, or ends the "
    "compiler; simplify it"
)


@dataclass(frozen=True, slots=True)
class GuidedDecodingConfig:
    """``backend``: llguidance (with xgrammar for EBNF grammars), none, or auto for llguidance where
    it is installed and the model has a tokenizer. ``tokenizer_dir`` is the folder of the
    tokenizer, None for the checkpoint. ``compile_seconds`` is the processor time that a guide may
    take: time that passes would refuse good guides on a busy machine."""

    backend: str = "auto"
    tokenizer_dir: str | None = None
    compile_seconds: float = 0.2

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(
                f"guided_decoding_backend is {self.backend!r}: choose one of {', '.join(BACKENDS)}"
            )
        if not MIN_COMPILE_SECONDS <= self.compile_seconds <= COMPILE_SECONDS:
            raise ConfigurationError(
                f"guided_decoding_compile_seconds is {self.compile_seconds:g}: it must be between "
                f"{MIN_COMPILE_SECONDS:g} and {COMPILE_SECONDS:g}"
            )


class PendingGuide:
    """A guide that may still be compiled; dropping it ends the waiting."""

    __slots__ = ("_deadline", "_future")

    def __init__(self, future: Future[CompiledGuide]) -> None:
        self._future = future
        self._deadline = time.monotonic() + COMPILE_SECONDS

    @property
    def is_settled(self) -> bool:
        """True when `take` answers at once."""
        return self._future.done() or time.monotonic() > self._deadline

    def take(self) -> CompiledGuide:
        """The compiled guide.

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
            return self._future.result()
        except BaseException:  # our bug, or a panic of the library
            _logger.exception("a guide could not be compiled")
            raise ServingError(
                f"'{GUIDE_FIELD}' could not be compiled: the server failed"
            ) from None


class GuideService:
    """Compiles the guides of requests, or says why it does not. Thread-safe."""

    def __init__(
        self, config: GuidedDecodingConfig, checkpoint: Path | None, vocab_size: int
    ) -> None:
        """`ConfigurationError` if the configuration names llguidance and it cannot be used.

        ``end_id`` and ``more_end_ids`` are those of the tokenizer that guides; -1 without one.
        """
        self.end_id = -1
        self.more_end_ids: tuple[int, ...] = ()
        self._vocab_size = vocab_size
        self._compile_seconds = config.compile_seconds
        self._tokenizer_json: Callable[[], str] = str
        self._special: Mapping[str, int] = {}
        self._tokenizer: LLTokenizer | None = None
        self._ebnf_tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: WeakValueDictionary[Guide, Future[CompiledGuide]] = WeakValueDictionary()
        self._compiled: OrderedDict[Guide, Future[CompiledGuide]] = OrderedDict()
        self._num_workers = 0
        folder = Path(config.tokenizer_dir) if config.tokenizer_dir else checkpoint
        self._refusal = _refusal(config, folder)
        if self._refusal or folder is None:
            if config.backend == "llguidance":
                raise ConfigurationError(f"guided_decoding_backend is llguidance: {self._refusal}")
            return
        from inflight_backend.text.tokenizer import TextCodec  # needs tokenizers

        codec = TextCodec(folder, checkpoint)
        self.end_id = codec.end_id
        self.more_end_ids = tuple(each for each in codec.more_end_ids if each < vocab_size)
        self._tokenizer_json = codec.to_json
        if config.backend == "llguidance":
            try:
                self._load_tokenizer()
            except Exception as error:  # the library raises whatever a bad tokenizer makes it raise
                raise ConfigurationError(
                    f"guided_decoding_backend is llguidance: the tokenizer cannot be used: {error}"
                ) from None

    def start(self, guide: Guide, on_compiled: Callable[[], None]) -> PendingGuide:
        """Compile ``guide``, unless that was done lately or is being done; returns at once.

        ``on_compiled`` is called once it is compiled or refused, on the thread that does it; at
        once if that is done. `UnsupportedRequest` if this server does not guide answers,
        `CapacityExceeded` if too many guides wait.
        """
        if self._refusal:
            raise UnsupportedRequest(
                f"'{TYPE_FIELD}' is not supported by this server: {self._refusal}"
            )
        if guide.type is GuideType.EBNF_GRAMMAR and find_spec("xgrammar") is None:
            raise UnsupportedRequest(
                f"'{TYPE_FIELD}' ebnf_grammar needs xgrammar, which is not installed on this "
                "server (in a clone of inflight: pip install '.[guided]')"
            )
        with self._lock:
            future = self._find(guide) or self._enqueue(guide)
        future.add_done_callback(lambda _: on_compiled())
        return PendingGuide(future)

    def close(self) -> None:
        """Start no more compilations."""
        with self._lock:
            self._waiting.clear()

    def _find(self, guide: Guide) -> Future[CompiledGuide] | None:
        known = self._compiled.get(guide)
        if known is None or _is_worn(known):
            return self._waiting.get(guide)
        self._compiled.move_to_end(guide)
        return known

    def _enqueue(self, guide: Guide) -> Future[CompiledGuide]:
        if len(self._waiting) >= MAX_WAITING:
            raise CapacityExceeded(
                f"'{GUIDE_FIELD}' cannot be compiled now: {MAX_WAITING} grammars wait for that, "
                "which is the limit; try again later"
            )
        future: Future[CompiledGuide] = Future()
        self._waiting[guide] = future
        if self._num_workers < _NUM_THREADS:
            start_thread(self._work)
            self._num_workers += 1
        return future

    def _work(self) -> None:
        """On a thread: compile guides until none waits."""
        while (job := self._next_job()) is not None:
            guide, future = job
            try:
                future.set_result(self._compile(guide))
            except BaseException as error:
                if not isinstance(error, InvalidRequest):  # the guide is not at fault
                    with self._lock:
                        self._compiled.pop(guide, None)
                future.set_exception(error)

    def _next_job(self) -> tuple[Guide, Future[CompiledGuide]] | None:
        """The guide that a request has waited for longest; None ends the thread's work."""
        with self._lock:
            job = next(self._waiting.items(), None)
            if job is None:
                self._num_workers -= 1
                return None
            guide, future = job
            del self._waiting[guide]
            future.set_running_or_notify_cancel()
            self._compiled.pop(guide, None)
            self._compiled[guide] = future  # at the end: the cache drops the first
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return job

    def _compile(self, guide: Guide) -> CompiledGuide:
        try:
            tokenizer = self._load_tokenizer()
        except Exception as error:  # the library raises whatever a bad tokenizer makes it raise
            raise InvalidRequest(
                f"'{GUIDE_FIELD}' cannot be used with the tokenizer of this model: "
                f"{in_short(error)}"
            ) from None
        work: Callable[[], CompiledGuide]
        if guide.type is GuideType.EBNF_GRAMMAR:
            work = partial(EbnfGuide.compile, guide, self._load_ebnf_tokenizer(tokenizer))
        else:
            grammar = to_grammar(guide, self._special)
            work = partial(LlguidanceGuide.compile, guide, grammar, tokenizer)
        _try_in_child(work, self._compile_seconds)
        return work()

    def _load_tokenizer(self) -> LLTokenizer:
        """Made once, when a guide needs it first. ValueError if llguidance cannot use it."""
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                text = self._tokenizer_json()
                self._tokenizer = LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=max(self.end_id, 0)
                )
                self._special = special_ids(text, self._tokenizer)
            return self._tokenizer

    def _load_ebnf_tokenizer(self, tokenizer: LLTokenizer) -> Any:
        with self._tokenizer_lock:
            if self._ebnf_tokenizer is None:
                self._ebnf_tokenizer = make_ebnf_tokenizer(
                    tokenizer, self._vocab_size, max(self.end_id, 0)
                )
            return self._ebnf_tokenizer


def _refusal(config: GuidedDecodingConfig, folder: Path | None) -> str:
    """Why this server guides no answers; empty if it does."""
    if config.backend == "none":
        return "guided_decoding_backend is none"
    if folder is None or find_tokenizer(folder) is None:
        return "the checkpoint has no tokenizer; set tokenizer_dir"
    if find_spec("llguidance") is None:
        return "llguidance is not installed (in a clone of inflight: pip install '.[server]')"
    return ""


def _is_worn(future: Future[CompiledGuide]) -> bool:
    return future.done() and future.exception() is None and future.result().is_worn()


def _try_in_child(work: Callable[[], object], cpu_seconds: float) -> None:
    """Do ``work`` in a forked child process within limits on CPU time and memory.

    `InvalidRequest` if ``work`` raises it, or if the child meets a limit or ends by a fault. The
    child uses neither the device nor any lock of the server, so a fork of a process with threads is
    safe; one that hangs all the same is killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_error, args=(work, cpu_seconds, sender), daemon=True)
    child.start()
    sender.close()
    error: BaseException | None
    try:
        error = receiver.recv() if receiver.poll(COMPILE_SECONDS) else InvalidRequest(_FAILED)
    except EOFError:
        child.join()
        is_late = child.exitcode == -signal.SIGPROF
        error = InvalidRequest(_takes_too_long(cpu_seconds) if is_late else _FAILED)
    finally:
        child.kill()
        child.join()
        receiver.close()
    if error is not None:
        raise error


def _takes_too_long(cpu_seconds: float) -> str:
    return (
        f"'{GUIDE_FIELD}' takes more than {cpu_seconds:g} s of processor time to compile, the "
        "limit guided_decoding_compile_seconds; simplify it"
    )


def _send_error(work: Callable[[], object], cpu_seconds: float, sender: Any) -> None:
    """In the child: do ``work``, and send None or what it raises."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the libraries' last words may quote the guide
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _CHILD_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The timer ends the process by itself: the libraries never come back to Python meanwhile. A
    # limit of the system would count whole seconds.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    error: BaseException | None = None
    try:
        work()
    except InvalidRequest as refusal:
        error = refusal
    except MemoryError:
        error = InvalidRequest(_FAILED)
    except BaseException as failure:  # without its text, which may quote the guide
        error = RuntimeError(type(failure).__name__)
    sender.send(error)
