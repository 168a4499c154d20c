"""What-if of a ring that has dropped its beginning: some were in flight, and some still are."""

from __future__ import annotations

import pytest
from recorder.recorded import GUARANTEED, RecordedWorld, read
from recorder.test_whatif_as_recorded import PRICES
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.settings import Settings
from inflight_recorder.whatif import predict
from inflight_recorder.workload import Latencies, read_workload


def ring() -> str:
    """20 requests in flight when it begins and when it ends; six come near its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "CHUNK_ITERATIONS", 30)
        patch.setattr(recorder_module, "NUM_CHUNKS", 3)
        world = RecordedWorld(Settings(GUARANTEED, 3000, 4, 40, 640), prices=PRICES)
        for number in range(1, 21):
            world.arrive(make_request(number, 10, 300))
        for _ in range(120):
            world.iterate()
        for number in range(21, 27):
            request = make_request(number, 10, 400 if number % 2 else 5)
            world.arrive(request, int(world.clock.time_us) * 1000)
            for _ in range(5):
                world.iterate()
        return world.text


def test_what_was_measured_is_measured_from_where_the_ring_begins() -> None:
    text = ring()
    iterations = list(read(text))
    assert len(read(text).header.active) == 20
    span = (iterations[-1].start_us + iterations[-1].step_us - iterations[0].start_us) / 1e6
    measured = read_workload(read(text)).latencies.summary()
    num_tokens = sum(
        len(i.decision.context) + len(i.decision.generation) for i in iterations if i.decision
    )
    assert measured.num_tokens == num_tokens
    assert measured.seconds == pytest.approx(span)
    assert measured.tokens_per_second == pytest.approx(num_tokens / span)


def test_it_is_known_of_whom_a_prediction_knows_nothing_or_not_the_end() -> None:
    workload = read_workload(read(ring()))
    assert (workload.num_found, workload.num_unended) == (20, 3)
    assert [job.num_new_tokens for job in workload.jobs] == [400, 5, 400, 5, 400, 5]
    summary = predict(Settings(GUARANTEED, 3000, 4, 40, 640), workload.jobs, PRICES)
    assert (summary.num_requests, summary.num_tokens) == (6, 1215)


def test_no_time_has_passed_where_nobody_got_a_token() -> None:
    latencies = Latencies()
    latencies.arrived(1, 5_000_000)
    latencies.ended(1)
    assert (latencies.summary().seconds, latencies.summary().tokens_per_second) == (0.0, 0.0)
