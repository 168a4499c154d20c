"""Fill docs/compatibility.md: what happens to each row, and the tests that show it.

The page itself holds the rows: every input, output, parameter and metric of the peer's models. A
test names those that it shows: ``@pytest.mark.contract("ensemble input", "top_k top_p")``. Fails
for a row that is honoured without a test, and for a test that names what is no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

from google.protobuf import text_format
from page import ROOT, all_tests, marks, write
from tritonclient.grpc import model_config_pb2

import inflight_protocol as protocol
from inflight_server.serve.repository import DEFAULTS

NOT_THERE = "not there: "
"""What the status of a metric begins with by hand: it has another name in later versions."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table below the heading ``title``; ``part``: the first word above its names."""

    title: str
    part: str
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.cells[0].strip("`")

    @property
    def model(self) -> str:
        """Two interfaces of the peer have models of the same name."""
        return self.title.partition(" ")[0]

    @property
    def verdict(self) -> Verdict:
        if self.part in ("input", "output", "parameter"):
            return judge(self.model, self.part, self.name)
        return Verdict(NOT_THERE) if self.cells[2].startswith(NOT_THERE) else Verdict()

    @property
    def claim(self) -> tuple[str, str]:
        """What tests must name: the row, or for a refusal its kind."""
        if self.verdict.kind:
            return "refusal", self.verdict.kind
        where = (
            f"{self.title} {self.part}"
            if self.part in ("input", "output", "parameter")
            else self.part
        )
        return where, self.name


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
    """What happens to the ``part`` (input, output or parameter) ``name`` of ``model``."""
    if part == "parameter":
        return _judge_parameter(model, name)
    tensors = _config(model).input if part == "input" else _config(model).output
    if name not in {tensor.name for tensor in tensors}:
        return Verdict("absent" if part == "input" else "absent-output")
    if part == "output":
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


def read_rows(page: str) -> Iterator[tuple[int, Row]]:
    """The rows of all tables, with the numbers of their lines."""
    title = part = ""
    for number, line in enumerate(page.splitlines()):
        if line.startswith("## "):
            title = line[3:].replace("`", "")
        elif not line.startswith("| "):
            part = ""
        elif not part:
            part = line.split()[1]
        elif not line.startswith("| ---"):
            yield number, Row(title, part, tuple(line[2:-2].split(" | ")))


def absent(part: str) -> Iterator[tuple[str, str]]:
    """(model, name) of each ``part`` (input, output or parameter) that a model does not have."""
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    for _, row in read_rows(page):
        if row.part == part and row.verdict.kind.startswith("absent"):
            yield row.model, row.name


def render(old: str) -> str:
    """The page with each row's status and tests; ``ValueError`` lists what is wrong."""
    lines = old.splitlines()
    rows = dict(read_rows(old))
    claimed: dict[tuple[str, str], list[str]] = {
        row.claim: [] for row in rows.values() if row.verdict.kind != NOT_THERE
    }
    problems = []
    for test, function in all_tests():
        for where, names in marks(function, "contract"):
            there = [name for place, name in claimed if place == where]
            for name in there if names == "*" else str(names).split():
                if name in there:
                    claimed[str(where), name].append(test)
                else:
                    problems.append(f"{test}: there is no row {name} in {where}")
    problems += [
        f"{where}: no test names {name}" for (where, name), tests in claimed.items() if not tests
    ]
    if problems:
        raise ValueError("\n".join(problems))
    for number, row in rows.items():
        tests = "<br>".join(f"`{test}`" for test in claimed.get(row.claim, ()))
        cells = list(row.cells)
        cells[-1] = tests
        if row.part != "client":
            cells[-2] = row.verdict.text if row.verdict.kind != NOT_THERE else cells[-2]
        lines[number] = f"| {' | '.join(cells)} |"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(__doc__, "compatibility.md", render)
