"""Predictions of many servers: each behaves as one alone would with what it is sent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from inflight_recorder.cost_model import CostModel
from inflight_recorder.fleet.prediction import predict_fleet
from inflight_recorder.fleet.routers import ROUTERS, CacheAware, LeastLoad, RoundRobin
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import Simulation
from inflight_recorder.whatif import PredictedServer, predict
from inflight_recorder.workload import Job, random_arrivals
from inflight_scheduler import CapacitySchedulerPolicy

BLOCK = 16
NOISY = CostModel(2000.0, 5.0, 50.0, 30.0, 0.01, 0.0, tuple(range(-100, 900, 7)))
SETTINGS = Settings(CapacitySchedulerPolicy.MAX_UTILIZATION, 64, BLOCK, 16, 256, enable_reuse=True)


def make_jobs(number: int = 300, rate: float = 150.0, num_texts: int = 12) -> list[Job]:
    """Prompts that begin with one of a few texts; some are high up in the order, some impatient."""
    rng = random.Random(number)
    jobs = []
    for place, time_us in enumerate(random_arrivals(rng, rate, number)):
        text, num_common, num_own = rng.randrange(num_texts), rng.randrange(9), rng.randrange(3)
        blocks = [100 * text + k for k in range(num_common)]
        blocks += [10**6 + 10 * place + k for k in range(num_own)]
        num_new = rng.randint(1, 60)
        jobs.append(
            Job(
                time_us,
                len(blocks) * BLOCK + rng.randint(1, BLOCK),
                num_new + rng.choice([0, 5]),
                num_new,
                priority=rng.choice([0.5, 0.5, 0.9]),
                hashes=b"".join(block.to_bytes(8, "big") for block in blocks),
                patience_us=rng.choice([None, None, None, 40_000]),
            )
        )
    return jobs


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("changes", "rate", "ratio"),
    [
        ({}, 900.0, 2.05),
        ({"is_overlapped": True}, 900.0, 2.05),
        ({"is_overlapped": True}, 200.0, 3.0),
        ({"windows": (None, 40), "max_drafts": 0}, 900.0, 2.0),  # where none is skipped
    ],
)
@pytest.mark.parametrize("name", ROUTERS)
def test_skipped_turns_change_nothing(
    name: str,
    changes: dict[str, Any],
    rate: float,
    ratio: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither what comes out nor which loads the router sees; and most turns are skipped."""
    settings, jobs = replace(SETTINGS, **changes), make_jobs(rate=rate)

    def run() -> tuple[Any, list[list[int]]]:
        router, seen = ROUTERS[name](BLOCK), []
        choose = router.choose

        def note(job: Job, loads: Sequence[int]) -> int:
            seen.append(list(loads))
            return choose(job, loads)

        monkeypatch.setattr(router, "choose", note)
        return predict_fleet(settings, jobs, NOISY, 4, router), seen

    steps: list[PredictedServer] = []
    step = PredictedServer._step

    def count_step(server: PredictedServer) -> None:
        steps.append(server)
        step(server)

    monkeypatch.setattr(PredictedServer, "_step", count_step)
    quick, num_quick_steps = run(), len(steps)
    monkeypatch.setattr(PredictedServer, "skips_turns", False)
    assert run() == quick
    assert len(steps) >= ratio * num_quick_steps
    assert quick[0].num_requests == len(jobs)
    assert (quick[0].num_unanswered > 0, quick[0].num_pauses > 0) == (rate > 500, rate > 500)
    assert 0.05 < quick[0].hit_rate < 0.9


def test_one_server_is_what_a_prediction_without_a_router_is() -> None:
    jobs = make_jobs(100)
    assert predict_fleet(SETTINGS, jobs, NOISY, 1, LeastLoad(BLOCK)) == predict(
        SETTINGS, jobs, NOISY
    )


def test_in_turn_each_server_is_one_of_its_own() -> None:
    jobs = make_jobs(90)
    fleet = predict_fleet(SETTINGS, jobs, NOISY, 3, RoundRobin(BLOCK))
    alone = [predict(SETTINGS, jobs[k::3], replace_noise(NOISY)) for k in range(3)]
    same = predict_fleet(SETTINGS, jobs, replace_noise(NOISY), 3, RoundRobin(BLOCK))
    assert same.num_tokens == sum(each.num_tokens for each in alone) == fleet.num_tokens
    assert same.num_pauses == sum(each.num_pauses for each in alone)
    assert same.ttft_p99 == max(each.ttft_p99 for each in alone)
    assert same.max_batch == max(each.max_batch for each in alone)


def replace_noise(cost: CostModel) -> CostModel:
    """The same prices, always exactly: each server draws for itself."""
    return cost._replace(noise=())


def test_loads_are_the_requests_in_flight() -> None:
    """Counted otherwise: those that have come by then, without those that have left."""
    jobs, seen = make_jobs(200), []
    server = PredictedServer(Simulation(SETTINGS), NOISY)
    for number, job in enumerate(jobs, start=1):
        server.submit(number, job)
    server.advance()

    class Spy(RoundRobin):
        def choose(self, job: Job, loads: Sequence[int]) -> int:
            seen.append(loads[0])
            return super().choose(job, loads)

    predict_fleet(SETTINGS, jobs, NOISY, 1, Spy(BLOCK))
    assert len(server.ends_us) == len(jobs)
    ends = server.ends_us
    expected = [
        place - sum(end <= job.arrival_us for end in ends) for place, job in enumerate(jobs)
    ]
    assert seen == expected
    assert max(expected) > 5


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([[0, 0, 0]] * 4, [0, 1, 2, 0]),
        ([[3, 1, 2], [3, 2, 2], [3, 3, 3]], [1, 2, 0]),
        ([[5, 0]] * 3, [1, 1, 1]),
    ],
)
def test_least_load(loads: list[list[int]], chosen: list[int]) -> None:
    router = LeastLoad(BLOCK)
    job = make_jobs(1)[0]
    assert [router.choose(job, each) for each in loads] == chosen


def test_cache_aware() -> None:
    def job(*blocks: int, rest: int = 0) -> Job:
        hashes = b"".join(block.to_bytes(8, "big") for block in blocks)
        return Job(0, len(blocks) * BLOCK + rest, 5, 5, hashes=hashes)

    router = CacheAware(BLOCK)
    assert router.choose(job(1, 2, 3), [0, 0, 0]) == 0
    assert router.choose(job(1, 2, 9), [1, 0, 0]) == 0, "it has two thirds of it"
    assert router.choose(job(1, 5, 6, 7), [2, 0, 0]) == 1, "a quarter is not enough"
    assert router.choose(job(8, 9), [2, 1, 0]) == 2, "nobody has it"
    assert router.choose(job(1, 2, 3), [70, 70, 0]) == 2, "the others have 70 requests more"
    assert router.choose(job(1, 2, 3), [60, 60, 60]) == 2, "which has it now, too"
    assert router.choose(job(rest=40), [1, 1, 0]) == 2


def test_nothing_to_predict() -> None:
    with pytest.raises(RecordingError, match="holds no request that came"):
        predict_fleet(SETTINGS, [], NOISY, 2, RoundRobin(BLOCK))
