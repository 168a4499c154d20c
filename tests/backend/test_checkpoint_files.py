"""Every file of a checkpoint: links may not leave its folder, wherever it is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import find_file, read_weight_headers
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.introspection import TOKENIZER_FILES, ModelInfo
from inflight_server.serve.preflight import check_checkpoint
from inflight_server.serve.settings import DEMO_MODEL

CONFIG = EngineConfig(device="cpu", max_batch_size=2, max_tokens_in_paged_kv_cache=64)
LIMITS = RequestLimits(258, 100, 200, exclude_input_in_output=False, refusal_reason=lambda _: None)
INDEX = "model.safetensors.index.json"
NAMED_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TOLD = {*TOKENIZER_FILES, NAMED_TEMPLATE}
NAMES = sorted({"config.json", "generation_config.json", "model.safetensors", *TOLD})


def load(folder: Path) -> dict[str, str]:
    """Everything that reads a folder when a server starts; the files it then tells its clients."""
    check_checkpoint(folder)
    read_weight_headers(folder)
    Engine.load(folder, CONFIG)
    codec = TextCodec.load(folder, None)
    description = ModelInfo("m", folder, LIMITS, codec)
    files: dict[str, str] = json.loads(description.to_json())["files"]
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model with more files, in which all that may be read is read."""
    copy = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for name in ("special_tokens_map.json", "chat_template.json"):
        (copy / name).write_text("{}")
    (copy / NAMED_TEMPLATE).parent.mkdir()
    (copy / NAMED_TEMPLATE).write_text("t")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return Path(copy)


@pytest.mark.case(106)
@pytest.mark.parametrize("name", [*NAMES, INDEX])
def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    if name == INDEX:
        outside.write_text('{"weight_map": {"secret": "model.safetensors"}}')
    else:
        (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(caught.value) == f"{name}: is a link that leaves the checkpoint folder"
    outside.unlink()
    with pytest.raises(CheckpointError, match=rf"^{name}: no such file$"):
        load(folder)


@pytest.mark.case(106)
@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_link_made_after_the_load_is_not_told(folder: Path, tmp_path: Path, name: str) -> None:
    description = ModelInfo("m", folder, LIMITS, None)
    outside = (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"^{name}: is a link"):
        description.to_json()


@pytest.mark.case(106)
def test_a_snapshot_of_a_hub_cache_is_served(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123abcd"
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    assert set(load(snapshot)) == TOLD


def test_links_inside_a_folder_and_to_it_are_followed(folder: Path, tmp_path: Path) -> None:
    for name in NAMES:
        kept = (folder / name).rename((folder / name).with_suffix(".kept"))
        (folder / name).symlink_to(kept.name)
    (tmp_path / "link").symlink_to(folder)
    assert set(load(tmp_path / "link")) == TOLD


def test_what_is_no_file_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a link").symlink_to("a pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("a folder", "a pipe", "a link", "nothing"):
        assert find_file(tmp_path, name) is None
    with pytest.raises(CheckpointError, match=r"^circle: no such file$"):
        find_file(tmp_path, "circle")
