"""Write docs/protocol.md from the table `inflight_protocol`."""

from __future__ import annotations

from collections.abc import Iterable

from page import table, write

import inflight_protocol as protocol
from inflight_protocol import ParameterSpec, TensorSpec

HEAD = """\
# Tensors and parameters

Written by `python tools/write_protocol_docs.py` from `inflight_protocol`; do not edit.

Shapes are without the batch dimension, as in `config.pbtxt`: a client sends `[1, ...]`, or up to
64 rows (`triton_max_batch_size`) of prompts padded to one length, with `input_lengths`; each
response then says its `batch_index`, and the request ends with the last one. *Refused* means that a
request which carries the tensor ends with an error that names it, unless its value asks for nothing
(given in brackets), because existing clients send such values by default.
"""


def render(old: str) -> str:
    """The whole page, whatever ``old`` was."""
    renamed = "\n".join(
        f"- `{new}` is another name of `{old}`; sending both is an error."
        for new, old in protocol.RENAMED_INPUTS.items()
    )
    ensemble = table(
        ("`ensemble`", f"`{protocol.LLM_MODEL_NAME}`"),
        ((f"`{a}`", f"`{b}`") for a, b in protocol.ENSEMBLE_INPUT_MAP.items()),
    )
    return "\n".join(
        [
            HEAD,
            f"## Inputs of `{protocol.LLM_MODEL_NAME}`\n",
            _tensor_table(protocol.INPUTS),
            renamed + "\n",
            f"## Outputs of `{protocol.LLM_MODEL_NAME}`\n",
            "An output is sent only when the client asks for it; a client that names none gets "
            "`output_ids` and\n`sequence_length` for a prompt of ids, `text_output` for a prompt "
            "of text; with each response\n`batch_index`, and with the last one zeros for log "
            "probabilities and logits that it has not asked\nfor, as clients of before v0.14 read "
            "them. A request for nothing but outputs that are not sent yet is\nrefused.\n",
            _tensor_table(protocol.OUTPUTS),
            "## Inputs of `ensemble`\n",
            ensemble,
            "## Parameters (`inflight serve --set key=value`)\n",
            table(
                ("key", "default", "values", "meaning"),
                (_parameter_row(spec) for spec in protocol.PARAMETERS),
            ),
        ]
    )


def _tensor_table(specs: Iterable[TensorSpec]) -> str:
    return table(
        ("tensor", "type", "shape", "status", "meaning"), (_tensor_row(spec) for spec in specs)
    )


def _tensor_row(spec: TensorSpec) -> tuple[str, ...]:
    state = "honoured"
    if not spec.is_honoured:
        state = "refused" if spec.neutral is None else f"refused (`{spec.neutral}`)"
    shape = str(list(spec.dims))
    return (f"`{spec.name}`", spec.dtype, shape, state, spec.meaning)


def _parameter_row(spec: ParameterSpec) -> tuple[str, ...]:
    values = ", ".join(spec.choices) or spec.kind
    if spec.minimum is not None and spec.maximum is not None:
        values = f"{spec.kind}, {spec.minimum:.15g} to {spec.maximum:.15g}"
    meaning = spec.meaning if spec.is_honoured else f"{spec.meaning}: only the default is accepted"
    return (f"`{spec.name}`", spec.default or "not set", values, meaning)


if __name__ == "__main__":
    write(__doc__, "protocol.md", render)
