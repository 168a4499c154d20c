"""The queue before the batch manager: order, bound, deadlines, stops, and requests that wait for
their grammar."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from backend.triton.conftest import MakeServer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.guided_answers import HeldCompiler
from support.scheduler_world import World
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    responses_of,
    wait_until,
    wait_until_queued,
)
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CapacityExceeded, RequestInFlight
from inflight_backend.guided.compiler import PendingGuide
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import RequestLimits, validate
from inflight_backend.triton.queue import RequestIds, RequestQueue
from inflight_scheduler import (
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    LlmRequest,
    make_scheduler,
)
from inflight_server.serve.settings import DEMO_MODEL

LIMITS = RequestLimits(
    vocab_size=100,
    max_input_len=200,
    max_seq_len=200,
    exclude_input_in_output=False,
    refusal_reason=lambda request: None,
)


def request(request_id: int, num_prompt: int = 1, num_new: int = 1, **values: Any) -> Any:
    made = InferenceRequest.from_tokens(request_id, [7] * num_prompt, num_new, **values)
    validate(made, LIMITS)
    return made


def queue_of(*priorities: float, span: float = 1000, max_size: int = 100) -> RequestQueue:
    queue = RequestQueue(max_size, span)
    for request_id, priority in enumerate(priorities):
        queue.put(request(request_id, priority=priority))
    return queue


def taken(queue: RequestQueue, max_num_requests: int = -1) -> list[int]:
    return [each.request_id for each in queue.take(max_num_requests)]


def test_priority_decides_within_the_span() -> None:
    assert taken(queue_of(0.5, 0.1, 0.9, 0.5, 1.0)) == [4, 2, 0, 3, 1]
    assert taken(queue_of(0.5, 1.0, 1.0, 1.0, span=4)) == [1, 0, 2, 3]
    assert taken(queue_of(0.0, 1.0, span=0)) == [0, 1]


def test_a_queue_that_refuses_keeps_what_it_has_and_takes_others_when_it_does_no_more() -> None:
    queue = queue_of(0.5)
    queue.refuse("not now")
    with pytest.raises(CapacityExceeded, match="not now"):
        queue.put(request(1))
    assert len(queue) == 1
    queue.refuse("")
    queue.put(request(1))
    assert [each.request_id for each in queue.take(5)] == [0, 1]


def test_a_full_queue_refuses_at_once_whatever_the_priority() -> None:
    queue = queue_of(0.0, 0.0, max_size=2)
    with pytest.raises(CapacityExceeded, match="Maximum queue size of 2 has been reached"):
        queue.put(request(2, priority=1.0))
    queue.put(request(3), continues=True)  # an answer that has begun
    assert taken(queue, 2) == [3, 0]
    queue.put(request(2, priority=1.0))
    assert taken(queue) == [2, 1]


def test_places_are_those_of_the_order_and_a_stop_takes_out() -> None:
    queue = queue_of(0.5, 0.1, 0.9)
    assert [queue.find_place(i) for i in range(4)] == [(2, 3), (3, 3), (1, 3), None]
    assert queue.stop(0)
    assert [queue.find_place(i) for i in range(3)] == [None, (2, 2), (1, 2)]
    assert not queue.stop(0), "it does not wait any more: the batch manager is told"
    assert (queue.poll_stop_signals(), queue.poll_stop_signals()) == ({0}, set())
    assert taken(queue) == [2, 1]


def test_the_overdue_leave_with_their_place_and_each_once() -> None:
    queue = RequestQueue(100)
    queue.put(request(1))
    queue.put(request(2, max_queue_time_ms=1))
    queue.put(request(3, allotted_time_ms=1, priority=1.0))
    queue.put(request(4, max_queue_time_ms=60_000, allotted_time_ms=50_000))
    queue.put(request(5, max_queue_time_ms=60_000, allotted_time_ms=1))
    queue.put(request(6, max_queue_time_ms=1, allotted_time_ms=60_000))
    time.sleep(0.002)
    overdue = queue.take_overdue()
    assert [(each.request.request_id, each.place, each.num_waiting) for each in overdue] == [
        (3, 1, 6),
        (2, 3, 6),
        (5, 5, 6),
        (6, 6, 6),
    ]
    assert queue.take_overdue() == []
    assert taken(queue) == [1, 4]


def test_who_has_left_is_not_overdue_and_not_remembered() -> None:
    queue = RequestQueue(100)
    for request_id in range(2000):
        queue.put(request(request_id, max_queue_time_ms=60_000))
        assert queue.stop(request_id)
    assert queue._order == [] == list(queue._entries)
    queue.put(request(1, max_queue_time_ms=1))
    assert taken(queue) == [1]
    queue.put(request(1))  # the same id again, without a deadline
    time.sleep(0.002)
    assert queue.take_overdue() == []
    assert taken(queue) == [1]


class Line:
    """The queue, the active requests and a scheduler, as the server has them one after another."""

    def __init__(
        self,
        policy: CapacitySchedulerPolicy,
        span: float,
        num_places: int,
        num_blocks: int,
        chunking: ContextChunking | None = None,
        max_num_tokens: int | None = None,
    ) -> None:
        manager = BlockManager(num_blocks, 2)
        scheduler = make_scheduler(
            policy,
            manager,
            max_batch_size=num_places,
            max_num_tokens=None if chunking is None else max_num_tokens,
            chunking=chunking,
        )
        self.world = World(scheduler, manager, num_places, span)
        self.queue = RequestQueue(1000, span)
        self.num_places = num_places
        self.arrived: list[LlmRequest] = []
        self.started: dict[int, int] = {}  # in which iteration
        self.num_iterations = 0

    def arrive(self, priority: float, num_prompt: int, num_new: int) -> None:
        made = request(len(self.arrived), num_prompt, num_new, priority=priority)
        self.queue.put(made)
        self.arrived.append(made.llm_request)

    def step(self) -> None:
        for each in self.queue.take(self.num_places - len(self.world.active)):
            assert each.llm_request is not None
            self.world.arrive(each.llm_request)
        batch = self.world.step()
        self.num_iterations += 1
        for setup in batch.setups:
            self.started.setdefault(setup.request_id, self.num_iterations)

    def num_passed_by(self, number: int) -> int:
        """Later requests that started in an iteration before its own."""
        own = self.started[number]
        return sum(other > number and when < own for other, when in self.started.items())


PRIORITIES = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(CapacitySchedulerPolicy),
    span=st.sampled_from([0.0, 1.0, 3.0, 10.0, 1000.0]),
    num_places=st.integers(1, 4),
    num_blocks=st.integers(6, 12),
    chunking=st.none()
    | st.builds(ContextChunking, st.sampled_from(ContextChunkingPolicy), st.integers(1, 4)),
    max_num_tokens=st.integers(4, 8),
    waves=st.lists(
        st.lists(st.tuples(PRIORITIES, st.integers(1, 8), st.integers(1, 4)), max_size=6),
        max_size=10,
    ),
)
@example(  # beside the first of two long prompts, which is cut, short ones do not pass the other
    policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    span=0.0,
    num_places=4,
    num_blocks=12,
    chunking=ContextChunking(unit_size=4),
    max_num_tokens=6,
    waves=[[(0.5, 8, 1), (0.5, 8, 1)], [(0.5, 1, 1)], [(0.5, 1, 1)]],
)
def test_the_documented_number_of_later_requests_holds_from_end_to_end(
    policy: CapacitySchedulerPolicy,
    span: float,
    num_places: int,
    num_blocks: int,
    chunking: ContextChunking | None,
    max_num_tokens: int,
    waves: list[list[tuple[float, int, int]]],
) -> None:
    """Fewer than ``span * (1 - p)`` later requests start before a request, the queue included."""
    line = Line(policy, span, num_places, num_blocks, chunking, max_num_tokens)
    for wave in waves:
        for priority, num_prompt, num_new in wave:
            line.arrive(priority, num_prompt, num_new)
        line.step()
    while len(line.started) < len(line.arrived):
        line.step()
    for number, arrived in enumerate(line.arrived):
        num_passed_by = line.num_passed_by(number)
        assert num_passed_by == 0 or num_passed_by < span * (1 - arrived.priority)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda each: each.name)
def test_a_flood_of_high_priority_passes_a_low_one_by_no_more_than_the_span(
    policy: CapacitySchedulerPolicy,
) -> None:
    """The flood never ends and is faster than the server; the low one starts in its turn."""
    span = 50
    line = Line(policy, span, num_places=2, num_blocks=8)
    line.arrive(1.0, 2, 3)
    line.arrive(0.0, 2, 3)
    while 1 not in line.started:
        for _ in range(3):
            line.arrive(1.0, 2, 3)
        line.step()
        assert len(line.arrived) < 1000, "it starves"
    assert span - 2 <= line.num_passed_by(1) < span


def test_who_waits_for_a_grammar_keeps_its_place_and_holds_up_nobody() -> None:
    ready: Future[Any] = Future()
    queue = queue_of()
    for request_id in range(4):
        made = request(request_id)
        if request_id in (0, 2):
            made.guide = PendingGuide(ready)
        queue.put(made)
    assert taken(queue, 1) == [1]
    assert taken(queue) == [3]
    assert queue.find_place(2) == (2, 2)
    assert queue.is_preparing(2)
    assert taken(queue) == []
    queue.put(request(4))
    ready.set_result(None)
    assert not queue.is_preparing(2)
    assert taken(queue, 2) == [0, 2]
    assert taken(queue) == [4]


def test_a_request_that_leaves_twice_does_not_free_the_id_of_the_next_one() -> None:
    """One that the queue refuses does: when it is refused, and when it hears so."""
    ids = RequestIds()
    first = ids.reserve("a")
    ids.release("a", first)
    second = ids.reserve("a")
    ids.release("a", first)
    assert ids.find("a") == second
    with pytest.raises(RequestInFlight):
        ids.reserve("a")
    ids.release("a", second)
    assert ids.find("a") is None


PROMPT = [5, 6, 7]

TIMES = ("first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


@pytest.fixture
def server(make_server: MakeServer, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The demo model behind a gate."""
    config = EngineConfig(
        device="cpu", max_batch_size=3, max_beam_width=3, max_tokens_in_paged_kv_cache=1024
    )
    engine: Any = Engine.load(DEMO_MODEL, config)
    submit = engine.submit

    def wait_and_submit(batch: Any) -> Any:
        gate(batch)
        return submit(batch)

    monkeypatch.setattr(engine, "submit", wait_and_submit)
    return make_server(engine, max_beam_width="3", tokenizer_dir=str(DEMO_MODEL))


@pytest.mark.parametrize(
    "wants",
    [
        {"return_perf_metrics": True},
        {"return_num_input_tokens": True, "return_num_output_tokens": True},
        {"return_log_probs": True},
        {"return_log_probs": True, "num_top_log_probs": 2, "return_log_prob_ranks": True},
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"return_finish_reason": True},
        {"return_log_probs": True, "return_perf_metrics": True, "beam_width": 3},
        {"beam_width": 3},
        {"return_log_probs": True, "return_num_output_tokens": True, "stop_words": ["9 1"]},
    ],
    ids=lambda wants: "-".join(wants),
)
def test_it_has_every_output_it_asked_for(
    server: Server, gate: Gate, wants: dict[str, Any]
) -> None:
    values = {"input_ids": PROMPT, "request_output_len": 3, **wants}
    [whole] = responses_of(server.ask(**values))
    gate.close_after(0)
    busy = server.send(input_ids=[5], request_output_len=2)
    assert gate.is_reached.wait(WAIT)
    late = server.send("late", **values)
    wait_until_queued(server, 1)
    server.ask("late", stop=True)
    assert late.is_final.wait(WAIT)
    gate.set()
    assert busy.is_final.wait(WAIT)
    [sent] = responses_of(late)
    assert sent.keys() == whole.keys()
    for name, tensor in sent.items():
        assert tensor.dtype == whole[name].dtype, name
        assert tensor.ndim == whole[name].ndim, name
    num_beams = wants.get("beam_width", 1)
    assert sent["output_ids"].tolist() == [[PROMPT] * num_beams], "as of any whole answer"
    assert sent["sequence_length"].tolist() == [[len(PROMPT)] * num_beams]
    num_new = whole["output_ids"].shape[2] - len(PROMPT)
    assert whole["output_log_probs"].shape == (1, num_beams, num_new)
    assert sent["output_log_probs"].shape == (1, num_beams, 0)
    assert sent["cum_log_probs"].tolist() == [[0] * num_beams]
    for name in ("top_log_probs", "output_log_prob_ranks"):
        assert sent.get(name, sent["output_ids"][:, :, :0]).size == 0
    for name in ("context_logits", "generation_logits"):
        assert sent[name].size == (0 if f"return_{name}" in wants else 1)
    if "num_input_tokens" in sent:
        assert sent["num_input_tokens"].tolist() == [[len(PROMPT)]]
    if "num_output_tokens" in sent:
        assert sent["num_output_tokens"].tolist() == [[0]]
    if "arrival_time_ns" in sent:
        assert sent["arrival_time_ns"].item() > whole["last_token_time_ns"].item()
        assert [sent[name].item() for name in TIMES] == [0, 0, 0]
    if "finish_reason" in sent:
        assert sent["finish_reason"].tolist() == [[b"cancelled"]]


@pytest.fixture
def make_guiding(
    make_server: MakeServer, tmp_path: Path, gate: Gate
) -> Iterator[Callable[..., Server]]:
    """A factory of servers that guide, with one place and a queue of four."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)

    def make(**parameters: str) -> Server:
        engine = CountingEngine(vocab_size=300, before_step=gate)
        return make_server(engine, max_batch_size="1", max_queue_size="4", **parameters)

    yield make
    gate.set()


@pytest.fixture
def guiding(make_guiding: Callable[..., Server]) -> Server:
    """A server of that kind."""
    return make_guiding()


def send(server: Server, text: str, **values: Any) -> FakeSender:
    """A request with the regex ``text``, which is also its id."""
    values = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": text, **values}
    return server.send(text, input_ids=[1], end_id=0, request_output_len=5, **values)


def test_what_a_full_queue_refuses_is_not_compiled(
    guiding: Server, gate: threading.Event, held: HeldCompiler
) -> None:
    gate.clear()
    taken = [guiding.send(input_ids=[1], request_output_len=2)]
    wait_until(lambda: guiding.model._manager.get_num_active_requests() == 1)
    taken += [guiding.send(input_ids=[1], request_output_len=2) for _ in range(4)]
    wait_until_queued(guiding, 4)
    for number in range(50):
        text, code = error_of(send(guiding, f"a{{{number}}}"))
        assert "Maximum queue size of 4 has been reached" in text
        assert code == FakePbUtils.TritonError.UNAVAILABLE
    gate.set()
    held.go_on.set()
    assert all(sender.is_final.wait(WAIT) for sender in taken)
    assert send(guiding, "last").is_final.wait(WAIT)
    assert held.begun == ["last"]


def test_what_was_stopped_cancelled_or_overdue_is_not_compiled(
    guiding: Server, held: HeldCompiler
) -> None:
    first = [send(guiding, text) for text in "ab"]
    wait_until(lambda: sorted(held.begun) == ["a", "b"])
    stopped, overdue = send(guiding, "c"), send(guiding, "d", max_queue_time_ms=1)
    guiding.send("c", stop=True)
    assert stopped.is_final.wait(WAIT)
    assert overdue.is_final.wait(WAIT)
    assert error_of(overdue)[0].endswith("in the queue, and its grammar is being compiled")
    [answer] = guiding.ask("a", why=True).responses
    assert b'"its grammar is being compiled"' in answer.output_tensors[0].as_numpy()[0, 0]
    cancelled = send(guiding, "e")
    cancelled.cancelled = True
    assert cancelled.is_final.wait(WAIT)
    last = send(guiding, "f")
    held.go_on.set()
    assert all(sender.is_final.wait(WAIT) for sender in (*first, last))
    assert sorted(held.begun) == ["a", "b", "f"]


def test_a_grammar_that_takes_its_time_is_no_stall(
    make_guiding: Callable[..., Server], held: HeldCompiler
) -> None:
    server = make_guiding(stall_seconds="0.2")
    sender = send(server, "a")
    wait_until(lambda: held.begun == ["a"])
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        assert server.model.is_ready()
        time.sleep(0.01)
    held.go_on.set()
    assert sender.is_final.wait(WAIT)
    assert sender.responses[-1].error is None
