"""Filling the templates, for a run and for a folder of the user (`inflight model-repository`)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from support.command_runner import run as run_command
from tritonclient.grpc import model_config_pb2 as pb

from inflight_server.commands.serve import model_repository
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS, assemble


def config(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())


def test_both_models_have_the_files_that_triton_loads(tmp_path: Path) -> None:
    assemble(tmp_path / "models", {"max_batch_size": "7"})
    files = {str(p.relative_to(tmp_path / "models")) for p in (tmp_path / "models").rglob("*")}
    assert files == {
        "ensemble",
        "ensemble/1",
        "ensemble/config.pbtxt",
        "tensorrt_llm",
        "tensorrt_llm/1",
        "tensorrt_llm/1/__pycache__",
        "tensorrt_llm/1/model.py",
        "tensorrt_llm/config.pbtxt",
    }
    llm = config(tmp_path / "models" / "tensorrt_llm")
    assert llm.max_batch_size == 64, "rows of one request"
    assert llm.parameters["max_batch_size"].string_value == "7"
    assert llm.parameters["max_num_tokens"].string_value == "${max_num_tokens}", "not set"


def test_loading_a_model_changes_none_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would load it again: server#7489."""
    assemble(tmp_path / "models", {})
    version = tmp_path / "models" / "tensorrt_llm" / "1"
    (version / "model.py").write_text("IS_LOADED = True")
    before = {path: path.stat().st_mtime_ns for path in (version, *version.iterdir())}
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(version.parent)
    assert importlib.import_module("1.model").IS_LOADED  # as Triton's stub does
    assert {path: path.stat().st_mtime_ns for path in (version, *version.iterdir())} == before


@pytest.mark.parametrize(
    "value",
    [
        '/a "quoted" path',
        "C:\\back\\slash",
        "line\nbreak",
        "/модель/模型",
        "${max_seq_len}",
        "$$ $",
    ],
)
def test_any_value_reaches_the_model_as_it_is(tmp_path: Path, value: str) -> None:
    assemble(tmp_path / "models", {"gpt_model_path": value})
    parameters = config(tmp_path / "models" / "tensorrt_llm").parameters
    assert parameters["gpt_model_path"].string_value == value


def run(*arguments: str | Path, code: int = 0) -> str:
    done = run_command(model_repository, *arguments)
    assert done.exit_code == code, done.output
    return str(done.output)


@pytest.mark.contract("tensorrt_llm parameter", "gpt_model_path")
def test_the_command_writes_a_repository_and_says_how_to_start_it(tmp_path: Path) -> None:
    out = tmp_path / "a" / "models"
    said = run(out, "--set", "max_batch_size=8", "--set", "tokenizer_dir=/tok")
    assert f"--model-repository={out}" in said
    assert {path.name for path in out.iterdir()} == set(DEFAULT_MODELS)
    llm = config(out / "tensorrt_llm")
    assert llm.model_transaction_policy.decoupled
    assert llm.parameters["max_batch_size"].string_value == "8"
    assert llm.parameters["gpt_model_path"].string_value.endswith("demo_model")


@pytest.mark.contract("preprocessing parameter", "tokenizer_dir gpt_model_path")
@pytest.mark.contract("postprocessing parameter", "tokenizer_dir skip_special_tokens")
def test_every_other_model_is_written_when_asked_for(tmp_path: Path) -> None:
    """The checkpoint may be on another machine."""
    options = [word for name in OPTIONAL_MODELS for word in ("--add", name)]
    switches = ["--set", "skip_special_tokens=false", "--set", "add_special_tokens=false"]
    switches += ["--set", "tensorrt_llm_model_name=mine", "--model", "/nowhere/checkpoint"]
    said = run(tmp_path, "--no-decoupled", *options, *switches)
    assert "/nowhere/checkpoint is not on this machine" in said
    assert {path.name for path in tmp_path.iterdir()} == {*DEFAULT_MODELS, *OPTIONAL_MODELS}
    for folder in tmp_path.iterdir():
        found = config(folder)
        assert found.name == folder.name
        assert (folder / "1").is_dir()
        assert not found.model_transaction_policy.decoupled
    for model, key, value in (
        ("tensorrt_llm", "gpt_model_path", "/nowhere/checkpoint"),
        ("postprocessing", "skip_special_tokens", "false"),
        ("postprocessing", "gpt_model_path", "/nowhere/checkpoint"),
        ("tensorrt_llm_bls", "tensorrt_llm_model_name", "mine"),
        ("vllm_model", "tensorrt_llm_model_name", "mine"),
    ):
        assert config(tmp_path / model).parameters[key].string_value == value


def test_a_draft_model_is_written_beside_its_target(tmp_path: Path) -> None:
    """With what it takes over from that, and what is its own."""
    switches = ["--set", "max_batch_size=8", "--set", "tokenizer_dir=/tok"]
    own = ["--draft-model", "/nowhere/small", "--draft-set", "max_seq_len=99"]
    run(tmp_path, "--model", "/nowhere/large", *switches, *own)
    found = config(tmp_path / "tensorrt_llm_draft")
    assert found.name == "tensorrt_llm_draft"
    relay, target = config(tmp_path / "tensorrt_llm_bls"), config(tmp_path / "tensorrt_llm")
    assert list(found.input) == list(target.input)
    for each, key, value in (
        (found, "gpt_model_path", "/nowhere/small"),
        (found, "max_batch_size", "8"),
        (found, "max_seq_len", "99"),
        (found, "tokenizer_dir", "${tokenizer_dir}"),
        (found, "kv_cache_free_gpu_mem_fraction", "0.2"),
        (target, "kv_cache_free_gpu_mem_fraction", "0.6"),
        (target, "gpt_model_path", "/nowhere/large"),
        (relay, "gpt_model_path", "/nowhere/large"),
        (relay, "tensorrt_llm_draft_model_name", "tensorrt_llm_draft"),
    ):
        assert each.parameters[key].string_value == value, key


def test_models_of_the_folder_stay_unless_they_are_ours_and_force_is_given(tmp_path: Path) -> None:
    other = tmp_path / "theirs" / "config.pbtxt"
    other.parent.mkdir()
    other.write_text("mine")
    run(tmp_path)
    (tmp_path / "tensorrt_llm" / "stray").touch()
    assert "exists: give another folder, or --force" in run(tmp_path, code=1)
    assert (tmp_path / "tensorrt_llm" / "stray").exists()
    run(tmp_path, "--force", "--set", "max_batch_size=3")
    assert not (tmp_path / "tensorrt_llm" / "stray").exists()
    assert config(tmp_path / "tensorrt_llm").parameters["max_batch_size"].string_value == "3"
    assert other.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {*DEFAULT_MODELS, "theirs"}


def test_a_model_that_another_program_wrote_is_never_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "ensemble" / "config.pbtxt"
    theirs.parent.mkdir()
    theirs.write_text('name: "ensemble"')
    assert "was not written by inflight" in run(tmp_path, "--force", code=1)
    assert theirs.read_text() == 'name: "ensemble"'
    assert not (tmp_path / "tensorrt_llm").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--add", "resnet"], "there is no such model; known are preprocessing"),
        (["--set", "max_batch_sise=3"], "did you mean max_batch_size"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in run(tmp_path / "out", *arguments, code=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    assert "is no folder" in run(tmp_path / "file", code=1)
