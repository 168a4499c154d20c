"""Stop words, bad words and biased words as token lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.sampling import read_words
from inflight_backend.text.tokenizer import TextCodec

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


def word_table(rows: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """``[num_rows, 2, n]``: all ids of a row's words one after the other, and where each word ends.

    Ids are padded with 0, ends with -1. Without words n is 0.
    """
    size = max((sum(map(len, words)) for words in rows), default=0)
    result = np.zeros((len(rows), 2, size), dtype=np.int32)
    result[:, 1] = -1
    for row, words in zip(result, rows, strict=True):
        ids = [token for word in words for token in word]
        row[0, : len(ids)] = ids
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


def add_words(
    request: InferenceRequest, name: str, texts: Sequence[str], codec: TextCodec, vocab_size: int
) -> None:
    """Add texts to the list ``name`` as tokens.

    A word inside a text begins with a space in most vocabularies, so both forms are added.
    """
    forms = [
        form for text in texts for form in ((text,) if text[0].isspace() else (text, f" {text}"))
    ]
    _add_tokens(
        request, name, [ids for form in forms if (ids := codec.encode_word(form))], vocab_size
    )


def add_special_words(
    request: InferenceRequest, texts: Sequence[str], codec: TextCodec, vocab_size: int
) -> None:
    """Add the stop words among ``texts`` that no text can show: those with a special token."""
    words = [(text, codec.encode_word(text)) for text in texts]
    if found := [ids for text, ids in words if codec.names_special(text, ids)]:
        _add_tokens(request, "stop_words_list", found, vocab_size)


def _add_tokens(
    request: InferenceRequest, name: str, more: Sequence[Sequence[int]], vocab_size: int
) -> None:
    words = dict.fromkeys([*read_words(request, name, vocab_size), *map(tuple, more)])
    if words:
        request.replace_tensor(name, word_table([list(words)]))


def add_bias(
    request: InferenceRequest,
    words: Sequence[tuple[str, float]],
    codec: TextCodec,
    vocab_size: int,
) -> None:
    """Add the weight of each word to the bias of each of its tokens (TensorRT-LLM's rule)."""
    bias = np.zeros(vocab_size, dtype=np.float32)
    if request.has_tensor("embedding_bias"):
        given = request.get_tensor("embedding_bias").reshape(-1)
        if given.size == vocab_size:  # else validation says what is wrong with it
            bias += given.astype(np.float32)
    for word, weight in words:
        ids = codec.encode_word(word)
        if not ids:
            raise InvalidRequest("'embedding_bias_words' holds a text without tokens")
        bias[ids] += weight
    request.replace_tensor("embedding_bias", bias[None])
