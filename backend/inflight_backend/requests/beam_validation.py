"""How a request wants its beams searched, read from its tensors and checked.

Names, defaults and meaning are TensorRT-LLM's (see `inflight_scheduler.beam_search`). What draws at
random, or needs one text to go on, is refused together with beams by name.
"""

from __future__ import annotations

import numpy as np

from inflight_backend.errors import ConfigurationError, InvalidRequest
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.request_values import integer, number
from inflight_protocol import PARAMETER_BY_NAME
from inflight_scheduler import BeamParams, OutputParams, SamplingParams

_ONE_TEXT_ONLY = (
    "guided_decoding_guide_type",
    "draft_input_ids",
    "logits_post_processor_name",
)

_MAX_LENGTH_PENALTY = 40.0
"""The longest text there may be, 2**24 tokens, to this power is a number still, and so is one by
it: the loop divides by either."""


def check_engine(engine: object, max_beam_width: int) -> None:
    """`ConfigurationError` unless ``engine`` has rows for so many beams."""
    if max_beam_width > getattr(engine, "max_beam_width", 1):
        raise ConfigurationError(
            f"max_beam_width is {max_beam_width}, more than the engine was made for"
        )


def check_beam_width(max_beam_width: int) -> None:
    """`ConfigurationError` unless a server can have so many beams."""
    spec = PARAMETER_BY_NAME["max_beam_width"]
    assert spec.minimum is not None
    assert spec.maximum is not None
    if not spec.minimum <= max_beam_width <= spec.maximum:
        raise ConfigurationError(
            f"max_beam_width is {max_beam_width}: it must be between {spec.minimum} and "
            f"{spec.maximum}"
        )


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
    for name in _ONE_TEXT_ONLY:
        if request.has_tensor(name) and _asks_for_something(request.get_tensor(name)):
            raise InvalidRequest(f"'{name}' and 'beam_width' above 1 exclude each other")
    if outputs.num_top_log_probs:
        raise InvalidRequest("'num_top_log_probs' and 'beam_width' above 1 exclude each other")
    for name in ("generation_logits", "log_prob_ranks"):
        if getattr(outputs, name):
            raise InvalidRequest(f"'return_{name}' and 'beam_width' above 1 exclude each other")
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
