"""Sampling and beam search settings of a request, read from its tensors and checked.

Names and neutral values are those of TensorRT-LLM's Triton backend; word lists have its layout:
``[1, 2, L]``, all tokens of all words in row 0, where each word ends in row 1, then -1. Settings
that sample at random, or need a single text to continue, are refused together with beams by name
(rules of the search: `inflight_scheduler.beam_search`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.outputs import input_of
from inflight_backend.requests.values import check_vocabulary, integer, number
from inflight_scheduler import MAX_STOP_TOKEN_IDS, BeamParams, OutputParams, SamplingParams
from inflight_scheduler.sampling import SETTINGS, Setting

MAX_WORDS = 1024
"""Stop words, or bad words, of one request."""

MAX_WORD_TOKENS = 128
"""Tokens of one of them."""

MAX_LIST_TOKENS = 8192
"""Tokens of all of them: each step compares ends of texts with all bad words of its requests."""

_STOP_TOKEN_IDS = "stop_token_ids"

Word = tuple[int, ...]


def read_sampling(
    request: InferenceRequest,
    max_new_tokens: int,
    vocab_size: int,
    more_end_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """The sampling settings of ``request``, as the table `SETTINGS` has them; `InvalidRequest` for
    one outside its bounds. ``more_end_ids`` are ``stop_token_ids``, too."""
    limits = {"vocab_size - 1": vocab_size - 1, "max_new_tokens": max_new_tokens}
    values: dict[str, Any] = {
        name: _read_setting(request, setting, limits)
        for name, setting in SETTINGS.items()
        if request.has_tensor(setting.tensor)
    }
    if "top_k" in values:
        values["top_k"] = min(values["top_k"], vocab_size)  # more than all of them filters nothing
    seed = values.get("seed", secrets.randbits(64))  # without a seed no two requests sample alike
    values["seed"] = seed - 2**64 if seed >= 2**63 else seed  # device tensors hold signed numbers
    return SamplingParams(
        **values,
        bias=_read_bias(request, vocab_size),
        bad_words=read_words(request, "bad_words_list", vocab_size),
        stop_token_ids=read_stop_token_ids(request, vocab_size, more_end_ids),
    )


def _read_setting(
    request: InferenceRequest, setting: Setting, limits: Mapping[str, int]
) -> int | float:
    bounds = [
        limits[bound] if isinstance(bound, str) else bound
        for bound in (setting.minimum, setting.maximum)
    ]
    read = number if setting.dtype == "FP32" else integer
    return read(request, setting.tensor, 0, *bounds)  # type: ignore[arg-type]  # int or float alike


def read_stop_token_ids(
    request: InferenceRequest, vocab_size: int, more: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The tokens that end the answer beside the end id, those sent and ``more``: sorted, each once.

    As for the end id -1 is none: rows of one tensor may name different numbers of them.
    Raises `InvalidRequest`.
    """
    ids = list(more)
    if request.has_tensor(_STOP_TOKEN_IDS):
        ids += request.get_tensor(_STOP_TOKEN_IDS).reshape(-1).tolist()
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"'{_STOP_TOKEN_IDS}' holds {len(ids)} ids, more than {MAX_STOP_TOKEN_IDS}; those that "
            "the checkpoint ends texts with count when no 'end_id' is sent"
        )
    check_vocabulary(_STOP_TOKEN_IDS, ids, vocab_size, minimum=-1)
    return tuple(sorted(set(ids) - {-1}))  # sorted, so that equal sets are equal tuples


def read_words(request: InferenceRequest, name: str, vocab_size: int) -> tuple[Word, ...]:
    """The words of a list, each once; none if it was not sent. Raises `InvalidRequest`."""
    if not request.has_tensor(name):
        return ()
    return request.reading(name, lambda tensor: _words(name, tensor, vocab_size))


def _words(name: str, tensor: Array, vocab_size: int) -> tuple[Word, ...]:
    if tensor.ndim not in (2, 3) or tensor.shape[-2] != 2:
        raise InvalidRequest(f"'{name}' has shape {list(tensor.shape)}, expected [1, 2, n]")
    ids, ends = tensor.reshape(2, -1)
    num_words = int((ends >= 0).argmin()) if (ends < 0).any() else len(ends)
    if (ends[num_words:] != -1).any():
        raise InvalidRequest(
            f"'{name}' holds an offset behind the first -1 of row 1, or a negative one; offsets "
            "come first and the rest of the row is -1"
        )
    if num_words > MAX_WORDS:
        raise InvalidRequest(f"'{name}' holds {num_words} words, more than {MAX_WORDS}")
    num_tokens = int(ends[num_words - 1]) if num_words else 0
    if MAX_LIST_TOKENS < num_tokens <= len(ids):
        raise InvalidRequest(f"'{name}' holds {num_tokens} tokens, more than {MAX_LIST_TOKENS}")
    return _cut_words(name, ids, ends[:num_words], vocab_size)


def _cut_words(name: str, ids: Array, ends: Array, vocab_size: int) -> tuple[Word, ...]:
    words = []
    start = 0
    for end in ends.tolist():
        if not start < end <= len(ids):
            raise InvalidRequest(
                f"'{name}' has the offset {end} behind {start}: the offsets of row 1 must increase "
                f"and be at most {len(ids)}, the length of row 0"
            )
        if end - start > MAX_WORD_TOKENS:
            raise InvalidRequest(
                f"'{name}' holds a word of {end - start} tokens, more than {MAX_WORD_TOKENS}"
            )
        word = tuple(ids[start:end].tolist())
        check_vocabulary(name, word, vocab_size)
        words.append(word)
        start = end
    return tuple(dict.fromkeys(words))


def _read_bias(request: InferenceRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The biases that are not 0, by token."""
    if not request.has_tensor("embedding_bias"):
        return ()
    return request.reading("embedding_bias", lambda tensor: _biases(tensor, vocab_size))


def _biases(tensor: Array, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = tensor.reshape(-1)
    if bias.size == 0:
        return ()
    if bias.size != vocab_size:
        raise InvalidRequest(
            f"'embedding_bias' holds {bias.size} numbers, expected one for each of the "
            f"{vocab_size} tokens of the vocabulary"
        )
    # -inf is how a client forbids a token.
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise InvalidRequest("'embedding_bias' holds NaN or +inf; give finite numbers or -inf")
    if np.isneginf(bias).all():
        raise InvalidRequest("'embedding_bias' is -inf for every token: none is left to draw")
    ids = bias.nonzero()[0]
    return tuple(zip(ids.tolist(), bias[ids].tolist(), strict=True))


_ONE_TEXT_ONLY = ("guided_decoding_guide_type", "draft_input_ids", "logits_post_processor_name")
_ONE_TEXT_OUTPUTS = ("num_top_log_probs", "generation_logits", "log_prob_ranks")

_MAX_LENGTH_PENALTY = 40.0
"""The longest text there may be, 2**24 tokens, to this power is a number still, and so is one by
it: the loop divides by either."""


def read_beams(request: InferenceRequest, max_beam_width: int, vocab_size: int) -> BeamParams:
    """All about the search; a width of 1 is none. Raises `InvalidRequest`."""
    width = integer(request, "beam_width", 1, 1, 2**31 - 1)
    if width > max_beam_width:
        raise InvalidRequest(
            f"'beam_width' is {width}, more than max_beam_width = {max_beam_width}; ask for less "
            "or raise max_beam_width"
        )
    if 2 * width > vocab_size and width > 1:
        raise InvalidRequest(f"'beam_width' is {width}, more than half the vocabulary")
    num_returned = width
    if width > 1:
        num_returned = integer(request, "num_return_sequences", width, 1, 2**31 - 1)
    if num_returned > width:
        raise InvalidRequest(
            f"'num_return_sequences' is {num_returned}, more than 'beam_width' = {width}: a search "
            "returns its beams"
        )
    return BeamParams(
        width=width,
        num_returned=num_returned,
        length_penalty=number(
            request, "len_penalty", 0.0, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY
        ),
        early_stopping=_read_early_stopping(request),
        diversity_rate=number(request, "beam_search_diversity_rate", 0.0, -1e6, 1e6),
    )


def check_with_beams(
    request: InferenceRequest, sampling: SamplingParams, outputs: OutputParams
) -> None:
    """`InvalidRequest` for what a request with several beams cannot have as well."""
    excluded = [
        name
        for name in _ONE_TEXT_ONLY
        if request.has_tensor(name) and _asks_for_something(request.get_tensor(name))
    ]
    excluded += [input_of(name) for name in _ONE_TEXT_OUTPUTS if getattr(outputs, name)]
    if excluded:
        raise InvalidRequest(f"'{excluded[0]}' and 'beam_width' above 1 exclude each other")
    for name, value, draws in (
        ("runtime_top_k", sampling.top_k, sampling.top_k > 1),
        ("runtime_top_p", sampling.top_p, 0.0 < sampling.top_p < 1.0),
        ("min_p", sampling.min_p, sampling.min_p > 0.0),
    ):
        if draws:
            raise InvalidRequest(
                f"'{name}' is {value:g}, but 'beam_width' above 1 searches and draws nothing at "
                "random; leave it out"
            )


def _asks_for_something(tensor: Array) -> bool:
    """Not for an empty tensor, nor for an empty text."""
    return bool(tensor.size) and (tensor.dtype != np.object_ or any(tensor.reshape(-1)))


def _read_early_stopping(request: InferenceRequest) -> int:
    """1, 0 or another number: a truth value on the wire, a number of TensorRT-LLM's batch manager
    in a process of ours."""
    if not request.has_tensor("early_stopping"):
        return 1
    return int(np.asarray(request.get_tensor("early_stopping")).reshape(-1)[0])
