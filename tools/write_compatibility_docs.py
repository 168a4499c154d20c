"""Write docs/compatibility.md: what clients of the peer's models send, and which test shows what we
do with it; ``--check`` compares.

Fails for a row that is honoured without a test, for a test that does not exist, and for tests none
of whose files names the row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

from contract_metrics import METRIC_ROWS, MetricRow
from contract_rows import CLIENT_ROWS, MODELS, REFUSALS, ModelRows, Row
from google.protobuf import text_format
from page import ROOT, TESTS, all_tests, table, write_or_check
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """``kind`` of `REFUSALS`; "" for what is honoured."""

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
        return Verdict("absent" if part == "inputs" else "absent output")
    if part == "outputs":
        spec = protocol.OUTPUT_BY_NAME.get(name)
        return Verdict() if spec is None or spec.is_honoured else Verdict("output")
    inner = protocol.ENSEMBLE_INPUT_MAP.get(name, name) if model in _TEXT_MODELS else name
    found = protocol.INPUT_BY_NAME.get(inner)
    return Verdict() if found is None or found.is_honoured else Verdict("input", found.neutral)


_TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


def _judge_parameter(model: str, name: str) -> Verdict:
    if model != protocol.LLM_MODEL_NAME:
        return Verdict() if name in _config(model).parameters else Verdict("absent parameter")
    if name in protocol.TRITON_PARAMETERS or name in DEFAULTS:
        return Verdict()
    spec = protocol.PARAMETER_BY_NAME.get(name)
    if spec is None:
        return Verdict("absent parameter")
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
    problems = list(_problems())
    if problems:
        raise ValueError("\n".join(problems))
    clients = ((row.tags, row.needs, _shown(row.tests)) for row in CLIENT_ROWS)
    parts = [HEAD, CLIENTS, table(("tag", "its clients", "test"), clients), ANSWERS]
    for rows in MODELS:
        parts += _render_model(rows)
    parts.append("## Metrics\n")
    parts.append(table(("family", "label", "status", "test"), map(_metric_row, METRIC_ROWS)))
    return "\n".join(parts)


def _render_model(rows: ModelRows) -> Iterator[str]:
    is_later = rows.note.startswith("The model of that name")
    yield f"## `{rows.model}`{' of the LLM API' if is_later else ''}\n"
    if rows.note:
        yield f"{rows.note}\n"
    for part in ("inputs", "outputs", "parameters"):
        if listed := getattr(rows, part):
            head = (part.removesuffix("s"), "", "status", "test")
            yield table(head, [_row(rows.model, part, row) for row in listed])


def _row(model: str, part: str, row: Row) -> tuple[str, ...]:
    verdict = judge(model, part, row.name)
    tests = REFUSALS[verdict.kind] if verdict.kind else row.tests
    return (f"`{row.name}`", row.note, verdict.text, _shown(tests))


def _names(model: str, name: str) -> set[str]:
    """Under which names a test may speak of a row: those of a whole table of rows, too."""
    inner = protocol.ENSEMBLE_INPUT_MAP.get(name, name)
    names = {name, inner, protocol.RENAMED_INPUTS.get(inner, inner)}
    return names | {"ENSEMBLE_INPUT_MAP"} if model in _TEXT_MODELS else names


def _metric_row(row: MetricRow) -> tuple[str, ...]:
    values = ", ".join(row.values)
    if not _is_there(row):
        return (f"`{row.family}`", values, f"not there: {row.later}", "")
    return (f"`{row.family}`", values, "honoured", _shown(row.tests))


def _is_there(row: MetricRow) -> bool:
    families = [*protocol.METRICS, *protocol.V1_METRICS]
    there = {value for each in families if each.name == row.family for value in each.values}
    return set(row.values) <= there


def _problems() -> Iterator[str]:
    """Honoured rows without a test that exists and speaks of them."""
    for tests in (*REFUSALS.values(), *(row.tests for row in CLIENT_ROWS)):
        yield from _missing(tests)
    for rows in MODELS:
        for part in ("inputs", "outputs", "parameters"):
            for row in getattr(rows, part):
                if not judge(rows.model, part, row.name).kind:
                    yield from _check(
                        f"{rows.model}: {row.name}", _names(rows.model, row.name), row.tests
                    )
    for metric in METRIC_ROWS:
        if _is_there(metric):
            yield from _check(metric.family, {metric.family, "METRICS"}, metric.tests)
        elif not metric.later:
            yield f"{metric.family}: {metric.values} is not there; say what is in its place"


def _check(what: str, names: set[str], tests: Sequence[str]) -> Iterator[str]:
    if not tests:
        yield f"{what} is honoured and has no test: name one in contract_rows.py"
    missing = list(_missing(tests))
    yield from missing
    if tests and not missing and not names & set().union(*map(_words, tests)):
        yield f"{what}: the files of {', '.join(tests)} do not speak of it"


def _missing(tests: Sequence[str]) -> Iterator[str]:
    return (f"there is no test {test}" for test in tests if test not in _all_tests())


@cache
def _words(test: str) -> frozenset[str]:
    path = TESTS / test.partition("::")[0]
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


@cache
def _all_tests() -> frozenset[str]:
    return frozenset(test for test, _ in all_tests())


def _shown(tests: Sequence[str]) -> str:
    return "<br>".join(f"`{test}`" for test in tests)


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, "compatibility.md", render))
