"""Finds tritonserver, and sets up the environment in which it runs our Python.

The stub (the process that runs the model) links libpython dynamically and finds the packages
through the ``python3`` that is first on PATH: both point it at the interpreter we run in.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from inflight_backend.errors import ConfigurationError

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
"""Where NVIDIA's images keep the server."""

_STUB = "triton_python_backend_stub"
_LIBRARY = "libtriton_python.so"
_DEFAULTS = {
    # Threads that wait for work sleep: spinning ones take the cores that tritonserver and the
    # sending thread need, and hold up the first step after an idle time. On a machine with nothing
    # else to do GOMP_SPINCOUNT=5000 is faster (docs/performance.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    # On a CPU torch keeps a compiled matrix product per number of rows, 1,024 of them unless told
    # otherwise, and malloc an arena per thread: 647 instead of 320 MB after 4 minutes of mixed load
    # on the demo model, at the same speed.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    # One arena that keeps up to 512 MiB of what a step frees, for the next step: to give pages back
    # and fault them in again took a tenth of the time of a long prefill.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver with its Python backend.

    ``is_embedded``: it comes from the nvidia-pytriton wheel, whose stubs (one per Python version)
    lie apart from the backend.
    """

    binary: Path
    backend_dir: Path
    stub: Path
    library_dirs: tuple[Path, ...]
    is_embedded: bool


def locate() -> TritonInstall:
    """The server on PATH, else the one of NVIDIA's images, else the one of the wheel."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return describe_install(Path(on_path).resolve())
    if CONTAINER_BINARY.is_file():
        return describe_install(CONTAINER_BINARY)
    package = importlib.util.find_spec("pytriton")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return describe_install(binary)
    raise ConfigurationError(
        "no tritonserver found, neither on PATH nor in NVIDIA's container folder: "
        "use a Triton image, or in a clone of inflight: pip install '.[server,embedded]'"
    )


def describe_install(binary: Path) -> TritonInstall:
    """The install around ``binary``; ``ConfigurationError`` if it has no fitting Python backend."""
    root = binary.parent.parent
    stubs = root / "python_backend_stubs"
    is_embedded = stubs.is_dir()
    candidates = (root / "backends", CONTAINER_BINARY.parents[1] / "backends")
    backend_dir = next((c for c in candidates if (c / "python" / _LIBRARY).is_file()), None)
    if backend_dir is None:
        raise ConfigurationError(
            f"the tritonserver {binary} has no Python backend (looked for python/{_LIBRARY} in "
            f"{candidates[0]})"
        )
    stub = (stubs / _PYTHON if is_embedded else backend_dir / "python") / _STUB
    _check_stub(stub)
    bundled = root.parent.parent / "nvidia_pytriton.libs"
    library_dirs = (bundled,) if bundled.is_dir() else ()
    return TritonInstall(binary, backend_dir, stub, (*library_dirs, libpython_dir()), is_embedded)


def _check_stub(stub: Path) -> None:
    if not stub.is_file():
        raise ConfigurationError(
            f"this tritonserver cannot run Python {_PYTHON} (no {stub}): use Python 3.10 to 3.12"
        )
    linked = re.search(rb"libpython(3\.\d+)", stub.read_bytes())
    if linked is not None and linked[1].decode() != _PYTHON:
        raise ConfigurationError(
            f"this tritonserver runs Python {linked[1].decode()}, inflight is installed in "
            f"Python {_PYTHON}: install it in Python {linked[1].decode()}"
        )


def libpython_dir() -> Path:
    """The folder of the shared libpython of this interpreter.

    ``ConfigurationError`` without one: the stub would then hang in loading, or run another Python.
    """
    name = f"libpython{_PYTHON}.so.1.0"
    library_dir = Path(sysconfig.get_config_var("LIBDIR") or "")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in (library_dir, library_dir / multiarch, Path(sys.base_prefix) / "lib"):
        if (folder / name).is_file():
            return folder
    raise ConfigurationError(
        f"this Python has no shared library {name} (looked in {library_dir} and "
        f"{Path(sys.base_prefix) / 'lib'}), which tritonserver needs: install libpython{_PYTHON} "
        "or a Python built with --enable-shared"
    )


def prepare_backends(install: TritonInstall, target: Path) -> Path:
    """The folder for ``--backend-directory``; for the wheel, a copy with the stub put in place."""
    if not install.is_embedded:
        return install.backend_dir
    python_backend = target / "python"
    shutil.copytree(
        install.backend_dir / "python",
        python_backend,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy2(install.stub, python_backend / _STUB)
    (python_backend / _STUB).chmod(0o700)
    return target


def environment(install: TritonInstall) -> dict[str, str]:
    """Our environment, with this interpreter and the libraries of the server first.

    What the operator has set counts; else `_DEFAULTS`.
    """
    env = {**_DEFAULTS, **os.environ}
    executables = str(Path(sys.executable).parent)
    env["PATH"] = _joined(executables, env.get("PATH", ""))
    env["LD_LIBRARY_PATH"] = _joined(
        *map(str, install.library_dirs), env.get("LD_LIBRARY_PATH", "")
    )
    return env


def _joined(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)
