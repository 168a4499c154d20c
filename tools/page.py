"""What the tools that write pages of docs/ share: tables, the tests and their marks, writing."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, is_numeric: bool = False) -> str:
    """A table of Markdown; numbers stand to the right."""
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + (" ---: |" if is_numeric else " --- |") * len(head),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(description: str | None, name: str, render: Callable[[str], str]) -> None:
    """Command line: write docs/``name`` as ``render`` makes it of its old text."""
    argparse.ArgumentParser(description=description).parse_args()
    page = ROOT / "docs" / name
    page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


def all_tests() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every test with its id, ``file::function`` below tests/."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS)}::{node.name}", node


def marks(function: ast.FunctionDef, name: str) -> Iterator[list[object]]:
    """The constants that each ``@pytest.mark.name(...)`` of a test is given."""
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{name}":
                yield [each.value for each in node.args if isinstance(each, ast.Constant)]
