"""Filling the templates."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from inflight_server.serve.repository import assemble


def assembled(target: Path, **values: str) -> Any:
    assemble(target, values)
    text = (target / "tensorrt_llm" / "config.pbtxt").read_text()
    return text_format.Parse(text, pb.ModelConfig())


def test_values_fill_their_keys_and_the_rest_stays_unset(tmp_path: Path) -> None:
    config = assembled(tmp_path / "models", max_batch_size="7")
    assert config.max_batch_size == 64, "rows of one request"
    assert config.parameters["max_batch_size"].string_value == "7"
    assert config.parameters["max_num_tokens"].string_value == "${max_num_tokens}"


def test_both_models_have_what_triton_loads(tmp_path: Path) -> None:
    assemble(tmp_path / "models", {})
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
    config = assembled(tmp_path / "models", gpt_model_path=value)
    assert config.parameters["gpt_model_path"].string_value == value
