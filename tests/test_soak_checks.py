"""What the soak calls right, leaked or late: each check finds what it is there for."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.manager_harness import Recorder, request, running
from support.server_process import assert_counts, assert_counts_in_part

from inflight_scheduler import BlockManager

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from soak_parts import judge
from soak_parts.answers import is_cut, is_whole
from soak_parts.server import DRAIN_SECONDS, MODEL, Footprint, footprint, judge_stop, repairs
from soak_parts.traffic import Span

pytestmark = pytest.mark.slow

PROMPT = "1 2 3"


@pytest.mark.parametrize(
    ("text", "num_tokens", "whole", "cut"),
    [
        (" 4 5 6 7", 8, True, False),
        (" 4 5 6 7", 9, False, True),
        ("", 8, False, True),
        (" 4", 150, False, True),
        (" 4 5 6 7", 4, False, False),
        (" 4 6", 8, False, False),
        (" 4 5 5", 8, False, False),
        (" 9 10", 8, False, False),
    ],
)
def test_an_answer_is_whole_or_cut_or_wrong(
    text: str, num_tokens: int, whole: bool, cut: bool
) -> None:
    assert is_whole(PROMPT, text, num_tokens) == whole
    assert is_cut(PROMPT, text, num_tokens) == cut


@pytest.mark.parametrize("text", ["", " 4", " 4 5 6 7 8", " 4 5 6 6"])
def test_the_tests_of_the_real_server_see_it_too(text: str) -> None:
    assert_counts(PROMPT, " 4 5 6 7", 8)
    with pytest.raises(AssertionError):
        assert_counts(PROMPT, text, 8)
    with pytest.raises(AssertionError):
        assert_counts_in_part(PROMPT, text, 0)


def test_memory_kept_of_each_request_is_found() -> None:
    """150 bytes of each of 20 requests a second are only 10 MB in an hour."""

    def judged(bytes_per_request: float) -> list[str]:
        steady = judge.Samples()
        for second in range(0, 900, 5):
            held = 400 + 20 * second * bytes_per_request / 2**20
            steady.add(second, {MODEL: Footprint(held, 1)})
        return judge.judge_memory(judge.Samples(), steady, True, 20 * 895, 1800)[1]

    assert judged(0) == judged(90) == []
    assert "150 bytes per request" in judged(150)[0]


@pytest.mark.parametrize(
    ("is_warm", "steady_seconds", "policy_seconds", "is_failure"),
    [
        (True, 900, 1800, False),
        (False, 900, 1800, True),
        (True, 590, 1800, True),
        (False, 900, 1790, False),
    ],
)
def test_an_hour_whose_memory_was_not_judged_is_no_success(
    is_warm: bool, steady_seconds: int, policy_seconds: float, is_failure: bool
) -> None:
    warm_up, steady = judge.Samples(), judge.Samples()
    for second in range(0, steady_seconds + 5, 5):
        steady.add(second, {MODEL: Footprint(400, 1)})
    report, failures = judge.judge_memory(warm_up, steady, is_warm, 1000, policy_seconds)
    assert report["is_judged"] == (is_warm and steady_seconds >= judge.MIN_SECONDS)
    assert [failure.partition(":")[0] for failure in failures] == (
        ["memory was not judged"] if is_failure else []
    )


def test_a_warm_up_leaves_enough_to_judge() -> None:
    load = 0.88 * judge.JUDGED_FROM_SECONDS
    assert load - judge.longest_warm_up(load) > judge.MIN_SECONDS
    assert judge.longest_warm_up(load) > 15 * 60  # a busy machine needed 14 minutes
    assert judge.longest_warm_up(42.0) == 21.0


def test_a_descriptor_too_many_is_told_with_its_kind() -> None:
    before = {MODEL: Footprint(1, 1, Counter({"pipe": 2}))}
    after = {MODEL: Footprint(1, 1, Counter({"pipe": 2, "socket, ESTABLISHED": 1}))}
    report, failures = judge.compare(before, after)
    assert report[MODEL]["more_of"] == {"socket, ESTABLISHED": 1}
    assert failures == [f"{MODEL}: 1 more descriptors"]


def test_streams_that_end_late_or_never_are_found() -> None:
    spans = [Span(1.0, 9.0, False), Span(5.0, 11.5, True), Span(10.4, 10.6, True)]
    report, failures = judge.judge_ends(spans, [11.0], 10.0, 14.0, 2.0)
    assert (report["open_streams"], report["seconds_until_they_ended_max"]) == (1, 1.5)
    assert (report["sent_meanwhile_seconds_max"], failures) == (0.2, [])
    spans += [Span(5.0, 13.5, True), Span(10.5, 14.0, True)]
    _, failures = judge.judge_ends(spans, [4.0], 10.0, 14.0, 2.0)
    assert failures == ["1 streams did not end", "2 streams ended after up to 3.5 s, not 2"]


def test_what_a_dead_process_ended_well_is_found() -> None:
    """But for answers that had come before and were not read yet."""
    told, unread = Span(1.0, 11.5, False, is_refused=True), Span(1.0, 10.2, False)
    assert judge.judge_ends([told, unread], [], 10.0, 14.0, 2.0)[1] == []
    spans = [told, unread, Span(1.0, 11.5, False)]
    _, failures = judge.judge_ends(spans, [], 10.0, 14.0, 2.0)
    assert failures == ["1 streams ended without an error 1.5 s later"]


def test_a_stop_that_waits_for_forgotten_requests_or_leaves_something_is_found() -> None:
    assert judge_stop(0, 9.0, []) == []
    assert judge_stop(1, 9.0, ["a folder"]) == ["exit code 1", "left behind: ['a folder']"]
    (failure,) = judge_stop(0, DRAIN_SECONDS + 0.1, [])
    assert failure == "the stop took 60 s: it waited for requests that nobody sent"


def test_what_the_idle_check_mends_is_found_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder([request(1, [100], 9)])
    with running(recorder):
        recorder.wait_for_finals(1)
    assert repairs(caplog.text) == []
    monkeypatch.setattr(BlockManager, "release", lambda self, leaving: None)
    recorder = Recorder([request(1, [100], 9)])
    with running(recorder) as manager:
        recorder.wait_for_finals(1)
        while '"Repairs": 1' not in manager.stats_json:
            manager.wake()
    assert len(repairs(caplog.text)) == 1


def test_a_connection_to_whoever_counts_is_no_leak() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = footprint(os.getpid())
        assert before.descriptors["socket, LISTEN"] >= 1
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert footprint(os.getpid()).descriptors == before.descriptors
    left, right = socket.socketpair()
    with left, right:
        more = footprint(os.getpid()).descriptors - before.descriptors
        assert more == {"socket": 2}
