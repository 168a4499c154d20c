"""Writes a model repository from the templates of the package.

`assemble` is what `inflight serve` uses for the private repository of a run; `install` is for a
folder of the user (`inflight model-repository`) and may hold other models.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from inflight_backend.errors import ConfigurationError
from inflight_protocol import DRAFT_MODEL_NAME, ENSEMBLE_MODEL_NAME, LLM_MODEL_NAME

DEFAULT_MODELS = (LLM_MODEL_NAME, ENSEMBLE_MODEL_NAME)
OPTIONAL_MODELS = ("preprocessing", "postprocessing", "tensorrt_llm_bls", "vllm_model")
"""Models for clients that call them by these names; written only when asked for."""

DRAFT_MODELS = ("tensorrt_llm_bls", DRAFT_MODEL_NAME)
"""Models of a server with a draft model: the second one has the template of `tensorrt_llm`."""

DEFAULTS: Mapping[str, str] = {"triton_max_batch_size": "64", "decoupled_mode": "true"}
"""Values of the templates that are no parameters of the model."""

UINT32_KEY = "uint32_inputs"
"""Which integers have the type that the peer gave them to v0.6; Triton takes one type only."""

UINT32_INPUTS = (
    "request_output_len",
    "max_tokens",
    "end_id",
    "pad_id",
    "beam_width",
    "runtime_top_k",
    "top_k",
    "min_length",
    "prompt_vocab_size",
    "REQUEST_OUTPUT_LEN",  # of preprocessing, which hands it on
)
_INTEGERS = re.compile(rf'(name: "(?:{"|".join(UINT32_INPUTS)})"\s+data_type: )TYPE_INT32')

_PACKAGE = Path(__file__).parents[1]
_NO_CACHE = "__pycache__"
"""A file in place of the folder that Python would write beside model.py when it is loaded: Triton
would take the model for changed then, and load all of it again (with model control `poll` at once,
with `explicit` when an ensemble of it is loaded)."""

_MARK = "# Written by `inflight model-repository`, which replaces it when given --force.\n"


def template_dir() -> Path:
    """The templates: inside the package (a wheel), else beside it (a checkout)."""
    for folder in (_PACKAGE / "model_repository", _PACKAGE.parents[1] / "model_repository"):
        if (folder / "tensorrt_llm" / "config.pbtxt").is_file():
            return folder
    raise ConfigurationError("the model_repository folder of inflight is missing: reinstall it")


def assemble(
    target: Path,
    values: Mapping[str, str],
    models: Sequence[str] = DEFAULT_MODELS,
    draft_values: Mapping[str, str] | None = None,
) -> None:
    """Write ``models`` to ``target`` (new) with every ``${key}`` of ``values`` filled.

    ``draft_values``: those of the draft model.

    With `UINT32_KEY` set to true the integers of clients of v0.5 and v0.6 are UINT32, as they send
    them. A key without a value stays ``${key}``, which the model takes as not set.
    """
    for model in models:
        is_draft = model == DRAFT_MODEL_NAME
        filled = {**DEFAULTS, **((draft_values or {}) if is_draft else values)}
        escaped = {key: escape(value) for key, value in filled.items()}
        folder = target / model
        template = template_dir() / (LLM_MODEL_NAME if is_draft else model)
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns("__pycache__", ".gitkeep"))
        version = folder / "1"
        version.mkdir(exist_ok=True)
        if (version / "model.py").exists():
            (version / _NO_CACHE).touch()
        config = folder / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        if is_draft:
            text = text.replace(f'name: "{LLM_MODEL_NAME}"', f'name: "{DRAFT_MODEL_NAME}"', 1)
        if values.get(UINT32_KEY, "").lower() == "true":
            text = _INTEGERS.sub(r"\1TYPE_UINT32", text)
        config.write_text(_MARK + Template(text).safe_substitute(escaped), encoding="utf-8")


def install(
    target: Path,
    values: Mapping[str, str],
    models: Sequence[str],
    draft_values: Mapping[str, str] | None = None,
    *,
    may_replace: bool,
) -> None:
    """Put ``models`` into the folder ``target``, made if need be; other models there stay.

    ``ConfigurationError`` if one of them is there already, unless ``may_replace`` and it was
    written by us. The folders appear whole; when something is refused or fails, none changes.
    """
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is no folder: give another one")
    taken = [model for model in models if (target / model).exists()]
    for model in taken:
        if not may_replace:
            raise ConfigurationError(
                f"{target / model} exists: give another folder, or --force to replace it"
            )
        if not _is_ours(target / model):
            raise ConfigurationError(
                f"{target / model} was not written by inflight and is not replaced: move it away"
            )
    target.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that moving it there is a rename; Triton loads no hidden folder's models.
    with tempfile.TemporaryDirectory(prefix=".inflight-", dir=target) as scratch:
        assemble(Path(scratch) / "new", values, models, draft_values)
        for model in models:
            if model in taken:
                (target / model).rename(Path(scratch) / model)
            (Path(scratch) / "new" / model).rename(target / model)


def _is_ours(folder: Path) -> bool:
    try:
        return (folder / "config.pbtxt").read_text(encoding="utf-8").startswith(_MARK)
    except (OSError, ValueError):
        return False


def escape(value: str) -> str:
    """``value`` as the inside of a quoted protobuf text string."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in os.fsencode(value)
    )
