"""Which continuations go on: a search told step by step."""

from __future__ import annotations

import pytest

from inflight_scheduler import BeamParams, BeamSearch


@pytest.mark.parametrize(
    ("rate", "winners"),
    [
        (0.0, [(1, 5), (1, 6)]),  # the likelier beam leaves the other one no place
        (0.1, [(1, 5), (2, 7)]),  # -1.1 and -1.25 + 0.1, before -1.2
        (2.0, [(2, 7), (2, 8)]),
        (-2.0, [(1, 5), (1, 6)]),
    ],
)
def test_a_diversity_rate_is_added_per_rank_of_the_beam_gone_on_from(
    rate: float, winners: list[tuple[int, int]]
) -> None:
    params = BeamParams(width=2, num_returned=2, diversity_rate=rate)
    search = BeamSearch(params, end_id=-1, max_new_tokens=9)
    assert search.advance([[(1, -0.1), (2, -1.0), (3, -9.0), (4, -9.5)]])
    first, second = [(5, -1.0), (6, -1.1)], [(7, -0.25), (8, -0.5)]
    assert search.advance([first, second])
    assert [beam.tokens for beam in search.hypotheses()] == winners
