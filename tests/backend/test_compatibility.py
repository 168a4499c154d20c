"""Whatever this server does not support is refused by name: the rows of docs/compatibility.md.

Tensors that no model has are tested on the real server (`e2e/test_model_repository.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.triton_harness import Server, ids_of
from support.triton_stub import CountingEngine, FakePbUtils
from write_compatibility_docs import absent

import inflight_protocol as protocol
from inflight_backend.errors import ConfigurationError, InvalidRequest
from inflight_backend.manager import gpt_manager
from inflight_backend.manager.parameters import parse_parameters
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_backend.triton_io.outputs import choose_outputs
from inflight_protocol import ParameterSpec, TensorSpec
from inflight_protocol.aliases import TEMPLATE_HINTS

LIMITS = RequestLimits(
    vocab_size=100,
    max_input_len=50,
    max_seq_len=60,
    exclude_input_in_output=False,
    refusal_reason=lambda request: None,
)
MINIMAL = {"gpt_model_path": "/models/m"}


def names_of(specs: list[Any]) -> list[str]:
    return [spec.name for spec in specs]


REFUSED_INPUTS = [spec for spec in protocol.INPUTS if not spec.is_honoured]
REFUSED_PARAMETERS = [spec for spec in protocol.PARAMETERS if not spec.is_honoured]


@pytest.mark.contract("refusal", "input")
@pytest.mark.parametrize("spec", REFUSED_INPUTS, ids=names_of(REFUSED_INPUTS))
def test_unsupported_input_is_refused_by_name(spec: TensorSpec) -> None:
    """Whatever its value, unless that asks for nothing."""
    shape = (1, *(abs(length) for length in spec.dims))
    nothing = 0 if spec.neutral == protocol.ONLY_ZEROS else spec.neutral
    wanted = [value for value in (3, 0, 1, -1) if value != nothing]
    for value in wanted:
        tensor = np.full(shape, value).astype(protocol.DTYPE_TO_NUMPY[spec.dtype])
        if spec.dtype == "BOOL" and spec.neutral is not None and bool(value) == spec.neutral:
            continue
        prompt = {"input_ids": np.array([[1]], dtype=np.int32)}
        request = InferenceRequest(1, {**prompt, spec.name: tensor})
        with pytest.raises(InvalidRequest, match=f"'{spec.name}' is not supported"):
            validate(request, LIMITS)


@pytest.mark.contract("refusal", "output")
def test_unsupported_output_is_refused_by_name() -> None:
    """Also beside supported outputs, and outputs that only answer questions."""
    refused = {spec.name for spec in protocol.OUTPUTS if not spec.is_honoured}
    for name in refused | {"stats", "why", "recording", "description"}:
        with pytest.raises(InvalidRequest, match=f"output '{name}' cannot be requested here"):
            choose_outputs(frozenset({"output_ids", "sequence_length", name}), is_text=False)


@pytest.mark.contract("refusal", "parameter")
@pytest.mark.parametrize("spec", REFUSED_PARAMETERS, ids=names_of(REFUSED_PARAMETERS))
def test_unsupported_parameter_is_refused_by_name(spec: ParameterSpec) -> None:
    flipped = "false" if spec.default == "true" else "true"
    other = {"bool": flipped, "int": "17", "float": "0.125"}.get(spec.kind, "something")
    with pytest.raises(ConfigurationError, match=f"^{spec.name} .* is not supported, got"):
        parse_parameters({**MINIMAL, spec.name: other})
    assert parse_parameters({**MINIMAL, spec.name: spec.default}) == parse_parameters(MINIMAL)


@pytest.mark.contract("refusal", "absent-parameter")
def test_unknown_settings_are_refused_by_name() -> None:
    names = [name for _, name in absent("parameter")]
    assert {"triton_backend", "multimodal_model_path"} <= set(names)
    for name in names:
        with pytest.raises(ConfigurationError, match=f"unknown setting '{name}': "):
            parse_parameters({**MINIMAL, name: "x"})


def test_settings_of_tensorrt_llms_templates_get_a_hint() -> None:
    """The hint replaces the most similar setting: ``engine_dir`` looks like ``tokenizer_dir``."""
    for name, hint in TEMPLATE_HINTS.items():
        assert name not in protocol.PARAMETER_BY_NAME
        with pytest.raises(ConfigurationError) as caught:
            parse_parameters({**MINIMAL, name: "x"})
        assert str(caught.value) == f"unknown setting '{name}': {hint}"
    known = {word for hint in TEMPLATE_HINTS.values() for word in re.findall(r"\w+_\w+", hint)}
    assert known - {"TYPE_FP32", "tensorrt_llm"} <= set(protocol.PARAMETER_BY_NAME)


CONTRACT_METRICS = {
    ("nv_trt_llm_request_metrics", "request_type"): {
        "active": "Active Request Count",
        "max": "Max Request Count",
        "scheduled": "Scheduled Requests",
        "context": "Context Requests",
        "waiting": "Waiting Requests",
    },
    ("nv_trt_llm_runtime_memory_metrics", "memory_type"): {
        "cpu": "Runtime CPU Memory Usage",
        "gpu": "Runtime GPU Memory Usage",
        "pinned": "Runtime Pinned Memory Usage",
    },
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
        "max": "Max KV cache blocks",
        "free": "Free KV cache blocks",
        "used": "Used KV cache blocks",
        "tokens_per": "Tokens per KV cache block",
        "reused": "Reused KV cache blocks",
        "fraction": "Fraction used KV cache blocks",
    },
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
        "total_context_tokens": "Total Context Tokens",
        "generation_requests": "Generation Requests",
        "micro_batch_id": "MicroBatch ID",
        "paused_requests": "Paused Requests",
    },
    ("nv_trt_llm_v1_metrics", "v1_specific_metric"): {
        "total_context_tokens": "Total Context Tokens",
        "total_generation_tokens": "Total Generation Tokens",
        "empty_generation_slots": "Empty Generation Slots",
    },
    ("nv_trt_llm_general_metrics", "general_type"): {
        "timestamp": "Timestamp",
        "iteration_counter": "Iteration Counter",
    },
    ("nv_trt_llm_disaggregated_serving_metrics", "disaggregated_serving_type"): {
        "kv_cache_transfer_ms": "",
        "request_count": "",
    },
    ("nv_llm_input_token_len", "response_metric_type"): {"total_input_tokens": ""},
    ("nv_llm_output_token_len", "response_metric_type"): {"total_output_tokens": ""},
}
"""(metric, label) -> value -> the key of the statistics JSON that it is set from, "" for none."""


@pytest.mark.contract("metric", "*")
def test_metrics_are_set_from_the_statistics_the_contract_names() -> None:
    """Value by value: two swapped ones would be true numbers under wrong names."""
    families = [*protocol.METRICS, *protocol.V1_METRICS]
    own = (protocol.ERRORS, protocol.EVENTS, protocol.REUSE, protocol.LORA)
    ours = {(family.name, family.label, value) for family in own for value in family.values}
    assert all(family.name.startswith("inflight_") for family in own)
    there = {
        (family.name, family.label, value): key
        for family in families
        for value, key in family.values.items()
    }
    contract = {
        (name, label, value): key
        for (name, label), values in CONTRACT_METRICS.items()
        for value, key in values.items()
    }
    assert {row: key for row, key in there.items() if row not in ours} == contract


@pytest.mark.contract(
    "tensorrt_llm parameter",
    "exclude_input_in_output cancellation_check_period_ms stats_check_period_ms",
)
def test_settings_reach_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CountingEngine()
    monkeypatch.setattr(FakePbUtils, "families", {})
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    monkeypatch.setattr(gpt_manager, "load_engine", lambda *args: engine)
    periods = {"cancellation_check_period_ms": "7000", "stats_check_period_ms": "9000"}
    server = Server(tmp_path, engine, exclude_input_in_output="true", **periods)
    try:
        assert ids_of(server.ask(input_ids=[1, 2], request_output_len=3)) == [3, 4, 5]
        tasks = server.model._periodic_tasks._tasks
        assert [task.period for task in tasks][:2] == [7.0, 9.0]
    finally:
        server.model.finalize()
