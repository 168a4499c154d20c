"""The metrics by themselves; what they say of a server: `test_triton_model`."""

from __future__ import annotations

import json

import pytest
from fakes import FakePbUtils

from inflight_backend.triton.metrics import TritonMetrics


def test_an_iteration_is_one_line_of_the_log_however_often_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(FakePbUtils, "families", {})
    monkeypatch.setattr(FakePbUtils.Logger, "lines", lines)
    metrics = TritonMetrics(FakePbUtils, "tensorrt_llm", "1")
    stats = [json.dumps({"Iteration Counter": number}) for number in (1, 2)]
    for looked_at in (stats[0], stats[0], stats[1], stats[1]):
        metrics.update(looked_at)
    assert lines == stats
