"""`inflight model-repository`: what it writes, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner

from inflight_server.commands.serve import model_repository
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS

APP = typer.Typer()
APP.command()(model_repository)


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(APP, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return done.output


def config(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())


@pytest.mark.contract("tensorrt_llm parameter", "gpt_model_path")
def test_it_writes_what_triton_loads(tmp_path: Path) -> None:
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
    options = [word for name in OPTIONAL_MODELS for word in ("--add", name)]
    switches = ["--set", "skip_special_tokens=false", "--set", "add_special_tokens=false"]
    switches += ["--set", "tensorrt_llm_model_name=mine"]
    run(tmp_path, "--no-decoupled", *options, *switches)
    assert {path.name for path in tmp_path.iterdir()} == {*DEFAULT_MODELS, *OPTIONAL_MODELS}
    for folder in tmp_path.iterdir():
        found = config(folder)
        assert found.name == folder.name
        assert (folder / "1").is_dir()
        assert not found.model_transaction_policy.decoupled
    parameters = config(tmp_path / "postprocessing").parameters
    assert parameters["skip_special_tokens"].string_value == "false"
    assert parameters["gpt_model_path"].string_value.endswith("demo_model")
    for relay in ("tensorrt_llm_bls", "vllm_model"):
        named = config(tmp_path / relay).parameters["tensorrt_llm_model_name"]
        assert named.string_value == "mine"


def test_the_checkpoint_may_be_on_another_machine(tmp_path: Path) -> None:
    said = run(tmp_path, "--model", "/nowhere/checkpoint")
    assert "/nowhere/checkpoint is not on this machine" in said
    path = config(tmp_path / "tensorrt_llm").parameters["gpt_model_path"].string_value
    assert path == "/nowhere/checkpoint"


def test_what_is_there_stays_unless_it_is_ours_and_force_is_given(tmp_path: Path) -> None:
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


def test_a_model_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "ensemble" / "config.pbtxt"
    theirs.parent.mkdir()
    theirs.write_text('name: "ensemble"')
    said = run(tmp_path, "--force", code=1)
    assert "was not written by inflight" in said
    assert theirs.read_text() == 'name: "ensemble"'
    assert not (tmp_path / "tensorrt_llm").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--add", "resnet"], "there is no such model; known are preprocessing"),
        (["--set", "max_batch_sise=3"], "did you mean max_batch_size"),
        (["--set", "max_batch_size=x"], "max_batch_size must be a whole number"),
        (
            ["--add", "postprocessing", "--set", "skip_special_tokens=perhaps"],
            "skip_special_tokens must be true or false",
        ),
        (["--set", "skip_special_tokens=true"], "ask for it, --add postprocessing"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    said = run(tmp_path / "out", *arguments, code=1)
    assert message in said
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is no folder" in run(tmp_path / "file", code=1)
