"""The benchmark of building responses runs; its figures are another matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_form_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "responses.json"
    command = [sys.executable, "benchmarks/responses.py", "--tokens", "16", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr  # 1: above the limit, on a busy machine
    result = json.loads(output.read_text(encoding="utf-8"))
    cases = {(row["form"], row["tokens_per_response"]) for row in result["rows"]}
    assert len(cases) == len(result["rows"]) == 4 * 2
    for row in result["rows"]:
        assert row["loop_us_per_token"] > 0
        assert row["sender_us_per_token"] > 0
