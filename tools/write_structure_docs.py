"""Writes the table of modules of docs/structure.md from the first lines of their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

from page import ROOT, write

PACKAGES = sorted(ROOT.glob("*/inflight_*/"))
HEADING = "## Every module\n"


def render(old: str) -> str:
    """``old`` with the rows of the modules as they are now."""
    lines = [HEADING]
    for package in PACKAGES:
        folders = sorted({path.parent for path in package.rglob("*.py")})
        for folder in folders:
            modules = sorted(set(folder.glob("*.py")) - {folder / "__init__.py"})
            if modules:
                lines.append(f"\n**{folder.relative_to(package.parent)}**\n\n")
                lines += [f"- `{path.stem}`: {first_line(path)}\n" for path in modules]
    return old.partition(HEADING)[0] + "".join(lines)


def first_line(path: Path) -> str:
    """What a module's docstring says first, its first sentence."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    write(__doc__, "structure.md", render)
