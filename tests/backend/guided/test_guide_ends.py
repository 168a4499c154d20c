"""Guides and several end ids: each may end an answer where the grammar does, and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_checkpoint
from support.manager_harness import Recorder, request, running

from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.text.tokenizer import TextCodec
from inflight_server.serve.settings import DEMO_MODEL

CODEC = TextCodec(DEMO_MODEL)
END = CODEC.end_id
OTHER = 265  # of the model, not of the tokenizer
VOCAB_SIZE = 270


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the demo's tokenizer; texts end at either of two ids."""
    folder = write_checkpoint(tmp_path_factory.mktemp("ends") / "model", vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, OTHER]}))
    return folder


def token(text: str) -> int:
    [token_id] = CODEC.encode_word(text)
    return token_id


def ask(number: int, regex: str, liked: int, **values: Any) -> InferenceRequest:
    """An answer with ``liked`` wherever it may come, else with an "a"."""
    bias = [0.0] * VOCAB_SIZE
    bias[token("a")] = 1e6
    bias[liked] = 1e9
    return request(
        number,
        CODEC.encode("one two three", 99),
        30,
        guided_decoding_guide_type="regex",
        guided_decoding_guide=regex,
        embedding_bias=bias,
        exclude_input_in_output=True,
        **values,
    )


def answers(model: Path, *requests: InferenceRequest) -> list[str]:
    """The text of each answer, or its error."""
    params = TrtGptModelOptionalParams(
        device="cpu", kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8)
    )
    recorder = Recorder(requests)
    numbers = [each.request_id for each in requests]
    with running(recorder, model, params=params):
        recorder.wait_for_finals(*numbers)
    errors = [recorder.responses[number][-1][2] for number in numbers]
    texts = [CODEC.decode(recorder.tokens(number)) for number in numbers]
    return [error or text for error, text in zip(errors, texts, strict=True)]


def test_every_end_id_ends_an_answer_where_the_grammar_may(model: Path) -> None:
    named: dict[str, Any] = {"end_id": END, "stop_token_ids": [269, OTHER]}
    first, last, alone = answers(
        model,
        ask(1, "a{3,9}", OTHER, **named),
        ask(2, "a{3,9}", END, **named),
        ask(3, "a{3,9}", OTHER, end_id=END),  # what the checkpoint ends with is not named here
    )
    assert (first, last, alone) == ("aaa", "aaa", "aaaaaaaaa")


def test_without_an_end_id_there_are_all_of_the_checkpoint(model: Path) -> None:
    named, unnamed, many = answers(
        model,
        ask(1, "a{3,9}", OTHER, stop_token_ids=[269]),
        ask(2, "a{3,9}", OTHER),
        ask(3, "a{3,9}", OTHER, stop_token_ids=[*range(128)]),
    )
    assert (named, unnamed) == ("aaa", "aaa")
    assert "'stop_token_ids' holds 129 ids, more than 128; those that the checkpoint" in many


def test_a_stop_token_that_is_text_ends_nothing_before_the_grammar(model: Path) -> None:
    """As with vLLM: an answer that ends with such a token is whole."""
    inside, behind, only = answers(
        model,
        ask(1, "a[bc]a", token("b"), end_id=END, stop_token_ids=[token("b")]),
        ask(2, "a{2}[ab]*", token("b"), end_id=END, stop_token_ids=[token("b"), OTHER]),
        ask(3, "aba", token("a"), end_id=END, stop_token_ids=[token("b")]),
    )
    assert (inside, behind) == ("aca", "aa")
    assert "allows nothing here but 'end_id' or 'stop_token_ids' as text, and no end yet" in only


def test_a_grammar_that_is_through_ends_whatever_the_minimum(model: Path) -> None:
    assert answers(
        model, ask(1, "abc", OTHER, end_id=END, stop_token_ids=[OTHER], min_length=20)
    ) == ["abc"]
