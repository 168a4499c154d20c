"""More than fits: everything ends, everybody progresses, memory stays flat."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, Recorder, request, running
from support.triton_harness import WAIT, error_of, ids_of, wait_until
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import NamedTensor
from inflight_backend.triton import dispatcher
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_recorder import recorder as recorder_module
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch

STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


@pytest.mark.case(78)
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION, STATIC_BATCH])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_four_times_the_pool_finishes_under_every_policy(
    policy: CapacitySchedulerPolicy, is_chunked: bool
) -> None:
    """48 requests of 11 blocks each, twelve of them at once, in a pool of 33 blocks."""
    recorder = Recorder([request(i, [10 * i] * 4, 38) for i in range(1, 49)])
    engine = CountingEngine(num_blocks=33, tokens_per_block=4, max_num_tokens=64)
    params = TrtGptModelOptionalParams(max_batch_size=12, enable_chunked_context=is_chunked)
    with running(recorder, engine, policy, params=params) as manager:
        recorder.wait_for_finals(*range(1, 49))
        assert manager._batcher.is_idle_and_intact()
    for i in range(1, 49):
        assert recorder.tokens(i) == [(10 * i + k) % 1000 for k in range(1, 39)]
        assert [is_final for _, is_final, _ in recorder.responses[i]].count(True) == 1


@pytest.mark.case(79)
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_a_request_that_fills_the_pool_and_short_ones_both_progress(
    policy: CapacitySchedulerPolicy,
) -> None:
    """It needs all 16 blocks; short ones come before and after it without end, and end one by one:
    never is the pool empty by itself."""
    recorder = Recorder()
    ended: list[int] = []
    next_id = [2]

    def length_of(request_id: int) -> int:
        return 4 + request_id % 5

    def keep_coming(request_id: int, is_final: bool) -> None:
        if is_final:
            ended.append(request_id)
            if next_id[0] < 400 and 1 not in ended:
                recorder.pending.append(request(next_id[0], [7], length_of(next_id[0])))
                next_id[0] += 1

    recorder.on_response = keep_coming
    engine = CountingEngine(num_blocks=16, tokens_per_block=4, max_seq_len=64, max_num_tokens=64)
    params = TrtGptModelOptionalParams(max_batch_size=4)
    recorder.pending = [request(100_000 + i, [7], length_of(i)) for i in range(3)]
    recorder.pending.insert(2, request(1, [1] * 4, 60))
    with running(recorder, engine, policy, params=params):
        recorder.wait_for_finals(1)
        recorder.wait_for_finals(*range(2, next_id[0]))
    assert recorder.tokens(1) == list(range(2, 62))
    position = ended.index(1)
    assert position < 100, "short ones overtook it without end"
    for i in range(2, next_id[0]):
        assert recorder.tokens(i) == list(range(8, 8 + length_of(i)))


@pytest.mark.case(81)
def test_prompts_of_64k_tokens_beside_generation_keep_token_gaps_bounded() -> None:
    """Who generates gets a token in every iteration, no iteration is over the budget, and what the
    host does for a long prompt does not hold anybody up."""
    budget, length = 1024, 2**16
    largest: list[int] = []
    generating: list[int] = []
    times: list[float] = []

    def measure(batch: ScheduledBatch) -> None:
        chunks = sum(len(chunk.tokens) for chunk in batch.context_chunks)
        largest.append(chunks + len(batch.generation_slots))
        generating.append(len(batch.generation_slots))
        times.append(time.monotonic())

    engine = CountingEngine(
        num_blocks=5000,
        tokens_per_block=32,
        max_seq_len=length + 64,
        max_num_tokens=budget,
        before_step=measure,
    )
    recorder = Recorder([request(i, [10 * i], 200) for i in range(1, 9)])
    began: list[int] = []

    def add_long(request_id: int, is_final: bool) -> None:
        if len(recorder.tokens(1)) == 5 and not began:
            began.append(len(largest))
            recorder.pending += [request(100 + k, [3 + k] * length, 2) for k in range(2)]

    recorder.on_response = add_long
    params = TrtGptModelOptionalParams(
        max_batch_size=16,
        enable_chunked_context=True,
        kv_cache_config=KvCacheConfig(enable_block_reuse=True),
    )
    with running(recorder, engine, params=params):
        recorder.wait_for_finals(*range(1, 9), 100, 101)
    assert max(largest) <= budget
    during = slice(began[0] + 1, began[0] + 2 * length // budget)
    assert min(generating[during]) == 8, "somebody who generates was left out of an iteration"
    assert min(largest[during]) > budget - 8 - 32, "the long prompts did run beside them"
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sorted(gaps[during])[len(gaps[during]) // 2] < 0.1
    assert max(gaps[began[0] - 1 : during.stop]) < 5.0, (
        "seconds; 0.06 to 0.35 at a load of 10 to 20 on two cores"
    )


@pytest.mark.slow
@pytest.mark.case(84)
def test_many_tiny_requests_leave_nothing_behind(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one object per request; `benchmarks/tiny_requests.py` sends a million of them."""
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 1)  # full soon
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 10)
    engine = CountingEngine(num_blocks=16)
    server = make_server(engine, max_batch_size="64")

    def crowd(number: int) -> int:
        for start in range(0, number, 50):
            senders = [
                server.send(f"{start + i}", input_ids=[i], request_output_len=1, streaming=True)
                for i in range(50)
            ]
            for sender in senders:
                assert sender.is_final.wait(WAIT)
        engine.batches.clear()
        del senders, sender
        gc.collect()
        return sys.getallocatedblocks()

    crowd(500)
    first, last = crowd(500), [crowd(2000) for _ in range(4)][-1]
    # Counts of the whole process go up and down by a thousand; a leak would be 8,000.
    assert last - first < 4000, f"{last - first} objects kept of 8,000 requests"


@pytest.mark.case(71)
def test_while_responses_cannot_leave_nothing_new_is_started(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes no response: what waits for it stays bounded, and all of it leaves later."""
    monkeypatch.setattr(dispatcher, "_MAX_BACKLOG", 100)
    server = make_server(CountingEngine())
    is_stuck, release = threading.Event(), threading.Event()
    stuck = FakeSender()

    def wait(response: Any = None, flags: int = 0) -> None:
        is_stuck.set()
        assert release.wait(3 * WAIT)
        FakeSender.send(stuck, response, flags)

    stuck.send = wait  # type: ignore[method-assign]
    server.send("stuck", sender=stuck, input_ids=[1], request_output_len=5, streaming=True)
    assert is_stuck.wait(WAIT)  # with what it has taken so far, which does not count
    others = [
        server.send(f"{i}", input_ids=[1], request_output_len=40, streaming=True) for i in range(30)
    ]
    queue = server.model._dispatcher._queue
    wait_until(lambda: server.model._dispatcher.is_behind)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 0)
    assert queue.qsize() < 100 + 4 * 40, "only what was active went on"
    assert len(server.model._queue) > 20
    release.set()
    for sender in (stuck, *others):
        assert sender.is_final.wait(WAIT)
    assert ids_of(others[-1]) == list(range(2, 42))


@pytest.mark.case(71)
def test_what_waits_to_be_sent_counts_by_its_size_until_it_is_sent(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few large responses: beams say everything anew, and a row of logits is a vocabulary."""
    monkeypatch.setattr(dispatcher, "_MAX_BACKLOG_BYTES", 4500)
    server = make_server(CountingEngine())
    sends = server.model._dispatcher
    is_stuck, release = threading.Event(), threading.Event()
    stuck = FakeSender()

    def wait(response: Any = None, flags: int = 0) -> None:
        is_stuck.set()
        assert release.wait(WAIT)
        FakeSender.send(stuck, response, flags)

    stuck.send = wait  # type: ignore[method-assign]
    server.send("stuck", sender=stuck, why=True)
    assert is_stuck.wait(WAIT)
    assert not sends.is_behind
    row = NamedTensor("generation_logits", np.zeros((1, 1, 1, 1000), dtype=np.float32))
    sends.send_response(0, [row], False, "")
    assert not sends.is_behind
    sends.answer(ResponseSender(FakeSender(), ResponseFactory(FakePbUtils)), "why", 500 * "x")
    assert sends.is_behind
    other = server.send(input_ids=[1], request_output_len=3)
    assert len(server.model._queue) == 1
    release.set()
    assert other.is_final.wait(WAIT)
    assert not sends.is_behind
    wait_until(lambda: sends._num_bytes == 0)


@pytest.mark.case(71)
def test_feeds_of_statistics_are_few_and_end(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(CountingEngine())
    feeds = [server.send(stats=True) for _ in range(16)]
    text, code = error_of(server.ask(stats=True))
    assert text.startswith("16 feeds of statistics are open, which is the limit")
    assert code == FakePbUtils.TritonError.UNAVAILABLE
    assert len(server.ask(stats=True, streaming=False).responses) == 1
    feeds[0].cancelled = True
    assert feeds[0].is_final.wait(WAIT)
    wait_until(lambda: len(server.model._frontend._feeds) == 15)
    monkeypatch.setattr(dispatcher, "_MAX_FEED_BYTES", 3000)
    server.ask(input_ids=[1], request_output_len=30)
    for feed in feeds:
        assert feed.is_final.wait(WAIT)
    wait_until(lambda: server.model._frontend._feeds == [])
    assert not server.model._dispatcher._subscribers
