"""A Triton request, parsed once: nothing behind it reads Triton's tensors again.

Each row of a batched request is a `Prompt`. Rows are told apart by ``batch_index`` and end
together, as the sequences of one prompt do. If one row is refused, all are, before any has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.sampling import MAX_WORDS
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.generation_config import DRAWING_INPUTS
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.aliases import (
    BENCHMARK_PARAMETERS,
    expand,
    has_beams,
    with_benchmark_parameters,
)
from inflight_backend.triton_io.inputs import (
    RequestHead,
    decode_text,
    read_flag,
    read_inputs,
    read_texts,
)
from inflight_backend.triton_io.word_lists import add_bias, add_special_words, add_words

MAX_STOP_WORDS = 256
"""Stop words of one request given as text."""

_PROMPTS = ("input_ids", "text_input")


class RequestKind(Enum):
    """What a request asks for; all but the first are named by the input that says so."""

    GENERATE = ""
    STOP = "stop"
    STATS = "stats"
    READY = "ready"
    DESCRIBE = "describe"
    RECORDING = "recording"
    WHY = "why"
    ADAPTERS = "lora_adapters"
    LIVE = "live"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a request that generates.

    ``tensors``: the inputs of an `InferenceRequest`, which the batch manager's validation reads;
    everything else a client may send is a field. ``num_sequences``: answers wanted, None if it was
    not sent. ``is_whole``: all tokens in one response.
    """

    tensors: Mapping[str, Array]
    text: str | None
    is_streaming: bool
    has_beams: bool
    num_sequences: int | None
    stop_words: tuple[str, ...]
    bad_words: tuple[str, ...]
    biased_words: tuple[tuple[str, float], ...]
    wants_finish_reason: bool
    keeps_stop_word: bool
    skips_special_tokens: bool

    @classmethod
    def read(cls, inputs: Mapping[str, Array]) -> Prompt:
        """From the tensors of one row; `InvalidRequest` names the input that is wrong."""
        return cls(
            tensors={
                name: tensor
                for name, tensor in inputs.items()
                if name not in protocol.CONTROL_INPUTS
            },
            text=_read_text(inputs),
            is_streaming=bool(_read_streaming(inputs)),
            has_beams=has_beams(inputs),
            num_sequences=_read_num_sequences(inputs),
            stop_words=tuple(read_texts(inputs, "stop_words", MAX_STOP_WORDS)),
            bad_words=tuple(read_texts(inputs, "bad_words", MAX_WORDS // 2)),
            biased_words=_read_biased_words(inputs),
            wants_finish_reason=bool(read_flag(inputs, "return_finish_reason")),
            keeps_stop_word=bool(read_flag(inputs, "include_stop_str_in_output")),
            skips_special_tokens=read_flag(inputs, "skip_special_tokens") is not False,
        )

    def count_requests(self, maximum: int) -> int:
        """Requests of the batch manager: a search with beams is one, whatever it returns.

        `InvalidRequest` for more sequences than ``maximum``.
        """
        num_sequences = 1 if self.num_sequences is None else self.num_sequences
        if not 1 <= num_sequences <= maximum:
            raise InvalidRequest(f"'num_return_sequences' is {num_sequences}, outside 1..{maximum}")
        return 1 if self.has_beams else num_sequences

    def make_request(
        self,
        number: int,
        codec: TextCodec | None,
        limits: RequestLimits,
        default_sampling: Mapping[str, float],
    ) -> InferenceRequest:
        """The request for the batch manager; texts are encoded here.

        ``default_sampling``: by input, of a text that comes without them.

        With stop words to be found in the text its tokens must come as they are sampled. Beams look
        for those words as tokens, and so does every request for those with special tokens, which
        have no text.
        """
        comes_in_pieces = self.is_streaming or (bool(self.stop_words) and not self.has_beams)
        request = InferenceRequest(number, self.tensors, is_streaming=comes_in_pieces)
        if self.text is not None:
            codec = _needed(codec, "text_input")
            ids = codec.encode(self.text, limits.max_prompt_len)
            request.set_tensor("input_ids", np.array([ids], dtype=np.int32))
            if not request.has_tensor("end_id"):
                _set_end_ids(request, codec)
            self._set_sampling(request, default_sampling)
        size = limits.vocab_size
        if self.bad_words:
            codec = _needed(codec, "bad_words")
            add_words(request, "bad_words_list", self.bad_words, codec, size)
        if self.biased_words:
            add_bias(request, self.biased_words, _needed(codec, "embedding_bias_words"), size)
        if self.has_beams and self.num_sequences is not None:
            returned = np.array([[self.num_sequences]], dtype=np.int32)
            request.replace_tensor("num_return_sequences", returned)
        if self.has_beams and self.stop_words:
            codec = _needed(codec, "stop_words")
            add_words(request, "stop_words_list", self.stop_words, codec, size)
        elif self.stop_words and codec is not None:
            add_special_words(request, self.stop_words, codec, size)
        return request

    def _set_sampling(self, request: InferenceRequest, defaults: Mapping[str, float]) -> None:
        for name, value in defaults.items():
            if request.has_tensor(name) or (self.has_beams and name in DRAWING_INPUTS):
                continue
            dtype = protocol.DTYPE_TO_NUMPY[protocol.INPUT_BY_NAME[name].dtype]
            request.set_tensor(name, np.array([[value]], dtype=dtype))


@dataclass(frozen=True, slots=True)
class TritonRequest:
    """One request of Triton's. ``outputs``: those that the client names, none if it names none.

    ``is_streaming`` None: not sent. ``prompts`` only for RequestKind.GENERATE, at least one.
    ``adapter`` only for RequestKind.ADAPTERS: its name and folder, each "" if not sent.
    ``cursor`` and ``wants_blocks`` only for RequestKind.LIVE.
    """

    request_id: str
    kind: RequestKind
    outputs: frozenset[str] = frozenset()
    is_streaming: bool | None = None
    prompts: tuple[Prompt, ...] = ()
    adapter: tuple[str, str] = ("", "")
    cursor: str = ""
    wants_blocks: bool = False

    @classmethod
    def read(
        cls, triton_request: Any, head: RequestHead, all_outputs: frozenset[str]
    ) -> TritonRequest:
        """From what Triton hands over; `InvalidRequest` names the input or parameter that is wrong.

        ``all_outputs``: the outputs of the model, all of which Triton asks for when a client names
        none.
        """
        head.refuse_settings(but=(protocol.STREAMING_PARAMETER, *BENCHMARK_PARAMETERS))
        inputs = with_benchmark_parameters(head, expand(read_inputs(triton_request)))
        _check_streaming_parameter(head, inputs)
        outputs = frozenset(triton_request.requested_output_names())
        if outputs == all_outputs:
            outputs = frozenset()
        return cls.from_inputs(head.request_id, inputs, outputs)

    @classmethod
    def from_inputs(
        cls, request_id: str, inputs: Mapping[str, Array], outputs: frozenset[str]
    ) -> TritonRequest:
        """From tensors by name, ``sampling_parameters`` expanded."""
        for kind in RequestKind:
            if kind is not RequestKind.GENERATE and read_flag(inputs, kind.value):
                is_streaming = _read_streaming(inputs) if kind is RequestKind.STATS else None
                adapter = _read_adapter(inputs) if kind is RequestKind.ADAPTERS else ("", "")
                cursors, wants_blocks = list[str](), False
                if kind is RequestKind.LIVE:
                    cursors = read_texts(inputs, "live_since", 1)
                    wants_blocks = bool(read_flag(inputs, "live_blocks"))
                return cls(
                    request_id,
                    kind,
                    outputs,
                    is_streaming,
                    adapter=adapter,
                    cursor="".join(cursors),
                    wants_blocks=wants_blocks,
                )
        if "lora_path" in inputs:
            raise InvalidRequest("'lora_path' goes with 'lora_adapters'; name a loaded adapter")
        for name in ("live_since", "live_blocks"):
            if name in inputs:
                raise InvalidRequest(f"'{name}' goes with 'live'; leave it out")
        prompts = tuple(Prompt.read(row) for row in _split_rows(inputs))
        return cls(request_id, RequestKind.GENERATE, outputs, None, prompts)


def _read_adapter(inputs: Mapping[str, Array]) -> tuple[str, str]:
    texts = [read_texts(inputs, name, 1) for name in ("lora_name", "lora_path")]
    name, path = (each[0] if each else "" for each in texts)
    return name, path


def _read_streaming(inputs: Mapping[str, Array]) -> bool | None:
    """``streaming``, or ``stream`` as text clients call it; None when neither was sent."""
    token_flag, text_flag = read_flag(inputs, "streaming"), read_flag(inputs, "stream")
    if token_flag is not None and text_flag is not None:
        raise InvalidRequest("'streaming' is given twice (also as 'stream')")
    return text_flag if token_flag is None else token_flag


def _check_streaming_parameter(head: RequestHead, inputs: Mapping[str, Array]) -> None:
    """`InvalidRequest` if the parameter of that name is not what the input says.

    A stop request says it of the request that it stops.
    """
    said = head.read_switch(protocol.STREAMING_PARAMETER)
    if said is None or read_flag(inputs, "stop"):
        return
    flags = [inputs[name] for name in ("streaming", "stream") if name in inputs]
    if any((flag.astype(np.bool_) != said).any() for flag in flags) or (said and not flags):
        raise InvalidRequest(
            f"request parameter '{protocol.STREAMING_PARAMETER}' must say what input 'streaming' "
            "says, or be left out"
        )


def _split_rows(inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    """The inputs of each row, with a batch dimension of 1; ``inputs`` itself for a single row.

    Prompts of different lengths are padded, and ``input_lengths`` says where each ends. Raises
    `InvalidRequest` for a tensor with another number of rows than the prompt.
    """
    prompt = next((inputs[name] for name in _PROMPTS if name in inputs), None)
    if prompt is None or prompt.ndim < 2 or len(prompt) < 2:
        return [inputs]
    num_rows = len(prompt)
    for name, tensor in inputs.items():
        if tensor.ndim == 0 or len(tensor) != num_rows:
            shape = list(tensor.shape)
            raise InvalidRequest(
                f"'{name}' has shape {shape}, but the prompt has {num_rows} rows: the first "
                "dimension of every tensor must be the same"
            )
    return [
        {name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(num_rows)
    ]


def _read_text(inputs: Mapping[str, Array]) -> str | None:
    """``text_input`` as a string; None when it was not sent."""
    tensor = inputs.get("text_input")
    if tensor is None:
        return None
    if "input_ids" in inputs:
        raise InvalidRequest("'text_input' and 'input_ids' are both given; send one of them")
    if tensor.size != 1:
        raise InvalidRequest(f"'text_input' must hold one string, got {tensor.size}")
    text = decode_text("text_input", tensor.reshape(-1)[0])
    if not text:
        raise InvalidRequest("'text_input' is empty: a prompt needs at least one token")
    return text


def _read_num_sequences(inputs: Mapping[str, Array]) -> int | None:
    tensor = inputs.get("num_return_sequences")
    if tensor is None:
        return None
    if tensor.size != 1 or tensor.dtype != np.int32:
        raise InvalidRequest(
            f"'num_return_sequences' must be one INT32, got {tensor.size} of {tensor.dtype}"
        )
    return int(tensor.reshape(-1)[0])


def _read_biased_words(inputs: Mapping[str, Array]) -> tuple[tuple[str, float], ...]:
    words, weights = inputs.get("embedding_bias_words"), inputs.get("embedding_bias_weights")
    if words is None and weights is None:
        return ()
    if words is None or weights is None or words.size != weights.size:
        raise InvalidRequest(
            "'embedding_bias_words' and 'embedding_bias_weights' must come together and have the "
            f"same length, got {0 if words is None else words.size} and "
            f"{0 if weights is None else weights.size}"
        )
    if weights.dtype != np.float32:
        raise InvalidRequest(f"'embedding_bias_weights' has type {weights.dtype}, expected FP32")
    read_texts(inputs, "embedding_bias_words", MAX_WORDS)  # type, number and size
    texts = [decode_text("embedding_bias_words", word) for word in words.reshape(-1)]
    return tuple(zip(texts, weights.reshape(-1).tolist(), strict=True))


def _set_end_ids(request: InferenceRequest, codec: TextCodec) -> None:
    """End the answer where the checkpoint ends texts, beside what the client has named."""
    if codec.end_id >= 0:
        request.set_tensor("end_id", np.array([codec.end_id], dtype=np.int32))
    if codec.more_end_ids:
        more = np.array([codec.more_end_ids], dtype=np.int32)
        if request.has_tensor("stop_token_ids"):
            named = request.get_tensor("stop_token_ids")
            if named.dtype != np.int32:
                return  # validation says so
            more = np.concatenate((named.reshape(1, -1), more), axis=1)
        request.replace_tensor("stop_token_ids", more)


def _needed(codec: TextCodec | None, name: str) -> TextCodec:
    if codec is None:
        raise UnsupportedRequest(f"'{name}' needs a tokenizer, and the checkpoint has none")
    return codec
