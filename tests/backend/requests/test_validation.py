"""From tensors to a request: values arrive, and each error names the field and the bound."""

from __future__ import annotations

import logging
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
from inflight_scheduler import BeamSearch, LlmRequest

TIMES = ("max_queue_time_ms", "allotted_time_ms")
LIMITS = RequestLimits(
    vocab_size=100,
    max_input_len=20,
    max_seq_len=32,
    exclude_input_in_output=False,
    refusal_reason=lambda request: None,
    max_draft_len=3,
)


def validated(**values: Any) -> LlmRequest:
    """The request of plain ``values``; None leaves one of the two required ones out."""
    return validate(request_of(**values), LIMITS)


def request_of(**values: Any) -> InferenceRequest:
    tensors = {"input_ids": [1, 2], "request_output_len": 4, **values}
    sent = {name: value for name, value in tensors.items() if value is not None}
    return InferenceRequest(1, make_inputs(sent))


def error_of(kind: type[InvalidRequest] = InvalidRequest, /, **values: Any) -> str:
    with pytest.raises(kind) as caught:
        validated(**values)
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
        ({"num_top_log_probs": 21}, "'num_top_log_probs' is 21, outside 0..20"),
        ({"num_top_log_probs": -1}, "'num_top_log_probs' is -1, outside 0..20"),
        ({"priority": 1.5}, "'priority' is 1.5; it must be a finite number, 0..1"),
        ({"priority": -0.001}, "'priority' is -0.001; it must be a finite number, 0..1"),
        ({"priority": float("nan")}, "'priority' is nan"),
        ({"cache_salt": ""}, "'cache_salt' has 0 bytes, outside 1..256"),
        ({"cache_salt": "é" * 129}, "'cache_salt' has 258 bytes, outside 1..256"),
        ({"max_queue_time_ms": -1}, "'max_queue_time_ms' is -1, outside 1..2147483647"),
        ({"max_queue_time_ms": 0}, "'max_queue_time_ms' is 0, outside 1..2147483647"),
        ({"allotted_time_ms": 0}, "'allotted_time_ms' is 0, outside 1..2147483647"),
    ],
)
@pytest.mark.case(2, 4, 8, 9, 10, 12, 13, 14, 15, 16, 27, 31, 38, 44, 45)
def test_refused_with_field_and_bound(values: dict[str, Any], message: str) -> None:
    assert message in error_of(**values)


@pytest.mark.parametrize("penalty", [40.0, -40.0, 41.0, -41.0, 100.0, -100.0])
def test_accepted_length_penalty_weighs_the_longest_answer(penalty: float) -> None:
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
        ({"lora_task_id": 7}, "'lora_task_id' is not supported by this server, which runs without"),
        ({"draft_logits": np.zeros((1, 1, 9), np.float16)}, "'draft_logits' is not supported"),
        ({"draft_acceptance_threshold": 0.5}, "'draft_acceptance_threshold' is not supported"),
        ({"logits_post_processor_name": "x"}, "'logits_post_processor_name' is not supported"),
        (
            {"guided_decoding_guide_type": "json", "end_id": 3},
            "'guided_decoding_guide_type' is not supported by this server",
        ),
        ({"encoder_input_ids": [4]}, "'encoder_input_ids' is for models with an encoder, and this"),
        ({"decoder_input_ids": [4, 5]}, "'decoder_input_ids' is for models with an encoder"),
        ({"decoder_input_lengths": 2}, "'decoder_input_lengths' is for models with an encoder"),
    ],
)
@pytest.mark.case(41)
def test_feature_that_this_server_lacks_is_unsupported(
    values: dict[str, Any], message: str
) -> None:
    assert message in error_of(UnsupportedRequest, **values)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input_ids", np.array([[1]], np.int64), "'input_ids' has type int64, expected INT32"),
        ("temperature", np.array([[1.0]]), "'temperature' has type float64, expected FP32"),
        ("temperature", np.ones((1, 2), np.float32), "'temperature' must hold one value, got 2"),
        ("input_ids", np.ones((2, 3), np.int32), "'input_ids' has shape [2, 3]"),  # 20
        ("input_ids", np.ones((1, 2, 2), np.int32), "'input_ids' has shape [1, 2, 2]"),  # 19
        ("cache_salt", np.array([[b"a", b"b"]], np.object_), "'cache_salt' must hold one value"),
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
        more = {protocol.ONLY_ZEROS: [[0, 0, 0]]}.get(str(spec.neutral))
        for each in (value, value if more is None else more):
            request = InferenceRequest(1, make_inputs({"input_ids": [1], spec.name: each}))
            assert validate(request, LIMITS).tokens == [1], spec.name


def test_what_the_peers_clients_send_to_any_model() -> None:
    """Its preprocessing has one id for a decoder that was given no text."""
    sent = request_of(
        input_ids=[1], decoder_input_ids=[0], decoder_input_lengths=1, encoder_input_ids=[]
    )
    assert validate(sent, LIMITS).tokens == [1]


@pytest.mark.contract("tensorrt_llm input", "pad_id")
@pytest.mark.case(11, 13)
def test_values_arrive() -> None:
    """Prompt and answer are as long as they may be."""
    sent = request_of(
        input_ids=[1] * 20 + [99],
        input_lengths=20,
        request_output_len=12,
        end_id=99,
        pad_id=0,
        priority=0.25,
        cache_salt="tenant ä",
        max_queue_time_ms=1500,
        allotted_time_ms=2**31 - 1,
    )
    came, llm_request = sent.created_ns / 1e9, validate(sent, LIMITS)
    assert llm_request.tokens == [1] * 20
    assert (llm_request.max_new_tokens, llm_request.end_id, llm_request.pad_id) == (12, 99, 0)
    assert (llm_request.priority, llm_request.cache_salt) == (0.25, "tenant ä".encode())
    deadlines = (llm_request.queue_deadline, llm_request.run_deadline)
    assert deadlines == (came + 1.5, came + 2147483.647)


@pytest.mark.case(17)
def test_defaults() -> None:
    llm_request = validated(request_output_len=None)
    assert llm_request.max_new_tokens == DEFAULT_MAX_TOKENS
    assert llm_request.sampling.is_greedy
    assert (llm_request.end_id, llm_request.sampling.min_length) == (-1, 0)
    assert (llm_request.priority, llm_request.cache_salt) == (0.5, b"")
    assert (llm_request.queue_deadline, llm_request.run_deadline) == (None, None)


@pytest.mark.parametrize(("asked", "allowed"), [(None, 2.0), (500, 0.5), (60_000, 2.0)])
def test_request_may_ask_for_less_time_than_the_server_allows_not_for_more(
    asked: int | None, allowed: float
) -> None:
    sent = request_of(**{name: asked for name in TIMES if asked})
    limits = replace(LIMITS, max_queue_seconds=2.0, max_run_seconds=2.0)
    came, llm_request = sent.created_ns / 1e9, validate(sent, limits)
    deadlines = (llm_request.queue_deadline, llm_request.run_deadline)
    assert deadlines == (came + allowed, came + allowed)


def test_salt_may_be_any_bytes() -> None:
    sent = request_of()
    sent.set_tensor("cache_salt", np.array([[b"\xff\x00"]], dtype=np.object_))
    assert validate(sent, LIMITS).cache_salt == b"\xff\x00"


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "num_drafts", "num_kept"),
    [
        (2, 7, 3, 3),
        (2, 3, 3, 2),  # the last token is sampled
        (18, 9, 3, 2),  # as much as the longest prompt
        (20, 9, 1, 0),
        (2, 1, 1, 0),
        (2, 9, 0, 0),
    ],
)
def test_drafts_of_a_client_are_cut_to_those_that_can_count(
    prompt_len: int,
    max_new: int,
    num_drafts: int,
    num_kept: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values: dict[str, Any] = {"input_ids": [1] * prompt_len, "request_output_len": max_new}
    values["draft_input_ids"] = list(range(num_drafts))
    assert validated(**values).draft_tokens == tuple(range(num_kept))
    assert not caplog.records, "what clients do often writes nothing by default"
    caplog.set_level(logging.DEBUG)
    validated(**values)
    assert ("draft tokens are cut off" in caplog.text) == (num_kept < num_drafts)
    assert validated(**values, frequency_penalty=0.5).draft_tokens == ()


@pytest.mark.case(31)
@pytest.mark.parametrize("end_id", [-(2**31), -2, -1, 100, 1048576, 2**31 - 1])
def test_end_id_outside_the_vocabulary_ends_nothing(end_id: int) -> None:
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
    for set_it in (request.set_tensor, request.replace_tensor):
        for wrong in ([1, 2], 5, "text", object()):
            kind = type(wrong).__name__
            with pytest.raises(InvalidRequest, match=f"'input_ids' is a {kind}, not an array"):
                set_it("input_ids", wrong)  # type: ignore[arg-type]
    request.set_tensor("input_ids", np.int32(5))  # type: ignore[arg-type]
    assert request.get_tensor("input_ids").shape == ()


@pytest.mark.parametrize("request_id", [-1, 2**64, 5.0, "5", None, np.int64(-1)])
def test_invalid_request_id_is_refused(request_id: Any) -> None:
    """A float ended all requests in flight."""
    with pytest.raises(InvalidRequest, match="unsigned 64-bit"):
        InferenceRequest(request_id)


@pytest.mark.parametrize("request_id", [np.uint64(2**64 - 1), np.int32(7), True])
def test_numpy_id_becomes_a_python_number(request_id: Any) -> None:
    """A recording could not be written of any other."""
    number = InferenceRequest(request_id).request_id
    assert (type(number), number) == (int, request_id)
