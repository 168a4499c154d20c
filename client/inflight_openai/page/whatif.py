"""What if: the recording of the last minutes under another policy or size, beside what happened.

It computes for seconds, so `run` belongs into a process of its own.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from inflight_openai.errors import bad_field
from inflight_recorder.cost_model import fit_cost_model
from inflight_recorder.schema import SettingsRecord
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.storage import RecordingFile, open_recording
from inflight_recorder.timeline import Activity, Lane, Timeline, build_timeline
from inflight_recorder.whatif import predict
from inflight_recorder.workload import read_workload
from inflight_scheduler import POLICIES, find_policy

MAX_LANES = 300
"""Of each of the two pictures: the last ones."""

SIZES = ("num_blocks", "max_batch_size")
_KINDS = {
    Activity.WAITING: "waiting",
    Activity.CONTEXT: "context",
    Activity.GENERATION: "generation",
    Activity.PAUSED: "paused",
    Activity.RESUMED: "resumed",
    Activity.IDLE: "idle",
}


def policy_names() -> list[str]:
    """The policies that may be asked for."""
    return list(POLICIES)


def read_changes(body: dict[str, Any]) -> dict[str, Any]:
    """The settings that are to be others: ``policy`` and `SIZES`, each left out or null for the
    recorded one; `ApiError` names what is wrong."""
    changes: dict[str, Any] = {}
    if (name := body.get("policy")) is not None:
        if not isinstance(name, str) or name not in POLICIES:
            raise bad_field("policy", f"choose one of {', '.join(POLICIES)}")
        changes["policy"] = name
    for field in SIZES:
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise bad_field(field, "expected a number from 1")
        changes[field] = value
    if unknown := body.keys() - {"policy", *SIZES}:
        raise bad_field(min(unknown), "not a setting of a prediction")
    return changes


def run(recording: str, changes: dict[str, Any]) -> dict[str, Any]:
    """``measured`` and ``predicted``: a summary (`inflight_recorder.workload.Summary`), and lanes
    ``[id, start_us, end_us, [[kind, start_us, end_us] ...]]`` from the start of each.

    ``error`` in their place if nothing can be predicted.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-whatif-") as folder:
        try:
            return _run(Path(folder), recording, changes)
        except RecordingError as error:
            return {"error": str(error).removeprefix("recorded.jsonl: ")}


def _run(folder: Path, recording: str, changes: dict[str, Any]) -> dict[str, Any]:
    recorded, predicted = folder / "recorded.jsonl", folder / "predicted.jsonl"
    recorded.write_text(recording, encoding="ascii")
    with open_recording(recorded) as reader:
        settings, workload = reader.settings, read_workload(reader)
    cost = fit_cost_model(workload.samples)
    changed = _changed(settings, changes)
    with closing(RecordingFile(predicted)) as sink:
        summary = predict(
            changed, workload.jobs, cost, sink=sink, num_recorded_steps=workload.num_steps
        )
    measured = workload.latencies.summary(reuse=workload.reuse)
    return {
        "settings": {
            "measured": _shown(settings),
            "predicted": _shown(changed),
        },
        "measured": {**asdict(measured), "lanes": _lanes(recorded)},
        "predicted": {**asdict(summary), "lanes": _lanes(predicted)},
    }


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """`RecordingError` for numbers out of their bounds."""
    if "policy" in changes:
        changes = {**changes, "policy": find_policy(changes["policy"]), "scheduler_class": None}
    elif settings.scheduler_class is not None:
        raise RecordingError("the server runs a scheduler of its own: choose a policy")
    changed = replace(settings, **changes)
    SettingsRecord.of(changed)
    return changed


def _shown(settings: Settings) -> dict[str, Any]:
    policy = settings.scheduler_class or settings.policy_name
    return {"policy": policy, **{field: getattr(settings, field) for field in SIZES}}


def _lanes(path: Path) -> list[list[Any]]:
    with open_recording(path) as reader:
        timeline = build_timeline(reader, max_lanes_with_reasons=0)
    start = timeline.start_us[0]
    return [_lane(timeline, lane, start) for lane in timeline.lanes[-MAX_LANES:]]


def _lane(timeline: Timeline, lane: Lane, start: int) -> list[Any]:
    def begin(index: int) -> int:
        is_over = index >= timeline.num_iterations
        return (timeline.end_us(index - 1) if is_over else timeline.start_us[index]) - start

    parts = [
        [_KINDS[each.activity], begin(each.start), timeline.end_us(each.end - 1) - start]
        for each in lane.intervals
    ]
    end = begin(lane.start) if not parts else parts[-1][2]
    return [lane.request_id, begin(lane.start), end, parts]
