"""Write the table of alerts in docs/operations.md from deploy/alerts.yml."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile
from typing import Any

import yaml
from page import ROOT, table, write

RULES = ROOT / "deploy" / "alerts.yml"
HEAD = ("alert", "when", "for", "means")


def rules() -> list[dict[str, Any]]:
    """Every rule of the file."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def render(old: str) -> str:
    """The page with another table of alerts; ``ValueError`` if it has none."""
    first = table(HEAD, ())
    before, found, rest = old.partition(first)
    if not found:
        raise ValueError(f"the page has no table with the head {first!r}")
    lines = rest.splitlines(keepends=True)
    return before + table(HEAD, _rows()) + "".join(dropwhile(lambda line: line[0] == "|", lines))


def _rows() -> Iterator[tuple[str, ...]]:
    for rule in rules():
        means = rule["annotations"]["description"]
        yield rule["alert"], f"`{rule['expr']}`", rule.get("for", ""), means


if __name__ == "__main__":
    write(__doc__, "operations.md", render)
