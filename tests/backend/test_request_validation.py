"""Bad input: each error names the field and the bound. Numbers are those of the acceptance list."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import DEFAULT_MAX_TOKENS, RequestLimits, validate
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import BeamSearch

LIMITS = RequestLimits(
    vocab_size=100,
    max_input_len=20,
    max_seq_len=32,
    exclude_input_in_output=False,
    refusal_reason=lambda request: None,
    max_draft_len=3,
)


def error_of(kind: type[InvalidRequest] = InvalidRequest, /, **values: Any) -> str:
    tensors = {"input_ids": [1, 2], "request_output_len": 4, **values}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(kind) as caught:
        validate(InferenceRequest(1, make_inputs(tensors)), LIMITS)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.contract("tensorrt_llm input", "request_output_len beam_search_diversity_rate")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": []}, "'input_ids' is empty"),  # case 2
        ({"input_ids": None}, "the prompt is missing"),  # 4
        ({"input_ids": [1, -3]}, "-3, outside the vocabulary 0..99"),  # 8
        ({"input_ids": [100]}, "100, outside the vocabulary 0..99"),  # 9
        ({"input_ids": [2**31 - 1]}, "2147483647, outside the vocabulary"),  # 10
        ({"input_ids": [1] * 21}, "21 tokens, more than max_input_len = 20"),  # 12
        ({"input_ids": [1] * 20, "request_output_len": 13}, "(13) = 33, more than max_seq_len"),
        ({"request_output_len": 0}, "'request_output_len' is 0, outside 1.."),  # 14
        ({"request_output_len": -1}, "'request_output_len' is -1"),  # 15
        ({"request_output_len": 2**31 - 1}, "more than max_seq_len = 32"),  # 16
        ({"request_output_len": None, "max_tokens": 0}, "'max_tokens' is 0"),
        ({"max_tokens": 3}, "'request_output_len' is given twice (also as 'max_tokens')"),
        ({"seed": 1, "random_seed": 1}, "'random_seed' is given twice (also as 'seed')"),
        ({"random_seed": 1, "seed": 1}, "'random_seed' is given twice (also as 'seed')"),
        ({"input_lengths": 3}, "'input_lengths' is 3, outside 1..2"),
        ({"input_lengths": 0}, "'input_lengths' is 0, outside 1..2"),
        ({"temperature": float("nan")}, "'temperature' is nan"),  # 21
        ({"temperature": float("inf")}, "'temperature' is inf"),
        ({"temperature": -0.5}, "'temperature' is -0.5; it must be a finite number, at least 0"),
        ({"runtime_top_p": 1.0001}, "'runtime_top_p' is 1.0001"),  # 23
        ({"runtime_top_p": float("nan")}, "'runtime_top_p' is nan"),
        ({"runtime_top_k": -1}, "'runtime_top_k' is -1, outside 0.."),  # 24
        ({"min_length": 5}, "'min_length' is 5, outside 0..4"),  # 26
        ({"min_tokens": -1}, "'min_tokens' is -1"),
        ({"pad_id": -2}, "'pad_id' is -2"),
        ({"beam_width": 2}, "'beam_width' is 2, more than max_beam_width = 1; ask for less"),  # 27
        ({"beam_width": 0}, "'beam_width' is 0, outside 1.."),
        ({"len_penalty": float("nan")}, "'len_penalty' is nan; it must be a finite number"),
        ({"len_penalty": -41.0}, "'len_penalty' is -41; it must be a finite number, -40..40"),
        ({"beam_search_diversity_rate": 1e7}, "'beam_search_diversity_rate' is 1e+07"),
        ({"draft_input_ids": [3] * 4}, "holds 4 tokens, more than max_draft_len = 3; send fewer"),
        ({"draft_input_ids": [3, 100]}, "'draft_input_ids' holds 100, outside the vocabulary"),
        ({"draft_input_ids": [-1]}, "'draft_input_ids' holds -1, outside the vocabulary"),
        ({"guided_decoding_guide_type": "json"}, "'guided_decoding_guide_type' needs an 'end_id'"),
        ({"stop_token_ids": [5, -2]}, "'stop_token_ids' holds -2, outside the vocabulary 0.."),
        ({"stop_token_ids": [10**6]}, "'stop_token_ids' holds 1000000, outside the vocabulary"),
        ({"stop_token_ids": [5] * 129}, "'stop_token_ids' holds 129 ids, more than 128"),
        ({"num_top_log_probs": 21}, "'num_top_log_probs' is 21, outside 0..20"),
        ({"num_top_log_probs": -1}, "'num_top_log_probs' is -1, outside 0..20"),
    ],
)
@pytest.mark.case(2, 4, 8, 9, 10, 12, 13, 14, 15, 16, 21, 23, 24, 26, 27, 31, 38)
def test_refused_with_field_and_bound(values: dict[str, Any], message: str) -> None:
    assert message in error_of(**values)


@pytest.mark.parametrize("penalty", [40.0, -40.0, 41.0, -41.0, 100.0, -100.0])
def test_a_length_penalty_that_is_taken_weighs_the_longest_answer(penalty: float) -> None:
    """What a score is divided by would else be too large for a number, or 0: the loop raised."""
    values = {"input_ids": [1], "beam_width": 2, "len_penalty": penalty}
    limits = replace(LIMITS, max_beam_width=2)
    try:
        llm_request = validate(InferenceRequest(1, make_inputs(values)), limits)
    except InvalidRequest:
        assert abs(penalty) > 40
        return
    assert isinstance(llm_request.beams, BeamSearch)
    longest = protocol.PARAMETER_BY_NAME["max_seq_len"].maximum
    assert longest is not None
    scale: float = longest**llm_request.beams.params.length_penalty
    assert math.isfinite(scale)
    assert scale > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_task_id": 7}, "'lora_task_id' is not supported by this server; leave it out or"),
        ({"return_log_probs": True}, "'return_log_probs' is not supported by the engine"),
        ({"draft_logits": np.zeros((1, 1, 9), np.float16)}, "'draft_logits' is not supported"),
        ({"draft_acceptance_threshold": 0.5}, "'draft_acceptance_threshold' is not supported"),
        ({"logits_post_processor_name": "x"}, "'logits_post_processor_name' is not supported"),
        (
            {"guided_decoding_guide_type": "json", "end_id": 3},
            "'guided_decoding_guide_type' is not supported by this server",
        ),
    ],
)
@pytest.mark.case(41)
def test_what_is_not_there_is_unsupported(values: dict[str, Any], message: str) -> None:
    assert message in error_of(UnsupportedRequest, **values)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input_ids", np.array([[1]], np.int64), "'input_ids' has type int64, expected INT32"),
        ("temperature", np.array([[1.0]]), "'temperature' has type float64, expected FP32"),
        ("temperature", np.ones((1, 2), np.float32), "'temperature' must hold one value, got 2"),
        ("input_ids", np.ones((2, 3), np.int32), "'input_ids' has shape [2, 3]"),  # 20
        ("input_ids", np.ones((1, 2, 2), np.int32), "'input_ids' has shape [1, 2, 2]"),  # 19
    ],
)
@pytest.mark.case(18, 19, 20)
def test_wrong_type_or_shape(name: str, tensor: Any, message: str) -> None:
    request = InferenceRequest(1)
    if name != "input_ids":
        request.set_tensor("input_ids", np.array([[1]], np.int32))
    request.set_tensor(name, tensor)
    with pytest.raises(InvalidRequest) as caught:
        validate(request, LIMITS)
    assert message in str(caught.value)


def test_every_tensor_not_honoured_passes_with_its_neutral_value_only() -> None:
    for spec in protocol.INPUTS:
        if spec.is_honoured or spec.neutral is None:
            continue
        value: Any = spec.neutral
        if isinstance(value, str):
            value = np.empty((2, 0) if spec.name.endswith("words_list") else (0,))
        more = {protocol.AT_MOST_ONE: [[7]], protocol.ONLY_ZEROS: [[0, 0, 0]]}.get(
            str(spec.neutral)
        )
        for each in (value, value if more is None else more):
            request = InferenceRequest(1, make_inputs({"input_ids": [1], spec.name: each}))
            assert validate(request, LIMITS).tokens == [1], spec.name


@pytest.mark.contract("tensorrt_llm input", "pad_id min_tokens")
@pytest.mark.case(30)
def test_accepted_values_arrive() -> None:
    request = InferenceRequest.from_tokens(
        9,
        [1, 2, 3, 4],
        8,
        is_streaming=True,
        input_lengths=3,
        temperature=0.5,
        runtime_top_k=7,
        runtime_top_p=0.25,
        seed=2**64 - 1,
        min_tokens=2,
        end_id=99,
        pad_id=0,
    )
    llm_request = validate(request, LIMITS)
    assert llm_request.tokens == [1, 2, 3]
    assert (llm_request.max_new_tokens, llm_request.end_id, llm_request.pad_id) == (8, 99, 0)
    sampling = llm_request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.seed, sampling.min_length) == (-1, 2)  # the seed as a signed number
    assert llm_request.is_streaming


@pytest.mark.case(31)
@pytest.mark.parametrize("end_id", [-(2**31), -2, -1, 100, 1048576, 2**31 - 1])
def test_an_end_id_outside_the_vocabulary_ends_nothing(end_id: int) -> None:
    """As in TensorRT-LLM, whose benchmarks send one; a guided answer needs one that ends it."""
    values = {"input_ids": [1], "end_id": end_id}
    assert validate(InferenceRequest(1, make_inputs(values)), LIMITS).end_id == -1
    values |= {"guided_decoding_guide_type": "json"}
    with pytest.raises(InvalidRequest, match="needs an 'end_id' within the vocabulary"):
        validate(InferenceRequest(1, make_inputs(values)), LIMITS)


def test_ids_above_the_vocabulary_are_folded_where_that_is_set() -> None:
    ids = [0, 99, 100, 250, 2**31 - 1]
    request = InferenceRequest.from_tokens(1, ids, 1)
    with pytest.raises(
        InvalidRequest, match=r"outside the vocabulary 0\.\.99; .*out_of_vocabulary=fold"
    ):
        validate(request, LIMITS)
    folding = replace(LIMITS, folds_ids=True)
    assert validate(request, folding).tokens == [0, 99, 0, 50, 47]
    with pytest.raises(InvalidRequest, match=r"'input_ids' holds -1, outside the vocabulary 0"):
        validate(InferenceRequest.from_tokens(1, [5, -1], 1), folding)


@pytest.mark.case(11, 13, 23)
def test_boundary_values_are_served() -> None:
    request = InferenceRequest.from_tokens(1, [1] * 20, 12, runtime_top_p=1.0, temperature=0.0)
    assert validate(request, LIMITS).prompt_len == 20


@pytest.mark.case(23, 24)
@pytest.mark.parametrize(("top_p", "top_k"), [(0.0, 0), (1.0, 100), (0.5, 101), (0.5, 2**31 - 1)])
def test_filters_that_filter_nothing_are_served(top_p: float, top_k: int) -> None:
    """0 is off, as for TensorRT-LLM's clients; more than the vocabulary is all of it."""
    request = InferenceRequest.from_tokens(1, [1], 1, runtime_top_p=top_p, runtime_top_k=top_k)
    sampling = validate(request, LIMITS).sampling
    assert (sampling.top_p, sampling.top_k) == (top_p, min(top_k, LIMITS.vocab_size))


@pytest.mark.case(22)
def test_temperature_zero_is_greedy_whatever_else_is_asked() -> None:
    request = InferenceRequest.from_tokens(1, [1], 1, temperature=0.0, runtime_top_p=0.9)
    assert validate(request, LIMITS).sampling.is_greedy


@pytest.mark.case(17)
def test_defaults() -> None:
    llm_request = validate(InferenceRequest(1, make_inputs({"input_ids": [1]})), LIMITS)
    assert llm_request.max_new_tokens == DEFAULT_MAX_TOKENS
    assert llm_request.sampling.is_greedy
    assert (llm_request.end_id, llm_request.sampling.min_length) == (-1, 0)


def test_unseeded_requests_draw_differently() -> None:
    requests = [InferenceRequest.from_tokens(i, [1], 1) for i in range(3)]
    assert len({validate(request, LIMITS).sampling.seed for request in requests}) == 3


def test_tensor_names_are_checked() -> None:
    request = InferenceRequest(1)
    with pytest.raises(InvalidRequest, match="invalid tensor name 'nope'"):
        request.set_tensor("nope", np.zeros(1))
    with pytest.raises(InvalidRequest, match="invalid tensor name 'stop'"):
        request.set_tensor("stop", np.zeros(1))
    with pytest.raises(InvalidRequest, match="undefined tensor 'end_id'"):
        request.get_tensor("end_id")
    with pytest.raises(InvalidRequest, match="'end_id' is None"):
        request.set_tensor("end_id", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_id", [-1, 2**64, 5.0, "5", None, np.int64(-1)])
def test_what_is_no_id_is_refused(request_id: Any) -> None:
    """A float ended everybody who was in flight with it."""
    with pytest.raises(InvalidRequest, match="unsigned 64-bit"):
        InferenceRequest(request_id)


@pytest.mark.parametrize("request_id", [np.uint64(2**64 - 1), np.int32(7), True])
def test_an_id_of_numpy_becomes_a_number(request_id: Any) -> None:
    """A recording could not be written of any other."""
    number = InferenceRequest(request_id).request_id
    assert (type(number), number) == (int, request_id)
