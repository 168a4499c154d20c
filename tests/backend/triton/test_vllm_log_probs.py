"""``logprobs`` of ``vllm_model``, in front of a real `tensorrt_llm` with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend.triton.conftest import MakeServer
from support.checkpoints import VOCAB_SIZE, load_oracle, write_checkpoint
from support.relay_harness import Ask, tensors_of, vllm_model
from support.triton_harness import Server, error_of
from support.triton_stub import FakeSender
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError
from inflight_backend.triton_models import relay_client as relay
from inflight_backend.triton_models.vllm import LogProbs

PROMPT = "7 2 3"
DRAWN = {"temperature": 1.5, "seed": 5, "max_tokens": 16, "ignore_eos": True}
"""Seldom the likeliest token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose words are numbers; each begins with its space, which a text drops."""
    torch.set_num_threads(1)
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"))
    vocab = {f"\u2581{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="\u25810"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def ask(folder: Path, make_server: MakeServer) -> Iterator[Ask]:
    """``vllm_model`` over it."""
    config = EngineConfig(
        device="cpu", max_batch_size=4, max_num_tokens=64, max_tokens_in_paged_kv_cache=384
    )
    engine: Any = Engine.load(folder, config)
    make_server(engine, gpt_model_path=str(folder))
    with vllm_model(gpt_model_path=str(folder)) as ask:
        yield ask


def ids_of(rows: list[dict[str, Any]]) -> list[int]:
    """The drawn tokens, which come first."""
    return [int(next(iter(row))) for row in rows]


@torch.inference_mode()
def expected_rows(folder: Path, ids: list[int], num_top: int) -> list[dict[str, Any]]:
    """What transformers says of an answer to `PROMPT`, in the form of vLLM's backend."""
    prompt = [int(word) for word in PROMPT.split()]
    logits = load_oracle(folder)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    rows = []
    for token, values in zip(ids, logits.float().log_softmax(-1), strict=True):
        likeliest = values.topk(num_top).indices.tolist()
        ranks = {token: int((values >= values[token]).sum())}
        ranks |= {each: place for place, each in enumerate(likeliest, start=1)}
        rows.append(
            {
                str(each): {
                    "logprob": pytest.approx(values[each].item(), abs=2e-4),
                    "rank": rank,
                    "decoded_token": f" {each}",
                }
                for each, rank in ranks.items()
            }
        )
    return rows


@pytest.mark.contract("vllm_model input", "return_logprobs")
@pytest.mark.contract("vllm_model output", "logprobs")
@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("num_top", [0, 2, "20"])
def test_values_and_ranks_are_those_of_transformers(
    folder: Path, ask: Ask, is_streaming: bool, num_top: Any
) -> None:
    """Every response says those of its tokens, and as many as it counts."""
    wants = {"return_logprobs": True, "return_num_output_tokens": True}
    settings = {**DRAWN, "n": 2, "logprobs": num_top}
    wants |= {"return_cumulative_logprob": True, "stream": is_streaming}
    responses = tensors_of(ask(PROMPT, settings, **wants, exclude_input_in_output=True))
    assert (len(responses) > 1) == is_streaming
    sizes = set()
    for index in range(2):
        rows = []
        for response in responses:
            told = json.loads(response["logprobs"][index])
            assert len(told) == response["num_output_tokens"][index]
            rows += told
        ids = ids_of(rows)
        assert len(ids) == 16
        expected = expected_rows(folder, ids, int(num_top))
        assert rows == expected
        assert [list(row) for row in rows] == [list(row) for row in expected], "in this order"
        own = [row[str(token)] for row, token in zip(rows, ids, strict=True)]
        assert max(each["rank"] for each in own) > 20
        sizes |= {len(row) for row in rows}
        sums = responses[-1]["cumulative_logprob"]
        assert sums[index] == pytest.approx(sum(each["logprob"] for each in own), abs=1e-3)
        text = b"".join(response["text_output"][index] for response in responses).decode()
        assert text == "".join(f" {token}" for token in ids)
    top = int(num_top)
    assert sizes == ({top, top + 1} if top else {1}), "the drawn token is among them, or beside"


def test_what_is_greedy_reads_as_its_tokens(ask: Ask) -> None:
    """As vLLM's own tests have it: the likeliest tokens are the text."""
    wants = {"return_logprobs": True, "exclude_input_in_output": True}
    whole = {"max_tokens": 9, "ignore_eos": True, "logprobs": 0}
    [answer] = tensors_of(ask(PROMPT, {"temperature": 0, **whole}, **wants))
    stop = " ".join(answer["text_output"][0].decode().split()[4:6])
    for settings in (whole, {**whole, "stop": stop, "logprobs": 1}):
        [answer] = tensors_of(ask(PROMPT, {"temperature": 0, **settings}, **wants))
        rows = json.loads(answer["logprobs"][0])
        assert [[each["rank"] for each in row.values()] for row in rows] == [[1]] * len(rows)
        text = "".join(each["decoded_token"] for row in rows for each in row.values())
        assert text == answer["text_output"][0].decode() + str(settings.get("stop", ""))
        assert len(rows) == (6 if "stop" in settings else 9)


@pytest.fixture
def counting(server: Server) -> Iterator[Ask]:
    """``vllm_model`` over an engine that knows no log probabilities; without a tokenizer."""
    with vllm_model() as ask:
        yield ask


def test_without_the_setting_there_are_none(counting: Ask) -> None:
    """``null`` in every response, of every answer."""
    for logprobs in ({}, {"logprobs": None}, {"logprobs": False}):
        settings = {"n": 2, "max_tokens": 3, **logprobs}
        for is_streaming in (False, True):
            responses = tensors_of(
                counting("1", settings, stream=is_streaming, return_logprobs=True)
            )
            assert {tuple(each["logprobs"]) for each in responses} == {(b"null", b"null")}


def test_the_setting_alone_tells_nothing(counting: Ask) -> None:
    settings = {"max_tokens": 2, "logprobs": 3}
    for more in ({"settings": settings}, {"parameters": settings}):
        [answer] = tensors_of(counting("1", **more, return_logprobs=False))
        assert answer == {"text_output": [b"1 2 3"]}


def message_of(sender: FakeSender) -> str:
    return error_of(sender)[0]


@pytest.mark.parametrize("is_asked_for", [True, False])
@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (21, "'sampling_parameters': logprobs is 21, outside 0..20"),
        (-1, "'sampling_parameters': logprobs is -1, outside 0..20"),
        (True, "'sampling_parameters': logprobs must be a whole number"),
        (1.5, "'sampling_parameters': logprobs must be a whole number"),
        ("many", "'sampling_parameters': logprobs must be a whole number"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    counting: Ask, logprobs: Any, message: str, is_asked_for: bool
) -> None:
    answer = counting(settings={"logprobs": logprobs}, return_logprobs=is_asked_for)
    assert message_of(answer) == message


def test_a_model_without_a_tokenizer_refuses_them_by_name(
    counting: Ask, server: Server, tmp_path: Any
) -> None:
    """One that was written by an older version has no parameters."""
    message = "'return_logprobs' needs a tokenizer: set gpt_model_path"
    assert message_of(counting(settings={"logprobs": 1}, return_logprobs=True)).startswith(message)
    # With one, it is the engine that says what it has not.
    with vllm_model(tokenizer_dir=str(tmp_path), gpt_model_path="unread") as ask:
        refused = message_of(ask(settings={"logprobs": 1}, return_logprobs=True))
    assert refused == "'return_log_probs' is not supported by the engine of this server"


def test_a_model_that_loads_a_tokenizer_looks_for_its_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that dies then leaves the process for ever: it would never know its parent."""
    looks: list[str] = []
    monkeypatch.setattr(relay, "exit_with_parent", looks.append)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError), vllm_model(gpt_model_path=str(tmp_path)):
        pass
    assert looks == ["vllm_model"]


def tensors(ids: list[int], **values: Any) -> dict[str, Any]:
    ranks = np.array([[values.pop("ranks")]], dtype=np.int32)
    own = np.array([[values.pop("own")]], dtype=np.float32)
    return {
        "output_ids": np.array([[ids]], dtype=np.int32),
        "output_log_probs": own,
        "output_log_prob_ranks": ranks,
        **{name: np.array([[value]]) for name, value in values.items()},
    }


def test_of_equally_likely_tokens_the_place_counts() -> None:
    """The drawn token keeps the value that counts in its sum, which may be one among the filters'
    tokens only."""
    ties = {"top_log_prob_ids": [[7, 8]], "top_log_probs": [[-1.0, -1.0]]}
    [row] = LogProbs(2, str).read(tensors([8], own=[-0.5], ranks=[3], **ties))
    assert list(json.loads(row).items()) == [
        ("8", {"logprob": -0.5, "rank": 2, "decoded_token": "8"}),
        ("7", {"logprob": -1.0, "rank": 1, "decoded_token": "7"}),
    ]


def test_a_response_without_tokens_has_no_objects() -> None:
    nothing = tensors([], own=[], ranks=[])
    assert LogProbs(0, str).read(nothing) == []
    empty = np.empty((1, 1, 0, 3), dtype=np.float32)
    assert (
        LogProbs(3, str).read({**nothing, "top_log_prob_ids": empty, "top_log_probs": empty}) == []
    )
