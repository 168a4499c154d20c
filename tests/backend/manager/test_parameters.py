"""Settings: types, bounds, names, and the errors for wrong ones."""

from __future__ import annotations

from operator import attrgetter

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import (
    TrtGptModelOptionalParams,
    parse_parameters,
)
from inflight_protocol import PARAMETERS
from inflight_scheduler import ContextChunkingPolicy

MINIMAL = {"gpt_model_path": "checkpoint"}


def test_template_that_is_not_filled_is_all_defaults() -> None:
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
        ("max_batch_size", "", 256),
        ("drain_file", "", None),
        ("max_batch_size", " 65536 ", 65536),
        ("kv_cache_free_gpu_mem_fraction", "0.5", 0.5),
        ("exclude_input_in_output", "True", True),
        ("exclude_input_in_output", "0", False),
        ("gpt_model_type", "V1", "V1"),
        ("device", "cpu", "cpu"),
        ("scheduler_class", "mine:Scheduler", "mine:Scheduler"),
        ("batch_scheduler_policy", "static_batch", "static_batch"),
        ("max_queue_size", "0", 0),
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


@pytest.mark.contract(
    "tensorrt_llm parameter",
    "kv_cache_free_gpu_mem_fraction enable_kv_cache_reuse normalize_log_probs "
    "guided_decoding_backend",
)
@pytest.mark.parametrize(
    ("setting", "field", "texts"),
    [
        (
            "enable_kv_cache_reuse",
            "kv_cache_config.enable_block_reuse",
            {"": True, "false": False},
        ),
        (
            "kv_cache_free_gpu_mem_fraction",
            "kv_cache_config.free_gpu_memory_fraction",
            {"": 0.9, "0.25": 0.25},
        ),
        ("normalize_log_probs", "normalize_log_probs", {"": False, "true": True}),
        ("out_of_vocabulary", "out_of_vocabulary", {"": "refuse", "fold": "fold"}),
        (
            "guided_decoding_backend",
            "guided_decoding_config.backend",
            {"": "auto", "none": "none", "llguidance": "llguidance"},
        ),
        (
            "guided_decoding_compile_seconds",
            "guided_decoding_config.compile_seconds",
            {"": 0.2, "1.5": 1.5},
        ),
        ("enable_chunked_context", "enable_chunked_context", {"": None, "true": True}),
        (
            "context_chunking_policy",
            "context_chunking_policy",
            {"force_chunk": ContextChunkingPolicy.FORCE_CHUNK},
        ),
        ("context_chunk_unit", "context_chunk_unit", {"": None, "64": 64}),
        ("priority_span", "priority_span", {"20": 20.0}),
        (
            "max_attention_window_size",
            "kv_cache_config.max_attention_window",
            {"": (), "6": (6,), "6, 4096": (6, 4096)},
        ),
        ("max_state_snapshots", "kv_cache_config.max_state_snapshots", {"": None, "0": 0}),
        ("max_queue_seconds", "max_queue_seconds", {"": None, "2.5": 2.5}),
        ("max_run_seconds", "max_run_seconds", {"": None, "60": 60.0}),
    ],
)
def test_settings_reach_the_batch_manager(
    setting: str, field: str, texts: dict[str, object]
) -> None:
    for text, value in texts.items():
        parameters = parse_parameters({**MINIMAL, setting: text})
        params = TrtGptModelOptionalParams.from_parameters(parameters)
        assert attrgetter(field)(params) == value


def test_windows_that_are_no_numbers_are_refused() -> None:
    parameters = parse_parameters({**MINIMAL, "max_attention_window_size": "6;7"})
    with pytest.raises(ConfigurationError, match="must be whole numbers separated by commas"):
        TrtGptModelOptionalParams.from_parameters(parameters)


def test_defaults_are_those_of_the_optional_params() -> None:
    params = TrtGptModelOptionalParams.from_parameters(parse_parameters(MINIMAL))
    assert params == TrtGptModelOptionalParams()


@pytest.mark.parametrize(
    ("key", "message"),
    [("max_batchsize", "did you mean max_batch_size"), ("zzz", r"unknown setting 'zzz'$")],
)
def test_unknown_key_suggests_the_nearest_if_there_is_one(key: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_parameters({**MINIMAL, key: "4"})


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
def test_keys_that_are_not_set_or_neutral_are_ignored(key: str, text: str) -> None:
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
def test_unsupported_key_is_refused_with_the_fix(key: str, text: str, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} .*{fix}"):
        parse_parameters({**MINIMAL, key: text})


@pytest.mark.parametrize("raw", [{}, {"gpt_model_path": ""}, {"gpt_model_path": "${x}"}])
def test_checkpoint_is_required(raw: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="gpt_model_path is not set"):
        parse_parameters(raw)
