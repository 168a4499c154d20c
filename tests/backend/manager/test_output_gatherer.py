"""Log probabilities, logits and numbers of a request, through the batch manager, against
transformers, whatever the scheduler does."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.checkpoints import VOCAB_SIZE, load_oracle
from support.manager_harness import (
    GUARANTEED,
    MAX_UTILIZATION,
    Recorder,
    request,
    running,
    serve,
    small_engine,
)

from inflight_backend.errors import ErrorText, InvalidRequest
from inflight_backend.manager import output_gatherer
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.requests.outputs import MAX_LOGITS_BYTES, read_outputs
from inflight_scheduler import CapacitySchedulerPolicy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
NUM_NEW = 9
MAX_ROWS = MAX_LOGITS_BYTES // (4 * 32000)


@torch.inference_mode()
def oracle(folder: Path, prompt: list[int], answer: list[int]) -> tuple[Any, Any]:
    """Logits of every position of the prompt, and those each token of the answer was drawn by."""
    logits = load_oracle(folder)(torch.tensor([prompt + answer])).logits[0].float()
    return logits[: len(prompt)].numpy(), logits[len(prompt) - 1 : -1].numpy()


@pytest.mark.contract(
    "tensorrt_llm input", "return_log_probs return_context_logits return_generation_logits"
)
@pytest.mark.contract(
    "tensorrt_llm output", "cum_log_probs output_log_probs context_logits generation_logits"
)
@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("overlap", [OverlapScheduler.OFF, OverlapScheduler.ON])
@pytest.mark.parametrize(
    ("policy", "num_tokens", "has_chunks"),
    [(GUARANTEED, 1024, False), (GUARANTEED, 1024, True), (MAX_UTILIZATION, 64, True)],
)
def test_logits_are_those_of_transformers(
    folder: Path,
    is_streaming: bool,
    policy: CapacitySchedulerPolicy,
    num_tokens: int,
    has_chunks: bool,
    overlap: OverlapScheduler,
) -> None:
    """Alone, in chunks, and with pauses; penalties and filters do not show."""
    prompts = {i: PROMPT[i:] for i in range(1, 5)}
    wants = {"return_log_probs": True, "return_log_prob_ranks": True}
    wants |= {"return_generation_logits": True}
    recorder = Recorder(
        [
            request(
                i,
                prompt,
                NUM_NEW,
                streaming=is_streaming,
                temperature=1.5,
                runtime_top_k=20,
                repetition_penalty=1.5,
                seed=i,
                return_context_logits=i % 2 == 0,
                return_context_log_probs=i > 2,
                exclude_input_in_output=True,
                **({**wants, "num_top_log_probs": i} if i < 4 else {}),
            )
            for i, prompt in prompts.items()
        ]
    )
    serve(
        recorder,
        small_engine(folder, num_tokens),
        policy,
        enable_chunked_context=has_chunks,
        overlap_scheduler=overlap,
    )
    paused = max(stats["Paused Requests"] for stats in recorder.stats)
    assert (paused > 0) == (num_tokens == 64)
    for i, prompt in prompts.items():
        answer = recorder.tokens(i)
        assert len(answer) == NUM_NEW
        context, generation = oracle(folder, prompt, answer)
        first, *others = recorder.named_tensors[i]
        last = others[-1] if others else first
        if i % 2 == 0:
            np.testing.assert_allclose(first["context_logits"][0], context, atol=2e-4)
        assert ("context_logits" in first) == (i % 2 == 0)
        assert not any("context_logits" in other for other in others), "they are long"
        assert ("context_log_probs" in first) == (i > 2)
        assert not any("context_log_probs" in other for other in others)
        if i > 2:
            log_probs = torch.tensor(context).log_softmax(dim=-1)[:-1]
            told = log_probs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            np.testing.assert_allclose(first["context_log_probs"][0], told, atol=2e-4)
        assert ("top_context_log_probs" in first) == (i == 3)
        if i == 3:
            top = log_probs.topk(3)
            np.testing.assert_allclose(first["top_context_log_probs"][0], top.values, atol=2e-4)
            assert first["top_context_log_prob_ids"][0].tolist() == top.indices.tolist()
        if i == 4:
            assert not {"output_log_probs", "cum_log_probs", "generation_logits"} & last.keys()
            assert not {"top_log_probs", "top_log_prob_ids"} & last.keys()
            assert "output_log_prob_ranks" not in last
            continue
        logits = recorder.joined(i, "generation_logits")
        assert logits.shape == (1, 1, NUM_NEW, VOCAB_SIZE)
        np.testing.assert_allclose(logits[0, 0], generation, atol=2e-4)
        expected = torch.from_numpy(generation).log_softmax(-1)[torch.arange(NUM_NEW), answer]
        tops = torch.from_numpy(generation).log_softmax(-1).topk(i)
        np.testing.assert_allclose(
            recorder.joined(i, "top_log_probs")[0, 0], tops.values, atol=2e-4
        )
        assert recorder.joined(i, "top_log_prob_ids")[0, 0].tolist() == tops.indices.tolist()
        log_probs = recorder.joined(i, "output_log_probs")
        np.testing.assert_allclose(log_probs[0, 0], expected, atol=2e-4)
        drawn = generation[np.arange(NUM_NEW), answer]
        ranks = (generation >= drawn[:, None]).sum(axis=-1)
        assert recorder.joined(i, "output_log_prob_ranks")[0, 0].tolist() == ranks.tolist()
        assert len(set(ranks.tolist())) > 3, "not only the likeliest"
        np.testing.assert_allclose(last["cum_log_probs"], [[expected.sum()]], atol=2e-3)
        assert len(recorder.named_tensors[i]) == (NUM_NEW if is_streaming else 1)


# (how it is drawn, the filters of transformers that leave the same tokens)
FILTERS: tuple[tuple[dict[str, Any], list[tuple[str, Any]]], ...] = (
    ({"temperature": 0.7, "runtime_top_k": 5}, [("Temperature", 0.7), ("TopK", 5)]),
    ({"runtime_top_p": 0.6}, [("TopP", 0.6)]),
    (
        {"temperature": 1.3, "runtime_top_k": 40, "runtime_top_p": 0.9, "min_p": 0.1},
        [("Temperature", 1.3), ("TopK", 40), ("TopP", 0.9), ("MinP", 0.1)],
    ),
    ({}, []),
)


@pytest.mark.contract("tensorrt_llm parameter", "normalize_log_probs")
def test_normalized_log_probs_are_those_of_what_could_be_drawn(folder: Path) -> None:
    """With ``normalize_log_probs``; greedy rows had one token to draw. Logits stay the model's."""
    wants: dict[str, Any] = {
        "return_log_probs": True,
        "return_generation_logits": True,
        "num_top_log_probs": 1,
        "return_log_prob_ranks": True,
        "exclude_input_in_output": True,
    }
    recorder = Recorder(
        [
            request(i, PROMPT, NUM_NEW, seed=i, **drawn, **wants)
            for i, (drawn, _) in enumerate(FILTERS)
        ]
    )
    serve(recorder, small_engine(folder, normalize_log_probs=True))
    for i, (_, filters) in enumerate(FILTERS):
        answer = recorder.tokens(i)
        _, logits = oracle(folder, PROMPT, answer)
        expected = np.zeros(NUM_NEW)
        rows = torch.from_numpy(logits)
        own = rows.log_softmax(-1)
        for name, value in filters:
            warper = getattr(transformers, f"{name}LogitsWarper")(value)
            rows = warper(torch.zeros(NUM_NEW, 1, dtype=torch.int64), rows.clone())
        if filters:
            expected = rows.log_softmax(-1)[torch.arange(NUM_NEW), answer].numpy()
        log_probs = recorder.joined(i, "output_log_probs")[0, 0]
        np.testing.assert_allclose(log_probs, expected, atol=2e-4)
        np.testing.assert_allclose(
            recorder.joined(i, "top_log_probs")[0, 0, :, 0], own.max(-1).values, atol=2e-4
        )
        np.testing.assert_allclose(recorder.joined(i, "generation_logits")[0, 0], logits, atol=2e-4)
        ranks = (logits >= logits[np.arange(NUM_NEW), answer][:, None]).sum(axis=-1)
        assert recorder.joined(i, "output_log_prob_ranks")[0, 0].tolist() == ranks.tolist()


@pytest.mark.parametrize("num_steps", [1, 3])
def test_request_stopped_in_its_prompt_gets_the_logits_so_far(folder: Path, num_steps: int) -> None:
    prompt = (PROMPT * 3)[:40]
    wants = {"return_context_logits": True, "return_log_probs": True}
    recorder = Recorder([request(1, prompt, NUM_NEW, **wants)])
    recorder.stops = {1} if num_steps == 1 else set()  # asked for after a step

    def count(text: str) -> None:
        recorder.stats.append({})
        if len(recorder.stats) == num_steps - 1:
            recorder.stops = {1}

    recorder.return_stats = count  # type: ignore[method-assign]
    serve(recorder, small_engine(folder, max_num_tokens=8), enable_chunked_context=True)
    [sent] = recorder.named_tensors[1]
    assert sent["finish_reason"].item() == b"cancelled"
    logits = sent["context_logits"]
    assert logits.shape[:2] == (1, 8 * num_steps)
    context, _ = oracle(folder, prompt, [1])
    np.testing.assert_allclose(logits[0], context[: 8 * num_steps], atol=2e-4)
    assert sent["output_log_probs"].shape == (1, 1, 0)
    assert sent["cum_log_probs"].tolist() == [[0]]


@pytest.mark.contract(
    "tensorrt_llm input", "return_perf_metrics return_num_input_tokens return_num_output_tokens"
)
@pytest.mark.contract(
    "tensorrt_llm output",
    "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks "
    "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns "
    "acceptance_rate total_accepted_draft_tokens total_draft_tokens num_input_tokens "
    "num_output_tokens",
)
@pytest.mark.contract("tensorrt_llm of the LLM API output", "*")
def test_numbers_and_times(folder: Path) -> None:
    """Counts, block use with and without a cached prefix, and times in order."""
    wants = {
        "return_perf_metrics": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    before = time.monotonic_ns()
    recorder = Recorder([request(1, PROMPT, 6, **wants), request(2, [9], 2)])
    with running(recorder, small_engine(folder)) as manager:
        recorder.wait_for_finals(1, 2)
        recorder.pending.append(request(3, PROMPT, 6, streaming=False, **wants))
        manager.wake()
        recorder.wait_for_finals(3)
    assert list(recorder.named_tensors[2][-1]) == ["output_ids", "sequence_length", "finish_reason"]
    counts = [int(sent["num_output_tokens"].item()) for sent in recorder.named_tensors[1]]
    assert counts == [1] * 6, "of each response: clients add them up"
    first, second = recorder.named_tensors[1][-1], recorder.named_tensors[3][-1]
    for sent in (first, second):
        assert sent["num_input_tokens"].tolist() == [[17]]
        assert sent["num_output_tokens"].tolist() == [[1 if sent is first else 6]]
        times = [
            int(sent[name].item())
            for name in (
                "arrival_time_ns",
                "first_scheduled_time_ns",
                "first_token_time_ns",
                "last_token_time_ns",
            )
        ]
        assert times == sorted(times)
        assert before < times[0] < times[3] < time.monotonic_ns()
        for name in ("acceptance_rate", "total_draft_tokens", "total_accepted_draft_tokens"):
            assert sent[name].item() == 0
    names = ["kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"]
    assert [first[name].item() for name in names] == [6, 0, 6]  # 17 + 5 cached tokens by 4
    assert [second[name].item() for name in names] == [2, 4, 2], "as the peer's CI expects them"


def test_first_times_survive_a_pause(folder: Path) -> None:
    requests = [request(i, PROMPT[i:], NUM_NEW, return_perf_metrics=True) for i in range(4)]
    recorder = Recorder(requests)
    serve(recorder, small_engine(folder, 64), MAX_UTILIZATION)
    assert max(stats["Paused Requests"] for stats in recorder.stats) > 0
    for i in range(4):
        responses = recorder.named_tensors[i]
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"):
            assert len({int(sent[name].item()) for sent in responses}) == 1, name
        last = [int(sent["last_token_time_ns"].item()) for sent in responses]
        assert last == sorted(last)
        assert last[0] == responses[0]["first_token_time_ns"].item() < last[-1]


def test_an_end_id_leaves_its_row_out(folder: Path) -> None:
    recorder = Recorder([request(1, PROMPT, 6, return_log_probs=True)])
    with running(recorder, small_engine(folder)) as manager:
        recorder.wait_for_finals(1)
        end_id = recorder.tokens(1)[3]
        recorder.pending.append(request(2, PROMPT, 6, return_log_probs=True, end_id=end_id))
        manager.wake()
        recorder.wait_for_finals(2)
    shorter = recorder.joined(2, "output_log_probs")
    num_tokens = recorder.tokens(1).index(end_id)
    assert shorter.shape == (1, 1, num_tokens)
    longer = recorder.joined(1, "output_log_probs")
    np.testing.assert_allclose(shorter, longer[:, :, :num_tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "outputs", "error"),
    [
        (9000, 1, ["context_logits"], "'return_context_logits' would take 9000 tokens x 32000"),
        (1, MAX_ROWS, ["generation_logits"], ""),
        (
            1,
            MAX_ROWS,
            ["context_logits", "generation_logits"],
            "^'return_context_logits' and 'return_generation_logits' would take "
            f"{MAX_ROWS + 1} tokens x 32000 ",
        ),
    ],
)
def test_size_of_logits_is_bounded(
    prompt_len: int, max_new_tokens: int, outputs: list[str], error: str
) -> None:
    asked = request(1, [1], 1, **{f"return_{name}": True for name in outputs})
    with pytest.raises(InvalidRequest, match=error) if error else nullcontext():
        read_outputs(asked, prompt_len, max_new_tokens, 32000)


def test_logits_of_all_active_requests_share_one_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three come at once: the first takes the room, and when it has ended the room is free."""
    limit = 4 * VOCAB_SIZE * (len(PROMPT) + NUM_NEW)
    monkeypatch.setattr(output_gatherer, "MAX_LOGITS_BYTES", limit)
    both = {"return_context_logits": True, "return_generation_logits": True}
    recorder = Recorder(
        [
            request(1, PROMPT, NUM_NEW, **both),
            request(2, PROMPT, 1, return_generation_logits=True),
            request(3, PROMPT, NUM_NEW, return_log_probs=True),
        ]
    )
    with running(recorder, small_engine(folder)) as manager:
        recorder.wait_for_finals(1, 2, 3)
        recorder.pending.append(request(4, PROMPT, NUM_NEW, **both))
        manager.wake()
        recorder.wait_for_finals(4)
    [(_, _, error)] = recorder.responses[2]
    assert isinstance(error, ErrorText)
    assert error.code == "UNAVAILABLE"
    assert error == (
        f"'return_generation_logits' would take {4 * VOCAB_SIZE} bytes, and the logits of active "
        f"requests take {limit} of {limit} already; try again later"
    )
    for i in (1, 3, 4):
        assert len(recorder.tokens(i)) == NUM_NEW
