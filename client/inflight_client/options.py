"""Options of a request, and how they become tensors; how responses become results.

A `Request` is plain values under the names of `inflight_protocol`; a transport turns it into a
protobuf message or into JSON. Values are checked here only for what the wire cannot carry (a number
outside its dtype, text that is not Unicode). The server checks the rest and explains its refusals.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from inflight_client.errors import InvalidArgument, ServerError
from inflight_protocol import DTYPE_TO_NUMPY, INPUT_BY_NAME, LLM_MODEL_NAME
from inflight_protocol.sampling import SAMPLING_OPTIONS
from inflight_scheduler.sampling import SamplingOptions

DEFAULT_MAX_TOKENS = 64

TOKEN_OUTPUTS = ("output_ids", "sequence_length")
TEXT_OUTPUTS = ("text_output",)
FINISH_OUTPUT = "finish_reason"
"""Comes with a whole answer; a stream does without, each tensor costs time."""

INDEX_OUTPUT = "sequence_index"
"""Comes with every response of a request for several answers."""

FinishReason = Literal["length", "stop", "timed_out", "cancelled"]
"""``length``: the answer has ``max_tokens`` tokens; ``stop``: it came to its end id or a stop word;
``timed_out``, ``cancelled``: it was ended from outside."""

_FINISH_REASONS: dict[str, FinishReason] = {
    "end_id": "stop",
    "stop_words": "stop",
    "length": "length",
    "timed_out": "timed_out",
    "cancelled": "cancelled",
}

# Triton's words for an input that a model does not have, or has not got, and for no such model.
_UNKNOWN_QUESTION = re.compile(
    r"unexpected inference input|missing required input|but got \d+ inputs"
    r"|unknown model: '[^']*' is not found"
)

_QUESTION_TO_OUTPUTS: dict[str, tuple[str, ...]] = {
    "stop": (),
    "stats": ("stats",),
    "describe": ("description",),
    "ready": (),
    "why": ("why",),
    "recording": ("recording",),
    "lora_adapters": ("description",),
    "live": ("live",),
}


class GenerateOptions(SamplingOptions, total=False):
    """Optional settings of a request; the server decides those left out."""

    stop_words: Sequence[str]
    bad_words: Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    end_id: int
    pad_id: int
    exclude_input_in_output: bool
    priority: float
    cache_salt: str
    max_queue_time_ms: int
    allotted_time_ms: int
    guide_type: str
    guide: str
    n: int
    logits_processor: str
    lora: str


OPTION_TO_INPUT: dict[str, str] = {
    **{name: name for name in GenerateOptions.__annotations__},
    **SAMPLING_OPTIONS,
    "guide_type": "guided_decoding_guide_type",
    "guide": "guided_decoding_guide",
    "n": "num_return_sequences",
    "logits_processor": "logits_post_processor_name",
    "lora": "lora_name",
}
"""Key of `GenerateOptions` -> input tensor."""


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """What one response of a stream adds to the answer.

    A prompt of text is answered with ``text``, a prompt of token ids with ``token_ids``; the other
    one is empty. ``index``: which of ``n`` answers this belongs to.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer; ``text`` or ``token_ids`` is filled, as in `GenerateChunk`.

    ``finish`` is None when the server did not say why the answer ended.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the model: input values by tensor name, and the outputs it asks for."""

    values: Mapping[str, object]
    outputs: tuple[str, ...] = ()
    request_id: str = ""
    model: str = LLM_MODEL_NAME

    @property
    def is_generation(self) -> bool:
        """True unless it asks about the server or another request: then its id is not its own."""
        return self.values.keys().isdisjoint(_QUESTION_TO_OUTPUTS)


@dataclass(frozen=True, slots=True)
class Response:
    """One response: the values of each output in row-major order, strings as ``str``."""

    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def generate_request(
    model: str,
    prompt: str | Sequence[int],
    max_tokens: int,
    request_id: str,
    options: GenerateOptions,
    *,
    is_streaming: bool,
    is_single: bool = False,
) -> Request:
    """The request that continues ``prompt``; text is answered with text, ids with ids.

    ``is_single``: the caller has room for one answer, so ``n`` must be 1.

    `InvalidArgument` for an unknown option or a value that does not fit its tensor.
    """
    outputs: tuple[str, ...]
    values: dict[str, object]
    if isinstance(prompt, str):
        outputs = TEXT_OUTPUTS
        values = {
            "text_input": _clean_text("prompt", prompt),
            "max_tokens": _clean_value("max_tokens", "max_tokens", max_tokens),
            "stream": is_streaming,
        }
    else:
        outputs, token_ids = TOKEN_OUTPUTS, _clean_tokens("prompt", prompt, "text (str) or ")
        values = {
            "input_ids": token_ids,
            "input_lengths": len(token_ids),
            "request_output_len": _clean_value("max_tokens", "request_output_len", max_tokens),
            "streaming": is_streaming,
        }
    if not is_streaming:
        outputs += (FINISH_OUTPUT,)
        values["return_finish_reason"] = True  # over HTTP no output can be named
    for option, value in {"exclude_input_in_output": True, **options}.items():
        if option not in OPTION_TO_INPUT:
            known = ", ".join(OPTION_TO_INPUT)
            raise InvalidArgument(f"{option} is not an option of a request; known are {known}.")
        tensor = OPTION_TO_INPUT[option]
        values[tensor] = _clean_value(option, tensor, value)
    num_answers = values.get("num_return_sequences", 1)
    if is_single and num_answers != 1:
        raise InvalidArgument(f"n = {num_answers}: generate gives one answer; use generate_many.")
    if num_answers != 1:
        outputs += (INDEX_OUTPUT,)
    return Request(values, outputs, checked_request_id(request_id), model)


def question(model: str, name: str, request_id: str = "", **more: object) -> Request:
    """The request that asks about the server, or about the request ``request_id``, or ends that
    one: ``name`` is an input, and ``more`` are others."""
    outputs = _QUESTION_TO_OUTPUTS[name]
    return Request({name: True, **more}, outputs, checked_request_id(request_id), model)


def question_about(model: str, name: str, request_id: str) -> Request:
    """`question` about a request; `InvalidArgument` if ``request_id`` is empty."""
    if not request_id:
        raise InvalidArgument("request_id is empty: give the id the request was started with.")
    return question(model, name, request_id)


def is_unknown_question(error: ServerError) -> bool:
    """Whether a question was refused by a model that is not ours and does not know it."""
    return error.status is None and _UNKNOWN_QUESTION.search(str(error)) is not None


def checked_request_id(request_id: str) -> str:
    """``request_id`` itself; `InvalidArgument` unless it is a string both wires can carry."""
    if not isinstance(request_id, str):
        raise InvalidArgument(f"request_id = {request_id!r}: give a string.")
    return _clean_text("request_id", request_id)


def read_chunk(response: Response) -> GenerateChunk:
    """What a response adds to the answer; an empty final response adds nothing."""
    token_ids = response.tensors.get("output_ids", ())
    count = response.tensors.get("sequence_length", ())
    if count:
        # Rows may be padded to a common length; only the first `count` ids are the answer.
        token_ids = token_ids[: count[0]]
    texts = response.tensors.get("text_output", ())
    index = sum(response.tensors.get(INDEX_OUTPUT, ()))
    return GenerateChunk(texts[0] if texts else "", tuple(token_ids), index)


def read_objects(response: Response, output: str) -> list[dict[str, Any]]:
    """The JSON objects in an output; `ServerError` if it holds something else."""
    try:
        found = [json.loads(text) for text in response.tensors.get(output, ())]
    except json.JSONDecodeError as error:
        raise ServerError(f"the server sent {output} that is not JSON: {error}.") from None
    if not all(isinstance(each, dict) for each in found):
        raise ServerError(f"the server sent {output} that is no JSON object.")
    return found


class AnswerCollector:
    """Puts the responses of one request together into ``num_answers`` results."""

    def __init__(self, request: Request, num_answers: int = 1) -> None:
        self._request_id = request.request_id
        self._chunks: list[list[GenerateChunk]] = [[] for _ in range(num_answers)]
        self._reasons: list[FinishReason | None] = [None] * num_answers

    def add(self, response: Response) -> None:
        """Append what ``response`` carries; `ServerError` for an index beyond ``num_answers``."""
        chunk = read_chunk(response)
        if not 0 <= chunk.index < len(self._chunks):
            raise ServerError(f"the server sent answer {chunk.index} of {len(self._chunks)}.")
        self._chunks[chunk.index].append(chunk)
        for reason in response.tensors.get(FINISH_OUTPUT, ()):
            self._reasons[chunk.index] = _FINISH_REASONS.get(reason, self._reasons[chunk.index])

    def results(self) -> list[GenerateResult]:
        """The answers so far, by their index."""
        return [
            GenerateResult(
                self._request_id,
                "".join(chunk.text for chunk in chunks),
                tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
                reason,
            )
            for chunks, reason in zip(self._chunks, self._reasons, strict=True)
        ]


def _clean_tokens(name: str, values: Sequence[int], otherwise: str = "") -> list[int]:
    if not isinstance(values, Iterable):
        raise InvalidArgument(f"{name} = {values!r}: give {otherwise}a sequence of token ids.")
    return [_clean_integer(name, "INT32", token) for token in values]


def _clean_value(argument: str, tensor: str, value: Any) -> object:
    """``value`` as a plain Python value that its tensor can hold."""
    dtype, dims = INPUT_BY_NAME[tensor].dtype, INPUT_BY_NAME[tensor].dims
    if dtype == "BOOL":
        if not isinstance(value, bool):
            raise InvalidArgument(f"{argument} = {value!r}: give True or False.")
        return value
    if dtype == "STRING" and dims == (-1,):
        return _clean_texts(argument, value)
    if dtype == "STRING":
        if not isinstance(value, str):
            raise InvalidArgument(f"{argument} = {value!r}: give a string.")
        return _clean_text(argument, value)
    if dtype == "INT32" and dims == (-1,):
        return _clean_tokens(argument, value)
    if issubclass(DTYPE_TO_NUMPY[dtype], np.integer):
        return _clean_integer(argument, dtype, value)
    return _clean_float(argument, value)


def _clean_texts(name: str, values: Any) -> list[str]:
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes)
    texts = list(values) if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{name} = {values!r}: give a list of strings.")
    return [_clean_text(name, text) for text in texts]


def _clean_text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} is not valid Unicode text (position {error.start}): decode the bytes first."
        ) from None
    return value


def _clean_integer(name: str, dtype: str, value: Any) -> int:
    limits = np.iinfo(dtype.lower())
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} = {value!r}: give a whole number.") from None
    if not limits.min <= number <= limits.max:
        raise InvalidArgument(
            f"{name} = {number} does not fit {dtype}: give {limits.min} to {limits.max}."
        )
    return number


def _clean_float(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} = {value!r}: give a number.") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidArgument(f"{name} = {number}: give a finite number.")
    return number
