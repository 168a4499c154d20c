"""`TritonPythonModel` of ``vllm_model``: the tensors and answers of vLLM's own Triton backend.

One prompt per request, without a batch dimension; settings are those of `sampling_parameters`. It
relays to ``tensorrt_llm`` (see `relay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest
from inflight_backend.triton.decoding import read_flag, read_inputs
from inflight_backend.triton.relay import Convert, RelayModel, Tensors
from inflight_backend.triton.request_head import RequestHead
from inflight_backend.triton.sampling_parameters import expand, with_request_parameters
from inflight_client.protocol import LLM_MODEL_NAME

Array = npt.NDArray[Any]

_EXTRAS = {
    "finish_reason": ("finish_reason", "return_finish_reason"),
    "cumulative_logprob": ("cum_log_probs", "return_log_probs"),
    "num_input_tokens": ("num_input_tokens", "return_num_input_tokens"),
    "num_output_tokens": ("num_output_tokens", "return_num_output_tokens"),
}
"""Outputs beside the text -> that of ``tensorrt_llm``, and the input that asks for it."""
REFUSED_FLAGS = ("return_logprobs",)
"""Inputs that Triton's OpenAI frontend always sends, and that may only be false."""
_RUNNING = b"None"
_REASONS = {
    b"not_finished": _RUNNING,
    b"end_id": b"stop",
    b"stop_words": b"stop",
    b"length": b"length",
    b"timed_out": b"abort",
    b"cancelled": b"abort",
}
"""Our words for the end of an answer -> vLLM's."""
_NO_SETTINGS = {"sampling_parameters": np.array([b"{}"], dtype=np.object_)}


@dataclass(frozen=True, slots=True)
class Question:
    """One request: how it is put to ``tensorrt_llm``, and what its client wants to see.

    ``prefix`` comes before every answer: the prompt, or nothing. ``extras``: outputs beside the
    text.
    """

    inputs: dict[str, Array]
    prefix: bytes
    is_streaming: bool
    num_answers: int
    extras: tuple[str, ...]

    @property
    def requested(self) -> list[str]:
        """The outputs of ``tensorrt_llm`` that are needed."""
        extras = [_EXTRAS[name][0] for name in self.extras]
        return ["text_output", *extras, *(["sequence_index"] if self.num_answers > 1 else [])]

    def convert(self, responses: Iterator[Tensors]) -> Iterator[Tensors]:
        """vLLM's responses: what is new of every answer at once, or all of them in the end."""
        answers = None
        for tensors in responses:
            if answers is None:  # that many are served
                answers = _Answers(self.prefix, self.num_answers)
            answers.add(tensors)
            if self.is_streaming:
                yield answers.take(self.extras)
        if answers is not None and not self.is_streaming:
            yield answers.take(self.extras)


class _Answers:
    """The answers of one request, from what ``tensorrt_llm`` says of one at a time."""

    def __init__(self, prefix: bytes, num_answers: int) -> None:
        self._texts = [prefix] * num_answers
        self._reasons = [_RUNNING] * num_answers
        self._cum_log_probs = np.zeros(num_answers, dtype=np.float32)
        self._num_input_tokens = np.zeros(1, dtype=np.uint32)
        self._num_tokens = np.zeros(num_answers, dtype=np.uint32)  # since the last time

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

    def take(self, extras: Sequence[str]) -> Tensors:
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
        return {name: every[name] for name in ("text_output", *extras)}


class TritonPythonModel(RelayModel):
    """The model ``vllm_model``."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start what relays; a failure fails the load with one line."""
        self.open(args, LLM_MODEL_NAME)

    def translate(
        self, request: Any, head: RequestHead
    ) -> tuple[dict[str, Array], list[str], Convert]:
        """See `RelayModel.translate`."""
        head.check()
        question = read_question(read_inputs(request), head.settings)
        return question.inputs, question.requested, question.convert


def read_question(inputs: Mapping[str, Array], parameters: Mapping[str, Any]) -> Question:
    """The request that the tensors [1] and the parameters are; raises `InvalidRequest`."""
    is_streaming = bool(read_flag(inputs, "stream"))
    is_excluded = read_flag(inputs, "exclude_input_in_output")
    if is_streaming and is_excluded is False:
        raise InvalidRequest(
            "'exclude_input_in_output' must be true, or left out, in a stream: it has no prompt"
        )
    for name in REFUSED_FLAGS:
        if read_flag(inputs, name):
            raise InvalidRequest(f"'{name}' is not supported by this server, but for false")
    extras = [name for name in _EXTRAS if read_flag(inputs, f"return_{name}")]
    own = {name: inputs[name] for name in _NO_SETTINGS if name in inputs}
    tensors = dict(expand(_NO_SETTINGS | with_request_parameters(own, parameters)))
    num_answers = tensors.get("num_return_sequences", np.ones(1)).item()
    prompt = inputs["text_input"]
    tensors |= {
        "text_input": prompt[None],
        "stream": np.array([[is_streaming]]),
        "exclude_input_in_output": np.array([[True]]),
        **{_EXTRAS[name][1]: np.array([[True]]) for name in extras},
    }
    prefix = b"" if is_streaming or is_excluded else bytes(prompt.item())
    return Question(tensors, prefix, is_streaming, int(num_answers), tuple(extras))
