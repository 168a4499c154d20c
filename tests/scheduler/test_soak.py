"""Random worlds for 100,000 iterations. ``python -m scheduler.soak`` runs more of them."""

from __future__ import annotations

import pytest
from support.scheduler_soak import MixedSoak, Soak

from inflight_scheduler import CapacitySchedulerPolicy

pytestmark = pytest.mark.slow

POLICIES = pytest.mark.parametrize(
    "policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name
)


@pytest.mark.case(85)
@POLICIES
def test_soak(policy: CapacitySchedulerPolicy) -> None:
    """Every invariant after every step; in the end ids, blocks and queues are at baseline."""
    num_finished = num_right_guesses = 0
    for seed in range(25):
        soak = Soak(seed, policy)
        soak.run(120)
        num_finished += soak.num_arrivals
        num_right_guesses += soak.world.num_right_guesses
    assert num_finished > 500
    assert num_right_guesses > 100


@POLICIES
def test_soak_of_both_loops(policy: CapacitySchedulerPolicy) -> None:
    """As `test_soak`; steps overlap or do not, and requests stop and steps fail while one runs."""
    num_alone = num_overlapped = num_right_guesses = num_discarded = 0
    for seed in range(25):
        soak = MixedSoak(seed, policy)
        soak.run(120)
        num_alone += soak.world.num_alone
        num_overlapped += soak.world.num_overlapped
        num_right_guesses += soak.world.num_right_guesses
        num_discarded += soak.world.num_discarded_tokens
    assert num_alone > 500
    assert num_overlapped > 500
    assert num_right_guesses > 30
    assert num_discarded > 30


@POLICIES
def test_a_hundred_thousand_iterations(policy: CapacitySchedulerPolicy) -> None:
    """A third of them for each policy, with the invariants after every eighth step."""
    num_iterations, seed = 0, 1000
    while num_iterations < 100_000 // 3:
        soak = Soak(seed, policy, check_every=8)
        soak.run(500)
        num_iterations += soak.num_iterations
        seed += 1
