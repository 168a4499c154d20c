"""Everything about the draw: what arrives, and what is refused with field and bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import LlmRequest, SamplingParams

LIMITS = RequestLimits(
    vocab_size=10,
    max_input_len=20,
    max_seq_len=32,
    exclude_input_in_output=False,
    refusal_reason=lambda request: None,
)
NAN, INF = float("nan"), float("inf")


def accept(**values: Any) -> LlmRequest:
    inputs = make_inputs({"input_ids": [1, 2], "request_output_len": 4, **values})
    return validate(InferenceRequest(1, inputs), LIMITS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 0.0}, "'repetition_penalty' is 0; it must be a finite"),  # 25
        ({"repetition_penalty": NAN}, "'repetition_penalty' is nan"),
        ({"presence_penalty": INF}, "'presence_penalty' is inf; it must be a finite number"),
        ({"frequency_penalty": -2e6}, "'frequency_penalty' is -2e+06"),
        ({"min_p": 1.5}, "'min_p' is 1.5; it must be a finite number, 0..1"),
        ({"runtime_top_p_min": 0.0}, "'runtime_top_p_min' is 0; it must be a finite number, 1e-06"),
        ({"runtime_top_p_decay": 1.1}, "'runtime_top_p_decay' is 1.1"),
        ({"runtime_top_p_reset_ids": 10}, "'runtime_top_p_reset_ids' is 10, outside -1..9"),
        ({"no_repeat_ngram_size": 33}, "'no_repeat_ngram_size' is 33, outside 0..32"),
        ({"noRepeatNgramSize": -1}, "'noRepeatNgramSize' is -1, outside 0..32"),
        ({"prompt_ignore_length": -1}, "'prompt_ignore_length' is -1"),
        (
            {"embedding_bias": [0.5]},
            "'embedding_bias' holds 1 numbers, expected one for",
        ),  # 37
        ({"embedding_bias": [NAN] + [0] * 9}, "'embedding_bias' holds NaN or +inf"),
        ({"embedding_bias": [INF] + [0] * 9}, "'embedding_bias' holds NaN or +inf"),
        ({"embedding_bias": [-INF] * 10}, "'embedding_bias' is -inf for every token"),
        ({"stop_words_list": [1, 2]}, "'stop_words_list' has shape [1, 2], expected [1, 2, n]"),
        ({"stop_words_list": [[1], [1], [1]]}, "'stop_words_list' has shape [1, 3, 1]"),
        ({"bad_words_list": [[1, 2], [2, 1]]}, "'bad_words_list' has the offset 1 behind 2"),
        ({"bad_words_list": [[1, 2], [3, -1]]}, "'bad_words_list' has the offset 3 behind 0"),
        (
            {"bad_words_list": [[1, 2], [0, -1]]},
            "the offsets of row 1 must increase and be",
        ),
        (
            {"bad_words_list": [[1, 2], [-1, 2]]},
            "'bad_words_list' holds an offset behind",
        ),
        ({"bad_words_list": [[1, 2], [1, -2]]}, "or a negative one"),
        ({"stop_words_list": [[1, 10], [2, -1]]}, "'stop_words_list' holds 10, outside the vocab"),
        (
            {"stop_words_list": [[1] * 10_000, list(range(1, 10_001))]},  # 33
            "'stop_words_list' holds 10000 words, more than 1024",
        ),
        (
            {"stop_words_list": [[1] * 129, [129] + [-1] * 128]},  # 34
            "'stop_words_list' holds a word of 129 tokens, more than 128",
        ),
    ],
)
@pytest.mark.case(25, 33, 34, 37)
def test_refused_with_field_and_bound(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accept(**values)
    assert message in str(caught.value)


@pytest.mark.contract(
    "tensorrt_llm input",
    "bad_words_list embedding_bias temperature runtime_top_k runtime_top_p "
    "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids repetition_penalty "
    "presence_penalty frequency_penalty no_repeat_ngram_size noRepeatNgramSize",
)
def test_everything_arrives() -> None:
    request = accept(
        temperature=0.5,
        runtime_top_k=7,
        runtime_top_p=0.25,
        runtime_top_p_min=0.125,
        runtime_top_p_decay=0.5,
        runtime_top_p_reset_ids=3,
        min_p=0.0625,
        repetition_penalty=2.0,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        prompt_ignore_length=1,
        noRepeatNgramSize=3,
        min_tokens=2,
        seed=2**64 - 1,  # 30
        embedding_bias=[0, -2.5, 0, 0, -INF, 0, 0, 0, 0, 1],
        bad_words_list=[[1, 2, 3, 0], [1, 3, -1, -1]],
        stop_words_list=[[4, 4, 5, 4], [1, 2, 4, -1]],
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        seed=-1,
        min_length=2,
        min_p=0.0625,
        top_p_min=0.125,
        top_p_decay=0.5,
        top_p_reset_id=3,
        repetition_penalty=2.0,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        prompt_ignore_length=1,
        no_repeat_ngram_size=3,
        bias=((1, -2.5), (4, -INF), (9, 1.0)),
        bad_words=((1,), (2, 3)),
    )
    assert request.stop_words == ((4,), (5, 4))


@pytest.mark.parametrize("name", ["runtime_top_p_min", "runtime_top_p_decay", "repetition_penalty"])
def test_the_smallest_number_is_allowed(name: str) -> None:
    """As the FP32 it travels as, which is a little less: 1e-6 is TensorRT-LLM's own default of the
    first."""
    sampling = accept(**{name: 1e-6}).sampling
    assert getattr(sampling, name.removeprefix("runtime_")) == np.float32(1e-6)


def test_empty_lists_ask_for_nothing() -> None:
    empty = np.empty((2, 0))
    request = accept(stop_words_list=empty, bad_words_list=[[0], [-1]], embedding_bias=[])
    assert request.stop_words == request.sampling.bad_words == request.sampling.bias == ()
    assert not request.sampling.looks_back
