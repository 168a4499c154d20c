"""Recordings as text: the way there and back, and everything that is no recording."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from fuzz.fuzzing import fuzzing
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from inflight_recorder.header import Header
from inflight_recorder.lines import LineReader, LineWriter
from recorder.recorded import GUARANTEED, MAX_UTILIZATION, play, read, tiny_ring
from recorder.searching import SearchingWorld
from recorder.test_recorded_drafts import DraftingWorld

from inflight_recorder import steps
from inflight_recorder.cost_model import CostModel
from inflight_recorder.exporters import write_svg
from inflight_recorder.replay import replay
from inflight_recorder.schema import (
    END_REASONS,
    Arrival,
    Chunk,
    Decision,
    End,
    Iteration,
    Settings,
)
from inflight_recorder.settings import RecordingError
from inflight_recorder.storage import RecordingReader
from inflight_recorder.timeline import build_timeline
from inflight_recorder.whatif import predict
from inflight_recorder.workload import read_workload
from inflight_scheduler import ContextChunking

SETTINGS = Settings(MAX_UTILIZATION, 12, 4, 6, 40)
TEXT = play(SETTINGS, num_requests=20, seed=9).text
REUSING = Settings(MAX_UTILIZATION, 12, 4, 6, 40, ContextChunking(unit_size=3), True, True)


def middle_of_a_ring() -> str:
    with tiny_ring():
        return play(REUSING, num_requests=60, seed=9, max_iterations=50).text


def beams_and_drafts() -> Iterator[str]:
    """Searches and drafts, each in both loops; with and without shared blocks."""
    for is_overlapped, reuse in itertools.product([False, True], repeat=2):
        settings = Settings(
            MAX_UTILIZATION, 40, 4, 6, 40, None, reuse, reuse, is_overlapped=is_overlapped
        )
        for world in (SearchingWorld(settings), DraftingWorld(settings, seed=9)):
            yield play(settings, num_requests=10, seed=9, world=world, fault_rate=0.05).text


TEXTS = [TEXT, play(REUSING, num_requests=20, seed=9).text, middle_of_a_ring()]
TEXTS += beams_and_drafts()

PRICES = CostModel(900.0, 120.0, 40.0, 25.0, 1.0)

KEYS = "itdacg-+pfexyzlbmnsw"
"""Of an iteration: all there are."""

ids = st.lists(st.integers(0, 2**64 - 1), max_size=8, unique=True).map(tuple)


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(ids, max_size=5))
def test_who_generates_comes_back_in_order(lists: list[tuple[int, ...]]) -> None:
    writer, reader = LineWriter(), LineReader()
    for number, generation in enumerate(lists, start=1):
        iteration = Iteration(number, number, 1, (), Decision((), generation, ()), 3, ())
        assert reader.iteration(writer.iteration(iteration)) == iteration


def test_everything_comes_back() -> None:
    writer, reader = LineWriter(), LineReader()
    header = Header(
        Settings(GUARANTEED, 5, 4, 3, None, ContextChunking(unit_size=3), True, True, "a:B"),
        "0.1",
        "2026-01-01T00:00:00Z",
    )
    assert reader.header(writer.header(header)) == header
    iterations = [
        Iteration(
            7,
            12,
            3,
            (Arrival(1, 2, 3), Arrival(2, 2, 3, 9, 0.75), Arrival(3, 2, 3, 0, 0.5, 1, 0)),
            Decision((Chunk(1, 2), Chunk(3, 1)), (9, 8), (2,)),
            4,
            (End(1, "cancelled"), End(3, "error")),
        ),
        Iteration(8, 12, 0, (), None, 4, ()),
        Iteration(9, 13, 0, (), Decision((), (9, 8), ()), 4, ()),
    ]
    lines = [writer.iteration(iteration) for iteration in iterations]
    assert [reader.iteration(line) for line in lines] == iterations
    assert lines[2] == '{"i":9,"t":13,"d":0,"f":4}\n'  # nothing changed, nothing told


def test_a_steady_iteration_costs_few_bytes() -> None:
    generation = tuple(range(1000, 1256))
    writer = LineWriter()
    writer.iteration(Iteration(1, 0, 0, (), Decision((), generation, ()), 3, ()))
    changed = (*generation[:7], 5, *generation[8:])
    line = writer.iteration(Iteration(2, 0, 0, (), Decision((), changed, ()), 3, ()))
    assert json.loads(line)["-"] == [1007]
    assert json.loads(line)["+"] == [7, 5]


@pytest.mark.case(114)
def test_no_text_of_the_user_is_in_a_recording() -> None:
    """Numbers, fixed keys and fixed words only."""
    words = set()
    for line in [line for text in TEXTS for line in text.splitlines()[1:]]:
        content = json.loads(line)
        words |= set(content) | {end[1] for end in content.get("e", [])}
        values = [x for key in "alm" for row in content.get(key, []) for x in row]
        assert all(x is None or type(x) in (int, float) for x in values)
        assert all(type(x) is int for key in "cp+-gn" for x in content.get(key, []))
    assert words <= set(KEYS) | {"cancelled", "end_id", "error", "not_finite"}


def changed_header(**changes: object) -> str:
    header, _, rest = TEXT.partition("\n")
    content = json.loads(header)
    content["settings"].update(changes)
    return json.dumps(content) + "\n" + rest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "test.jsonl is empty"),
        ("{}\n", "line 1: this is no recording"),
        ("[]\n", "line 1: a JSON object is expected"),
        ("not json\n", "line 1: this is no JSON"),
        ("[" * 100_000 + "\n", "line 1: this is no JSON"),
        (TEXT[:-10], "the line is cut off"),
        (TEXT.replace('"inflight_recording":1', '"inflight_recording":2'), "format version 2"),
        (TEXT.replace('"i":3', '"i":4'), "line 4: iteration 4 follows iteration 2"),
        (TEXT.replace('"t":', '"T":', 1), "line 2: the key 'T' is unknown here; use the software"),
        (TEXT.replace('"f":', '"f":-', 1), "line 2: f is -"),
        (TEXT.replace('"f":', '"f":1e3,"d":', 1), "line 2: f: a whole number is expected"),
        (TEXT.replace('"d":', '"d":true,"d":"', 1), "line 2: this is no JSON"),
        (changed_header(scheduler_class="a:\ud800"), r"line 1: a text is expected, not 'a:\ud800'"),
        (changed_header(scheduler_class="a:\0"), r"line 1: a text is expected, not 'a:\x00'"),
        (changed_header(num_blocks=10**18), "line 1: num_blocks is 1000000000000000000"),
        (changed_header(num_blocks=0), "line 1: num_blocks is 0"),
        (changed_header(max_batch_size=10**9), "line 1: max_batch_size is 1000000000"),
        (changed_header(max_num_tokens="many"), "max_num_tokens: a whole number is expected"),
        (changed_header(policy="best"), "policy is 'best': it must be one of"),
        (changed_header(chunking=["first_come_first_served", 0, None]), "chunking is 0"),
        (changed_header(chunking=["no", 1, None]), "chunking is 'no': it must be one of"),
        (changed_header(chunking=["force_chunk", 3, 2]), "chunking: unit_size 3 exceeds"),
        (changed_header(chunking=["force_chunk", 41, None]), "contradict one another"),
        (changed_header(enable_reuse=1), "enable_reuse: true or false is expected"),
        (changed_header(colour="red"), "the setting 'colour' is unknown here"),
        (
            TEXT.replace('"active":', '"more":1,"active":'),
            "the key of the header 'more' is unknown",
        ),
        (TEXT.replace('"a":[[1,', '"a":[[1,2,3,0,0.5,1,null,0,0,7],[1,'), "has 10 values, known"),
        (TEXT.replace('"a":[[1,', '"a":[[1,2,3,0,NaN],[1,'), "line 2: a priority is nan"),
        (TEXT.replace('"f":', '"f":1' + "0" * 4000 + ',"x":', 1), "line 2: f is 1000"),
        (TEXT.replace('"f":', '"f":1' + "0" * 5000 + ',"x":', 1), "line 2: this is no JSON"),
        (TEXT.replace('"active":[]', '"active":[],"cache":{}'), "line 1: cache: an object is"),
        (TEXT.replace('"active":[]', '"active":[],"running":1'), "line 1: running: true or false"),
        (TEXT.replace('"active":[]', '"active":[],"running":true'), "line 1: running: only in an"),
        (TEXT.replace('"a":[[1,', '"a":[[1,2,3],[1,', 1), "line 2: request 1 arrives while it is"),
        (TEXT.replace('"c":', '"-":[7],"c":', 1), "line 2: - must hold requests that generated"),
        (changed_header(num_blocks=1), "is larger than the whole pool"),
    ],
)
@pytest.mark.case(111, 112)
def test_what_is_no_recording_gets_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(RecordingError) as caught:
        replay(read(text))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def predict_other(text: str) -> None:
    """What-if, under the recorded settings or others."""
    settings, workload = read(text).header.settings, read_workload(read(text))
    fewer = max(1, settings.num_blocks * 2 // 3)
    changes: list[dict[str, Any]] = [
        {},
        {"is_overlapped": not settings.is_overlapped},
        {"policy": GUARANTEED, "num_blocks": fewer, "max_batch_size": 3},
    ]
    other = replace(settings, **changes[len(text) % 3])
    predict(other, workload.jobs, PRICES, book=workload.book)


def outcome(text: str) -> str:
    """What a user reads about this recording, whichever way it is read."""
    with suppress(RecordingError):
        write_svg(build_timeline(read(text)))
    with suppress(RecordingError):
        predict_other(text)
    try:
        return str(replay(read(text)))
    except RecordingError as error:
        return str(error)


def test_a_step_that_failed_ends_its_requests() -> None:
    line = next(line for line in TEXT.splitlines() if '"c":' in line)
    text = TEXT.replace(line, line[:-1] + ',"y":1}')
    with pytest.raises(RecordingError, match="survives a failed step"):
        replay(read(text))


@pytest.mark.parametrize("told", ['"c":[1,9]', '"g":[1]', '"+":[0,2]', '"p":[1]'])
def test_no_decision_is_hidden(told: str) -> None:
    """One behind an x would be compared with nothing."""
    line = f'{{"i":1,"t":0,"d":0,"x":1,{told},"f":12}}\n'
    assert "x: nothing was decided, but there is" in outcome(TEXT.partition("\n")[0] + "\n" + line)


@pytest.mark.case(111)
def test_nothing_is_decided_where_the_step_of_a_search_was_lost() -> None:
    """It has to be known before the decision, and takes its requests with it."""
    header = LineWriter().header(Header(Settings(MAX_UTILIZATION, 40, 4, 6, is_overlapped=True)))
    text = header + (
        '{"i":1,"t":0,"d":1,"a":[[1,4,9,0,0.5,3]],"c":[1,4],"f":39}\n'
        '{"i":2,"t":1,"d":1,"g":[1],"f":36,"m":[[1,0,0,0]]}\n'
        '{"i":3,"t":2,"d":1,"f":36,"e":[[1,"cancelled"]],"z":1}\n'
    )
    end = outcome(text)
    assert end == "test.jsonl, line 4: a decision, though the step it needs was lost"


@pytest.mark.case(112)
@pytest.mark.parametrize("follow", [build_timeline, read_workload])
def test_a_prompt_that_begins_again_and_again_is_refused_in_time(
    follow: Callable[[RecordingReader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 50 bytes takes all blocks there are, and the next one gives them back."""
    monkeypatch.setattr(steps, "MIN_PROMPT_BLOCKS", 100)
    monkeypatch.setattr(steps, "PROMPT_BLOCKS_PER_PLAN", 2)
    settings = Settings(MAX_UTILIZATION, 64, 1, 4, None, ContextChunking(unit_size=1))
    writer = LineWriter()
    lines = [writer.header(Header(settings))]
    begins, pauses = Decision((Chunk(1, 1),), (), ()), Decision((), (), (1,))
    for number in range(1, 100):
        arrivals = (Arrival(1, 50, 5),) if number == 1 else ()
        decision, num_free = (begins, 14) if number % 2 else (pauses, 64)
        lines.append(
            writer.iteration(Iteration(number, number, 1, arrivals, decision, num_free, ()))
        )
    follow(read("".join(lines[:5])))
    message = "line 6: prompts of more than 100 blocks, and 2 for each iteration, have begun"
    with pytest.raises(RecordingError, match=message):
        follow(read("".join(lines)))


@fuzzing
@given(st.data())
@pytest.mark.case(111)
@pytest.mark.case(122)
def test_damaged_recordings_end_well(data: st.DataObject) -> None:
    """Bytes changed, lines lost, doubled or moved: a clear error, or an answer; never a crash."""
    content = bytearray(data.draw(st.sampled_from(TEXTS)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "digit", "cut", "line"])):
            case "flip":
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "digit":
                digits = [k for k in range(place, min(place + 50, len(content)))
                          if chr(content[k]).isdigit()]  # fmt: skip
                for k in digits[:1]:
                    content[k : k + 1] = str(data.draw(st.integers(0, 10**19))).encode()
            case "cut":
                content = content[: max(place, 1)]
            case "line":
                lines = content.splitlines(keepends=True)
                source = data.draw(st.integers(0, len(lines) - 1))
                lines.insert(data.draw(st.integers(0, len(lines))), lines[source])
                content = bytearray(b"".join(lines))
    end = outcome(content.decode("latin-1").encode("ascii", "replace").decode())
    assert end.startswith(("test.jsonl", "identical", "iteration"))


@fuzzing
@given(st.data())
def test_any_cache_at_the_start_is_one_or_an_error(data: st.DataObject) -> None:
    """Numbers of one list changed, lost, doubled, or moved into another."""
    header, _, rest = TEXTS[2].partition("\n")
    content = json.loads(header)
    cache = content["cache"]
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(cache)))
        values = cache[key]
        if not isinstance(values, list) or not values:
            cache[key] = data.draw(st.none() | st.integers(-1, 50) | st.just([0]))
            continue
        place = data.draw(st.integers(0, len(values) - 1))
        number = data.draw(st.integers(-1, 14) | st.sampled_from([2**24, 2**37, 10**19]))
        match data.draw(st.sampled_from(["set", "insert", "delete", "copy"])):
            case "set":
                values[place] = number
            case "insert":
                values.insert(place, number)
            case "delete":
                del values[place]
            case "copy":
                values[place] = values[-1]
    end = outcome(json.dumps(content) + "\n" + rest)
    assert end.startswith(("test.jsonl, line", "identical", "iteration"))


def test_a_block_that_is_held_and_said_to_keep_another_text_keeps_one_of_them() -> None:
    """It was found by its old text after it had been given up: a `KeyError` or a failed assertion,
    where whoever reads a recording is owed a difference or one clear line."""
    header, _, rest = TEXTS[2].partition("\n")
    content = json.loads(header)
    kept = content["cache"]["kept"]
    for place, number in itertools.product(range(4), range(15)):
        kept[2], kept[-2] = place, number  # of the first block and of the last one
        end = outcome(json.dumps(content) + "\n" + rest)
        assert end.startswith(("test.jsonl, line", "identical", "iteration"))


def facts_of(ids: Sequence[int]) -> dict[str, st.SearchStrategy[object]]:
    """What each key but those of time may hold, in the right shape; true or not of ``ids``."""
    some = st.sampled_from([*ids, 0])
    few = st.integers(0, 9)

    def lists(*fields: st.SearchStrategy[object]) -> st.SearchStrategy[list[tuple[object, ...]]]:
        return st.lists(st.tuples(*fields), min_size=1, max_size=3)

    def flat(*fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return lists(*fields).map(lambda rows: list(itertools.chain(*rows)))

    return {
        "a": lists(few, few, few, few, st.just(0.5), few),
        "e": lists(some, st.sampled_from(sorted(END_REASONS))),
        "f": few,
        "l": lists(some, few, few),
        "m": lists(some, few, few) | lists(some, few, few, few),
        "n": flat(some, st.integers(1, 9), st.integers(0, 1), few),
        **dict.fromkeys("c+", flat(some, few)),
        **dict.fromkeys("-gp", flat(some)),
        **dict.fromkeys("bswxyz", st.just(1)),
    }


@fuzzing
@given(st.data())
@pytest.mark.case(111)
def test_other_facts_are_possible_or_an_error(data: st.DataObject) -> None:
    """Lines of any kind of recording that tell something else of those who run then."""
    text = data.draw(st.sampled_from(TEXTS))
    lines, iterations = text.splitlines(), list(read(text))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(1, len(iterations)))
        decision = iterations[place - 1].decision
        chunks, generation, paused = decision or ((), (), ())
        ids = [*(chunk.request_id for chunk in chunks), *generation, *paused]
        facts = facts_of(ids)
        key = data.draw(st.sampled_from("mnyz") | st.sampled_from(sorted(facts)))
        content = json.loads(lines[place])
        content.pop(key, None)
        if data.draw(st.integers(0, 3)):
            content[key] = data.draw(facts[key])
            if key in "yz":  # alone it is never true
                content["e"] = data.draw(st.just([(i, "error") for i in ids]) | facts["e"])
        lines[place] = json.dumps(content)
    end = outcome("\n".join(lines) + "\n")
    assert end.startswith(("test.jsonl, line", "identical", "iteration"))


@fuzzing
@given(
    st.dictionaries(
        st.sampled_from(KEYS),
        st.recursive(
            st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=4,
        ),
    ),
    st.sampled_from(TEXTS),
)
@pytest.mark.case(122)
def test_any_json_is_an_iteration_or_an_error(content: dict[str, object], text: str) -> None:
    header = text.partition("\n")[0] + "\n"
    line = json.dumps({"i": 1, "t": 0, "d": 0, "f": 12, **content}) + "\n"
    assert outcome(header + line).startswith(("test.jsonl, line 2", "identical", "iteration "))
