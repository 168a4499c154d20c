"""Inputs that are lists of texts: stop words, bad words, words with a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.sampling_validation import MAX_WORDS, read_words
from inflight_backend.text.tokenizer import TextCodec

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
