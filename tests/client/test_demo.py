"""The demo's own checks: it must not call a broken count a success."""

from __future__ import annotations

import pytest

from inflight_client.demo import Count, Demo


@pytest.mark.parametrize(
    ("text", "gap"),
    [
        (" 4 5 6", ""),
        (" 4 5 6 ", ""),
        (" 4 5 6 7 8 9 1", ""),
        ("", ""),
        (" 4 6", "says 6 where 5 comes next"),
        (" 4 4 5", "says 4 where 5 comes next"),
        (" 5", "says 5 where 4 comes next"),
        (" 4 5 x", "says x where 6 comes next"),
        ("4", "says 34 where 3 comes next"),
    ],
)
def test_gap(text: str, gap: str) -> None:
    found = Count("1 2 3", "id", text).gap()

    assert found.endswith(gap) if gap else found == ""


def make_demo(*texts: str) -> Demo:
    return Demo([Count("1 2 3", "id", text) for text in texts], {"Iteration Counter": 1})


def test_a_good_run_has_no_problem() -> None:
    assert make_demo(" 4 5 6", " 4", " 4 5", " 4 5").problems() == []


def test_a_stop_without_effect_is_a_problem() -> None:
    (problem,) = make_demo(" 4 5", " 4 5", " 4 5", " 4 5").problems()

    assert "was stopped but did not end early" in problem


def test_silence_is_a_problem() -> None:
    problems = make_demo(" 4 5", " 4", "", " 4 5").problems()

    assert 'the count "1 2 3" is empty' in problems


def test_missing_statistics_are_a_problem() -> None:
    demo = make_demo(" 4 5", " 4", " 4 5", " 4 5")
    demo.busiest = {}

    assert demo.problems() == ["no statistics arrived"]
