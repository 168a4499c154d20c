"""Write docs/compatibility.md: what clients of the peer's models send, and which test shows what we
do with it; ``--check`` compares.

Tests name their rows: ``@pytest.mark.contract("ensemble input", "top_k top_p")``. Fails for a row
that is honoured without a test, and for a test that names what is no row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

from contract_metrics import METRIC_ROWS, MetricRow
from contract_rows import CLIENT_ROWS, MODELS, ModelRows, Row
from google.protobuf import text_format
from page import ROOT, all_tests, marks, table, write_or_check
from tritonclient.grpc import model_config_pb2

import inflight_protocol as protocol
from inflight_server.serve.repository import DEFAULTS

HEAD = """\
# What clients of others send, and what happens here

Written by `python tools/write_compatibility_docs.py` from `tools/contract_rows.py`,
`inflight_protocol` and `model_repository`; do not edit.

Every input, output, parameter and metric of the Triton models of `tensorrtllm_backend` v0.5 to
v0.19 and later, and of `vllm_backend`: **honoured**, or **refused** with an error that names it. A
value in brackets asks for nothing and passes. *Not there* means that a model has no such tensor:
Triton names it, and settings are named when the server starts. Of fields in an HTTP body that are
no tensors Triton makes request parameters, and of HTTP and gRPC headers that it is told to forward.
`vllm_model` takes those, and parameters that a gRPC client sends, as vLLM's settings; the others
refuse them by name. These pass:

- `inflight_error_codes`, everywhere.
- `Streaming` of the peer's own client, on `tensorrt_llm` and `ensemble`: it must say what input
  `streaming` says (on a stop request: true or false).
- `accumulate_tokens` and `ignore_eos` of benchmark clients (vLLM's, SGLang's, TensorRT-LLM's,
  Modular's), on `tensorrt_llm`, `ensemble` and `tensorrt_llm_bls`. The first changes nothing, as
  with the peer: they add up the texts themselves. The second, if true, is `end_id` -1; the peer
  passes it over.

So start Triton without `--http-header-forward-pattern` and `--grpc-header-forward-pattern`. Each
row has a test, below `tests/`. What the tensors mean: [protocol.md](protocol.md).

**Same name, another default.** `normalize_log_probs` is false, as in TensorRT-LLM since March 2026
(its pull request 12366): log probabilities are the model's own. Before, it was true:
`output_log_probs` were those among what the filters left, 0 for every token of a greedy answer. For
clients that count on that: `--set normalize_log_probs=true`.
"""

CLIENTS = """\
## Clients by tag

The clients of `tensorrtllm_backend` run as they are, from v0.5 on. What those of a tag need where
not all do, and the tests that do what they do:
"""

ANSWERS = """\
So a request that names no outputs has `batch_index` in every response and, in the last one, zeros
in place of log probabilities (one for each new token) and logits (one) that it has not asked for;
through `ensemble`, which names them all, every request has. Who names outputs of `tensorrt_llm` or
`tensorrt_llm_bls` gets just those.
"""


Claims = dict[tuple[str, str], list[str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``kind``: of the marks of tests that go through all refusals of it; "" for honoured."""

    kind: str = ""
    passes: object = None

    @property
    def text(self) -> str:
        """For the table."""
        if not self.kind:
            return "honoured"
        if self.kind.startswith("absent"):
            return "refused: not there"
        return "refused" if self.passes in (None, "") else f"refused (`{self.passes}`)"


def judge(model: str, part: str, name: str) -> Verdict:
    """What happens to the ``part`` (inputs, outputs or parameters) ``name`` of ``model``."""
    if part == "parameters":
        return _judge_parameter(model, name)
    tensors = _config(model).input if part == "inputs" else _config(model).output
    if name not in {tensor.name for tensor in tensors}:
        return Verdict("absent" if part == "inputs" else "absent-output")
    if part == "outputs":
        spec = protocol.OUTPUT_BY_NAME.get(name)
        return Verdict() if spec is None or spec.is_honoured else Verdict("output")
    inner = protocol.ENSEMBLE_INPUT_MAP.get(name, name) if model in _TEXT_MODELS else name
    found = protocol.INPUT_BY_NAME.get(inner)
    return Verdict() if found is None or found.is_honoured else Verdict("input", found.neutral)


_TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


def _judge_parameter(model: str, name: str) -> Verdict:
    if model != protocol.LLM_MODEL_NAME:
        return Verdict() if name in _config(model).parameters else Verdict("absent-parameter")
    if name in protocol.TRITON_PARAMETERS or name in DEFAULTS:
        return Verdict()
    spec = protocol.PARAMETER_BY_NAME.get(name)
    if spec is None:
        return Verdict("absent-parameter")
    return Verdict() if spec.is_honoured else Verdict("parameter", spec.default)


@cache
def _config(model: str) -> Any:
    text = (ROOT / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
    filled = Template(text).safe_substitute({**DEFAULTS, "triton_max_batch_size": "1"})
    return text_format.Parse(filled, model_config_pb2.ModelConfig())


def absent(part: str) -> Iterator[tuple[str, str]]:
    """(model, name) of everything that is not there."""
    for rows in MODELS:
        for row in getattr(rows, part):
            if judge(rows.model, part, row.name).kind.startswith("absent"):
                yield rows.model, row.name


def render(old: str) -> str:
    """The whole page; ``ValueError`` lists what is wrong with the rows."""
    tests = _claims()
    clients = ((row.tags, row.needs, _shown(tests["client", row.name])) for row in CLIENT_ROWS)
    parts = [HEAD, CLIENTS, table(("tag", "its clients", "test"), clients), ANSWERS]
    for rows in MODELS:
        parts += _render_model(rows, tests)
    parts.append("## Metrics\n")
    metrics = [_metric_row(row, tests) for row in METRIC_ROWS]
    parts.append(table(("family", "label", "status", "test"), metrics))
    return "\n".join(parts)


def _claims() -> Claims:
    """(where, name) of a row -> the tests that name it."""
    rows = dict(_rows_with_tests())
    found: Claims = {(where, n): [] for where in rows for n in rows[where]}
    problems = []
    for test, function in all_tests():
        for where, names in marks(function, "contract"):
            there = rows.get(str(where), ())
            for name in there if names == "*" else str(names).split():
                if name in there:
                    found[str(where), name].append(test)
                else:
                    problems.append(f"{test}: there is no row {name} in {where}")
    problems += [
        f"{where}: no test names {name}" for (where, name), tests in found.items() if not tests
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _rows_with_tests() -> Iterator[tuple[str, list[str]]]:
    """Where rows stand, and the names of those that are honoured there."""
    refusals: set[str] = set()
    for rows in MODELS:
        for part in ("inputs", "outputs", "parameters"):
            kinds = {
                row.name: judge(rows.model, part, row.name).kind for row in getattr(rows, part)
            }
            refusals.update(kinds.values())
            yield f"{rows.title} {part[:-1]}", [name for name, kind in kinds.items() if not kind]
    yield "refusal", sorted(refusals - {""})
    yield "metric", [row.family for row in METRIC_ROWS if _is_there(row)]
    yield "client", [row.name for row in CLIENT_ROWS]


def _render_model(rows: ModelRows, tests: Claims) -> Iterator[str]:
    yield f"## `{rows.model}`{' of the LLM API' if rows.is_llm_api else ''}\n"
    if rows.note:
        yield f"{rows.note}\n"
    for part in ("inputs", "outputs", "parameters"):
        if listed := getattr(rows, part):
            head = (part[:-1], "", "status", "test")
            yield table(head, [_row(rows, part, row, tests) for row in listed])


def _row(rows: ModelRows, part: str, row: Row, tests: Claims) -> tuple[str, ...]:
    verdict = judge(rows.model, part, row.name)
    where = ("refusal", verdict.kind) if verdict.kind else (f"{rows.title} {part[:-1]}", row.name)
    return (f"`{row.name}`", row.note, verdict.text, _shown(tests[where]))


def _metric_row(row: MetricRow, tests: Claims) -> tuple[str, ...]:
    values = ", ".join(row.values)
    if not _is_there(row):
        return (f"`{row.family}`", values, f"not there: {row.later}", "")
    return (f"`{row.family}`", values, "honoured", _shown(tests["metric", row.family]))


def _is_there(row: MetricRow) -> bool:
    families = [*protocol.METRICS, *protocol.V1_METRICS]
    there = {value for each in families if each.name == row.family for value in each.values}
    return set(row.values) <= there


def _shown(tests: Sequence[str]) -> str:
    return "<br>".join(f"`{test}`" for test in tests)


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, "compatibility.md", render))
