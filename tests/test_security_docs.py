"""docs/security.md names what runs in a server, with its pinned versions, and the fuzzers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = "dev"


@pytest.mark.slow
def test_every_dependency_of_a_server_is_listed_with_its_pin() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    part = project.partition("\ndependencies = [")[2].partition("\n[project.scripts]")[0]
    for_servers = part.partition(f"\n{DEVELOPMENT} = [")[0]
    needed = {
        re.split(r"[\[<>=]", name)[0] for name in re.findall(r'"([a-z0-9-]+[^"]*)"', for_servers)
    }
    pins = dict(
        re.findall(
            r'^([a-z0-9-]+)==([^ \n]+)(?: ; python_version >= "3.11")?$',
            (ROOT / "constraints.txt").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([0-9][^ ]*) \|", page, re.MULTILINE))
    assert listed == {name: pins[name] for name in needed}


@pytest.mark.slow
def test_the_page_says_where_all_fuzzers_are() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    part = page.partition("Fuzzers over")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(tests/[a-z/]+)`", part))
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@fuzzing\n" in path.read_text(encoding="utf-8")
    }
    assert found == named
    assert "pytest -m fuzz --timeout 0" in part
