"""The table of model families."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import FAMILIES
from inflight_server.serve.settings import DEMO_MODEL

OWN_FAMILY = """
from inflight_backend.models.families.registry import DecoderOptions, register_family

@register_family("OwnForCausalLM", "own")
def read_options(reader):
    return DecoderOptions(has_qkv_bias=reader.boolean("qkv", default=False))
"""


def test_registered_family_reads_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family in a file of its own; without it the error lists the families that are known."""
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    values |= {"architectures": ["OwnForCausalLM"], "model_type": "own", "qkv": True}
    (tmp_path / "own_family.py").write_text(OWN_FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    reader = JsonReader(values, "config.json")
    importlib.import_module("own_family")
    try:
        assert ModelConfig.from_reader(reader).has_qkv_bias
    finally:
        del FAMILIES["OwnForCausalLM"]
    with pytest.raises(CheckpointError, match=r"'OwnForCausalLM' is not supported; .*Llama"):
        ModelConfig.from_reader(reader)
