"""Fill docs/reliability.md: figures of reports, and the tests of each case.

The cases are on the page; their numbers are stable, and a test claims one with
``@pytest.mark.case(56, 57)``. A case about a feature that is not there says so in place of tests.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import reliability_figures
from page import all_tests, marks, write

MARK = "<!-- the rest: python tools/write_reliability_docs.py -->"
_ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_OPEN, _NOT_THERE = "**open**", "*not there: "


def claims() -> dict[int, list[str]]:
    """Case number -> ids of the tests that carry ``@pytest.mark.case(number)``."""
    found: dict[int, list[str]] = defaultdict(list)
    for test, function in all_tests():
        for number in sorted({int(str(each)) for mark in marks(function, "case") for each in mark}):
            found[number].append(test)
    return found


def render(old: str) -> str:
    """The page with new figures and tests; ``ValueError`` if tests claim a case that it lacks."""
    head, _, rest = old.partition(MARK)
    cases, tests = rest.partition("## Cases\n")[2].partition("### ")[2], claims()
    rows = {int(row[1]): row[3] for row in _ROW.finditer(cases)}
    if unknown := set(tests) - set(rows):
        raise ValueError(f"tests claim the unknown cases {sorted(unknown)}")
    num_absent = sum(
        cell.startswith(_NOT_THERE) and number not in tests for number, cell in rows.items()
    )
    num_open = len(rows) - len(tests) - num_absent
    counts = (
        f"{len(tests)} of {len(rows)} cases have a test; {num_absent} are about features that are "
        f"not there; {num_open} are open.\n"
    )
    filled = _ROW.sub(lambda row: _filled(row, tests), cases)
    return f"{head}{MARK}\n\n{reliability_figures.render()}\n## Cases\n\n{counts}\n### {filled}"


def _filled(row: re.Match[str], tests: Mapping[int, Sequence[str]]) -> str:
    number, text, cell = row.groups()
    shown = "<br>".join(f"`{test}`" for test in tests.get(int(number), ()))
    return f"| {number} | {text} | {shown or (cell if cell.startswith(_NOT_THERE) else _OPEN)} |"


if __name__ == "__main__":
    write(__doc__, "reliability.md", render)
