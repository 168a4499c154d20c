"""`TritonPythonModel` of ``vllm_model``: the tensors and answers of vLLM's own Triton backend.

One prompt per request, without a batch dimension; settings are those of `triton_io.aliases`. It
relays to ``tensorrt_llm`` (`relay_client`) and has a tokenizer of its own for ``logprobs`` alone.

``logprobs`` is one JSON text per answer: a list with an object for each new token, which maps token
ids to ``logprob``, ``rank`` (1 for the most likely) and ``decoded_token``. The sampled token comes
first, with what it adds to the text: a part of a character adds nothing, and what completes it all
of it, as in vLLM. Its rank, when it is not among the most likely ones, is as in vLLM the number of
tokens that are at least as likely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import Array
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.relay_wire import Tensors
from inflight_backend.triton_io.aliases import (
    TENSOR_TO_KEY,
    expand,
    read_num_log_probs,
    with_request_parameters,
)
from inflight_backend.triton_io.inputs import RequestHead, decode_text, read_flag, read_inputs
from inflight_backend.triton_models.relay_client import Convert, RelayModel
from inflight_backend.triton_models.text_base import CODEC_PARAMETERS, parameters_of
from inflight_protocol import LLM_MODEL_NAME

_OWN = ("output_ids", "output_log_probs", "output_log_prob_ranks")
_TOP = ("top_log_prob_ids", "top_log_probs")


class TokenTexts:
    """What each token of an answer to ``prompt`` adds to its text; special ones have names."""

    def __init__(self, codec: TextCodec, prompt: str, *, skips_special_tokens: bool) -> None:
        prompt_ids = codec.encode_raw(prompt, add_special_tokens=True)
        self._codec = codec
        self._detokenizer = IncrementalDetokenizer(
            codec, prompt_ids, skip_special_tokens=skips_special_tokens
        )

    def take(self, ids: Sequence[int], *, is_final: bool) -> list[str]:
        """Of the next tokens; ``is_final``: there are no more."""
        texts = [
            self._detokenizer.push((token_id,)) or self._codec.special_text(token_id)
            for token_id in ids
        ]
        if is_final and texts:  # that of a character which stays incomplete
            texts[-1] += self._detokenizer.finish()
        return texts


@dataclass(frozen=True, slots=True)
class LogProbs:
    """What a request asks for: ``num_top`` of the likeliest beside each token of the answer.

    ``token_text``: the text of a token by its id. ``new_texts``: for an answer; takes time for a
    long prompt.
    """

    num_top: int
    token_text: Callable[[int], str]
    new_texts: Callable[[], TokenTexts]

    @property
    def inputs(self) -> dict[str, Array]:
        """What asks ``tensorrt_llm`` for them."""
        inputs = {
            name: np.array([[True]]) for name in ("return_log_probs", "return_log_prob_ranks")
        }
        return inputs | {"num_top_log_probs": np.array([[self.num_top]], dtype=np.int32)}

    @property
    def outputs(self) -> list[str]:
        """Where it tells them."""
        return [*_OWN, "finish_reason", *(_TOP if self.num_top else ())]

    def read(self, tensors: Mapping[str, Array], texts: Sequence[str]) -> list[str]:
        """The objects for the tokens of one response of ``tensorrt_llm``, each as its JSON.

        ``texts``: what each token adds.

        A long answer as Python's objects would take three times the room.
        """
        ids, values, ranks = (tensors[name].reshape(-1).tolist() for name in _OWN)
        tops: Iterable[list[tuple[int, float]]] = ([] for _ in ids)
        if self.num_top:
            rows = (tensors[name].reshape(-1, self.num_top).tolist() for name in _TOP)
            tops = (list(zip(*row, strict=True)) for row in zip(*rows, strict=True))
        return [
            json.dumps(self._object(*row))
            for row in zip(ids, texts, values, ranks, tops, strict=True)
        ]

    def _object(
        self, token_id: int, text: str, log_prob: float, rank: int, top: list[tuple[int, float]]
    ) -> dict[int, dict[str, Any]]:
        found = {token_id: self._entry(text, log_prob, rank)}
        for place, (likely, value) in enumerate(top, start=1):
            if likely == token_id:  # of equally likely ones the place counts
                found[token_id]["rank"] = place
            else:
                found[likely] = self._entry(self.token_text(likely), value, place)
        return found

    @staticmethod
    def _entry(text: str, log_prob: float, rank: int) -> dict[str, Any]:
        return {"logprob": log_prob, "rank": rank, "decoded_token": text}


def to_text(objects: Iterable[str]) -> bytes:
    """The list of them."""
    return f"[{', '.join(objects)}]".encode()


_EXTRAS = {
    "finish_reason": ("finish_reason", "return_finish_reason"),
    "cumulative_logprob": ("cum_log_probs", "return_log_probs"),
    "num_input_tokens": ("num_input_tokens", "return_num_input_tokens"),
    "num_output_tokens": ("num_output_tokens", "return_num_output_tokens"),
}
"""Outputs beside the text -> that of ``tensorrt_llm``, and the input that asks for it."""
_LOG_PROBS = "logprobs"
_NO_LOG_PROBS = b"null"  # for a client that asks for the output, but not with the setting
_RUNNING = b"None"
_NOT_FINISHED = b"not_finished"
_REASONS = {
    _NOT_FINISHED: _RUNNING,
    b"end_id": b"stop",
    b"stop_words": b"stop",
    b"length": b"length",
    b"timed_out": b"abort",
    b"cancelled": b"abort",
}
"""Our words for the end of an answer -> vLLM's."""
_TENSOR = re.compile(rf"\b(?:{'|'.join(TENSOR_TO_KEY)})\b")
_NO_SETTINGS = {"sampling_parameters": np.array([b"{}"], dtype=np.object_)}


@dataclass(frozen=True, slots=True)
class Question:
    """One request: how it is put to ``tensorrt_llm``, and what its client wants to see.

    ``prefix`` comes before every answer: the prompt, or nothing. ``extras``: outputs beside the
    text. ``log_probs`` says which to tell, ``has_log_probs`` whether to send that output at all.
    """

    inputs: dict[str, Array]
    prefix: bytes
    is_streaming: bool
    num_answers: int
    extras: tuple[str, ...]
    has_log_probs: bool
    log_probs: LogProbs | None

    @property
    def requested(self) -> list[str]:
        """The outputs of ``tensorrt_llm`` that are needed."""
        extras = [_EXTRAS[name][0] for name in self.extras]
        log_probs = [] if self.log_probs is None else self.log_probs.outputs
        extras = [name for name in extras if name not in log_probs]
        index = ["sequence_index"] if self.num_answers > 1 else []
        return ["text_output", *extras, *log_probs, *index]

    def convert(self, responses: Iterator[Tensors]) -> Iterator[Tensors]:
        """vLLM's responses: what is new of every answer at once, or all of them in the end."""
        answers = None
        for tensors in responses:
            if answers is None:  # that many are served
                answers = _Answers(self)
            answers.add(tensors)
            if self.is_streaming:
                yield answers.take()
        if answers is not None and not self.is_streaming:
            yield answers.take()


class _Answers:
    """The answers of one request, from what ``tensorrt_llm`` says of one at a time."""

    def __init__(self, question: Question) -> None:
        self._question = question
        num_answers = question.num_answers
        self._texts = [question.prefix] * num_answers
        self._reasons = [_RUNNING] * num_answers
        self._cum_log_probs = np.zeros(num_answers, dtype=np.float32)
        self._num_input_tokens = np.zeros(1, dtype=np.uint32)
        self._num_tokens = np.zeros(num_answers, dtype=np.uint32)  # since the last time
        self._log_probs: list[list[str]] = [[] for _ in range(num_answers)]  # as well
        asked = question.log_probs
        self._token_texts = [] if asked is None else [asked.new_texts() for _ in self._texts]

    def add(self, tensors: Tensors) -> None:
        """Take in one response."""
        index = int(tensors["sequence_index"].item()) if "sequence_index" in tensors else 0
        self._texts[index] += tensors["text_output"].item()
        if "finish_reason" in tensors:
            self._reasons[index] = _REASONS[tensors["finish_reason"].item()]
        if "cum_log_probs" in tensors:
            self._cum_log_probs[index] = tensors["cum_log_probs"].item()
        if "num_input_tokens" in tensors:
            self._num_input_tokens[0] = tensors["num_input_tokens"].item()
        if "num_output_tokens" in tensors:
            self._num_tokens[index] += tensors["num_output_tokens"].item()
        if self._question.log_probs is not None:
            ids = tensors["output_ids"].reshape(-1).tolist()
            is_final = tensors["finish_reason"].item() != _NOT_FINISHED
            texts = self._token_texts[index].take(ids, is_final=is_final)
            self._log_probs[index] += self._question.log_probs.read(tensors, texts)

    def take(self) -> Tensors:
        """What has come since the last time."""
        every = {
            "text_output": np.array(self._texts, dtype=np.object_),
            "finish_reason": np.array(self._reasons, dtype=np.object_),
            "cumulative_logprob": self._cum_log_probs.copy(),
            "num_input_tokens": self._num_input_tokens.copy(),
            "num_output_tokens": self._num_tokens,
        }
        self._texts = [b""] * len(self._texts)
        self._num_tokens = np.zeros_like(self._num_tokens)
        tensors = {name: every[name] for name in ("text_output", *self._question.extras)}
        if self._question.has_log_probs:
            tensors[_LOG_PROBS] = np.array(self._take_log_probs(), dtype=np.object_)
        return tensors

    def _take_log_probs(self) -> list[bytes]:
        if self._question.log_probs is None:
            return [_NO_LOG_PROBS] * len(self._log_probs)
        taken, self._log_probs = self._log_probs, [[] for _ in self._log_probs]
        return [to_text(objects) for objects in taken]


class TritonPythonModel(RelayModel):
    """The model ``vllm_model``; as vLLM's own, its last response says so."""

    tells_end_at_once = True

    def initialize(self, args: dict[str, str]) -> None:
        """Start what relays; a failure fails the load with one line."""
        parameters = parameters_of(args, *CODEC_PARAMETERS, "tensorrt_llm_model_name")
        # Before a tokenizer loads: the server may die meanwhile.
        self.open(args, parameters.get("tensorrt_llm_model_name") or LLM_MODEL_NAME)
        self._codec = _load_codec(parameters)

    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[dict[str, Array], list[str], Convert]:
        """See `RelayModel.translate`."""
        head.check()
        question = read_question(read_inputs(request), head.settings, self._codec)
        return question.inputs, question.requested, question.convert

    def reword(self, error: str) -> str:
        """See `RelayModel.reword`: the keys of vLLM's ``SamplingParams``."""
        return _TENSOR.sub(lambda found: TENSOR_TO_KEY[found[0]], error)


def _load_codec(parameters: Mapping[str, str]) -> TextCodec | None:
    """The tokenizer that ``tensorrt_llm`` has; None if the parameters do not say or it has none."""
    folder, tokenizer_dir = (parameters.get(key) for key in ("gpt_model_path", "tokenizer_dir"))
    return TextCodec.load(Path(folder), tokenizer_dir) if folder else None


def read_question(
    inputs: Mapping[str, Array], parameters: Mapping[str, Any], codec: TextCodec | None
) -> Question:
    """The request that the tensors [1] and the parameters are; raises `InvalidRequest`."""
    is_streaming = bool(read_flag(inputs, "stream"))
    is_excluded = read_flag(inputs, "exclude_input_in_output")
    if is_streaming and is_excluded is False:
        raise InvalidRequest(
            "'exclude_input_in_output' must be true, or left out, in a stream: it has no prompt"
        )
    extras = [name for name in _EXTRAS if read_flag(inputs, f"return_{name}")]
    own = {name: inputs[name] for name in _NO_SETTINGS if name in inputs}
    settings = _NO_SETTINGS | with_request_parameters(own, parameters)
    num_log_probs = read_num_log_probs(settings)
    has_log_probs = bool(read_flag(inputs, f"return_{_LOG_PROBS}"))
    tensors = dict(expand(settings, has_log_probs=True))
    num_answers = tensors.get("num_return_sequences", np.ones(1)).item()
    prompt = inputs.get("text_input")
    if prompt is None:  # Triton only counts what came
        raise InvalidRequest("'text_input' is missing")
    log_probs = None
    if has_log_probs and num_log_probs is not None:
        text = decode_text("text_input", prompt.item())
        skips = read_flag(tensors, "skip_special_tokens") is not False
        codec = _needed(codec)
        new_texts = partial(TokenTexts, codec, text, skips_special_tokens=skips)
        log_probs = LogProbs(num_log_probs, codec.token_text, new_texts)
    tensors |= {
        "text_input": prompt[None],
        "stream": np.array([[is_streaming]]),
        "exclude_input_in_output": np.array([[True]]),
        **{_EXTRAS[name][1]: np.array([[True]]) for name in extras},
        **({} if log_probs is None else log_probs.inputs),
    }
    prefix = b"" if is_streaming or is_excluded else bytes(prompt.item())
    return Question(
        tensors, prefix, is_streaming, int(num_answers), tuple(extras), has_log_probs, log_probs
    )


def _needed(codec: TextCodec | None) -> TextCodec:
    if codec is None:
        raise UnsupportedRequest(
            f"'return_{_LOG_PROBS}' needs a tokenizer: set gpt_model_path in the parameters of "
            "this model"
        )
    return codec
