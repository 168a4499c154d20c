"""Write figures and table of docs/reliability.md from reports and tests; ``--check`` compares."""

from __future__ import annotations

import sys
from collections import defaultdict

import reliability_figures
from page import all_tests, marks, write_or_check
from reliability_cases import SECTIONS, Case

MARK = "<!-- the rest: python tools/write_reliability_docs.py -->"


def claims() -> dict[int, list[str]]:
    """Case number -> ids of the tests that carry ``@pytest.mark.case(number)``."""
    found: dict[int, list[str]] = defaultdict(list)
    for test, function in all_tests():
        for number in sorted({int(str(each)) for mark in marks(function, "case") for each in mark}):
            found[number].append(test)
    return found


def render(tests: dict[int, list[str]]) -> str:
    """The part of the page below the mark."""
    all_cases = [case for section in SECTIONS for case in section.cases]
    unknown = set(tests) - {case.number for case in all_cases}
    if unknown:
        raise ValueError(f"tests claim the unknown cases {sorted(unknown)}")
    num_tested = sum(case.number in tests for case in all_cases)
    absent = [case for case in all_cases if case.absent and case.number not in tests]
    open_ = [case for case in all_cases if not case.absent and case.number not in tests]
    parts = [
        f"{MARK}\n\n{reliability_figures.render()}\n## Cases\n",
        f"{num_tested} of {len(all_cases)} cases have a test; {len(absent)} are about features "
        f"that are not there; {len(open_)} are open.\n",
    ]
    for section in SECTIONS:
        parts.append(f"### {section.title}\n\n| | case | test |\n| --- | --- | --- |")
        parts += [_row(case, tests.get(case.number, [])) for case in section.cases]
        parts.append("")
    return "\n".join(parts)


def page(old: str) -> str:
    """The page with its table written anew; what stands above the mark is kept."""
    return old.partition(MARK)[0] + render(claims())


def _row(case: Case, tests: list[str]) -> str:
    shown = "<br>".join(f"`{test}`" for test in tests)
    if not shown:
        shown = f"*not there: {case.absent}*" if case.absent else "**open**"
    return f"| {case.number} | {case.text} | {shown} |"


def main() -> int:
    """Write the table, or with ``--check`` fail if it is not what the tests say."""
    return write_or_check(__doc__, "reliability.md", page)


if __name__ == "__main__":
    sys.exit(main())
