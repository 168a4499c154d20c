"""What the tools that write pages of docs/ share: tables, and the choice to write or to compare."""

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


def write_or_check(description: str | None, name: str, render: Callable[[str], str]) -> int:
    """Write docs/``name`` as ``render`` makes it of its old text, or with ``--check`` compare; the
    exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    page = ROOT / "docs" / name
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    new = render(old)
    if not parser.parse_args().check:
        page.write_text(new, encoding="utf-8")
    elif old != new:
        tool = f"tools/write_{page.stem}_docs.py"
        print(f"docs/{name} is out of date: run python {tool}")
        return 1
    return 0


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
