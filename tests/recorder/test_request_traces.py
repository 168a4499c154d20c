"""Published request traces become jobs: arrivals, lengths and shared prompt blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from inflight_recorder import request_traces
from inflight_recorder.cost_model import CostModel
from inflight_recorder.request_traces import TraceOptions, read_trace
from inflight_recorder.settings import RecordingError, Settings
from inflight_recorder.simulator import split_hashes
from inflight_recorder.whatif import predict
from inflight_recorder.workload import Workload
from inflight_scheduler.policies.scheduler import CapacitySchedulerPolicy

MOONCAKE = {"timestamp": 3000, "input_length": 6758, "output_length": 500}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def traced(path: Path, text: str | bytes, **options: object) -> Workload:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path, TraceOptions(**options))  # type: ignore[arg-type]


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
            "2023-11-16 18:15:50.9951690,396,109\r\n",
            [(0, 374, 44), (4_314_579, 396, 109)],
        ),
        (
            "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2,10\n"
            "2024-05-10T02:00:01Z,3,8\n2024-05-10 02:00:02.5+01:00,4,7\n",
            [(0, 2, 10), (3_602_490_070, 4, 7), (7_200_990_070, 3, 8)],
        ),
        (
            lines(MOONCAKE, {**MOONCAKE, "timestamp": 5999.5, "session_id": "a"}),
            [(0, 6758, 500), (2_999_500, 6758, 500)],
        ),
    ],
    ids=["azure 2023", "azure 2024", "mooncake"],
)
def test_published_ones(path: Path, text: str, wanted: list[object]) -> None:
    """Heads of the files, or rows of the pages that describe them."""
    found = traced(path, text)
    jobs = [(job.arrival_us, job.prompt_len, job.num_new_tokens) for job in found.jobs]
    assert jobs == wanted
    assert all(job.max_new_tokens == job.num_new_tokens for job in found.jobs)


def test_texts_beside_the_lengths_may_be_long(path: Path) -> None:
    """They are not looked at."""
    text = '"' + "One text, another, " * 6000 + '"'
    head = "TIMESTAMP,prompt,ContextTokens,GeneratedTokens\n"
    found = traced(path, head + "".join(f"{n},{text},{70_000 + n},5\n" for n in range(3)))
    assert [job.prompt_len for job in found.jobs] == [70_000, 70_001, 70_002]


def test_columns_units_and_speed_are_told(path: Path) -> None:
    text = "when,in,out\n1000,10,1\n4000,20,2\n7000,30,3\n"
    for unit, factor in (("us", 1), ("ms", 1000), (None, 1_000_000)):
        found = traced(path, text, columns=["when", "in", "out"], unit=unit, speed=2.0)
        assert [job.arrival_us for job in found.jobs] == [0, 1500 * factor, 3000 * factor]
    assert [job.prompt_len for job in found.jobs] == [10, 20, 30]
    now = 1_700_000_000_123_456_789  # since 1970
    found = traced(
        path, lines({**MOONCAKE, "timestamp": now}, MOONCAKE | {"timestamp": now + 7000}), unit="ns"
    )
    assert [job.arrival_us for job in found.jobs] == [0, 7]


def test_with_a_rate_the_file_need_not_say_when(path: Path) -> None:
    """Lengths are those of the file, in its order; arrivals are made up, the same each time."""
    rows = [{"input_length": n, "output_length": n} for n in range(1, 401)]
    found = traced(path, lines(*rows), rate=50)
    again = read_trace(path, TraceOptions(rate=50))
    assert found.jobs == again.jobs
    assert [job.prompt_len for job in found.jobs] == list(range(1, 401))
    assert found.jobs[-1].arrival_us == pytest.approx(8e6, rel=0.2)
    assert read_trace(path, TraceOptions(rate=50, seed=1)).jobs != found.jobs


def test_no_tokens_are_left_out_and_the_first_ones_can_be_taken(path: Path) -> None:
    text = lines(*({**MOONCAKE, "output_length": n % 3} for n in range(9)))
    assert traced(path, text + lines({**MOONCAKE, "input_length": 0})).num_left_out == 4
    traced(path, text)
    found = read_trace(path, TraceOptions(num_requests=2))
    assert (len(found.jobs), found.num_left_out) == (2, 1)


def chat(ids: list[int], prompt_len: int) -> dict[str, object]:
    return {**MOONCAKE, "input_length": prompt_len, "output_length": 1, "hash_ids": ids}


def num_shared(one: bytes, other: bytes) -> int:
    """Blocks that two prompts share from their beginning."""
    pairs = zip(split_hashes(one), split_hashes(other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize("tokens_per_block", [16, 100, 512, 1024])
def test_prompts_share_the_full_blocks_that_their_ids_say(
    path: Path, tokens_per_block: int
) -> None:
    """A block is shared if all ids up to its end are the same, whatever the size of the blocks."""
    rows = [
        chat([0, 1, 2], 1400),
        chat([0, 1, 3], 1400),
        chat([0, 1, 2, 4], 1600),  # the third block of the first one was not full
        chat([7], 300),
        chat([0, 9], 600),
        chat([9, 1], 600),  # ids behind another beginning
        {**MOONCAKE, "output_length": 1},
        chat([], 600),
        chat([-1, 2**64 - 2], 600),
        chat([-1, -2], 600),  # as numbers with a sign, or without one
    ]
    jobs = traced(path, lines(*rows), tokens_per_block=tokens_per_block).jobs
    shared = [num_shared(jobs[0].hashes, job.hashes) * tokens_per_block for job in jobs[:6]]
    expected = [1400, 1024, 1400, 0, 512, 0]
    assert shared == [length // tokens_per_block * tokens_per_block for length in expected]
    assert jobs[6].hashes == jobs[7].hashes == b""
    assert jobs[8].hashes == jobs[9].hashes
    assert len(jobs[8].hashes) == 8 * (600 // tokens_per_block)


def test_the_cache_finds_what_prompts_share(path: Path) -> None:
    """Six prompts of 64 tokens, of which 48 are the same: with reuse they are computed once."""
    rows = [chat([1, 2, 3, 10 + n], 64) for n in range(6)]
    jobs = traced(path, lines(*rows), hash_tokens=16, speed=0.001, tokens_per_block=8).jobs
    prices = CostModel(1000.0, 100.0, 0.0, 10.0, 0.0)
    settings = Settings(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, 64, 8, 8, 512)
    alone = predict(settings, jobs, prices)
    sharing = predict(replace(settings, enable_reuse=True), jobs, prices)
    assert alone.num_requests == sharing.num_requests == 6
    assert sharing.ttft_p50 < alone.ttft_p50 / 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace holds no request"),
        ("\n \n", "trace holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace holds no request"),
        ("a,b\n1,2\n", "line 2: of no known trace are the columns 'a, b': name those of arrival"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n6,2\n", "line 3: 'GeneratedTokens' is"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n6,x,2\n",
            "line 3: ContextTokens is 'x'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,-1,1\n", "from 0 to 1,048,576"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1.5,1\n", "ContextTokens is '1.5'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,inf\n", "GeneratedTokens is 'inf'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1048577,1\n", "is '1048577'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", "TIMESTAMP is 'nan': a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1e300,1,1\n", "TIMESTAMP is '1e300'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:15:46,1,1\n", "'2023-13-16 18:15"),
        ('TIMESTAMP,ContextTokens,GeneratedTokens\n"5,1,1\n', "this is no CSV"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff,1,1\n",
            "line 2: this is no text: unpack",
        ),
        (b"\x1f\x8b\x08\x00", "line 1: this is no text: unpack a compressed file"),
        ("[\n" + lines(MOONCAKE), "line 1: one JSON object a line is expected, as `jq -c '.[]'`"),
        ("{" * 100_000, "line 1: one JSON object a line"),
        (lines(MOONCAKE) + "nonsense\n", "line 2: one JSON object a line"),
        (
            lines(MOONCAKE, {"delay": 3, **MOONCAKE, "timestamp": None}),
            "'timestamp' is missing: name another with --trace-columns, or let them",
        ),
        (
            "ContextTokens,GeneratedTokens,Total\n3772,54,3826\n",
            "line 2: 'TIMESTAMP' is missing: name another with --trace-columns, or let them come",
        ),
        (lines({**MOONCAKE, "timestamp": True}), "timestamp is True"),
        (lines({**MOONCAKE, "input_length": [1]}), "input_length is [1]"),
        (lines({**MOONCAKE, "output_length": True}), "output_length is True"),
        (lines({**MOONCAKE, "input_length": 1, "hash_ids": [True]}), "hash_ids: a list of whole"),
        (lines({**MOONCAKE, "hash_ids": 5}), "hash_ids: a list of whole numbers"),
        (lines({**MOONCAKE, "hash_ids": [0.5] * 14}), "hash_ids: a list of whole numbers"),
        (lines({**MOONCAKE, "hash_ids": [2**64] * 14}), "hash_ids: numbers of 64 bits"),
        (
            lines({**MOONCAKE, "hash_ids": [1]}),
            "line 1: hash_ids has 1 ids for 6,758 tokens, which are 14 blocks of 512: give",
        ),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(
    path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(RecordingError) as caught:
        traced(path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("trace")
    assert len(str(caught.value)) < 250


def test_traces_beyond_the_bounds_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(request_traces, "MAX_NUM_JOBS", 2)
        with pytest.raises(
            RecordingError, match=r"line 3: more than 2 requests, or 1,000,000,000 to"
        ):
            traced(path, lines(*[MOONCAKE] * 3))
    monkeypatch.setattr(request_traces, "MAX_NEW_TOKENS", 1200)
    monkeypatch.setattr(request_traces, "MAX_ROW_BYTES", 100)
    text = lines(*[MOONCAKE] * 3)
    with pytest.raises(RecordingError, match=r"line 3: more than .* with --num-requests"):
        traced(path, text)
    assert len(traced(path, text, num_requests=2).jobs) == 2
    with pytest.raises(RecordingError, match="line 2: the row is longer than 100 bytes"):
        traced(path, lines(MOONCAKE) + " " * 101)
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_trace(path.with_name("nowhere"), TraceOptions())
