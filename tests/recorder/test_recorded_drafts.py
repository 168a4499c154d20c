"""Recordings of steps with drafts are decided again, exactly, and can be followed."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from inflight_recorder.header import Header
from inflight_recorder.lines import LineReader, LineWriter
from recorder.recorded import (
    GUARANTEED,
    MAX_UTILIZATION,
    RecordedWorld,
    play,
    read,
    tiny_ring,
)
from scheduler.fake_engine import VOCAB_SIZE, draw
from scheduler.world import make_request

from inflight_recorder import recorder as recorder_module
from inflight_recorder.cost_model import CostModel
from inflight_recorder.replay import replay
from inflight_recorder.schema import Decision, Drafts, Iteration, Settings
from inflight_recorder.settings import Lists, RecordingError
from inflight_recorder.timeline import build_timeline
from inflight_recorder.workload import read_workload
from inflight_scheduler import ContextChunking, ContextChunkingPolicy, LlmRequest, ScheduledBatch


class DraftingWorld(RecordedWorld):
    """Some get drafts, right ones and wrong ones; then nothing overlaps (see `OverlappedSteps`)."""

    def __init__(self, settings: Settings, seed: int, prices: CostModel | None = None) -> None:
        super().__init__(settings, prices=prices)
        self.dice = random.Random(seed)
        self.num_accepted = 0
        self.recorder._num_blocks_of = self.manager.num_blocks_of

    def iterate(self, stops: Iterable[LlmRequest] = (), fault: str = "") -> Lists:
        if self.dice.random() < 0.4:
            self._guess()
        if not self.active.num_with_drafts:
            return super().iterate(stops, fault)
        self.recorder.settled(self.active)
        if self.running is not None:
            before, self.running = self.running, None
            for request in self.planner.settle(before, self._draw(before)):
                if request.is_finished:
                    self.end(request)
            self.recorder.finish_iteration()
            return [], [], []
        is_overlapped, self.is_overlapped = self.is_overlapped, False
        lists = super().iterate(stops, "failed" if fault else "")
        self.is_overlapped = is_overlapped
        return lists

    def end(self, request: LlmRequest, error: str = "") -> None:
        self.num_accepted += request.num_accepted_drafts
        super().end(request, error)

    def _guess(self) -> None:
        budget = self.scheduler.micro_batch_scheduler.max_num_tokens or 2**20  # type: ignore[attr-defined]
        for request in self.active:
            is_fresh = request.is_context_init_state and request.seq_slot is None
            if request.num_pending_tokens or not (
                is_fresh or request.is_generation_in_progress_state
            ):
                continue
            limit = budget - (request.prompt_len if is_fresh else 1)
            text = list(request.tokens)
            for _ in range(self.dice.randint(0, max(0, min(4, limit)))):
                is_right = self.dice.random() < 0.7
                text.append(draw(text, -1, 0) if is_right else self.dice.randrange(VOCAB_SIZE))
            request.set_draft_tokens(text[request.num_tokens :])

    def _draw(self, batch: ScheduledBatch, fault: str = "") -> list[int]:
        owners, tokens = self.planner.token_owners(batch), list[int]()
        for run in (run for run in batch.runs if run.is_last):
            text = owners[len(tokens)].tokens[: run.start + len(run.tokens)]
            ends = range(len(run.drafts) + 1)
            tokens += [draw([*text, *run.drafts[:end]], -1, 0) for end in ends]
        plain = owners[len(tokens) :]
        return tokens + [draw(r.tokens[: r.num_drawn_tokens], -1, 0) for r in plain]


@pytest.mark.parametrize("is_overlapped", [False, True])
@hypothesis_settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([GUARANTEED, MAX_UTILIZATION]),
    num_blocks=st.integers(3, 16),
    tokens_per_block=st.sampled_from([1, 2, 4]),
    max_num_tokens=st.none() | st.integers(4, 40),
    chunking=st.none() | st.just(ContextChunking(unit_size=3)),
    reuse=st.sampled_from([(False, False), (True, True)]),
    seed=st.integers(0, 2**16),
    has_faults=st.booleans(),
    has_wrapped=st.booleans(),
    is_equal=st.booleans(),
)
def test_replay_is_identical(
    is_overlapped: bool,
    policy: object,
    num_blocks: int,
    tokens_per_block: int,
    max_num_tokens: int | None,
    chunking: ContextChunking | None,
    reuse: tuple[bool, bool],
    seed: int,
    has_faults: bool,
    has_wrapped: bool,
    is_equal: bool,
) -> None:
    """Also where somebody urgent comes in a turn in which nothing is decided."""
    settings = Settings(
        policy,  # type: ignore[arg-type]
        num_blocks,
        tokens_per_block,
        5,
        max_num_tokens,
        chunking,
        *reuse,
        is_overlapped=is_overlapped,
        priority_span=5,
    )
    priorities = (0.5,) if is_equal else (0.0, 0.5, 0.9)

    def text() -> str:
        world = DraftingWorld(settings, seed)
        rate = 0.05 if has_faults else 0.0
        play(
            settings,
            num_requests=12,
            seed=seed,
            world=world,
            priorities=priorities,
            fault_rate=rate,
        )
        return world.text

    if has_wrapped:
        with tiny_ring():
            recording = text()
    else:
        recording = text()
    result = replay(read(recording))
    assert result.divergence is None, str(result)
    history = build_timeline(read(recording))
    assert history.num_iterations == result.num_iterations
    read_workload(read(recording))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_that_drafts_are_recorded_at_all(is_overlapped: bool) -> None:
    settings = Settings(MAX_UTILIZATION, 12, 4, 5, is_overlapped=is_overlapped)
    world = DraftingWorld(settings, 3)
    play(settings, num_requests=20, seed=3, world=world)
    iterations = list(read(world.text))
    gained = [each.num_gained for iteration in iterations for each in iteration.drafts]
    assert sum(gained) > world.num_accepted > 5
    num_settled = sum(iteration.is_settled for iteration in iterations)
    assert 5 < num_settled < len(iterations) - 5
    assert any(i.is_settled and i.decision is None for i in iterations) == is_overlapped


def test_a_ring_knows_the_blocks_of_drafts_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk takes room for them, and the last one leaves them none."""
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 1)
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 1)
    chunking = ContextChunking(ContextChunkingPolicy.FORCE_CHUNK, 3)
    world = RecordedWorld(Settings(GUARANTEED, 20, 1, 2, chunking=chunking))
    world.recorder._num_blocks_of = world.manager.num_blocks_of
    request = make_request(1, 6, 8)
    request.set_draft_tokens((1, 2))
    world.arrive(request)
    for _ in range(3):
        world.iterate()
    assert (request.num_verified_drafts, request.num_tokens) == (0, 8)
    assert world.manager.num_blocks_of(1) == 8, "nothing is left over: the test shows nothing"
    assert str(replay(read(world.text))) == "identical, 1 iteration (1 request, 0 pauses)"


def test_drafts_come_back_as_they_were_written() -> None:
    writer, reader = LineWriter(), LineReader()
    drafts = (Drafts(1, 4, 4, 3), Drafts(9, 8, 2, 0))
    iteration = Iteration(
        1, 2, 3, (), Decision((), (1,), ()), 4, (), drafts=drafts, is_settled=True
    )
    line = writer.iteration(iteration)
    assert '"n":[1,4,4,3,9,8,2,0],"s":1' in line
    assert reader.iteration(line) == iteration


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ("[1,2]", "n must hold a request, its drafts"),
        ("[1,0,0,0]", "n is 0"),
        ("[1,2,3,0]", "n is 3"),
        ("[1,9999999,1,1]", "must be between 1 and 4096"),
        ("[7,1,1,1]", "request 7 has drafts, but it is not active"),
    ],
)
def test_what_cannot_be(drafts: str, message: str) -> None:
    settings = Settings(GUARANTEED, 12, 4, 6)
    header, first, *rest = play(settings, num_requests=2).text.splitlines(keepends=True)
    first = first.replace("}", f',"n":{drafts}}}')
    with pytest.raises(RecordingError, match=message.replace("(", "\\(")):
        replay(read(header + first + "".join(rest)))


SETTLED_FIRST = (
    '{"i":1,"t":0,"d":0,"a":[[1,4,1,0,0.5,2],[2,4,4]],"c":[1,4],"f":15}',
    '{"i":2,"t":0,"d":0,"c":[2,4],"f":15}',
)

SEARCH_WITH_DRAFTS = (
    '{"i":1,"t":0,"d":0,"a":[[1,5,8,0,0.5,3]],"c":[1,5],"f":12}',
    '{"i":2,"t":0,"d":0,"g":[1],"m":[[1,0,0,0]],"n":[1,3,3,1],"f":9}',
)


@pytest.mark.parametrize(
    ("lines", "is_overlapped", "message"),
    [
        (SEARCH_WITH_DRAFTS, True, "request 1 has drafts, but it searches with beams"),
        (SETTLED_FIRST, True, "request 1 ended before this decision"),
        (('{"i":1,"t":0,"d":0,"a":[[1,4,4]],"c":[1,4],"n":[1,2,2,1],"f":14}',), True, "runs on"),
        (
            ('{"i":1,"t":0,"d":0,"a":[[1,4194304,1,0,0.5,1024]],"x":1,"f":0}',),
            False,
            "the tables of all beams have more than 16777216",
        ),
    ],
)
def test_no_file_leads_where_the_loop_never_goes(
    lines: tuple[str, ...], is_overlapped: bool, message: str
) -> None:
    """Nor to tables larger than any pool: blocks that beams share cost nothing there."""
    num_blocks = 16 if is_overlapped else 2**22
    settings = Settings(GUARANTEED, num_blocks, 4, 1, is_overlapped=is_overlapped)
    text = LineWriter().header(Header(settings)) + "".join(f"{line}\n" for line in lines)
    with pytest.raises(RecordingError, match=message):
        replay(read(text))
