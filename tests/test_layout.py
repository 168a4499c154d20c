"""The shape of the repository: what design.md promises about folders, imports and the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "inflight_backend": "backend",
    "inflight_client": "client",
    "inflight_kernels": "kernels",
    "inflight_openai": "client",
    "inflight_protocol": "client",
    "inflight_recorder": "scheduler",
    "inflight_scheduler": "scheduler",
    "inflight_server": "backend",
}

# Imports the named modules ("name.*": with all inside), while those listed first are blocked.
IMPORT_MODULES = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

blocked = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
for name in sys.argv[2:]:
    module = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            importlib.import_module(found.name)
"""


def test_no_top_level_folder_is_a_package() -> None:
    assert [str(path) for path in ROOT.glob("*/__init__.py")] == []


def test_a_package_holds_at_most_twelve_modules() -> None:
    folders = {
        path.parent
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*.py")
    }
    counts = {
        folder: len(set(folder.glob("*.py")) - {folder / "__init__.py"}) for folder in folders
    }
    assert [folder for folder, count in counts.items() if count > 12] == []


@pytest.mark.fast(5)  # the others import torch
@pytest.mark.parametrize(
    ("names", "blocked"),
    [
        # The scheduler is pure Python.
        ("inflight_scheduler.*", "torch numpy triton tritonclient httpx typer rich msgspec"),
        ("inflight_recorder.*", "torch numpy triton tritonclient httpx typer rich"),
        # The wire table is shared with the server, which has no client libraries.
        ("inflight_protocol", "torch triton tritonclient grpc httpx typer rich"),
        # Base install: a client needs nothing of the server.
        (
            "inflight_client.* inflight_openai.command",
            "torch triton safetensors tokenizers transformers pytriton starlette uvicorn pydantic",
        ),
        ("inflight_openai.*", "torch triton safetensors transformers pytriton"),
        # What the batch manager imports, on a machine that records into memory only.
        (
            "inflight_recorder.recorder inflight_recorder.settings inflight_recorder.storage "
            "inflight_backend.manager.gpt_manager",
            "msgspec tritonclient httpx typer rich",
        ),
        ("inflight_kernels.*", "safetensors tokenizers transformers tritonclient typer rich"),
        # Without the Triton language the torch reference remains.
        ("inflight_kernels", "triton"),
        # A server without a GPU has no triton; pytriton is only a place to find a tritonserver.
        (
            "inflight_server.commands.serve inflight_backend.triton.model",
            "triton pytriton transformers",
        ),
    ],
)
def test_packages_import_without_what_they_do_not_need(names: str, blocked: str) -> None:
    command = [sys.executable, "-c", IMPORT_MODULES, ",".join(blocked.split()), *names.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def source_files() -> Iterator[Path]:
    """Every file that a commit would hold: hidden and generated folders are passed over."""
    generated = {"__pycache__", "build", "dist"}
    for top in ROOT.iterdir():
        if top.is_file():
            if top.name != ".git":  # of a worktree: where the repository is
                yield top
        elif top.name == ".ci" or not (top.name.startswith(".") or top.name in generated):
            yield from (
                path
                for path in top.rglob("*")
                if path.is_file() and not generated & set(path.relative_to(ROOT).parts)
            )


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    # Written in two parts, so that this file does not find itself.
    words = ["/wo" + "rk/", "/opt/" + "wheels", "/opt/" + "pypi", "/root/" + ".pyenv"]
    words += ["pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "pytorch" + ".org"]
    found = []
    for path in source_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        text = content.decode("utf-8")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []


@pytest.mark.case(123)
def test_every_logger_leaves_out_what_exceptions_say() -> None:
    """They may quote a prompt. (The recorder logs no exceptions; the OpenAI front's only handler
    leaves the messages out for all loggers.)"""
    logging_files = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES.keys() - {"inflight_recorder", "inflight_openai"}
        for path in (ROOT / PACKAGES[package] / package).rglob("*.py")
        if "getLogger" in path.read_text(encoding="utf-8")
    ]
    assert sorted(logging_files) == [
        "backend/inflight_backend/log.py",
    ]


def requirements_of(name: str, extras: frozenset[str]) -> set[str]:
    """Names of everything an installation of `name[extras]` brings along here."""
    pending, seen = [(name, extras)], {(name, extras)}
    while pending:
        owner, owner_extras = pending.pop()
        for text in distribution(owner).requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in owner_extras | {""}):
                continue
            found = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if found not in seen:
                seen.add(found)
                pending.append(found)
    return {found for found, _ in seen}


def test_constraints_pin_everything_that_is_installed() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                pinned[canonicalize_name(requirement.name)] = requirement
    for name, requirement in pinned.items():
        [specifier] = requirement.specifier
        assert specifier.operator == "==", f"{name} is not pinned to one version"
    extras = frozenset({"server", "embedded", "gpu", "guided", "openai", "hub", "dev"})
    needed = requirements_of("inflight", extras) - {"inflight"}
    assert needed - set(pinned) == set()


def test_the_wheel_holds_the_packages_the_models_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    [wheel] = tmp_path.glob("inflight-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == set(PACKAGES)
    expected = {
        path.relative_to(ROOT / folder).as_posix()
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*.py")
    }
    expected |= {
        f"inflight_server/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "model_repository").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    demo = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    expected |= {f"inflight_backend/demo_model/{name}" for name in demo}
    assert expected <= names
