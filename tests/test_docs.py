"""The documentation says what the code does."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from support.manager_harness import Recorder, request, running
from support.triton_stub import CountingEngine

from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_server.serve.settings import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]


PAGES = (
    "compatibility",
    "models",
    "operations",
    "performance",
    "protocol",
    "reliability",
    "structure",
)


@pytest.mark.parametrize("name", PAGES)
def test_written_pages_are_up_to_date(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    written: str = importlib.import_module(f"write_{name}_docs").render(page)
    if page != written:
        pytest.fail(f"docs/{name}.md is out of date: run python tools/write_{name}_docs.py")


@pytest.mark.slow
def test_the_example_without_triton_serves_a_checkpoint() -> None:
    """Four functions, one checkpoint: the second count is stopped by a stop signal at 13."""
    command = [sys.executable, "examples/gpt_manager.py", str(DEMO_MODEL), "1 2 3", "10 11"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    first = next(line for line in result.stdout.splitlines() if line.startswith("1 2 3"))
    assert first == "1 2 3 4 5 6 7 8 9 10 11 1"  # 20 tokens, one per byte
    assert result.stdout.splitlines()[0].endswith("13")
    assert '"Used KV cache blocks": 0' in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["ShortestFirst", "HalfOfThePlaces"])
def test_the_schedulers_of_the_page_work(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The example, and the code blocks of docs/scheduling.md, as the manager's scheduler."""
    page = (ROOT / "docs/scheduling.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = (ROOT / "examples/own_scheduler.py").read_text(encoding="utf-8") + "".join(blocks)
    module = types.ModuleType("docs_scheduler")
    exec(compile(code, "docs/scheduling.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "docs_scheduler", module)
    recorder = Recorder([request(i, [100 * i], 40 - 5 * i) for i in range(1, 7)])
    finished: list[int] = []
    recorder.on_response = lambda i, is_final: finished.append(i) if is_final else None
    params = TrtGptModelOptionalParams(max_batch_size=2, scheduler_class=f"docs_scheduler:{name}")
    with running(recorder, CountingEngine(num_blocks=16), params=params):
        recorder.wait_for_finals(*range(1, 7))
    for i in range(1, 7):
        assert recorder.tokens(i) == list(range(100 * i + 1, 100 * i + 41 - 5 * i))
    assert "takes over" not in caplog.text


def test_links_of_the_pages_lead_somewhere() -> None:
    """Relative links of the README and of docs/ point to files that exist."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_page_says_to_install_another_project_of_our_name() -> None:
    """PyPI has another project of that name: ours comes from a clone."""
    folders = ("backend", "client", "docs", "deploy", "kernels", "scheduler")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = [path for path in files if path.suffix in {".md", ".py", ".pbtxt", ".yml"}]
    for path in [ROOT / "README.md", *texts]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^\n]*[ '\"]inflight\b", text), path.name


@pytest.mark.slow
def test_the_security_page_lists_every_dependency_of_a_server_with_its_pin() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    part = project.partition("\ndependencies = [")[2].partition("\ndev = [")[0]
    needed = {re.split(r"[\[<>=]", name)[0] for name in re.findall(r'"([a-z0-9-]+[^"]*)"', part)}
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
