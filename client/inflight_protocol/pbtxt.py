"""Writes tensors and parameters of the ``config.pbtxt`` files from the tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from inflight_protocol.ensemble import DRAFT_INPUTS, ENSEMBLE_INPUT_MAP, ENSEMBLE_OUTPUT_MAP
from inflight_protocol.inputs import INPUT_BY_NAME, INPUTS
from inflight_protocol.outputs import OUTPUT_BY_NAME, OUTPUTS
from inflight_protocol.parameters import PARAMETERS
from inflight_protocol.specs import TensorSpec

_REQUIRED_BY_ENSEMBLE = frozenset({"text_input", "max_tokens"})
_PARAMETERS = re.compile(
    r'(parameters \{\n  key: "(\w+)"\n  value: \{ string_value: "\$\{\2\}" \}\n\}\n)+'
)


def update_repository(folder: Path) -> None:
    """Rewrite tensors, parameters and maps in the configs of ``folder``; the rest stays."""
    llm = folder / "tensorrt_llm" / "config.pbtxt"
    text = _with_tensors(llm.read_text(), INPUTS, OUTPUTS, frozenset(), is_ragged=True)
    llm.write_text(_PARAMETERS.sub(lambda _: _parameters(), text, count=1))
    inputs = [
        replace(INPUT_BY_NAME[inner], name=name) for name, inner in ENSEMBLE_INPUT_MAP.items()
    ]
    outputs = [
        replace(OUTPUT_BY_NAME[inner], name=name) for name, inner in ENSEMBLE_OUTPUT_MAP.items()
    ]
    for model, more in (("ensemble", ()), ("tensorrt_llm_bls", DRAFT_INPUTS)):
        path = folder / model / "config.pbtxt"
        text = _with_tensors(path.read_text(), [*inputs, *more], outputs, _REQUIRED_BY_ENSEMBLE)
        for kind, names in (("input", ENSEMBLE_INPUT_MAP), ("output", ENSEMBLE_OUTPUT_MAP)):
            text = re.sub(rf"( +{kind}_map .*\n)+", _map(kind, names), text)
        path.write_text(text)


def _with_tensors(
    text: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    required: frozenset[str],
    *,
    is_ragged: bool = False,
) -> str:
    for kind, specs in (("input", inputs), ("output", outputs)):
        blocks = ",\n".join(
            _tensor(
                spec,
                is_ragged=is_ragged and spec.is_ragged,
                is_optional=kind == "input" and spec.name not in required,
            )
            for spec in specs
        )
        section = f"{kind} [\n{blocks}\n]\n"
        pattern = re.compile(rf"^{kind} \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)
        text = pattern.sub(section, text)  # dims have no backslash, so nothing is a group reference
    return text


def _tensor(spec: TensorSpec, *, is_ragged: bool, is_optional: bool) -> str:
    lines = [
        f'name: "{spec.name}"',
        f"data_type: TYPE_{spec.dtype}",
        f"dims: [ {', '.join(map(str, spec.dims))} ]",
        *(["allow_ragged_batch: true"] if is_ragged else []),
        *(["optional: true"] if is_optional else []),
    ]
    return "\n".join(["  {", *(f"    {line}" for line in lines), "  }"])


def _parameters() -> str:
    return "".join(
        f'parameters {{\n  key: "{name}"\n  value: {{ string_value: "${{{name}}}" }}\n}}\n'
        for name in (spec.name for spec in PARAMETERS)
    )


def _map(kind: str, names: Mapping[str, str]) -> str:
    return "".join(
        f'      {kind}_map {{ key: "{inner}" value: "{name}" }}\n' for name, inner in names.items()
    )


if __name__ == "__main__":
    update_repository(Path(__file__).parents[2] / "model_repository")
