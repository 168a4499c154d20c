"""The loaded model with a fake `pb_utils`: config, load, requests, responses, drain, unload."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    ids_of,
    responses_of,
    text_of,
    wait_until,
)
from support.triton_stub import (
    CountingEngine,
    FailingSender,
    FakeMetricFamily,
    FakePbUtils,
    FakeRequest,
    FakeTritonError,
)

from inflight_backend.errors import ConfigurationError, InvalidRequest
from inflight_backend.manager import gpt_manager
from inflight_backend.manager.parameters import parse_parameters
from inflight_backend.status import read_status
from inflight_backend.triton import model as module
from inflight_backend.triton.model import (
    check_config,
    check_numpy,
    check_own_stub,
    with_queue_limit,
)
from inflight_backend.triton_io.inputs import read_inputs
from inflight_protocol import METRICS
from inflight_server.serve.tritonserver import locate


@pytest.mark.case(104)
@pytest.mark.parametrize(
    ("vocab_size", "parameters", "error"),
    [
        (999, {}, "the tokenizer has 1000 tokens, the model's embedding only 999 rows"),
        (1000, {"max_beam_width": "65"}, "max_beam_width"),
    ],
)
def test_a_load_that_fails_is_one_line_in_the_status_file(
    make_server: MakeServer,
    tokenizer: None,
    tmp_path: Path,
    vocab_size: int,
    parameters: dict[str, str],
    error: str,
) -> None:
    with pytest.raises(FakePbUtils.TritonModelException, match=error):
        make_server(CountingEngine(vocab_size=vocab_size), **parameters)
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert status.phase == "failed"
    assert error in str(status.fields["error"])


ZEROS: dict[str, tuple[int, ...]] = {
    "cum_log_probs": (1, 1),
    "output_log_probs": (1, 1, 1),
    "context_logits": (1, 1, 1),
    "generation_logits": (1, 1, 1, 1),
}
"""Tensors of the last response to a client that names none and asks for none -> shapes."""


@pytest.mark.parametrize("is_excluded", [True, False])
def test_who_names_no_outputs_reads_zeros_of_what_it_did_not_ask_for(
    server: Server, is_excluded: bool
) -> None:
    """As clients of tensorrtllm_backend up to v0.13 do; who names outputs gets just those."""
    asked: dict[str, Any] = {"input_ids": [1, 2], "request_output_len": 3}
    asked["exclude_input_in_output"] = is_excluded
    [tensors] = responses_of(server.ask(**asked))
    for name, shape in (ZEROS | {"output_log_probs": (1, 1, 3)}).items():
        assert tensors[name].shape == shape, name
        assert tensors[name].dtype == np.float32
        assert not tensors[name].any()
    [tensors] = responses_of(server.ask(outputs=("output_ids", "sequence_length"), **asked))
    assert list(tensors) == ["output_ids", "sequence_length"]


def test_drafts_of_a_client_come_back_as_far_as_they_are_right(server: Server) -> None:
    values: dict[str, Any] = {
        "input_ids": [1, 2, 3],
        "request_output_len": 8,
        "return_perf_metrics": True,
    }
    sender = server.ask(draft_input_ids=[4, 5, 6, 9], streaming=True, **values)
    first = sender.responses[0].output_tensors[0].as_numpy()
    assert first.reshape(-1).tolist()[:4] == [4, 5, 6, 7]  # later tokens may have joined them
    assert ids_of(sender) == list(range(4, 12))
    last = responses_of(sender)[-1]
    for name, value in (("draft_tokens", 4), ("accepted_draft_tokens", 3)):
        assert last[f"total_{name}"].item() == value
    assert last["acceptance_rate"].item() == 0.75
    text, code = error_of(server.ask(draft_input_ids=[4] * 9, **values))
    assert "'draft_input_ids' holds 9 tokens, more than max_draft_len = 8" in text
    assert code == FakePbUtils.TritonError.INVALID_ARG


@pytest.mark.contract("tensorrt_llm of the LLM API input", "text_input")
@pytest.mark.contract("tensorrt_llm of the LLM API output", "text_output")
@pytest.mark.case(32)
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stream": True}, " 7 8 9"),
        ({}, "5 6 7 8 9"),
        ({"exclude_input_in_output": True}, " 7 8 9"),
        ({"stream": True, "stop_words": [""]}, " 7 8 9"),  # an empty word asks for nothing
    ],
)
def test_text_in_text_out(server: Server, values: dict[str, Any], text: str) -> None:
    sender = server.ask(text_input="5 6", max_tokens=3, **values)
    assert text_of(sender) == text
    assert "stream" in values or len(sender.responses) == 1


def test_outputs_follow_the_request(server: Server) -> None:
    sender = server.ask(outputs=("text_output",), input_ids=[7], request_output_len=2)
    assert text_of(sender) == "7 8 9"
    assert ids_of(sender) == []
    error, _ = error_of(server.ask(outputs=("context_logits",), input_ids=[7]))
    assert "none of the requested outputs can be sent" in error


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_input": ""}, "'text_input' is empty"),  # case 1
        ({"text_input": "1", "input_ids": [1]}, "'text_input' and 'input_ids' are both given"),  # 3
        ({"request_output_len": 4}, "the prompt is missing"),  # 4
        ({"text_input": b"\xff\xfe"}, "'text_input' is not valid UTF-8"),  # 5
        ({"input_ids": [1], "request_output_len": 0}, "'request_output_len' is 0"),  # 14
        ({"input_ids": [1], "beam_width": 2}, "'beam_width' is 2, more than max_beam_width = 1"),
        ({"text_input": "1", "stream": True, "streaming": True}, "given twice"),
        ({"input_ids": [1] * 200, "request_output_len": 100}, "300, more than max_seq_len = 256"),
        ({"input_ids": [1], "stop": True}, "a stop request needs the request id"),
        ({"input_ids": [1], "why": True}, "'why' needs the request id of the request it asks"),
        ({"input_ids": [1], "lora_task_id": 7}, "'lora_task_id' is not supported by this server"),
    ],
)
@pytest.mark.case(1, 3, 4, 5, 14, 41)
def test_bad_requests_are_refused_by_name(
    server: Server, values: dict[str, Any], message: str
) -> None:
    text, code = error_of(server.ask(**values))
    assert message in text
    codes = FakePbUtils.TritonError
    is_unsupported = "is not supported" in message
    assert code == (codes.UNSUPPORTED if is_unsupported else codes.INVALID_ARG)
    assert ids_of(server.ask(input_ids=[1], request_output_len=1)) == [1, 2]


@pytest.mark.case(66)
def test_stop_by_id_ends_a_running_stream_in_the_iteration_that_runs(
    server: Server, gate: Gate
) -> None:
    gate.close_after(3)
    sender = server.send("job", input_ids=[1], request_output_len=200, streaming=True)
    assert gate.is_reached.wait(WAIT)
    ack = server.ask("job", input_ids=[0], input_lengths=0, request_output_len=0, stop=True)
    assert [response.output_tensors for response in ack.responses] == [[]]
    gate.set()
    assert sender.is_final.wait(WAIT)
    assert len(server.engine.batches) == 4, "three before, and the one that ran"
    assert server.model._manager._batcher.block_manager.num_used_blocks == 0
    ids = ids_of(sender)
    assert ids == list(range(2, 2 + len(ids)))
    assert len(ids) < 200
    assert sender.responses[-1].error is None


@pytest.mark.contract("tensorrt_llm of the LLM API input", "return_finish_reason")
def test_the_reason_comes_with_the_last_response_to_who_asks(server: Server) -> None:
    sender = server.ask(
        input_ids=[1, 2], request_output_len=3, streaming=True, return_finish_reason=True
    )
    *others, last = responses_of(sender)
    assert not any("finish_reason" in tensors for tensors in others)
    assert last["finish_reason"].item() == b"length"


def last_line() -> dict[str, Any]:
    """Empty while there is none."""
    return dict(json.loads(["{}", *FakePbUtils.Logger.lines][-1]))


@pytest.mark.contract("metric", "*")
def test_metrics_and_the_lines_of_the_log_agree_integer_for_integer(server: Server) -> None:
    """Each line is the JSON from which the gauges were set; lengths count in their buckets."""
    families = FakePbUtils.families
    FakePbUtils.Logger.lines.clear()
    for num_prompt, num_new in ((6, 5), (11, 60), (3, 1)):
        server.ask(input_ids=[1] * num_prompt, request_output_len=num_new)
    server.ask(input_ids=[1] * 4, request_output_len=9, end_id=4)  # 2, 3 and the end
    server.ask(input_ids=[-1], request_output_len=9)  # refused: it has no length
    wait_until(lambda: len(families["nv_llm_output_token_len"].observed) == 4)
    assert families["nv_llm_input_token_len"].observed == [6, 11, 3, 4]
    assert families["nv_llm_output_token_len"].observed == [5, 60, 1, 2]
    for name in ("nv_llm_input_token_len", "nv_llm_output_token_len"):
        assert families[name].buckets == [10, 50, 100, 500, 1000]
    assert families["nv_trt_llm_disaggregated_serving_metrics"].kind == "counter"
    wait_until(lambda: last_line().get("Iteration Counter") == 5 + 60 + 1 + 3)
    server.model._periodic_tasks.close()  # nothing moves any more
    last = last_line()
    compared = 0
    for family in METRICS:
        for value, key in family.values.items():
            if isinstance(last.get(key), int):
                label = f"model=tensorrt_llm,version=1,{family.label}={value}"
                assert families[family.name].values[label] == last[key], (family.name, value)
                compared += 1
    assert compared == 18


@pytest.mark.contract("metric", "nv_trt_llm_v1_metrics")
def test_v1_has_its_own_metrics_and_answers_whole(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePbUtils, "families", {})
    server = make_server(CountingEngine(), gpt_model_type="V1")
    sender = server.ask(input_ids=[1, 2], request_output_len=3, streaming=True)
    assert ids_of(sender) == [1, 2, 3, 4, 5]
    assert set(FakePbUtils.families["nv_trt_llm_v1_metrics"].values) == {
        f"model=tensorrt_llm,version=1,v1_specific_metric={name}"
        for name in ("total_context_tokens", "total_generation_tokens", "empty_generation_slots")
    }
    assert "nv_trt_llm_inflight_batcher_metrics" not in FakePbUtils.families
    status = read_status(server.status_file)
    assert status is not None
    assert status.fields["policy"] == "static_batch"


@pytest.mark.parametrize("fails_finally", [False, True])
@pytest.mark.case(92)
def test_a_sender_that_raises_ends_its_own_stream_only(
    server: Server, gate: Gate, fails_finally: bool
) -> None:
    gate.clear()
    broken = FailingSender(num_failures=99 if fails_finally else 1)
    server.send("broken", sender=broken, input_ids=[1], request_output_len=50, streaming=True)
    healthy = server.send(input_ids=[1], request_output_len=50, streaming=True)
    gate.set()
    assert healthy.is_final.wait(WAIT)
    assert ids_of(healthy) == list(range(2, 52))
    wait_until(lambda: server.model._frontend.num_live == 0)
    assert broken.is_final.is_set() != fails_finally
    again = server.ask("broken", input_ids=[1], request_output_len=1)  # its id is free
    assert ids_of(again) == [1, 2]


@pytest.mark.case(77)
def test_queue_limit_is_a_named_refusal(make_server: MakeServer, gate: Gate) -> None:
    server = make_server(CountingEngine(before_step=gate), max_batch_size="1", max_queue_size="1")
    gate.clear()
    senders = [server.send(input_ids=[1], request_output_len=2) for _ in range(6)]
    refused = [sender for sender in senders if sender.is_final.wait(0.05)]
    assert refused
    text, code = error_of(refused[0])
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    assert text.startswith("Maximum queue size of 1 has been reached (max_queue_size); try again")
    assert "of 1 places are taken" in text
    assert "of 64 KV blocks are free" in text
    gate.set()
    assert all(sender.is_final.wait(WAIT) for sender in senders)


def test_it_beats_while_it_loads_and_the_watchdog_beats_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a hung load would look like a slow one, and a dead watchdog like a living one."""
    names: list[set[str]] = []

    def note(*args: object) -> CountingEngine:
        names.append({thread.name for thread in threading.enumerate()})
        return CountingEngine()

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    monkeypatch.setattr(gpt_manager, "load_engine", note)
    server = Server(tmp_path, CountingEngine())
    names.append({thread.name for thread in threading.enumerate()})
    server.model.finalize()
    assert ["LoadingBeat" in each for each in names] == [True, False]
    assert "Watchdog" in names[1]


PROMPT = {"input": [{"name": "text_input"}]}

ON_CPU = {"kind": "KIND_CPU", "count": 1, "gpus": []}

NO_LIMITS = {"timeout_action": "REJECT", "default_timeout_microseconds": 0, "max_queue_size": 0}


def on_gpus(*gpus: int, count: int = 1) -> dict[str, Any]:
    return {"kind": "KIND_GPU", "count": count, "gpus": list(gpus)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, ""),
        ({"input": [{"name": "input_ids"}]}, ""),
        ({"input": [{"name": "prompt"}]}, "neither input 'input_ids' nor 'text_input'"),
        ({"instance_group": [ON_CPU]}, ""),
        ({"instance_group": [on_gpus(0)]}, ""),
        ({"instance_group": [{"kind": "KIND_MODEL", "count": 1, "gpus": []}]}, ""),
        ({"instance_group": [{**ON_CPU, "count": 2}]}, "asks for 2 instances"),
        ({"instance_group": [ON_CPU, ON_CPU]}, "asks for 2 instances"),
        ({"instance_group": [on_gpus(0, 1, 2, 3)]}, "asks for 4 instances.*CUDA_VISIBLE_DEVICES"),
        ({"instance_group": [on_gpus(0, 1, count=2)]}, "asks for 4 instances"),
        ({"response_cache": {"enable": False}}, ""),
        ({"response_cache": {"enable": True}}, "response_cache is not for this model"),
        (  # Triton writes some numbers as text
            {"dynamic_batching": {"default_queue_policy": {"default_timeout_microseconds": "9"}}},
            "default_timeout_microseconds is 9.*max_queue_seconds",
        ),
        ({"dynamic_batching": {"priority_levels": 3}}, "priority_levels is 3.*input 'priority'"),
        ({"dynamic_batching": {"preferred_batch_size": [4], "priority_levels": 0}}, ""),
        # Triton adds an instance to a running one when ``count`` is raised and the model loaded
        # again, with the configuration of before. The group may have any name.
        ({"args": {"model_instance_name": "llm_2_0"}}, ""),
        ({"args": {"model_instance_name": "llm_2"}}, ""),
        ({"args": {"model_instance_name": "another_3"}}, ""),
        ({"args": {"model_instance_name": "llm_2_1"}}, "asks for 2 instances"),
        ({"args": {"model_instance_kind": "GPU", "model_instance_device_id": "0"}}, ""),
        (
            {"args": {"model_instance_kind": "GPU", "model_instance_device_id": "1"}},
            "GPU 1, .* CUDA_VISIBLE_DEVICES=1",
        ),
    ],
)
def test_config_is_taken_or_refused_by_name(config: dict[str, Any], message: str) -> None:
    args = config.pop("args", {})
    group = {"instance_group": [{**ON_CPU, "name": "llm_2"}]}
    with pytest.raises(ConfigurationError, match=message) if message else nullcontext():
        check_config({**PROMPT, **group, **config}, args)


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


NEW_STUB = b"...numpy.lib\0NumpyVersion\0major\0numpy._core\0"


def without(name: str) -> Any:
    """`FakePbUtils` of a Triton that lacks ``name``."""
    owner, _, part = name.rpartition(".")
    pb_utils: dict[str, Any] = {
        **vars(FakePbUtils),
        "TritonError": SimpleNamespace(**vars(FakeTritonError)),
        "MetricFamily": SimpleNamespace(**vars(FakeMetricFamily)),
    }
    found = vars(pb_utils[owner]) if owner else pb_utils
    del found[part]
    return SimpleNamespace(**pb_utils)


@pytest.mark.case(108)
@pytest.mark.parametrize(
    ("version", "stub", "is_too_new"),
    [
        ("1.24.0", b"", False),
        ("1.26.4", b"", False),
        ("2.0.0", b"", True),
        ("10.0", b"", True),
        ("2.3.1", NEW_STUB, False),
    ],
)
def test_numpy_fits_the_stub_or_is_refused(
    tmp_path: Path, version: str, stub: bytes, is_too_new: bool
) -> None:
    """That of the installed Triton, or a newer one that knows numpy 2."""
    path = tmp_path / "stub" if stub else locate().stub
    if stub:
        path.write_bytes(stub)
    text = rf"numpy {version} is too new.*'numpy<2'"
    with pytest.raises(ConfigurationError, match=text) if is_too_new else nullcontext():
        check_numpy(version, path)


@pytest.mark.case(108)
def test_server_that_we_did_not_start_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model checks the program that runs it: here Python, which has no numpy 2."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    monkeypatch.setattr("numpy.__version__", "2.1.0")
    with pytest.raises(FakePbUtils.TritonModelException, match=r"numpy 2\.1\.0 is too new"):
        Server(tmp_path, CountingEngine())


@pytest.mark.case(108)
@pytest.mark.parametrize("name", module._NEEDED)
def test_triton_that_is_too_old_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"too old: its Python backend has no {name};"):
        check_own_stub(without(name))
    check_own_stub(FakePbUtils)
