"""The committed model repository against the wire table, tensor by tensor."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from string import Template
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from inflight_protocol import (
    ENSEMBLE_INPUT_MAP,
    ENSEMBLE_MODEL_NAME,
    ENSEMBLE_OUTPUT_MAP,
    INPUTS,
    LLM_MODEL_NAME,
    TensorSpec,
    pbtxt,
)
from inflight_protocol.pbtxt import update_repository
from inflight_server.serve.repository import OPTIONAL_MODELS

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def load(model: str, repository: Path = REPOSITORY) -> Any:
    """The parsed config.pbtxt of a model, the batch size filled as `inflight serve` does."""
    text = (repository / model / "config.pbtxt").read_text()
    filled = Template(text).safe_substitute(triton_max_batch_size="1", decoupled_mode="true")
    return text_format.Parse(filled, pb.ModelConfig())


@pytest.fixture(scope="module")
def llm() -> Any:
    return load(LLM_MODEL_NAME)


@pytest.fixture(scope="module")
def ensemble() -> Any:
    return load(ENSEMBLE_MODEL_NAME)


def signature(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, pb.DataType.Name(tensor.data_type), tuple(tensor.dims)


@pytest.mark.contract("tensorrt_llm parameter", "FORCE_CPU_ONLY_INPUT_TENSORS")
@pytest.mark.contract(
    "ensemble input",
    "bad_words end_id pad_id top_k top_p temperature length_penalty repetition_penalty "
    "min_tokens presence_penalty frequency_penalty random_seed seed return_log_probs "
    "return_context_logits return_generation_logits return_perf_metrics "
    "return_kv_cache_reuse_stats return_num_input_tokens return_num_output_tokens "
    "beam_width",
)
@pytest.mark.contract("ensemble output", "*")
def test_committed_configs_are_generated_from_the_tables(tmp_path: Path) -> None:
    """After a change of a table: ``python -m inflight_protocol.pbtxt``."""
    shutil.copytree(REPOSITORY, tmp_path, dirs_exist_ok=True)
    update_repository(tmp_path)
    for path in REPOSITORY.glob("*/config.pbtxt"):
        assert (tmp_path / path.parent.name / path.name).read_text() == path.read_text()


def test_new_row_of_a_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(REPOSITORY, tmp_path, dirs_exist_ok=True)
    new = TensorSpec("new", "FP32", (-1, 2), "a new input", is_ragged=True)
    monkeypatch.setattr(pbtxt, "INPUTS", (*INPUTS, new))
    update_repository(tmp_path)
    config = load(LLM_MODEL_NAME, tmp_path)
    tensor = config.input[-1]
    assert (tensor.name, tensor.data_type, list(tensor.dims)) == ("new", pb.TYPE_FP32, [-1, 2])
    assert tensor.optional
    assert tensor.allow_ragged_batch


@pytest.mark.contract("tensorrt_llm parameter", "triton_max_batch_size decoupled_mode")
def test_llm_is_one_decoupled_python_instance_on_the_cpu(llm: Any) -> None:
    assert (llm.name, llm.backend, llm.max_batch_size) == (LLM_MODEL_NAME, "python", 1)
    assert llm.model_transaction_policy.decoupled
    (group,) = llm.instance_group
    assert (group.count, group.kind) == (1, pb.ModelInstanceGroup.KIND_CPU)
    assert llm.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "yes"


def test_ensemble_is_one_step_of_the_llm(ensemble: Any) -> None:
    assert (ensemble.name, ensemble.platform, ensemble.max_batch_size) == (
        ENSEMBLE_MODEL_NAME,
        "ensemble",
        1,
    )
    (step,) = ensemble.ensemble_scheduling.step
    assert step.model_name == LLM_MODEL_NAME
    assert dict(step.input_map) == {inner: name for name, inner in ENSEMBLE_INPUT_MAP.items()}
    assert dict(step.output_map) == {inner: name for name, inner in ENSEMBLE_OUTPUT_MAP.items()}


@pytest.mark.contract("tensorrt_llm_bls input", "*")
@pytest.mark.contract("tensorrt_llm_bls output", "*")
def test_relay_has_the_tensors_of_the_ensemble(ensemble: Any) -> None:
    relay = load("tensorrt_llm_bls")
    *inputs, num_drafts, use_logits = relay.input
    assert inputs == list(ensemble.input)
    assert signature(num_drafts) == ("num_draft_tokens", "TYPE_INT32", (1,))
    assert signature(use_logits) == ("use_draft_logits", "TYPE_BOOL", (1,))
    assert list(relay.output) == list(ensemble.output)
    assert relay.model_transaction_policy.decoupled


def test_vllm_model_has_vllms_tensors_without_a_batch_dimension() -> None:
    """Names, types and dims are those of vllm_backend's `src/model.py`."""
    front = load("vllm_model")
    assert (front.max_batch_size, front.backend) == (0, "python")
    assert front.model_transaction_policy.decoupled
    flags = "exclude_input_in_output return_finish_reason return_num_input_tokens"
    flags = f"stream {flags} return_num_output_tokens return_cumulative_logprob return_logprobs"
    assert {signature(tensor): tensor.optional for tensor in front.input} == {
        ("text_input", "TYPE_STRING", (1,)): False,
        ("sampling_parameters", "TYPE_STRING", (1,)): True,
        **{(name, "TYPE_BOOL", (1,)): True for name in flags.split()},
    }
    assert [signature(tensor) for tensor in front.output] == [
        ("text_output", "TYPE_STRING", (-1,)),
        ("finish_reason", "TYPE_STRING", (-1,)),
        ("cumulative_logprob", "TYPE_FP32", (-1,)),
        ("logprobs", "TYPE_STRING", (-1,)),
        ("num_input_tokens", "TYPE_UINT32", (1,)),
        ("num_output_tokens", "TYPE_UINT32", (-1,)),
    ]


@pytest.mark.parametrize("model", [LLM_MODEL_NAME, *OPTIONAL_MODELS])
def test_model_py_only_imports_a_class_of_the_package(model: str) -> None:
    source = (REPOSITORY / model / "1" / "model.py").read_text()
    assert len(source.splitlines()) <= 10
    (statement,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom))
    assert (statement.module or "").startswith("inflight_backend.triton")
    assert [alias.name for alias in statement.names] == ["TritonPythonModel"]
