"""Changes of the logits by the host: guides, and logits processors of the operator.

A logits processor is a Python callable that a request chooses by name. The contract is
TensorRT-LLM's ``LogitsPostProcessor`` (`cpp/include/tensorrt_llm/batch_manager/inferenceRequest.h`,
`executor/executor.h`): called before each token of a request is sampled, with

* its id, a number;
* its logits, a tensor [1, beams, vocab] float32 on the device, to be changed in place;
* the tokens so far of each beam, the prompt's first;
* the stream on which the device works (a ``cudaStream_t`` as a number; None on a CPU, as published
  processors expect it).

A callable with five arguments, as all published since TensorRT-LLM 0.12, is given None for the
client id; one with three, as before 0.10, no stream. If it is a class, each request gets its own
instance, made when its first token is sampled.

It runs on the loop's thread, before all other changes of the logits. A tensor that it returns
replaces its argument. If it raises, only its own request ends with an error: its row becomes NaN,
from which nothing is sampled. A token sampled after the last one of an answer is dropped, so a
processor with state may be called once more than there are tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from inflight_backend.engine.interface import (
    LogitsEdit,
    LogitsEdits,
    PendingStep,
    StepEngine,
)
from inflight_backend.errors import ConfigurationError, InvalidRequest
from inflight_backend.guided.masks import GuidedAnswer, GuidedRow, MaskMaker
from inflight_backend.log import get_logger
from inflight_backend.manager.user_scheduler import find_entry
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import PROCESSOR_FIELD, read_processor_name
from inflight_backend.requests.values import integer
from inflight_scheduler import LlmRequest

if TYPE_CHECKING:
    from inflight_backend.guided.matchers import CompiledGuide

NO_TOKEN = (
    "no token could be drawn: the model's logits are not finite numbers, or 'bad_words_list', "
    "'embedding_bias' and the other rules forbid every token"
)

Unread = tuple[Sequence[LlmRequest], PendingStep]
"""The requests of a step whose tokens have not been read, and the step."""


_logger = get_logger(__name__)

LogitsPostProcessor = Callable[..., Any]
"""(request id, logits [1, beams, vocab], tokens so far of each beam, stream) -> None or logits."""

SETTING = "logits_processors"

_NUM_ARGUMENTS = (4, 5, 3)  # the first of these that a processor can take
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NAN = float("nan")
_FORCED = 1e30  # divided by the least repetition_penalty, 1e-6, it is still finite in float32


def find_logits_processors(text: str | None) -> dict[str, LogitsPostProcessor]:
    """The processors of ``name=package.module:callable, ...``, by name."""
    processors: dict[str, LogitsPostProcessor] = {}
    for item in filter(None, (each.strip() for each in (text or "").split(","))):
        name, equals, entry = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigurationError(
                f"{SETTING}: '{item}' must have the form name=package.module:callable"
            )
        if name in processors:
            raise ConfigurationError(f"{SETTING} names '{name}' twice")
        processors[name] = find_entry(SETTING, entry, "callable")
    check_logits_processors(processors)
    return processors


def check_logits_processors(processors: Mapping[str, object]) -> None:
    """`ConfigurationError` for an invalid name, or a processor that cannot be called."""
    for name, processor in processors.items():
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{SETTING}: a name has 1 to 64 letters, digits, '_', '.' or '-', not '{name}'"
            )
        if not callable(processor):
            raise ConfigurationError(f"{SETTING}: '{name}' is not callable")
        if _num_arguments(processor) is None:
            raise ConfigurationError(
                f"{SETTING}: '{name}' must take (request_id, logits, tokens, stream), with a "
                "client_id behind them or without the stream; of a class, its instances"
            )
        if isinstance(processor, type) and not _takes(processor, ()):
            raise ConfigurationError(
                f"{SETTING}: '{name}' is a class that cannot be made without arguments, as each "
                "request makes one: extend it, or name an object"
            )


def _num_arguments(processor: Any) -> int | None:
    """The number of arguments for ``processor`` or its instances; None: it cannot be called."""
    own: tuple[None, ...] = ()
    if isinstance(processor, type):
        if not any("__call__" in vars(base) for base in processor.__mro__):
            return None
        processor, own = processor.__call__, (None,)  # a function that takes self
    taken = (number for number in _NUM_ARGUMENTS if _takes(processor, (*own, *[None] * number)))
    return next(taken, None)


def _takes(function: Any, arguments: tuple[None, ...]) -> bool:
    """Whether ``function`` takes these arguments; True for C functions without a signature."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


@dataclass(slots=True)
class _Choice:
    """The processor of one request; a class is replaced by its instance at the first call."""

    name: str
    processor: LogitsPostProcessor
    num_arguments: int
    error: str = ""

    def why_no_token(self) -> str:
        """Why no token could be sampled behind it."""
        return self.error or (
            f"no token could be drawn behind logits processor '{self.name}': it left no finite "
            "number, or the other rules forbid what it left"
        )

    def edit_of(self, request: LlmRequest, latest: Mapping[int, int]) -> LogitsEdit | None:
        """The edit of the next logits; ``latest``: sampled tokens that are not yet applied, by
        request id. None for a request that has ended: its next token is dropped."""
        tokens = request.tokens[: request.num_drawn_tokens]
        if request.num_pending_tokens:
            tokens.append(latest[request.request_id])
        has_answer = len(tokens) > request.orig_prompt_len
        if has_answer and (tokens[-1] < 0 or tokens[-1] in request.end_ids):
            return None
        return partial(self.edit, request.request_id, tokens)

    def edit(self, request_id: int, tokens: list[int], logits: Any, stream: int | None) -> None:
        """Have the user's code change logits [1, beams, vocab]; NaN if that fails.

        Infinity forces a token: it becomes a number that later rules keep finite.
        """
        try:
            if isinstance(self.processor, type):
                self.processor = self.processor()
            arguments = (request_id, logits, [tokens], stream, None)
            result = self.processor(*arguments[: self.num_arguments])
            if result is not None and getattr(result, "shape", None) != logits.shape:
                shape = list(getattr(result, "shape", ())) or type(result).__name__
                self.error = (
                    f"logits processor '{self.name}' returned {shape} where logits of shape "
                    f"{list(logits.shape)} belong"
                )
            else:
                if result is not None:
                    logits.copy_(result)
                logits.clamp_(max=_FORCED)
        except BaseException:  # a tokenizer's panic is no Exception
            self.error = f"logits processor '{self.name}' failed"
            _logger.warning("%s in request %d", self.error, request_id, exc_info=True)
        if self.error:
            logits.fill_(_NAN)


@dataclass(frozen=True, slots=True)
class _Hook:
    """What changes the logits of one request."""

    answer: GuidedAnswer | None
    choice: _Choice | None


class LogitsHooks:
    """Owner of the guides and processors of active requests, which change the logits of an engine.

    The tokens of such a request are sampled one by one.
    """

    def __init__(self, engine: StepEngine, processors: Mapping[str, LogitsPostProcessor]) -> None:
        self.mask_maker = MaskMaker(engine.vocab_size)
        self._engine = engine
        self._processors = {
            name: (processor, _num_arguments(processor) or _NUM_ARGUMENTS[0])
            for name, processor in processors.items()
        }
        self._hooks: dict[int, _Hook] = {}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._hooks

    def check(self, request: InferenceRequest) -> None:
        """`InvalidRequest` for an unknown name of a processor, or one with beams."""
        name = read_processor_name(request)
        if name and name not in self._processors:
            raise InvalidRequest(
                f"'{PROCESSOR_FIELD}' names {name[:64]!r}, and this server has no logits "
                "processor of that name; leave it out"
            )
        if name and integer(request, "beam_width", 1, -(2**31), 2**31 - 1) > 1:
            raise InvalidRequest(f"'{PROCESSOR_FIELD}' cannot go with a 'beam_width' above 1")

    def add(self, request: InferenceRequest, guide: CompiledGuide | None) -> None:
        """Change the logits of a checked request, if it has a guide or names a processor."""
        name = read_processor_name(request)
        if name or guide is not None:
            self._hooks[request.request_id] = _Hook(
                None if guide is None else GuidedAnswer(guide),
                _Choice(name, *self._processors[name]) if name else None,
            )

    def discard(self, request_id: int) -> None:
        """Forget a request, with or without any of these."""
        self._hooks.pop(request_id, None)

    def why_no_token(self, request_id: int) -> str:
        """Why no token could be sampled; empty if neither guide nor processor is the cause."""
        hook = self._hooks.get(request_id, _Hook(None, None))
        if hook.answer is not None and hook.answer.error:
            return hook.answer.error
        return "" if hook.choice is None else hook.choice.why_no_token()

    def prepare(self, owners: Sequence[LlmRequest], before: Unread | None) -> None:
        """Have the engine mask and edit rows of the next plan, whose rows belong to ``owners``.

        It asks for masks and edits while the decoder runs; this then waits for the tokens of the
        step ``before``, which have not been read.
        """
        guided: list[GuidedRow] = []
        edited: list[tuple[int, LlmRequest, _Choice]] = []
        for row, owner in enumerate(owners):
            if (hook := self._hooks.get(owner.request_id)) is not None:
                if hook.answer is not None:
                    guided.append((row, owner, hook.answer))
                if hook.choice is not None:
                    edited.append((row, owner, hook.choice))

        def latest() -> dict[int, int]:
            if before is None:
                return {}
            tokens = zip(before[0], before[1].read(), strict=True)
            return {owner.request_id: token for owner, token in tokens}

        def edits() -> LogitsEdits:
            tokens = latest()
            found = ((row, choice.edit_of(owner, tokens)) for row, owner, choice in edited)
            return [(row, edit) for row, edit in found if edit is not None]

        if guided:
            self._engine.mask_next(lambda: self.mask_maker.masks(guided, latest()))
        if edited:
            self._engine.edit_next(edits)
