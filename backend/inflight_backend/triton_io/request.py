"""Reads one Triton request: tensors, parameters, texts, and several prompts in one request.

Triton makes a request parameter of every field of an HTTP body that is no input of the model, and
of the headers it is told to forward; an ensemble passes them on to its steps. A model that does not
read `RequestHead.settings` refuses them: none is ignored.

Each row of a batched request becomes a request of its own. Rows are told apart by ``batch_index``
and end together, as the sequences of one prompt do. If one row is refused, all are, before any has
started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.sampling import MAX_WORDS, read_words
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.tokenizer import TextCodec
from inflight_protocol import ENSEMBLE_MODEL_NAME, ERROR_CODES_PARAMETER, LLM_MODEL_NAME
from inflight_protocol import aliases as elsewhere

Encode = Callable[[str], list[int]]

MAX_NUMBERS = 2**24
"""Numbers of one table, 64 MiB."""


def check_table(name: str, num_rows: int, num_columns: int) -> None:
    """`InvalidRequest` for what would become a table too large."""
    if num_rows * num_columns > MAX_NUMBERS:
        raise InvalidRequest(
            f"'{name}' would become {num_rows} rows of {num_columns} numbers each, "
            f"more than {MAX_NUMBERS} in all; send fewer rows at once"
        )


def word_ids(rows: Sequence[Sequence[str]], encode: Encode) -> npt.NDArray[np.int32]:
    """``[num_rows, 2, n]``: all ids of a row's words one after the other, and where each word ends.

    Ids are padded with 0, ends with -1. Empty words are passed over; without any, n is 0.
    """
    encoded = [[ids for word in row if word and (ids := encode(word))] for row in rows]
    size = max((sum(map(len, words)) for words in encoded), default=0)
    result = np.zeros((len(rows), 2, size), dtype=np.int32)
    result[:, 1] = -1
    for row, words in zip(result, encoded, strict=True):
        if words:
            flat = np.concatenate(words)
            row[0, : len(flat)] = flat
            row[1, : len(words)] = np.cumsum([len(word) for word in words])
    return result


def embedding_bias(
    rows: Sequence[Sequence[str]],
    weights: Sequence[Sequence[float]],
    encode: Encode,
    vocab_size: int,
) -> npt.NDArray[np.float32]:
    """``[num_rows, vocab_size]``: the weight of each word on every token of it.

    ``[num_rows, 0]`` without words. `InvalidRequest` unless there is a weight for every word.
    """
    if [len(row) for row in rows] != [len(row) for row in weights]:
        raise InvalidRequest("'EMBEDDING_BIAS_WORDS' and 'EMBEDDING_BIAS_WEIGHTS' differ in length")
    if not any(word for row in rows for word in row):
        return np.zeros((len(rows), 0), dtype=np.float32)
    check_table("EMBEDDING_BIAS_WORDS", len(rows), vocab_size)
    result = np.zeros((len(rows), vocab_size), dtype=np.float32)
    for bias, words, values in zip(result, rows, weights, strict=True):
        for word, value in zip(words, values, strict=True):
            if word:
                bias[encode(word)] += value
    return result


MAX_STOP_WORDS = 256
"""Stop words of one request given as text."""

MAX_TEXT_SIZE = 4096
"""Characters of all texts of one list."""


def read_texts(inputs: Mapping[str, Array], name: str, max_texts: int) -> list[str]:
    """The texts of an input that are not empty, each once; none if it was not sent."""
    tensor = inputs.get(name)
    if tensor is None:
        return []
    if tensor.dtype != np.object_:
        raise InvalidRequest(f"'{name}' has type {tensor.dtype}, expected STRING")
    if tensor.size > max_texts:
        raise InvalidRequest(f"'{name}' holds {tensor.size} texts, more than {max_texts}")
    texts = [_decode(name, value) for value in tensor.reshape(-1)]
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TEXT_SIZE:
        raise InvalidRequest(
            f"'{name}' holds {num_characters} characters, more than {MAX_TEXT_SIZE}"
        )
    return list(dict.fromkeys(filter(None, texts)))


def set_text_tensors(
    request: InferenceRequest,
    inputs: Mapping[str, Array],
    codec: TextCodec | None,
    vocab_size: int,
) -> None:
    """Turn bad words and biased words into tokens, beside those given as tokens."""
    bad_words = read_texts(inputs, "bad_words", MAX_WORDS // 2)
    if bad_words:
        add_words(request, "bad_words_list", bad_words, _needed(codec, "bad_words"), vocab_size)
    has_weights = "embedding_bias_weights" in inputs
    if "embedding_bias_words" in inputs or has_weights:
        _set_bias(request, inputs, _needed(codec, "embedding_bias_words"), vocab_size)


def add_words(
    request: InferenceRequest, name: str, texts: Sequence[str], codec: TextCodec, vocab_size: int
) -> None:
    """Add texts to the list ``name`` as tokens.

    A word inside a text begins with a space in most vocabularies, so both forms are added.
    """
    forms = [
        form for text in texts for form in ((text,) if text[0].isspace() else (text, f" {text}"))
    ]
    _add(request, name, [ids for form in forms if (ids := codec.encode_word(form))], vocab_size)


def add_special_words(
    request: InferenceRequest, texts: Sequence[str], codec: TextCodec, vocab_size: int
) -> None:
    """Add the stop words among ``texts`` that no text can show: those with a special token."""
    words = [(text, codec.encode_word(text)) for text in texts]
    if found := [ids for text, ids in words if codec.names_special(text, ids)]:
        _add(request, "stop_words_list", found, vocab_size)


def _add(
    request: InferenceRequest, name: str, more: Sequence[Sequence[int]], vocab_size: int
) -> None:
    words = list(dict.fromkeys([*read_words(request, name, vocab_size), *map(tuple, more)]))
    ids = [token for word in words for token in word]
    table = np.full((1, 2, max(len(ids), 1)), -1, dtype=np.int32)
    table[0, 0, : len(ids)] = ids
    table[0, 1, : len(words)] = np.cumsum([len(word) for word in words])
    request.replace_tensor(name, table)


def _set_bias(
    request: InferenceRequest, inputs: Mapping[str, Array], codec: TextCodec, vocab_size: int
) -> None:
    """Each token of a word gets the word's weight (the peer's rule)."""
    words, weights = inputs.get("embedding_bias_words"), inputs.get("embedding_bias_weights")
    if words is None or weights is None or words.size != weights.size:
        raise InvalidRequest(
            "'embedding_bias_words' and 'embedding_bias_weights' must come together and have the "
            f"same length, got {0 if words is None else words.size} and "
            f"{0 if weights is None else weights.size}"
        )
    if weights.dtype != np.float32:
        raise InvalidRequest(f"'embedding_bias_weights' has type {weights.dtype}, expected FP32")
    read_texts(inputs, "embedding_bias_words", MAX_WORDS)  # type, number and size
    bias = np.zeros(vocab_size, dtype=np.float32)
    if request.has_tensor("embedding_bias"):
        given = request.get_tensor("embedding_bias").reshape(-1)
        if given.size == vocab_size:  # else validation says what is wrong with it
            bias += given.astype(np.float32)
    for value, weight in zip(words.reshape(-1), weights.reshape(-1), strict=True):
        ids = codec.encode_word(_decode("embedding_bias_words", value))
        if not ids:
            raise InvalidRequest("'embedding_bias_words' holds a text without tokens")
        bias[ids] += weight
    request.replace_tensor("embedding_bias", bias[None])


def _needed(codec: TextCodec | None, name: str) -> TextCodec:
    if codec is None:
        raise UnsupportedRequest(f"'{name}' needs a tokenizer, and the checkpoint has none")
    return codec


def _decode(name: str, value: object) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidRequest(f"'{name}' holds a text that is not valid UTF-8") from None


_logger = get_logger(__name__)

_NOTHING = "{}"
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class RequestHead:
    """``settings``: the parameters that are neither Triton's nor ours, each a bool, number or text.

    ``fault`` says what of all this could not be read; "" if all could.
    """

    request_id: str = ""
    asks_for_codes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    def check(self) -> None:
        """`InvalidRequest` for what could not be read."""
        if self.fault:
            raise InvalidRequest(self.fault)

    def refuse_settings(self, *, but: Collection[str] = ()) -> None:
        """`InvalidRequest` also for any setting, by name: for models that take tensors only.

        ``but``: those that the model knows.
        """
        self.check()
        for key in self.settings:
            if key not in but:
                raise InvalidRequest(
                    f"{key[:_LONGEST_NAME]!r} came as a request parameter, not as an input tensor "
                    f"of the model, and no parameter of that name is known{_other_names(key)}"
                )

    def read_switch(self, name: str) -> bool | None:
        """A setting that is true or false, or 1 or 0; None when it was not sent."""
        value = self.settings.get(name)
        if value is not None and value not in (0, 1):
            raise InvalidRequest(f"request parameter '{name}' must be true or false")
        return None if value is None else bool(value)


def read_head(triton_request: Any) -> RequestHead:
    """Never raises: an error needs a way back, and its form depends on what is read here."""
    request_id, what = "", "the request id is"
    try:
        request_id = triton_request.request_id()
        what = "the request parameters are"
        text = triton_request.parameters()
        return RequestHead(request_id) if text == _NOTHING else _read(request_id, text)
    except UnicodeDecodeError:  # Triton takes any bytes over HTTP
        return RequestHead(request_id, fault=f"{what} not valid UTF-8")
    except Exception:  # whatever it is, only this request has it
        _logger.exception("the head of a request could not be read")
        return RequestHead(request_id, fault=f"{what} not readable")


def _other_names(key: str) -> str:
    """What to send in its place, for a name of another model."""
    if (names := elsewhere.names_of(key)) is None:
        return ""
    inner, outer = names
    where = "" if inner == outer else f" in {LLM_MODEL_NAME}, '{outer}' in {ENSEMBLE_MODEL_NAME}"
    return f"; the input is called '{inner}'{where}"


class _Pairs(list[tuple[str, Any]]):
    """The names and values of a JSON object; a name may stand there twice."""


def _read(request_id: str, text: str) -> RequestHead:
    settings: dict[str, Any] = {}
    fault = ""
    # Of a name that stands there twice Triton writes the first value twice.
    pairs = json.loads(text, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        return RequestHead(request_id, fault="the request parameters are no JSON object")
    for key, value in pairs:
        if key in settings:
            fault = f"{key[:_LONGEST_NAME]!r} is given twice"
        settings[key] = value
    if settings.get("id") == request_id:  # a field of an HTTP body, which Triton reads itself
        del settings["id"]
    asks_for_codes = settings.pop(ERROR_CODES_PARAMETER, False)
    if not isinstance(asks_for_codes, bool):
        fault = f"'{ERROR_CODES_PARAMETER}' must be true or false"
    return RequestHead(request_id, asks_for_codes is True, settings, fault)


_PROMPTS = ("input_ids", "text_input")


def split_rows(inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
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


def read_inputs(triton_request: Any) -> dict[str, Array]:
    """Every tensor of the request by name, as numpy; `InvalidRequest` for one in a GPU's memory.

    UINT32, which `repository.UINT32_INPUTS` may be, becomes INT32 bit by bit, as in the peer: -1
    stays -1.
    """
    tensors = triton_request.inputs()
    try:
        return {tensor.name(): _signed(tensor.as_numpy()) for tensor in tensors}
    except Exception:
        for tensor in tensors:
            if not tensor.is_cpu():
                raise InvalidRequest(_on_gpu(tensor.name())) from None
        raise


def _signed(tensor: Array) -> Array:
    return tensor.view(np.int32) if tensor.dtype == np.uint32 else tensor


def _on_gpu(name: str) -> str:
    return (
        f"'{name}' is in a GPU's memory: FORCE_CPU_ONLY_INPUT_TENSORS must be yes in config.pbtxt"
    )


def read_flag(inputs: Mapping[str, Array], name: str) -> bool | None:
    """A boolean control input; None when it was not sent. Rows may all say false."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        if tensor.size and not tensor.any():
            return False
        raise InvalidRequest(f"'{name}' must hold one value, got {tensor.size}")
    return bool(tensor.reshape(-1)[0])


def is_streaming(inputs: Mapping[str, Array]) -> bool | None:
    """``streaming``, or ``stream`` as text clients call it; None when neither was sent."""
    token_flag, text_flag = read_flag(inputs, "streaming"), read_flag(inputs, "stream")
    if token_flag is not None and text_flag is not None:
        raise InvalidRequest("'streaming' is given twice (also as 'stream')")
    return text_flag if token_flag is None else token_flag


def check_streaming(said: bool | None, inputs: Mapping[str, Array], *, is_stop: bool) -> None:
    """`InvalidRequest` if the parameter of that name, ``said``, is not what the input says.

    A stop request says it of the request that it stops.
    """
    if said is None or is_stop:
        return
    flags = [inputs[name] for name in ("streaming", "stream") if name in inputs]
    if any((flag.astype(np.bool_) != said).any() for flag in flags) or (said and not flags):
        raise InvalidRequest(
            f"request parameter '{protocol.STREAMING_PARAMETER}' must say what input 'streaming' "
            "says, or be left out"
        )


def read_text(inputs: Mapping[str, Array]) -> str | None:
    """``text_input`` as a string; None when it was not sent."""
    tensor = inputs.get("text_input")
    if tensor is None:
        return None
    if "input_ids" in inputs:
        raise InvalidRequest("'text_input' and 'input_ids' are both given; send one of them")
    if tensor.size != 1:
        raise InvalidRequest(f"'text_input' must hold one string, got {tensor.size}")
    value = tensor.reshape(-1)[0]
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidRequest("'text_input' is not valid UTF-8") from None
    if not text:
        raise InvalidRequest("'text_input' is empty: a prompt needs at least one token")
    return text


def make_request(
    number: int, inputs: Mapping[str, Array], codec: TextCodec | None, limits: RequestLimits
) -> InferenceRequest:
    """The request for the batch manager; texts are encoded here.

    With stop words to be found in the text its tokens must come as they are drawn. Beams look for
    those words as tokens, and so does everybody for those with special tokens, which have no text.
    """
    stop_texts = read_texts(inputs, "stop_words", MAX_STOP_WORDS)
    comes_in_pieces = bool(is_streaming(inputs)) or (bool(stop_texts) and not has_beams(inputs))
    request = InferenceRequest(number, is_streaming=comes_in_pieces)
    text = read_text(inputs)
    for name, tensor in inputs.items():
        if name not in protocol.CONTROL_INPUTS:
            request.set_tensor(name, tensor)
    if text is not None:
        if codec is None:
            raise UnsupportedRequest("'text_input' needs a tokenizer, and the checkpoint has none")
        ids = codec.encode(text, limits.max_input_len)
        request.set_tensor("input_ids", np.array([ids], dtype=np.int32))
        if not request.has_tensor("end_id"):
            set_end_ids(request, codec)
    set_text_tensors(request, inputs, codec, limits.vocab_size)
    if has_beams(inputs):
        set_beam_tensors(request, inputs, stop_texts, codec, limits.vocab_size)
    elif stop_texts and codec is not None:
        add_special_words(request, stop_texts, codec, limits.vocab_size)
    return request


def has_beams(inputs: Mapping[str, Array]) -> bool:
    """True for a request that searches; what is wrong with its width is said later."""
    width = inputs.get("beam_width")
    if width is None or width.size != 1 or width.dtype != np.int32:
        return False  # validation names what is wrong with it
    return bool(width.reshape(-1)[0] > 1)


def set_beam_tensors(
    request: InferenceRequest,
    inputs: Mapping[str, Array],
    stop_texts: Sequence[str],
    codec: TextCodec | None,
    vocab_size: int,
) -> None:
    """What beams want to know beside the inputs passed on: how many of them to return, and the
    texts that end one, as tokens."""
    if "num_return_sequences" in inputs:
        request.replace_tensor("num_return_sequences", inputs["num_return_sequences"])
    if stop_texts:
        if codec is None:
            raise UnsupportedRequest("'stop_words' needs a tokenizer, and the checkpoint has none")
        add_words(request, "stop_words_list", stop_texts, codec, vocab_size)


def set_end_ids(request: InferenceRequest, codec: TextCodec) -> None:
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
