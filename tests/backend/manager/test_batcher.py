"""The batcher: capacity policies and batching options through `GptManager`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.manager_harness import Recorder, request, running
from support.triton_stub import CountingEngine

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_backend.manager.user_scheduler import find_entry
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_recorder.timeline import build_timeline, title
from inflight_scheduler import POLICIES, CapacitySchedulerPolicy

OWN_POLICY = """
from inflight_scheduler import GuaranteedNoEvictScheduler, register_policy

@register_policy("one_at_a_time")
class OneAtATime(GuaranteedNoEvictScheduler):
    def schedule_request(self, active_requests):
        return super().schedule_request(active_requests[:1])
"""


def test_registered_policy_schedules_records_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy in a file of its own; it never pauses, so long requests need not be recomputed."""
    (tmp_path / "own_policy.py").write_text(OWN_POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    find_entry("policy", "own_policy:OneAtATime", "ClassName")
    path = tmp_path / "recording.jsonl"
    params = TrtGptModelOptionalParams(
        max_batch_size=8, record_file=str(path), enable_chunked_context=False
    )
    engine = CountingEngine(max_num_tokens=16)
    recorder = Recorder([request(i, [100 * i] * 10, 8) for i in (1, 2, 3)])
    try:
        with running(recorder, engine, "one_at_a_time", params=params) as manager:
            assert manager.policy == "one_at_a_time"
            recorder.wait_for_finals(1, 2, 3)
        with open_recording(path) as reader:
            assert title(build_timeline(reader)).startswith("one_at_a_time: 3 requests")
        with open_recording(path) as reader:
            assert replay(reader).divergence is None
    finally:
        del POLICIES["one_at_a_time"]
    assert [recorder.tokens(i)[0] for i in (1, 2, 3)] == [101, 201, 301]
    sizes = [len(each.context_chunks) + len(each.generation_slots) for each in engine.batches]
    assert max(sizes) == 1


@pytest.mark.parametrize("name", ["one_at_a_time", "MAX_UTILIZATION", ""])
def test_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    known = "guaranteed_no_evict, static_batch, max_utilization"
    text = f"scheduler_policy: there is no capacity policy '{name}'; known are {known}"
    with pytest.raises(ConfigurationError, match=text), running(Recorder(), policy=name):
        pass


def test_name_of_an_executor_policy_is_that_policy() -> None:
    with running(Recorder(), policy="max_utilization") as manager:
        assert manager.policy is CapacitySchedulerPolicy.MAX_UTILIZATION
