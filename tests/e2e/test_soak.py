"""The soak in small: `benchmarks/soak.py` with two minutes of load and the same checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(500)
@pytest.mark.case(85, 90, 117)
def test_two_minutes_of_soak_leave_zeros_where_zeros_belong(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--minutes", "2", "-o", str(report)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=480
    )
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads(report.read_text())["policies"]
    assert [part["policy"] for part in parts] == ["guaranteed_no_evict", "max_utilization"]
    for part in parts:
        load = part["load"]
        for each in (load, part["questions"]):
            assert set(each["finals_per_request_read_to_its_end"]) == {"1"}
        for outcome in ("completed", "cancelled", "stopped", "reset", "refused by name"):
            assert load["outcomes"][outcome] > 0
        for outcome in ("several sequences", "guided", "log probabilities", "stop words"):
            assert load["outcomes"][outcome] > 0
        for outcome in ("adapters", "completed, OpenAI's API"):
            assert load["outcomes"][outcome] > 0
        assert ("beams" in load["outcomes"]) == (part["model"] != "windows")
        assert load["outcomes"]["deadline"] > 0  # one that has begun, not one that came too late
        assert "silent" not in {**load["outcomes"], **part["kills"]["outcomes"]}
        assert part["questions"]["not_answered"] == 0
        assert part["leaks"]["kept_objects after the steady load"] == 0
        assert any(each["open_streams"] for each in part["recoveries"])
    # On a slow machine each policy has time for one kill only, and the next one for the next.
    kills = {each["what"] for part in parts for each in part["recoveries"]}
    assert kills == {"model process killed", "tritonserver killed"}
