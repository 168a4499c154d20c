"""Sampling settings, word lists and biases: their values arrive, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backend.requests.test_validation import LIMITS, error_of, validated

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import validate
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import SamplingParams
from inflight_scheduler.sampling import SETTINGS, Setting

MAX_NEW = 4
NAN, INF = float("nan"), float("inf")
ALL_SETTINGS = pytest.mark.parametrize("field", SETTINGS)


def bounds_of(setting: Setting) -> tuple[float, float]:
    named = {"vocab_size - 1": LIMITS.vocab_size - 1, "max_new_tokens": MAX_NEW}
    minimum, maximum = (named.get(str(each), each) for each in (setting.minimum, setting.maximum))
    return float(minimum), float(maximum)


def values_outside(setting: Setting) -> Iterator[float]:
    minimum, maximum = bounds_of(setting)
    if setting.dtype == "FP32":
        yield from (NAN, INF, -INF, minimum - 0.5)
        if minimum > 0:
            yield 0.0
        if maximum < INF:
            yield maximum + 0.5
    elif setting.dtype == "INT32":
        yield int(minimum) - 1
        if maximum < 2**31 - 1:
            yield int(maximum) + 1


@pytest.mark.case(21, 23, 24, 25, 26)
@ALL_SETTINGS
def test_value_outside_its_bounds_is_refused_by_name(field: str) -> None:
    setting = SETTINGS[field]
    minimum, maximum = bounds_of(setting)
    for value in values_outside(setting):
        message = error_of(request_output_len=MAX_NEW, **{setting.tensor: value})
        if setting.dtype == "FP32":
            bounds = f"at least {minimum:g}" if maximum == INF else f"{minimum:g}..{maximum:g}"
            number = f"{np.float32(value):g}"
            assert (
                message == f"'{setting.tensor}' is {number}; it must be a finite number, {bounds}"
            )
        else:
            bounds = f"{int(minimum)}..{int(maximum)}"
            assert message == f"'{setting.tensor}' is {value}, outside {bounds}"


@pytest.mark.contract(
    "tensorrt_llm input",
    "temperature runtime_top_k runtime_top_p runtime_top_p_min runtime_top_p_decay "
    "runtime_top_p_reset_ids repetition_penalty presence_penalty frequency_penalty "
    "no_repeat_ngram_size",
)
@pytest.mark.case(11, 13, 22, 23, 24, 30)
@ALL_SETTINGS
def test_bounds_are_allowed_and_arrive(field: str) -> None:
    """Also 1e-6, whose nearest FP32 is a little less. A ``top_k`` above the vocabulary is all of
    it, and a seed is a signed number on the device."""
    setting = SETTINGS[field]
    for value in filter(np.isfinite, (setting.minimum, *bounds_of(setting))):
        if setting.dtype == "UINT64":
            value = int(setting.maximum)
        sampling = validated(request_output_len=MAX_NEW, **{setting.tensor: value}).sampling
        expected = {"top_k": min(value, LIMITS.vocab_size), "seed": -1}.get(field, value)
        assert getattr(sampling, field) == (
            np.float32(expected) if setting.dtype == "FP32" else expected
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noRepeatNgramSize": -1}, "'noRepeatNgramSize' is -1, outside 0..32"),
        ({"min_tokens": -1}, "'min_tokens' is -1"),
        ({"stop_token_ids": [5, -2]}, "'stop_token_ids' holds -2, outside the vocabulary 0.."),
        ({"stop_token_ids": [10**6]}, "'stop_token_ids' holds 1000000, outside the vocabulary"),
        ({"stop_token_ids": [5] * 129}, "'stop_token_ids' holds 129 ids, more than 128"),
        ({"embedding_bias": [0.5]}, "'embedding_bias' holds 1 numbers, expected one for"),  # 37
        ({"embedding_bias": [NAN] + [0] * 99}, "'embedding_bias' holds NaN or +inf"),
        ({"embedding_bias": [INF] + [0] * 99}, "'embedding_bias' holds NaN or +inf"),
        ({"embedding_bias": [-INF] * 100}, "'embedding_bias' is -inf for every token"),
        ({"stop_words_list": [1, 2]}, "'stop_words_list' has shape [1, 2], expected [1, 2, n]"),
        ({"stop_words_list": [[1], [1], [1]]}, "'stop_words_list' has shape [1, 3, 1]"),
        ({"bad_words_list": [[1, 2], [2, 1]]}, "'bad_words_list' has the offset 1 behind 2"),
        ({"bad_words_list": [[1, 2], [3, -1]]}, "'bad_words_list' has the offset 3 behind 0"),
        ({"bad_words_list": [[1, 2], [0, -1]]}, "the offsets of row 1 must increase and be"),
        ({"bad_words_list": [[1, 2], [-1, 2]]}, "'bad_words_list' holds an offset behind"),
        ({"bad_words_list": [[1, 2], [1, -2]]}, "or a negative one"),
        ({"stop_words_list": [[1, 100], [2, -1]]}, "'stop_words_list' holds 100, outside the voc"),
        (
            {"stop_words_list": [[1] * 10_000, list(range(1, 10_001))]},  # 33
            "'stop_words_list' holds 10000 words, more than 1024",
        ),
        (
            {"stop_words_list": [[1] * 129, [129] + [-1] * 128]},  # 34
            "'stop_words_list' holds a word of 129 tokens, more than 128",
        ),
        (
            {"bad_words_list": [[1] * 8193, [*range(16, 8193, 16), 8193] + [-1] * 7680]},
            "'bad_words_list' holds 8193 tokens, more than 8192",
        ),
    ],
)
@pytest.mark.case(33, 34, 37)
def test_list_is_refused_with_field_and_bound(values: dict[str, Any], message: str) -> None:
    assert message in error_of(**values)


@pytest.mark.contract(
    "tensorrt_llm input", "bad_words_list embedding_bias noRepeatNgramSize min_tokens"
)
def test_lists_and_renamed_inputs_arrive() -> None:
    bias = np.zeros(100)
    bias[[1, 4, 9]] = -2.5, -INF, 1
    request = validated(
        noRepeatNgramSize=3,
        min_tokens=2,
        seed=5,
        embedding_bias=bias,
        bad_words_list=[[1, 2, 3, 0], [1, 3, -1, -1]],
        stop_words_list=[[4, 4, 5, 4], [1, 2, 4, -1]],
        stop_token_ids=[7, -1, 3, 7],
    )
    assert request.sampling == SamplingParams(
        seed=5,
        min_length=2,
        no_repeat_ngram_size=3,
        bias=((1, -2.5), (4, -INF), (9, 1.0)),
        bad_words=((1,), (2, 3)),
        stop_token_ids=(3, 7),
    )
    assert request.stop_words == ((4,), (5, 4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 5}, "'beam_width' is 5, more than max_beam_width = 4"),
        ({"num_return_sequences": 3}, "'num_return_sequences' is 3, more than 'beam_width' = 2"),
        ({"runtime_top_k": 2}, "'runtime_top_k' is 2, but 'beam_width' above 1"),
        ({"runtime_top_p": 0.5}, "'runtime_top_p' is 0.5, but"),
        ({"min_p": 0.1}, "'min_p' is 0.1, but"),
        ({"num_top_log_probs": 2}, "'num_top_log_probs' and 'beam_width' above 1 exclude"),
        ({"return_generation_logits": True}, "'return_generation_logits' and 'beam_width'"),
        ({"return_log_prob_ranks": True}, "'return_log_prob_ranks' and 'beam_width'"),
        ({"draft_input_ids": [7]}, "'draft_input_ids' and 'beam_width' above 1 exclude"),
        (
            {"guided_decoding_guide_type": "json", "end_id": 3},
            "'guided_decoding_guide_type' and 'beam_width' above 1 exclude each other",
        ),
        ({"guided_decoding_guide_type": "", "draft_input_ids": []}, ""),
        ({"logits_post_processor_name": "", "runtime_top_k": 1}, ""),
    ],
)
def test_settings_that_exclude_beams_are_refused_by_name(
    values: dict[str, Any], message: str
) -> None:
    """Empty texts and drafts ask for nothing."""
    limits = replace(LIMITS, max_beam_width=4)
    sent = InferenceRequest(1, make_inputs({"input_ids": [1, 2], "beam_width": 2}))
    for name, tensor in make_inputs(values).items():
        sent.replace_tensor(name, tensor)
    if not message:
        assert validate(sent, limits).beam_width == 2
        return
    with pytest.raises(InvalidRequest) as caught:
        validate(sent, limits)
    assert message in str(caught.value)


@pytest.mark.case(22)
def test_temperature_zero_is_greedy_with_any_filter() -> None:
    assert validated(temperature=0.0, runtime_top_p=0.9).sampling.is_greedy


def test_empty_lists_ask_for_nothing() -> None:
    empty = np.empty((2, 0))
    request = validated(stop_words_list=empty, bad_words_list=[[0], [-1]], embedding_bias=[])
    assert request.stop_words == request.sampling.bad_words == request.sampling.bias == ()
    assert not request.sampling.looks_back


def test_unseeded_requests_sample_differently() -> None:
    requests = [InferenceRequest.from_tokens(i, [1], 1) for i in range(3)]
    assert len({validate(request, LIMITS).sampling.seed for request in requests}) == 3
