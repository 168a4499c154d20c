"""What cannot have happened is refused by whatever follows a recording, and in time."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from support.recorder_worlds import GUARANTEED, MAX_UTILIZATION, play, read, tiny_ring

from inflight_recorder import simulator
from inflight_recorder.replay import replay
from inflight_recorder.schema import Header, SettingsRecord
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.storage import RecordingReader
from inflight_recorder.timeline import build_timeline
from inflight_recorder.workload import read_workload
from inflight_scheduler import ContextChunking

PLAIN = Settings(MAX_UTILIZATION, 40, 4, 6)
OVERLAPPED = Settings(MAX_UTILIZATION, 16, 4, 6, is_overlapped=True)
REUSING = Settings(MAX_UTILIZATION, 40, 4, 6, enable_reuse=True)
LARGE = Settings(GUARANTEED, 2**22, 4, 1)


def recording(settings: Settings, *iterations: dict[str, object]) -> str:
    """Iterations 1, 2, ... with these fields."""
    lines = [msgspec.json.encode(Header(2, SettingsRecord.of(settings))).decode()]
    for number, content in enumerate(iterations, start=1):
        lines.append(json.dumps({"i": number, "t": number, "d": 1, "f": 12} | content))
    return "\n".join(lines) + "\n"


def arrival(number: int, prompt_len: int, max_new: int, **more: object) -> dict[str, object]:
    lengths = {"prompt_len": prompt_len, "max_new_tokens": max_new}
    return {"request_id": number, **lengths, **more}


ONE = arrival(1, 4, 4)
BEAMS = {"a": [arrival(1, 5, 8, beam_width=3)], "s": {"c": [[1, 5]]}}


@pytest.mark.parametrize(
    ("settings", "iterations", "message"),
    [
        (PLAIN, [{"a": [ONE, ONE]}], "line 2: request 1 arrives while it is active"),
        (PLAIN, [{"a": [arrival(1, 400, 4)]}], "request 1 is larger than the whole pool"),
        (PLAIN, [{"s": {"g": [7]}, "a": [ONE]}], "request 7 runs, but it is not active"),
        (PLAIN, [{"s": {"c": [[1, 4]]}, "a": [ONE], "y": True}], "request 1 survives a failed"),
        (PLAIN, [{"a": [ONE], "s": {"c": [[1, 4]]}, "n": [[7, 1, 1, 1]]}], "7 has drafts, but it"),
        (PLAIN, [{"a": [ONE], "s": {"c": [[1, 4]]}, "n": [[1, 1, 2, 1]]}], "keeps more drafts"),
        (PLAIN, [{"a": [ONE], "s": {"c": [[1, 4]]}, "m": [[1, [0]]]}], "moves beams that do not"),
        (PLAIN, [BEAMS, {"s": {"g": [1]}, "m": [[1, [1, 0, 0]]]}], "cannot have moved so"),
        (
            PLAIN,
            [{"a": [ONE], "s": {}, "e": [[1, "not_finite"]]}, {"s": {"g": [1]}}],
            "1 runs, but",
        ),
        (REUSING, [{"a": [ONE], "l": [[1, "AAAA"]]}], "hashes: 3 bytes are not 8"),
        (OVERLAPPED, [{"a": [ONE], "s": {"c": [[1, 4]]}, "n": [[1, 2, 2, 1]]}], "runs on after"),
        (
            OVERLAPPED,
            [BEAMS, {"s": {"g": [1]}, "m": [[1, [0, 0, 0]]], "n": [[1, 3, 3, 1]]}],
            "request 1 has drafts, but it searches with beams",
        ),
        (
            OVERLAPPED,
            [
                {"a": [arrival(1, 4, 1, beam_width=2), arrival(2, 4, 4)], "s": {"c": [[1, 4]]}},
                {"s": {"c": [[2, 4]]}},
            ],
            "request 1 ended before this decision",
        ),
        (
            OVERLAPPED,
            [BEAMS, {"s": {"g": [1]}, "z": True, "e": [[1, "cancelled"]]}],
            "line 3: a decision, though the step it needs was lost",
        ),
        (
            LARGE,
            [{"a": [arrival(1, 2**22, 1, beam_width=1024)]}],
            "the tables of all beams have more than 16777216",
        ),
        (
            Settings(MAX_UTILIZATION, 40, 4, 6, 40, ContextChunking(unit_size=41)),
            [],
            "line 1: these settings contradict one another",
        ),
    ],
)
@pytest.mark.case(111, 112)
def test_an_impossible_recording_is_refused(
    settings: Settings, iterations: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(RecordingError) as caught:
        build_timeline(read(recording(settings, *iterations)))
    assert message in str(caught.value)


@pytest.mark.case(112)
@pytest.mark.parametrize("follow", [build_timeline, read_workload])
def test_a_prompt_that_begins_again_and_again_is_refused_in_time(
    follow: Callable[[RecordingReader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 50 bytes takes all blocks there are, and the next one gives them back."""
    monkeypatch.setattr(simulator, "MIN_PROMPT_BLOCKS", 100)
    monkeypatch.setattr(simulator, "PROMPT_BLOCKS_PER_PLAN", 2)
    settings = Settings(MAX_UTILIZATION, 64, 1, 4, None, ContextChunking(unit_size=1))
    turns = [{"s": {"c": [[1, 1]]}, "f": 14}, {"s": {"p": [1]}, "f": 64}] * 50
    lines = [{"a": [arrival(1, 50, 5)], **turns[0]}, *turns[1:]]
    follow(read(recording(settings, *lines[:4])))
    message = "line 6: prompts of more than 100 blocks, and 2 for each iteration, have begun"
    with pytest.raises(RecordingError, match=message):
        follow(read(recording(settings, *lines)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["cache"]["idle"].pop(), "the idle blocks are not those"),
        (lambda header: header["cache"]["idle"].append(12), "cache: block 12 of 12"),
        (lambda header: header["cache"]["kept"].pop(), "kept must name each block once"),
        (lambda header: header["cache"].update(hashes="AAA="), "hashes: 2 bytes are not 8 for"),
        (
            lambda header: header["cache"].update(
                hashes="AAAAAAAAAAA=" * len(header["cache"]["kept"])
            ),
            "hashes: Invalid base64",
        ),
        (lambda header: header["active"][0]["table"].clear(), r"request \d+ holds 0 blocks"),
        (
            lambda header: header["active"][0]["table"].append(header["active"][0]["table"][0]),
            "holds a block twice",
        ),
        (lambda header: header["cache"].update(held=[[1, 99]]), "has no 99 full blocks"),
        (lambda header: header["cache"].update(snapshots="AAAAAAAAAAA=" * 9), "Invalid base64"),
        (lambda header: header.pop("cache"), "in the middle and does not say what was cached"),
    ],
)
def test_a_cache_that_cannot_have_been_is_refused(
    change: Callable[[dict[str, dict[str, list[object]]]], object], message: str
) -> None:
    settings = Settings(MAX_UTILIZATION, 12, 2, 6, 40, None, True, True)
    with tiny_ring():
        text = play(settings, seed=4, max_iterations=40).text
    first, _, rest = text.partition("\n")
    header = json.loads(first)
    assert header["active"][0]["table"], "it holds nothing: the test shows nothing"
    change(header)
    with pytest.raises(RecordingError, match=message):
        replay(read(json.dumps(header) + "\n" + rest))
