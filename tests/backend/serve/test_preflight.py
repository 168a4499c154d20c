"""What is refused before a server starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_server.serve.preflight import (
    address_of,
    check_checkpoint,
    check_install,
    check_ports,
    check_settings,
    check_stub_starts,
)
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings
from inflight_server.serve.tritonserver import environment, locate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    shutil.copy(DEMO_MODEL / "config.json", folder)
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "nowhere does not exist.* fetches ORG/NAME from the Hub.* hf download NAME"),
        ("../..", r"has no config\.json: give .*/snapshots/abc$"),
        ("model.safetensors", r"is a file and no \.gguf; give the checkpoint folder it is in"),
    ],
)
def test_a_name_on_the_hub_its_cache_or_a_file_instead_of_a_folder(
    checkpoint: Path, given: str, message: str
) -> None:
    check_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(Path(os.path.normpath(checkpoint / given)))


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("config.json", None, r"has no config\.json"),
        ("config.json", b"{", r"config\.json: not valid JSON"),
        ("config.json", b"[]", r"config\.json: must hold a JSON"),
        ("config.json", b"\xff", r"config\.json: not valid JSON"),
        ("config.json", "adapter_config.json", r"it is an adapter \(LoRA\); give its base model"),
        ("config.json", Path("../../blobs/abc"), r"^config\.json: no such file behind this link"),
        ("model.safetensors", "pytorch_model.bin", r"^pytorch_model\.bin: .*convert it"),
        ("model.safetensors", "model-Q4.gguf", r"^model-Q4\.gguf: not a whole GGUF file, .*empty"),
        (
            "model.safetensors",
            ".cache/huggingface/download/x.incomplete",
            r"its download was not finished; the same again continues \(hf download",
        ),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}',
            r"^model-1\.safetensors: no such file, .* half downloaded or copied",
        ),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_is_wrong(
    checkpoint: Path, file: str, changed: bytes | str | Path | None, message: str
) -> None:
    """``changed``: the file's content, name or link instead; None without it."""
    path = checkpoint / file
    if isinstance(changed, str):
        (checkpoint / changed).parent.mkdir(parents=True, exist_ok=True)
        path.rename(checkpoint / changed)
    else:
        path.unlink(missing_ok=True)
    if isinstance(changed, bytes):
        path.write_bytes(changed)
    elif isinstance(changed, Path):
        path.symlink_to(changed)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(checkpoint)


def test_a_model_that_is_not_supported(checkpoint: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(config.replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*; the nearest is"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "OddForCausalLM"])
def test_code_of_a_checkpoint_is_not_run(checkpoint: Path, name: str) -> None:
    """Nor needed, where the architecture is one of ours."""
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": [name], "auto_map": {"AutoModelForCausalLM": "odd.Odd"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "odd.py").write_text("raise SystemExit(99)")
    if name == "LlamaForCausalLM":
        check_checkpoint(checkpoint)
    else:
        with pytest.raises(CheckpointError, match=r"not supported.*; code .* is never run$"):
            check_checkpoint(checkpoint)


@pytest.mark.contract("tensorrt_llm parameter", "tokenizer_dir")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parameters": {"tokenizer_dir": "/"}}, r"^tokenizer_dir: the folder .* has no tokenizer"),
        ({"parameters": {"record_file": "/r\u00e9cits"}}, "record_file .* only paths of ASCII"),
        ({"model": Path("/j\u00fcrgen")}, "--model /j\u00fcrgen: .* only paths of ASCII"),
        ({"model": Path("/bytes-\udcff")}, "only paths of ASCII"),
    ],
)
def test_a_path_that_triton_s_python_cannot_open_is_refused(
    checkpoint: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_settings(ServeSettings(**{"model": checkpoint, **values}))


@pytest.mark.parametrize("folder", ["/tmp/my files", "/tmp/j\u00fcrgen", "/tmp/$HOME", "/tmp/a'b"])
def test_temporary_files_from_where_no_model_starts_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", folder)
    with pytest.raises(ConfigurationError, match="set TMPDIR to a path of ASCII letters"):
        check_settings(ServeSettings(model=checkpoint))


def test_a_port_in_use_or_given_twice_is_named() -> None:
    """2001:db8::/32 is for documentation: no machine has an address of it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--grpc-port {port} .* on 127\.0\.0\.1"):
            check_ports("127.0.0.1", {"--grpc-port": port})
    with pytest.raises(ConfigurationError, match=r"used on 2001:db8::1 \((?!.*hostname)"):
        check_ports("2001:db8::1", {"--grpc-port": 1 << 15})
    with pytest.raises(ConfigurationError, match="--http-port and --grpc-port are both"):
        check_ports("127.0.0.1", dict.fromkeys(("--http-port", "--grpc-port"), 1 << 15))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("::1::", "--host ::1::: no such address"),
        ("127.0.0.1:8000", "no such address"),
        ("fe80::1%eth0", r"--host fe80::1%eth0: .* with a zone"),
        ("no.such.invalid", "--host no.such"),
        ("x" * 64, "no such address"),
        ("", "--host is empty"),
    ],
)
def test_unusable_host(host: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        address_of(host)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("10.1.2.3", "10.1.2.3"),
        ("::", "::"),
        ("[fd00:0::2]", "fd00::2"),
    ],
)
def test_a_host_becomes_an_address(host: str, address: str) -> None:
    assert address_of(host) == address


def test_a_stub_that_cannot_start_is_refused(tmp_path: Path) -> None:
    install = locate()
    check_install(install, environment(install))
    stub = tmp_path / "stub"
    stub.touch()
    with pytest.raises(ConfigurationError, match="cannot start"):
        check_stub_starts(stub, os.environ)
    stub.write_text("#!/bin/sh\necho 'error while loading shared libraries: libx.so' >&2\nexit 127")
    stub.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"cannot start: error while .* libx\.so"):
        check_stub_starts(stub, os.environ)
