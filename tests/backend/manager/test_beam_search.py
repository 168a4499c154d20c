"""Beam search on real checkpoints equals that of transformers in both loops and with pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beam_cases import CASES, PROMPT, Case, search
from support.checkpoints import VOCAB_SIZE, write_checkpoint
from support.manager_harness import (
    BOTH_LOOPS,
    GUARANTEED,
    MAX_UTILIZATION,
    Recorder,
    request,
    running,
    small_engine,
)

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import (
    KvCacheConfig,
    OverlapScheduler,
)
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_scheduler import CapacitySchedulerPolicy


@pytest.fixture(scope="module")
def end_ids(folder: Path) -> list[int | None]:
    """For each case a token that its beams contain."""
    return [
        search(folder, case, None)[0][0][case.num_new // 3] if case.has_end else None
        for case in CASES
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, end_ids: list[int | None]) -> list[list[list[int]]]:
    return [search(folder, *both)[0] for both in zip(CASES, end_ids, strict=True)]


def make_request(
    request_id: int, case: Case, end_id: int | None, *, streaming: bool = False, **more: Any
) -> InferenceRequest:
    made = request(
        request_id,
        case.prompt,
        case.num_new,
        streaming=streaming,
        beam_width=case.width,
        len_penalty=case.length_penalty,
        end_id=-1 if end_id is None else end_id,
        **{"exclude_input_in_output": True, **dict(case.ours), **more},
    )
    made.set_tensor("early_stopping", np.array([[case.early_stopping]], dtype=np.int32))
    return made


def beams_of(tensors: dict[str, Any]) -> list[list[int]]:
    """The answers of a response."""
    lengths = tensors["sequence_length"][0]
    return [
        ids[:length].tolist() for ids, length in zip(tensors["output_ids"][0], lengths, strict=True)
    ]


def run(
    folder: Path,
    requests: list[InferenceRequest],
    policy: CapacitySchedulerPolicy = GUARANTEED,
    num_tokens: int = 1024,
    stop_at: int | None = None,
    recorder: Recorder | None = None,
    attention_backend: str = "torch",
    **params: Any,
) -> Recorder:
    """``stop_at``: stop request 0 with its so-many-th response. Tokens of all beams are counted, as
    the peer's test of its metrics has it."""
    recorder = recorder or Recorder(requests)
    ids = [each.request_id for each in recorder.pending]
    if stop_at is not None:
        recorder.when(0, stop_at, lambda: recorder.stops.add(0))
    params = {"overlap_scheduler": OverlapScheduler.OFF, **params}
    engine = small_engine(
        folder,
        num_tokens,
        max_batch_size=4,
        max_beam_width=4,
        max_num_tokens=40,
        max_seq_len=40,
        attention_backend=attention_backend,
    )
    with running(recorder, engine, policy, max_batch_size=4, **params, max_beam_width=4) as manager:
        recorder.wait_for_finals(*ids)
        manager._batcher.block_manager.check_integrity()
        lengths = manager.lengths.take()
    if "record_file" in params:
        num_pauses = assert_replays(Path(params["record_file"]))
        assert sum(stats["Paused Requests"] for stats in recorder.stats) == num_pauses
    assert not recorder.stats or recorder.stats[-1]["Used KV cache blocks"] == 0
    if len(ids) == 1 and stop_at is None:
        [tensors] = recorder.named_tensors[ids[0]]
        assert [num for _, num in lengths] == [sum(map(len, beams_of(tensors)))]
    return recorder


def assert_replays(file: Path) -> int:
    """Every decision can be made again from its recording; returns the number of pauses."""
    with open_recording(file) as reader:
        result = replay(reader)
    assert result.divergence is None, result
    return result.num_pauses


def answers(
    folder: Path, end_ids: list[int | None], *arguments: Any, **params: Any
) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """All cases at once, beside a request without beams."""
    requests = [make_request(i, *both) for i, both in enumerate(zip(CASES, end_ids, strict=True))]
    requests.insert(3, request(99, PROMPT, 12))
    recorder = run(folder, requests, *arguments, **params)
    assert len(recorder.tokens(99)) == 12
    return [beams_of(recorder.named_tensors[i][-1]) for i in range(len(CASES))], recorder.stats


@pytest.mark.contract("tensorrt_llm input", "embedding_bias beam_width len_penalty early_stopping")
def test_beams_equal_those_of_transformers_in_any_batch(
    folder: Path, end_ids: list[int | None], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    lengths = {len(beam) for beams in expected for beam in beams}
    assert len(lengths) > 6, "some end early"
    for case, end_id, beams in zip(CASES, end_ids, expected, strict=True):
        for other in case.without():
            assert search(folder, other, end_id)[0] != beams
    file = {"record_file": str(tmp_path / "plain.jsonl")}
    found, stats = answers(folder, end_ids, **file)
    assert found == expected
    assert max(s["Generation Requests"] for s in stats) > 1
    assert max(s["Active Request Count"] for s in stats) == 4
    file = {"record_file": str(tmp_path / "overlapped.jsonl")}
    overlapped: dict[str, Any] = {"overlap_scheduler": OverlapScheduler.ON, **file}
    assert answers(folder, end_ids, **overlapped)[0] == expected
    reuse = KvCacheConfig(enable_block_reuse=True)
    chunked: dict[str, Any] = {"enable_chunked_context": True, "kv_cache_config": reuse}
    for number, more in enumerate(({}, overlapped)):
        more = {**more, "record_file": str(tmp_path / f"{number}.jsonl")}
        found, stats = answers(folder, end_ids, MAX_UTILIZATION, 84, **chunked, **more)
        assert found == expected
        assert max(s["Paused Requests"] for s in stats) > 0


@pytest.mark.slow
def test_beams_are_the_same_with_kernels_and_overlapped_loop(tmp_path: Path) -> None:
    """The kernels run in Triton's interpreter where there is no GPU."""
    shape: dict[str, Any] = {"head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path / "model", **shape)
    cases = (Case(3, 7, 9, has_end=False), Case(2, 6, 5, 1.0, 0, has_end=False))
    requests = [make_request(i, case, None) for i, case in enumerate(cases)]
    gpu: dict[str, Any] = {"overlap_scheduler": OverlapScheduler.ON, "attention_backend": "triton"}
    recorder = run(folder, requests, **gpu)
    for request_id, case in enumerate(cases):
        found = beams_of(recorder.named_tensors[request_id][-1])
        assert found == search(folder, case, None)[0]


def test_an_end_id_counts_in_the_sum_of_its_beam(
    folder: Path, end_ids: list[int | None], expected: list[list[list[int]]]
) -> None:
    case = CASES[2]
    _, scores = search(folder, case, end_ids[2])
    wants = {"return_log_probs": True, "return_num_output_tokens": True}
    made = make_request(0, case, end_ids[2], **wants)
    tensors = run(folder, [made]).named_tensors[0][-1]
    assert tensors["num_output_tokens"].item() == sum(map(len, expected[2]))
    sums = tensors["cum_log_probs"][0]
    has_ended = np.array([len(beam) < case.num_new for beam in expected[2]])
    assert has_ended.any()
    lengths = np.array([len(beam) for beam in expected[2]]) + has_ended
    np.testing.assert_allclose(sums / lengths, scores, rtol=1e-4)
    is_more = tensors["output_log_probs"][0].sum(axis=1) > sums + 1e-4
    assert is_more.tolist() == has_ended.tolist()


def test_stream_sends_all_beams_so_far_and_a_pause_repeats_none(folder: Path) -> None:
    cases = (CASES[2], CASES[4])
    requests = [make_request(i, case, None, streaming=True) for i, case in enumerate(cases)]
    recorder = run(folder, requests, MAX_UTILIZATION, 84)
    assert max(stats["Paused Requests"] for stats in recorder.stats) > 0
    for request_id, case in enumerate(cases):
        responses = [beams_of(each) for each in recorder.named_tensors[request_id]]
        assert responses[-1] == search(folder, case, None)[0]
        lengths = [{len(beam) for beam in beams} for beams in responses]
        assert lengths == [{length} for length in range(1, case.num_new + 1)]


def test_whole_answers_begin_with_the_prompt_and_are_padded(
    folder: Path, end_ids: list[int | None], expected: list[list[list[int]]]
) -> None:
    """With the client's pad_id, which need not be a token of the model."""
    case, beams = CASES[2], expected[2]
    whole: dict[str, Any] = {"exclude_input_in_output": False}
    requests = [make_request(i, case, end_ids[2], **whole) for i in range(2)]
    requests[1].set_tensor("pad_id", np.array([[32_000]], dtype=np.int32))
    requests[1].replace_tensor("num_return_sequences", np.array([[3]], dtype=np.int32))
    recorder = run(folder, requests)
    for request_id, num_beams, pad_id in ((0, 4, -1), (1, 3, 32_000)):
        ids = recorder.named_tensors[request_id][0]["output_ids"][0]
        assert len({len(beam) for beam in beams[:num_beams]}) > 1, "one must be padded"
        padding = [[pad_id] * (ids.shape[1] - len(case.prompt) - len(beam)) for beam in beams]
        rows = zip(beams[:num_beams], padding, strict=False)
        assert ids.tolist() == [[*case.prompt, *beam, *pad] for beam, pad in rows]


def test_stopped_search_returns_its_beams(folder: Path) -> None:
    made = make_request(0, CASES[5], None, streaming=True)
    recorder = run(folder, [made], stop_at=4)
    last, before = recorder.named_tensors[0][-1], recorder.named_tensors[0][-2]
    assert last["finish_reason"].tolist() == [[b"cancelled"]]
    assert [len(beam) for beam in beams_of(last)] == [4, 4, 4]
    assert beams_of(last) == beams_of(before)


@BOTH_LOOPS
def test_search_without_a_possible_token_ends_alone(
    folder: Path, overlap: OverlapScheduler, tmp_path: Path
) -> None:
    """Its first step leaves no beam for the next one."""
    nothing = np.full((1, VOCAB_SIZE), -np.inf, dtype=np.float32)
    nothing[0, 7] = 0.0  # which is the bad word
    rules: dict[str, Any] = {"embedding_bias": nothing, "bad_words_list": [[7], [1]]}
    broken = make_request(0, CASES[5], None, **rules)
    others = [make_request(1, CASES[5], None), request(2, PROMPT, 6)]
    file = tmp_path / "recording.jsonl"
    recorder = run(folder, [broken, *others], overlap_scheduler=overlap, record_file=str(file))
    assert "no token could be drawn" in recorder.responses[0][-1][2]
    assert [recorder.responses[each][-1][2] for each in (1, 2)] == ["", ""]


def test_stop_words_end_a_beam_and_belong_to_it(folder: Path) -> None:
    case = Case(2, 10, has_end=False)
    free, _ = search(folder, case, None)
    word = free[0][2:4]
    made = make_request(0, case, None, stop_words_list=[word, [2, -1]])
    beams = beams_of(run(folder, [made]).named_tensors[0][-1])
    assert free[0][:4] in beams
    for beam in beams:
        assert all(beam[i : i + 2] != word for i in range(len(beam) - 2)), "nothing follows it"


def test_beam_width_of_the_server_is_bounded() -> None:
    for width, message in ((65, "must be between 1 and 64"), (3, "more than the engine")):
        with (
            pytest.raises(ConfigurationError, match=f"max_beam_width is {width}.*{message}"),
            running(Recorder(), max_beam_width=width),
        ):
            pass


@pytest.mark.contract("tensorrt_llm input", "beam_search_diversity_rate")
def test_diversity_rate_changes_the_beams(folder: Path) -> None:
    """One above all log probabilities: each step continues the last beam only, so that the
    answers differ in their last token only."""
    case = Case(3, 6, has_end=False)
    rates = {0: 0.0, 1: 1e4}
    requests = [
        make_request(i, case, None, beam_search_diversity_rate=rate) for i, rate in rates.items()
    ]
    recorder = run(folder, requests)
    plain, diverse = (beams_of(recorder.named_tensors[i][-1]) for i in rates)
    assert plain == search(folder, case, None)[0]
    assert len({tuple(beam[:-1]) for beam in plain}) > 1
    assert len({tuple(beam[:-1]) for beam in diverse}) == 1
    assert len({beam[-1] for beam in diverse}) == 3
