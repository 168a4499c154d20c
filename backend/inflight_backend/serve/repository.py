"""The model repository of one run: the templates of the package with their values filled in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template

from inflight_backend.errors import ConfigurationError

DEFAULTS: Mapping[str, str] = {"triton_max_batch_size": "1"}
"""Values of the template that are no parameters of the model."""

_PACKAGE = Path(__file__).parents[1]


def template_dir() -> Path:
    """The templates: inside the package (a wheel), else beside it (a checkout)."""
    for folder in (_PACKAGE / "model_repository", _PACKAGE.parents[1] / "model_repository"):
        if (folder / "tensorrt_llm" / "config.pbtxt").is_file():
            return folder
    raise ConfigurationError("the model_repository folder of inflight is missing: reinstall it")


def assemble(target: Path, values: Mapping[str, str]) -> None:
    """Copy the templates to ``target`` (new) with every ``${key}`` of ``values`` filled.

    A key without a value stays ``${key}``, which the model takes as not set.
    """
    shutil.copytree(
        template_dir(), target, ignore=shutil.ignore_patterns("__pycache__", ".gitkeep")
    )
    escaped = {key: escape(value) for key, value in {**DEFAULTS, **values}.items()}
    for config in target.glob("*/config.pbtxt"):
        (config.parent / "1").mkdir(exist_ok=True)
        template = Template(config.read_text(encoding="utf-8"))
        config.write_text(template.safe_substitute(escaped), encoding="utf-8")


def escape(value: str) -> str:
    """``value`` as the inside of a quoted protobuf text string."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in os.fsencode(value)
    )
