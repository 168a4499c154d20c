"""What is refused before a server starts."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_server.serve.preflight import (
    address_of,
    check_checkpoint,
    check_install,
    check_ports,
    check_settings,
    check_stub_starts,
    has_tokenizer,
)
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings
from inflight_server.serve.tritonserver import environment, locate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(DEMO_MODEL / "config.json", folder)
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


def test_complete_checkpoint_passes(checkpoint: Path) -> None:
    check_checkpoint(checkpoint)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        check_checkpoint(tmp_path / "nowhere")


def test_folder_without_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_unreadable_config(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|must hold a JSON)"):
        check_checkpoint(checkpoint)


def test_a_model_that_is_not_supported(checkpoint: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(config.replace("LlamaForCausalLM", "GPT2LMHeadModel"))
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel.* supported: LlamaForCausalLM"):
        check_checkpoint(checkpoint)


def test_folder_without_safetensors(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"^pytorch_model\.bin: .*convert it"):
        check_checkpoint(checkpoint)
    (checkpoint / "pytorch_model.bin").rename(checkpoint / "model-Q4.gguf")
    with pytest.raises(CheckpointError, match=r"^model-Q4\.gguf: GGUF is not read"):
        check_checkpoint(checkpoint)


def test_what_people_give_instead_of_a_folder(tmp_path: Path, checkpoint: Path) -> None:
    """A name on the Hub, its cache, a file, an adapter: the error says what to give."""
    with pytest.raises(CheckpointError, match="nothing is fetched by name: hf download NAME"):
        check_checkpoint(tmp_path / "Qwen/Qwen3-8B")
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    with pytest.raises(CheckpointError, match=rf"has no config\.json: give {snapshot}$"):
        check_checkpoint(snapshot.parent.parent)
    with pytest.raises(CheckpointError, match="is a file; give the checkpoint folder it is in"):
        check_checkpoint(snapshot / "model.safetensors")
    (snapshot / "config.json").rename(snapshot / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter \(LoRA\), which is not supported"):
        check_checkpoint(snapshot)


def test_a_snapshot_mounted_without_its_blobs(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to("../../blobs/abc")
    with pytest.raises(CheckpointError, match=r"^config\.json: no such file behind this link"):
        check_checkpoint(checkpoint)


@pytest.mark.contract("tensorrt_llm parameter", "tokenizer_dir")
def test_tokenizer_folder_given_must_hold_one(checkpoint: Path, tmp_path: Path) -> None:
    settings = ServeSettings(model=checkpoint, parameters={"tokenizer_dir": str(tmp_path)})
    assert not has_tokenizer(settings)
    with pytest.raises(ConfigurationError, match=r"tokenizer_dir .* has no tokenizer\.json"):
        check_settings(settings)


def test_a_path_that_triton_s_python_cannot_open_is_refused(checkpoint: Path) -> None:
    folder = checkpoint.rename(checkpoint.with_name("j\u00fcrgen"))
    with pytest.raises(ConfigurationError, match=r"--model .*/j\u00fcrgen: .* only paths of ASCII"):
        check_settings(ServeSettings(model=folder))
    settings = ServeSettings(model=checkpoint, parameters={"record_file": "/r\u00e9cits"})
    with pytest.raises(ConfigurationError, match=r"record_file .* only paths of ASCII"):
        check_settings(settings)
    with pytest.raises(ConfigurationError, match="only paths of ASCII"):
        check_settings(ServeSettings(model=Path("/bytes-\udcff")))


@pytest.mark.parametrize("folder", ["/tmp/my files", "/tmp/j\u00fcrgen", "/tmp/$HOME", "/tmp/a'b"])
def test_temporary_files_from_where_no_model_starts_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", folder)
    with pytest.raises(ConfigurationError, match="set TMPDIR to a path of ASCII letters"):
        check_settings(ServeSettings(model=checkpoint))


def test_port_in_use_names_option_port_and_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--grpc-port {port} .* on 127\.0\.0\.1"):
            check_ports("127.0.0.1", {"--grpc-port": port})


def test_an_ipv6_address_is_tried_as_one() -> None:
    """2001:db8::/32 is for documentation: no machine has one of it."""
    with pytest.raises(ConfigurationError, match=r"used on 2001:db8::1 \((?!.*hostname)"):
        check_ports("2001:db8::1", {"--grpc-port": 1 << 15})


def test_two_options_with_one_port() -> None:
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


def test_the_server_of_this_environment_passes() -> None:
    install = locate()
    check_install(install, environment(install))


def test_stub_without_its_libraries_is_refused(tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\necho 'error while loading shared libraries: libx.so' >&2\nexit 127")
    stub.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"cannot start: error while .* libx\.so"):
        check_stub_starts(stub, os.environ)


def test_stub_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stub").touch()
    with pytest.raises(ConfigurationError, match="cannot start"):
        check_stub_starts(tmp_path / "stub", os.environ)
