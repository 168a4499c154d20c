"""What operators write into config.pbtxt beside tensors and parameters: done, or refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import error_of
from support.triton_stub import CountingEngine, FakePbUtils, FakeRequest

from inflight_backend.errors import ConfigurationError, InvalidRequest
from inflight_backend.manager.parameters import parse_parameters
from inflight_backend.triton.model import TritonPythonModel, check_config, with_queue_limit
from inflight_backend.triton_io.inputs import read_inputs

PROMPT = {"input": [{"name": "text_input"}]}
ON_CPU = {"kind": "KIND_CPU", "count": 1, "gpus": []}
NO_LIMITS = {"timeout_action": "REJECT", "default_timeout_microseconds": 0, "max_queue_size": 0}


def on_gpus(*gpus: int, count: int = 1) -> dict[str, Any]:
    return {"kind": "KIND_GPU", "count": count, "gpus": list(gpus)}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"input": [{"name": "input_ids"}]},
        {"instance_group": [ON_CPU]},
        {"instance_group": [on_gpus(0)]},
        {"instance_group": [{"kind": "KIND_MODEL", "count": 1, "gpus": []}]},
        {"response_cache": {"enable": False}},
        {
            "dynamic_batching": {
                "preferred_batch_size": [4],
                "max_queue_delay_microseconds": 1000,
                "priority_levels": 0,
                "default_queue_policy": NO_LIMITS,
            }
        },
    ],
)
def test_what_can_be_done_is_taken(config: dict[str, Any]) -> None:
    check_config({**PROMPT, **config}, {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"input": [{"name": "prompt"}]}, "neither input 'input_ids' nor 'text_input'"),
        ({"instance_group": [{**ON_CPU, "count": 2}]}, "asks for 2 instances"),
        ({"instance_group": [ON_CPU, ON_CPU]}, "asks for 2 instances"),
        ({"instance_group": [on_gpus(0, 1, 2, 3)]}, "asks for 4 instances.*CUDA_VISIBLE_DEVICES"),
        ({"instance_group": [on_gpus(0, 1, count=2)]}, "asks for 4 instances"),
        ({"response_cache": {"enable": True}}, "response_cache is not for this model"),
        (  # Triton writes some numbers as text
            {"dynamic_batching": {"default_queue_policy": {"default_timeout_microseconds": "9"}}},
            "default_timeout_microseconds is 9.*max_queue_seconds",
        ),
        ({"dynamic_batching": {"priority_levels": 3}}, "priority_levels is 3.*input 'priority'"),
    ],
)
def test_what_cannot_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_config({**PROMPT, **config}, {})


@pytest.mark.parametrize("policy", [{}, NO_LIMITS, {"max_queue_size": "32"}])
@pytest.mark.parametrize("own", [{}, {"max_queue_size": "${max_queue_size}"}])
def test_the_limit_of_tritons_queue_is_the_models(policy: Any, own: dict[str, str]) -> None:
    """`tensorrtllm_backend` reads it there: its README fills it in."""
    given = {"gpt_model_path": "/m", **own}
    config = {**PROMPT, "dynamic_batching": {"default_queue_policy": policy}}
    check_config(config, {})
    parameters = parse_parameters(with_queue_limit(given, config))
    expected = 32 if policy.get("max_queue_size") else parse_parameters(given).max_queue_size
    assert parameters.max_queue_size == expected


def test_two_limits_of_the_queue_must_be_the_same() -> None:
    config = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": 32}}}
    with_queue_limit({"max_queue_size": "32"}, config)
    with pytest.raises(ConfigurationError, match=r"is 32 and .* is 64: .*leave one of"):
        with_queue_limit({"max_queue_size": "64"}, config)


def test_an_instance_that_joins_a_running_one_is_refused() -> None:
    """Triton adds it when ``count`` is raised and the model loaded again, with the configuration of
    before. The group may have any name."""
    config = {**PROMPT, "instance_group": [{**ON_CPU, "name": "llm_2"}]}
    for name in ("llm_2_0", "llm_2", "another_3"):
        check_config(config, {"model_instance_name": name})
    with pytest.raises(ConfigurationError, match="asks for 2 instances"):
        check_config(config, {"model_instance_name": "llm_2_1"})


def test_another_gpu_than_the_first_is_refused() -> None:
    args = {"model_instance_kind": "GPU", "model_instance_device_id": "0"}
    check_config(PROMPT, args)
    with pytest.raises(ConfigurationError, match=r"GPU 1, .* CUDA_VISIBLE_DEVICES=1"):
        check_config(PROMPT, {**args, "model_instance_device_id": "1"})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_cache": {"enable": True}}, "response_cache"),
        (
            {"dynamic_batching": {"default_queue_policy": {"max_queue_size": 10**8}}},
            "max_queue_size is 100000000: it must be between 0 and",
        ),
    ],
)
def test_the_model_does_not_load_with_it(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    config = {**PROMPT, "parameters": {}, **asked}
    args = {"model_config": json.dumps(config), "model_name": "tensorrt_llm"}
    with pytest.raises(RuntimeError, match=message):
        TritonPythonModel().initialize(args)


def test_a_tensor_on_a_gpu_is_refused_with_what_to_set() -> None:
    """Triton hands it over as it is where the config says so, as those of the peer do."""
    request = FakeRequest({"input_ids": [[1]], "end_id": [[2]]})
    assert list(read_inputs(request)) == ["input_ids", "end_id"]
    request.inputs()[1].is_on_gpu = True
    with pytest.raises(InvalidRequest, match=r"'end_id' is in a GPU.*_CPU_ONLY_INPUT"):
        read_inputs(request)


def test_who_names_no_output_gets_those_of_its_prompt_whatever_the_config_has(
    make_server: MakeServer,
) -> None:
    """Triton requests all for it; those of `tensorrtllm_backend` have one that is refused."""
    outputs = ("output_ids", "sequence_length", "cum_log_probs", "context_phase_params")
    server = make_server(CountingEngine(), outputs=outputs)
    sender = server.ask(outputs=outputs, input_ids=[1], request_output_len=3)
    assert [each.name() for each in sender.responses[0].output_tensors][:2] == list(outputs[:2])
    error, _ = error_of(server.ask(outputs=(*outputs[:2], outputs[3]), input_ids=[1]))
    assert error == "output 'context_phase_params' cannot be requested here: it is not sent"
