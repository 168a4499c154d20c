"""`inflight whatif` from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_runner import piped, run
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running
from support.recorder_worlds import long_ring

from inflight_backend.manager.parameters import TrtGptModelOptionalParams
from inflight_server.commands.recordings import replay
from inflight_server.commands.whatif import MAX_VARIANTS, whatif


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "r.jsonl"
    recorder = Recorder([request(i, [i] * i, 20 + i) for i in range(1, 21)])
    params = TrtGptModelOptionalParams(max_batch_size=5, record_file=str(path))
    with running(recorder, None, MAX_UTILIZATION, params=params):
        recorder.wait_for_finals(*range(1, 21))
    return path


def test_a_table_with_what_was_measured_and_each_setting(recording: Path) -> None:
    options = ["--policy", "guaranteed_no_evict", "--policy", "static_batch", "--kv-blocks", 40]
    done = run(whatif, recording, *options, "--kv-blocks", 80)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["setting", "tokens/s"]
    assert [line.split("  ")[0] for line in lines[1:7]] == [
        "measured",
        "as recorded",
        "guaranteed_no_evict num_blocks=40",
        "guaranteed_no_evict num_blocks=80",
        "static_batch num_blocks=40",
        "static_batch num_blocks=80",
    ]
    assert any(line.startswith("20 requests; an iteration is predicted within ") for line in lines)
    assert "±10 %" in lines[0]


def test_larger_batches_than_recorded_are_marked(recording: Path) -> None:
    done = run(whatif, recording, "--max-batch-size", 3, "--max-batch-size", 12)
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert " 5 " in rows["measured"]
    assert "12*" in rows["max_batch_size=12"]
    assert "*" not in rows["max_batch_size=3"] + rows["as recorded"]
    assert "* batches larger than any recorded (5): " in done.stdout


def test_json_has_the_tokens_that_were_recorded(recording: Path) -> None:
    """The range of the first token holds the prediction; what was measured has none."""
    answer = json.loads(run(whatif, recording, "--max-batch-size", 10, "--json").stdout)
    assert {"base", "mean_noise"} < set(answer["cost_model"])
    assert "noise" not in answer["cost_model"], "thousands of numbers"
    measured, *predicted = answer["rows"]
    assert [row["num_tokens"] for row in answer["rows"]] == [sum(range(21, 41))] * 3
    assert measured["ttft_p50_range"] is None
    for row in predicted:
        low, high = row["ttft_p50_range"]
        assert low <= row["ttft_p50"] <= high
        assert low < high
    assert predicted[1]["ttft_p99"] < predicted[0]["ttft_p99"]


def test_several_servers_behind_each_router(recording: Path) -> None:
    options = [
        "--replicas",
        2,
        "--replicas",
        20,
        "--router",
        "least_load",
        "--router",
        "cache_aware",
    ]
    rows = json.loads(run(whatif, recording, *options, "--json").stdout)["rows"]
    assert [row["setting"] for row in rows] == [
        "measured",
        "as recorded",
        "replicas=2 least_load",
        "replicas=2 cache_aware",
        "replicas=20 least_load",
        "replicas=20 cache_aware",
    ]
    assert {row["num_tokens"] for row in rows} == {sum(range(21, 41))}
    assert [row["num_replicas"] for row in rows] == [1, 1, 2, 2, 20, 20]
    assert rows[4]["ttft_p99"] < rows[2]["ttft_p99"] < rows[1]["ttft_p99"]
    done = run(whatif, recording, "--replicas", 4, "--kv-blocks", 40)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:4]] == [
        "as recorded",
        "num_blocks=40 replicas=4 round_robin",
    ]


def test_a_scheduler_of_the_user_beside_the_recorded_one(recording: Path) -> None:
    """A row for it, and one under each of the other settings."""
    own = "support.user_schedulers:OneAtATime"
    options = ["--scheduler-class", own, "--policy", "static_batch", "--kv-blocks", 40]
    rows = json.loads(run(whatif, recording, *options, "--json").stdout)["rows"]
    names = [row["setting"] for row in rows[1:]]
    assert names == ["as recorded", "static_batch num_blocks=40", own, f"{own} num_blocks=40"]
    assert [row["max_batch"] for row in rows[1:]] == [5, 5, 1, 1]


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    path = tmp_path / "ring.jsonl"
    path.write_text(long_ring(), encoding="ascii")
    return path


def test_a_ring_counts_the_requests_that_it_does_not_know_to_the_end(ring: Path) -> None:
    lines = run(whatif, ring).stdout.splitlines()
    assert any(line.startswith("20 requests more, in flight when the recordi") for line in lines)
    assert any(line.startswith("3 requests had not ended when the recording did") for line in lines)
    for options, counts in (([], (20, 3)), (["--rate", 5, "--num-requests", 3], (0, 0))):
        content = json.loads(run(whatif, ring, *options, "--json").stdout)
        assert (content["num_in_flight_at_start"], content["num_unended"]) == counts


def test_a_prediction_that_goes_on_and_on_is_an_error_of_one_line(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three have hundreds of tokens to come; random requests take as long as asked."""
    monkeypatch.setattr("inflight_recorder.whatif.MIN_STEPS", 500)
    monkeypatch.setattr("inflight_recorder.whatif.STEPS_PER_STEP", 0)
    done = run(whatif, ring)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: this prediction takes more than 500 steps (iterations, ")
    assert done.stderr.count("\n") == 1
    done = run(whatif, ring, "--rate", 5, "--num-requests", 9)
    assert done.exit_code == 0, done.stderr


def test_a_pool_too_small_refuses(recording: Path) -> None:
    rows = json.loads(run(whatif, recording, "--kv-blocks", 1, "--json").stdout)["rows"]
    assert (rows[-1]["num_refused"], rows[-1]["num_tokens"]) == (20, 0)


def test_a_made_up_workload_and_saved_predictions(recording: Path, tmp_path: Path) -> None:
    lengths = ["--prompt", "5", "--output", "3-9", "--num-requests", 50]
    done = run(whatif, recording, "--rate", 100, *lengths, "--save", tmp_path / "new")
    assert done.exit_code == 0, done.stderr
    assert "measured" not in done.stdout
    again = run(replay, tmp_path / "new" / "as-recorded.jsonl")
    assert again.stdout.startswith("identical, ")
    assert "(50 requests, " in again.stdout


def test_the_recording_is_not_overwritten(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "num_blocks=40.jsonl"
    path.write_bytes(recording.read_bytes())
    done = run(whatif, path, "--save", tmp_path, "--kv-blocks", 40)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.endswith(f"{path} is the recording: choose another name\n")
    assert path.read_bytes() == recording.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{10 + n}.5000000,{8 + n},{n}\n" for n in range(6)
)


def test_the_requests_of_a_trace_are_run_instead(recording: Path, tmp_path: Path) -> None:
    """Also piped, faster, the first ones, at random, and with columns of other names."""
    trace = tmp_path / "azure.csv"
    trace.write_text(TRACE, encoding="ascii")

    def rows(*options: object) -> list[dict[str, Any]]:
        done = run(whatif, recording, "--trace", trace, "--json", *options)
        assert done.exit_code == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
        return found

    (alone,) = rows()
    assert alone["setting"] == "as recorded", "nothing of it was measured"
    assert (alone["num_requests"], alone["num_tokens"]) == (5, 15)
    assert alone["seconds"] > 4
    (fast,) = rows("--speed", 4)
    assert 1 < fast["seconds"] < alone["seconds"] - 2
    assert [row["num_tokens"] for row in rows("--num-requests", 2, "--kv-blocks", 9)] == [3, 3]
    (often,) = rows("--rate", 100)
    assert often["seconds"] < alone["seconds"] - 3  # slow iterations are in both
    with piped(trace) as trace_pipe, piped(recording) as recording_pipe:
        done = run(whatif, recording_pipe, "--trace", trace_pipe)
    assert "5 requests; an iteration is predicted within" in done.stdout
    assert "1 request more of the trace, without a prompt or without an answer: left out." in (
        done.stdout
    )
    trace.write_text(TRACE.replace("TIMESTAMP,ContextTokens", "at,in"), encoding="ascii")
    (named,) = rows("--trace-columns", "at, in, GeneratedTokens")
    assert named == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "--policy best: choose one of guaranteed_no_evict"),
        (["--rate", "5", "--prompt", "9-3"], "--prompt 9-3: write a number of tokens, or two"),
        (["--rate", "5", "--output", "x"], "--output x: write a number of tokens, or two"),
        (["--kv-blocks", str(10**18)], "num_blocks: Expected `int` <= 4194304"),
        (
            [x for k in range(MAX_VARIANTS + 1) for x in ("--kv-blocks", str(40 + k))],
            f"{MAX_VARIANTS + 1} combinations are more than",
        ),
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read: No such file"),
        (["--trace", "{}"], "line 2: TIMESTAMP is 'soon': a time is expected, or a date"),
        (["--trace", "{}", "--trace-columns", "a,b"], "--trace-columns a,b: write three names"),
        (["--trace", "{}", "--trace-unit", "h"], "--trace-unit h: choose one of s, ms, us, ns"),
        (["--trace", "{}", "--rate", "1", "--speed", "2"], "--speed is about the times of the tra"),
        (["--speed", "2"], "--speed is about a trace: name its file with --trace"),
        (["--rate", "2", "--trace-block", "16"], "--trace-block is about a trace"),
        (["--trace", "{}", "--prompt", "9"], "--prompt is about random requests: give"),
        (["--trace", "{}", "--rate", "2", "--output", "9"], "--output is about random requests"),
        (["--output", "9"], "--output is about random requests: give their --rate"),
        (["--trace", "{}", "--seed", "0"], "--seed is about random arrivals: give"),
        (["--router", "least_load"], "--router is about several servers: give --replicas"),
        (
            ["--replicas", "2", "--router", "best"],
            "--router best: choose one of round_robin, least_load, cache_aware",
        ),
        (
            ["--replicas", "2", "--router", "cache_aware", "--rate", "9"],
            "--router cache_aware: nothing is known of what these requests have in common",
        ),
        (["--replicas", "2", "--save", "x"], "--save is about single servers"),
        (["--num-requests", "9"], "--num-requests is about others than the recorded requests"),
    ],
)
def test_errors_are_one_line(
    recording: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", encoding="ascii")
    done = run(whatif, recording, *(option.format(trace) for option in options))
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
