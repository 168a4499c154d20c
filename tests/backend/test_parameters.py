"""Settings: types, bounds, names, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import (
    ServerParameters,
    TrtGptModelOptionalParams,
    parse_parameters,
)
from inflight_protocol import PARAMETERS
from inflight_scheduler import ContextChunkingPolicy

MINIMAL = {"gpt_model_path": "checkpoint"}


def test_fields_are_the_honoured_keys_of_the_table() -> None:
    honoured = [spec.name for spec in PARAMETERS if spec.is_honoured]
    assert [f.name for f in fields(ServerParameters)] == honoured


def test_defaults_of_the_table() -> None:
    parameters = parse_parameters(MINIMAL)
    assert parameters.batch_scheduler_policy == "guaranteed_no_evict"
    assert parameters.max_batch_size == 256
    assert parameters.kv_cache_free_gpu_mem_fraction == 0.9
    assert parameters.exclude_input_in_output is False
    assert parameters.max_num_tokens is None
    assert parameters.drain_file is None


def test_template_as_it_stands_is_all_defaults() -> None:
    unfilled = {spec.name: f"${{{spec.name}}}" for spec in PARAMETERS}
    filled = unfilled | MINIMAL | {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
    assert parse_parameters(filled) == parse_parameters(MINIMAL)


@pytest.mark.contract(
    "tensorrt_llm parameter",
    "gpt_model_type batch_scheduler_policy kv_cache_free_gpu_mem_fraction exclude_input_in_output",
)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("max_batch_size", "1", 1),
        ("max_batch_size", " 65536 ", 65536),
        ("kv_cache_free_gpu_mem_fraction", "0.5", 0.5),
        ("exclude_input_in_output", "True", True),
        ("exclude_input_in_output", "0", False),
        ("gpt_model_type", "V1", "V1"),
        ("device", "cpu", "cpu"),
        ("scheduler_class", "mine:Scheduler", "mine:Scheduler"),
        ("batch_scheduler_policy", "static_batch", "static_batch"),
        ("context_chunking_policy", "equal_progress", "equal_progress"),
        ("context_chunk_unit", "64", 64),
        ("priority_span", "0", 0.0),
        ("max_queue_size", "0", 0),
        ("max_queue_seconds", "2.5", 2.5),
        ("max_run_seconds", "", None),
        ("max_seq_len", "${max_seq_len}", None),
        ("max_seq_len", "", None),
    ],
)
def test_values_are_typed(key: str, text: str, value: object) -> None:
    assert getattr(parse_parameters({**MINIMAL, key: text}), key) == value


@pytest.mark.contract("tensorrt_llm parameter", "max_beam_width")
@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("max_batch_size", "0", "max_batch_size is 0: it must be between 1 and 65536"),
        ("max_batch_size", "65537", "must be between 1 and 65536"),
        ("max_batch_size", "eight", "max_batch_size must be a whole number, got 'eight'"),
        ("max_batch_size", "8.5", "must be a whole number"),
        ("max_beam_width", "65", "max_beam_width is 65: it must be between 1 and 64"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "must be between 0.01 and 0.99"),
        ("kv_cache_free_gpu_mem_fraction", "inf", "must be between 0.01 and 0.99"),
        ("kv_cache_free_gpu_mem_fraction", "lots", "must be a number"),
        ("exclude_input_in_output", "maybe", "must be true or false, got 'maybe'"),
        ("gpt_model_type", "V2", "Invalid gpt_model_type 'V2': choose one of V1, v1"),
        ("batch_scheduler_policy", "no_such_batch", "max_utilization, static_batch"),
        ("context_chunking_policy", "FORCE", "first_come_first_served, equal_progress, force_ch"),
        ("context_chunk_unit", "0", "context_chunk_unit is 0: it must be between 1 and 1048576"),
        ("priority_span", "-1", "priority_span is -1: it must be between 0 and"),
        ("max_queue_seconds", "0", "max_queue_seconds is 0: it must be between 0.001 and"),
        ("max_run_seconds", "nan", "max_run_seconds is nan: it must be between 0.001 and"),
    ],
)
def test_bad_values_name_key_and_bound(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_parameters({**MINIMAL, key: text})


def test_settings_of_the_scheduler_reach_the_batch_manager() -> None:
    raw = {
        "enable_chunked_context": "true",
        "context_chunking_policy": "force_chunk",
        "context_chunk_unit": "64",
        "priority_span": "20",
        "max_queue_seconds": "2.5",
        "max_run_seconds": "60",
    }
    params = TrtGptModelOptionalParams.from_parameters(parse_parameters({**MINIMAL, **raw}))
    assert params.enable_chunked_context
    assert params.context_chunking_policy == ContextChunkingPolicy.FORCE_CHUNK
    assert (params.context_chunk_unit, params.priority_span) == (64, 20.0)
    assert (params.max_queue_seconds, params.max_run_seconds) == (2.5, 60.0)
    defaults = TrtGptModelOptionalParams.from_parameters(parse_parameters(MINIMAL))
    assert defaults == TrtGptModelOptionalParams()


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean max_batch_size"):
        parse_parameters({**MINIMAL, "max_batchsize": "4"})


def test_unknown_key_without_a_neighbour_suggests_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown setting 'zzz'$"):
        parse_parameters({**MINIMAL, "zzz": "4"})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("enable_trt_overlap", "False"),
        ("gpu_weights_percent", "1"),
        ("decoding_mode", ""),
        ("medusa_choices", "${medusa_choices}"),
        ("executor_worker_path", "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"),
        ("worker_path", "/opt/tritonserver/backends/tensorrtllm/triton_tensorrtllm_worker"),
        ("max_kv_cache_length", "${max_kv_cache_length}"),
        ("max_kv_cache_length", ""),
    ],
)
def test_what_asks_for_nothing_passes(key: str, text: str) -> None:
    assert parse_parameters({**MINIMAL, key: text}) == parse_parameters(MINIMAL)


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("enable_trt_overlap", "true", "set it to 'false'"),
        ("decoding_mode", "medusa", "remove it"),
        ("max_num_sequences", "8", "remove it"),
        ("lora_cache_max_adapter_size", "many", "must be a whole number"),
    ],
)
def test_unsupported_key_is_refused_otherwise(key: str, text: str, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} .*{fix}"):
        parse_parameters({**MINIMAL, key: text})


@pytest.mark.parametrize("raw", [{}, {"gpt_model_path": ""}, {"gpt_model_path": "${x}"}])
def test_the_checkpoint_is_required(raw: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="gpt_model_path is not set"):
        parse_parameters(raw)
