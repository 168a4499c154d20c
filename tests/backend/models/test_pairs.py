"""Models with an encoder and a decoder against transformers, through the batch manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.manager_harness import (
    BOTH_LOOPS,
    MAX_UTILIZATION,
    STEP_FAILED,
    WAIT,
    Recorder,
    fail_once,
    request,
    running,
    serve,
    small_engine,
)
from support.pairs import PAIR_VARIANTS, Pair, write_pair

from inflight_backend.engine import EngineConfig
from inflight_backend.engine.memory_plan import concurrency, make_plan
from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import OverlapScheduler
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import read_model
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_protocol.tensors import make_inputs
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_server.serve.preflight import check_settings
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings

Change = Callable[[ModelConfig], ModelConfig]

SOURCES = [list(range(5, 42)), [7], list(range(60, 71)), [90, 3, 90, 3, 11]]
"""What encoders read: longer and shorter than the distances that T5 tells apart, and a block."""


@pytest.fixture(scope="module", params=PAIR_VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp(request.param), request.param)


def assert_close(found: npt.NDArray[np.float32], expected: torch.Tensor) -> None:
    bound = 2e-4 * max(1.0, float(expected.std()))
    assert np.abs(found - expected.numpy()).max() < bound


@pytest.mark.contract("tensorrt_llm input", "decoder_input_ids decoder_input_lengths")
def test_logits_and_tokens_are_those_of_transformers(pair: Pair) -> None:
    """Of texts of the decoder that are given, in chunks, and then of what it draws; encoders of
    different lengths together."""
    start = [int(pair.oracle.config.decoder_start_token_id or 0)]
    texts = [start, start + list(range(9, 30)), start, [*start, 4]]
    requests = [
        request(
            number,
            source,
            12,
            streaming=False,
            decoder_input_ids=[*text, 96],
            decoder_input_lengths=len(text),
            return_context_logits=True,
            return_generation_logits=True,
        )
        for number, (source, text) in enumerate(zip(SOURCES, texts, strict=True))
    ]
    engine = small_engine(pair.folder, max_num_tokens=40, max_seq_len=60)
    recorder = serve(requests, engine, overlap_scheduler=OverlapScheduler.ON)
    for number, (source, text) in enumerate(zip(SOURCES, texts, strict=True)):
        assert recorder.final_errors(number) == [""]
        tokens = recorder.tokens(number)
        assert tokens[: len(text)] == text
        assert tokens[len(text) :] == pair.greedy(source, 12, text)
        expected = pair.logits(source, tokens[:-1])
        (answer,) = recorder.named_tensors[number]
        assert_close(answer["context_logits"][0], expected[: len(text)])
        assert_close(answer["generation_logits"][0, 0], expected[len(text) - 1 :])


@pytest.fixture(scope="module")
def flan(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("flan-t5"), "flan-t5")


def test_a_draft_model_is_for_decoders_alone(flan: Pair) -> None:
    for model, draft_model, option in (
        (flan.folder, DEMO_MODEL, "--model"),
        (DEMO_MODEL, flan.folder, "--draft-model"),
    ):
        with pytest.raises(ConfigurationError, match=f"^{option} .* has an encoder"):
            check_settings(ServeSettings(model=model, draft_model=draft_model))


@BOTH_LOOPS
@pytest.mark.contract("tensorrt_llm parameter", "cross_kv_cache_fraction")
def test_scarce_cross_blocks_and_steps(
    flan: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: OverlapScheduler
) -> None:
    """Requests wait for cross blocks, and encoders for a step; each is answered as if alone, what
    it held is free in the end, and recordings say the same, also those that begin in the middle."""
    monkeypatch.setattr("inflight_recorder.recorder.CHUNK_ITERATIONS", 3)
    monkeypatch.setattr("inflight_recorder.recorder.NUM_CHUNKS", 4)
    file = tmp_path / "recording.jsonl"
    sources = [list(range(first, first + 17)) for first in range(4, 14)]
    requests = [request(number, source, 9) for number, source in enumerate(sources)]
    engine = small_engine(
        flan.folder, 2 * 60, max_num_tokens=20, max_seq_len=30, cross_kv_cache_fraction=0.4
    )
    assert (engine.num_blocks, engine.num_cross_blocks) == (18, 12)  # two of these sources fit
    recorder = Recorder(requests)
    with running(recorder, engine, overlap_scheduler=overlap, record_file=str(file)) as manager:
        recorder.wait_for_finals(*range(10))
        assert manager._batcher.is_idle_and_intact()
        ring = list(manager._batcher.recorder.lines())
    (tmp_path / "ring.jsonl").write_text("".join(ring))
    for each in (file, tmp_path / "ring.jsonl"):
        with open_recording(each) as reader:
            assert bool(reader.header.active) is (each is not file)
            assert replay(reader).divergence is None
    for number, source in enumerate(sources):
        assert recorder.tokens(number) == flan.greedy(source, 9, [0])
    most = [stats for stats in recorder.stats if stats["Total Context Tokens"] > 20]
    assert not most
    # Each encoder is a context request of its step, and so is each context.
    assert recorder.total("Context Requests") == 20
    assert recorder.total("Total Context Tokens") == 10 * (17 + 1)


def test_stopped_at_any_time_leaves_nothing(flan: Pair) -> None:
    """Before the encoder, between it and the context, and later; then the same ids come again."""
    source = list(range(5, 25))
    alone = flan.greedy(source, 8, [0])
    for overlap in (OverlapScheduler.OFF, OverlapScheduler.ON):
        engine = small_engine(flan.folder)
        for num_polls in range(5):
            recorder = StopAfter(num_polls, [request(number, source, 8) for number in (1, 2)])
            with running(recorder, engine, overlap_scheduler=overlap) as manager:
                recorder.wait_for_finals(1, 2)
                recorder.stops = set()
                recorder.pending.append(request(1, source, 8))
                manager.wake()
                recorder.wait_for_second(1)
                assert manager._batcher.is_idle_and_intact()
            assert recorder.tokens(2) == alone
            assert recorder.tokens(1)[-8:] == alone


class StopAfter(Recorder):
    """Stops request 1 from the so-many-th poll on."""

    def __init__(self, num_polls: int, requests: list[InferenceRequest]) -> None:
        super().__init__(requests)
        self.num_polls = num_polls

    def poll(self) -> set[int]:
        self.num_polls -= 1
        return {1} if self.num_polls < 0 and not self.num_finals(1) else set()

    def wait_for_second(self, request_id: int) -> None:
        with self.done:
            assert self.done.wait_for(lambda: self.num_finals(request_id) == 2, WAIT)

    def num_finals(self, request_id: int) -> int:
        return sum(is_final for _, is_final, _ in self.responses.get(request_id, ()))


def test_beams_share_an_answer(flan: Pair) -> None:
    """Those of transformers, whose scores end at the same length."""
    source = SOURCES[0]
    sent = request(
        1, source, 7, streaming=False, beam_width=3, len_penalty=1.0
    )  # fmt: skip
    engine = small_engine(flan.folder, max_beam_width=3)
    recorder = serve([sent, request(2, SOURCES[2], 7)], engine, max_beam_width=3)
    found = recorder.named_tensors[1][0]["output_ids"][0].tolist()
    with torch.inference_mode():
        expected = flan.oracle.generate(
            torch.tensor([source]),
            attention_mask=torch.ones(1, len(source), dtype=torch.long),
            max_new_tokens=7,
            min_new_tokens=7,
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            eos_token_id=None,
        )
    assert found == expected.tolist()
    assert recorder.tokens(2) == flan.greedy(SOURCES[2], 7, [0])


def test_as_in_the_executor_api(flan: Pair) -> None:
    """The encoder's input beside the decoder's; log probabilities and penalties are of the text of
    the decoder alone."""
    text, source = [0, 9, 10], SOURCES[0]
    plain = request(1, text, 6, encoder_input_ids=source, return_log_probs=True)
    recorder = serve([plain], small_engine(flan.folder))
    tokens = recorder.tokens(1)
    assert tokens == flan.greedy(source, 6, text)
    expected = flan.logits(source, [*text, *tokens[:-1]])[2:].log_softmax(-1)
    found = recorder.joined(1, "output_log_probs")[0, 0]
    wanted = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert np.abs(found - wanted.numpy()).max() < 1e-3


def test_a_failed_step_ends_its_requests_only(flan: Pair) -> None:
    """Those whose encoders ran in it, too; the next ones are answered."""
    engine = small_engine(flan.folder)
    assert engine._encoder is not None
    once = fail_once(engine._encoder, "run", RuntimeError("no luck"))
    once.arm()
    recorder = Recorder([request(1, SOURCES[0], 4)])
    with running(recorder, engine, overlap_scheduler=OverlapScheduler.ON) as manager:
        recorder.wait_for_finals(1)
        assert recorder.final_errors(1) == [STEP_FAILED]
        recorder.pending.append(request(2, SOURCES[0], 4))
        manager.wake()
        recorder.wait_for_finals(2)
        assert manager._batcher.is_idle_and_intact()
    assert recorder.tokens(2) == flan.greedy(SOURCES[0], 4, [0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": []}, "'input_ids' is empty: a prompt needs at least one token"),
        ({"input_ids": [5] * 65}, "the encoder's input has 65 tokens, more than the longest it"),
        ({"encoder_input_ids": [97]}, "'encoder_input_ids' holds 97, outside the vocabulary"),
        ({"encoder_input_ids": [5], "decoder_input_ids": [0]}, "are both given; with"),
        ({"decoder_input_ids": [-1]}, "'decoder_input_ids' holds -1, outside the vocabulary"),
        ({"decoder_input_ids": [0], "decoder_input_lengths": 2}, "'decoder_input_lengths' is 2"),
        ({"decoder_input_ids": [0] * 64}, "the prompt has 64 tokens, more than max_input_len"),
        ({"request_output_len": 64}, "= 65, more than max_seq_len = 64"),
        ({"lora_task_id": 3}, "'lora_task_id' is not supported"),
    ],
)
def test_refused_with_field_and_bound(flan: Pair, values: dict[str, Any], message: str) -> None:
    plain = {"input_ids": [5, 6], "request_output_len": 4, **values}
    recorder = serve([InferenceRequest(1, make_inputs(plain))], small_engine(flan.folder))
    [error] = recorder.final_errors(1)
    assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": MAX_UTILIZATION}, "batch_scheduler_policy: max_utilization cannot run a model"),
        (
            {"scheduler_class": "support.user_schedulers:Mine"},
            "scheduler_class is not supported for a model with an encoder",
        ),
    ],
)
def test_servers_that_would_pause_do_not_start(
    flan: Pair, options: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(ConfigurationError, match=message),
        running(Recorder(), small_engine(flan.folder), **options),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "triton"}, "attention_backend triton has no kernels for T5"),
        ({"attention_backend": "compiled"}, "attention_backend compiled has no kernels"),
        ({"enable_lora": True}, "enable_lora is not supported for T5ForConditionalGeneration"),
        ({"cross_kv_cache_fraction": 0.001}, "leaves 256 blocks for texts and 0 for the encoder's"),
    ],
)
def test_engines_that_cannot_be(flan: Pair, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        small_engine(flan.folder, **changes)


def test_the_plan_is_what_the_engine_does(flan: Pair) -> None:
    config = EngineConfig(max_batch_size=8, tokens_per_block=4, max_num_tokens=64, max_seq_len=64,
                          max_tokens_in_paged_kv_cache=1024)  # fmt: skip
    plan, engine = make_plan(flan.folder, config), small_engine(flan.folder)
    assert (plan.num_blocks, plan.num_cross_blocks) == (128, 128)
    assert (engine.num_blocks, engine.num_cross_blocks) == (128, 128)
    layers, numbers = 2, 4 * 20 * 2  # of keys and values, in float32
    assert plan.block_bytes == plan.cross_block_bytes == layers * numbers * 4 * 4
    assert plan.pool_bytes == 256 * plan.block_bytes
    # 15 blocks each: 10 of the prompt of 37, and 5 of a start and 16 new tokens.
    assert astuple(concurrency(plan, 37, 16)) == (37, 16, 15, 8, 8)
    assert concurrency(replace(plan, max_batch_size=99), 37, 16).guaranteed == 12
    num_numbers = sum(each.numel() for each in flan.oracle.parameters())
    num_tables = (3 + 2) * 4 * 23 - 2 * 4 * 8  # a table of distances for each layer
    assert plan.num_parameters == num_numbers + num_tables


@contextmanager
def changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> Iterator[None]:
    """Engines read ``change`` of a checkpoint's model."""
    with monkeypatch.context() as patch:
        patch.setattr("inflight_backend.engine.engine.read_model", lambda f: change(read_model(f)))
        yield


def across(**changes: Any) -> Change:
    return lambda model: model.with_layers(
        lambda _, layer: replace(layer, cross=layer.cross and replace(layer.cross, **changes))
    )


def encoder(change: Change) -> Change:
    return lambda model: replace(model, encoder=model.encoder and change(model.encoder))


def biased(**changes: Any) -> Change:
    return lambda model: model.with_attention(
        lambda _, each: {
            "relative_bias": each.relative_bias and replace(each.relative_bias, **changes)
        }
    )


UNDONE: list[tuple[str, Change]] = [
    ("t5", lambda model: replace(model, logit_scale=1.0)),
    ("t5", across(scale=0.2)),
    ("t5", biased(max_distance=20)),
    ("t5", encoder(biased(max_distance=20))),
    ("t5", encoder(biased(is_bidirectional=False))),
    ("bart", lambda model: replace(model, position_offset=1, max_position_embeddings=65)),
    ("bart", encoder(lambda each: replace(each, position_offset=1, max_position_embeddings=65))),
    ("bart", encoder(lambda each: replace(each, embedding_scale=2.0))),
    ("m2m_100", encoder(lambda each: replace(each, position_offset=1))),
]


@pytest.mark.fast(4)
@pytest.mark.parametrize(("name", "change"), UNDONE, ids=[str(n) for n in range(len(UNDONE))])
def test_an_option_that_is_undone_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Change
) -> None:
    pair, source, text = write_pair(tmp_path, name), SOURCES[0], [0, *range(9, 30)]
    sent = request(1, source, 1, decoder_input_ids=text, return_context_logits=True)
    with changed(monkeypatch, change):
        recorder = serve([sent], small_engine(tmp_path))
    found = recorder.named_tensors[1][0]["context_logits"][0]
    with pytest.raises(AssertionError):
        assert_close(found, pair.logits(source, text))
