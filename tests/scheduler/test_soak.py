"""Random worlds for thousands of iterations. ``python -m scheduler.soak`` runs more of them."""

from __future__ import annotations

import pytest
from scheduler.soak import Soak

from inflight_scheduler import CapacitySchedulerPolicy


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
@pytest.mark.case(85)
def test_soak(policy: CapacitySchedulerPolicy) -> None:
    """Every invariant after every step; in the end ids, blocks and queues are at baseline."""
    num_finished = 0
    for seed in range(25):
        soak = Soak(seed, policy)
        soak.run(120)
        num_finished += soak.num_arrivals
    assert num_finished > 500
