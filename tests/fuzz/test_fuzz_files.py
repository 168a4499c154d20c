"""Files that are not what they should be: one error of ours that names them, nothing else."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import fuzzing

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.manager.parameters import parse_parameters
from inflight_backend.models.checkpoint_files import read_weight_headers
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.weights import Checkpoint
from inflight_backend.text.tokenizer import TextCodec
from inflight_protocol import PARAMETERS
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [0, 1, 2, 3, 8, 64, "silu", "gelu", "bfloat16", "float8", "linear", "llama3"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint that can be served, to be spoilt."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "copy"))


def load(folder: Path) -> None:
    """What a server reads of a folder before it allocates anything."""
    read_weight_headers(folder)
    config = read_model(folder)
    if config.num_layers <= 64:
        with Checkpoint(folder) as checkpoint:
            checkpoint.check(config)


def load_or_refuse(folder: Path) -> None:
    with suppress(CheckpointError):
        load(folder)


@pytest.mark.case(103, 122)
@fuzzing
@given(data=st.data())
def test_any_config(copy: Path, data: st.DataObject) -> None:
    file = copy / "config.json"
    before = file.read_text()
    config: dict[str, Any] = json.loads(before)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            config[key] = data.draw(VALUES)
        else:
            config.pop(key, None)
    file.write_text(json.dumps(config))
    try:
        load_or_refuse(copy)
    finally:
        file.write_text(before)


@pytest.mark.case(102, 103, 122)
@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@fuzzing
@given(data=st.data())
def test_any_bytes(copy: Path, name: str, data: st.DataObject) -> None:
    """Bytes flipped, cut off, put in; most of them in the header."""
    file = copy / name
    before = file.read_bytes()
    content = bytearray(before)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content) - 1, 4000)))
        act = data.draw(st.sampled_from(["flip", "cut", "insert", "length"]))
        if act == "flip":
            content[at] ^= data.draw(st.integers(1, 255))
        elif act == "cut":
            del content[at:]
        elif act == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            content[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        if not content:
            break
    file.write_bytes(content)
    try:
        load_or_refuse(copy)
    finally:
        file.write_bytes(before)


@pytest.mark.case(104, 122)
@pytest.mark.parametrize("name", ["tokenizer.json", "tekken.json", "tokenizer.model"])
@fuzzing
@given(content=st.one_of(st.binary(max_size=60), VALUES.map(lambda v: json.dumps(v).encode())))
def test_any_tokenizer(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with suppress(CheckpointError):
        TextCodec.load(tmp_path, None)


@pytest.mark.case(122)
@fuzzing
@given(
    raw=st.dictionaries(
        st.sampled_from([spec.name for spec in PARAMETERS]) | st.text(max_size=8),
        st.text(max_size=12)
        | st.sampled_from(["nan", "inf", "1e999", "-1", "0x10", "9" * 40, "true", "${x}", "1_0"]),
        max_size=4,
    )
)
def test_any_parameters(raw: dict[str, str]) -> None:
    with suppress(ConfigurationError):
        parse_parameters({"gpt_model_path": "model", **raw})
