"""The documentation says what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "backend/inflight_backend/demo_model"


def test_protocol_page_is_what_the_table_says() -> None:
    command = [sys.executable, "tools/write_protocol_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_example_without_triton_serves_a_checkpoint() -> None:
    """Four functions, one checkpoint: the second count is stopped by a stop signal at 13."""
    command = [sys.executable, "docs/examples/gpt_manager.py", str(DEMO_MODEL), "1 2 3", "10 11"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    first = next(line for line in result.stdout.splitlines() if line.startswith("1 2 3"))
    assert first == "1 2 3 4 5 6 7 8 9 10 11 1"  # 20 tokens, one per byte
    assert result.stdout.splitlines()[0].endswith("13")
    assert '"Used KV cache blocks": 0' in result.stderr.splitlines()[-1]
