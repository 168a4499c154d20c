"""``vllm_model`` in front of a loaded `tensorrt_llm`, and its ``logprobs``."""

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
from support.triton_stub import FailingSender, FakePbUtils, FakeSender
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.triton_models import relay_client as relay
from inflight_backend.triton_models.vllm import LogProbs


@pytest.fixture
def ask(server: Server) -> Iterator[Ask]:
    """Send one request to ``vllm_model`` and wait for its end."""
    with vllm_model() as ask:
        yield ask


def test_the_sample_client_of_vllms_backend(ask: Ask) -> None:
    """It sends its settings twice, and text: as a tensor and as parameters of the request."""
    settings = {"temperature": "0", "top_p": "0.95", "max_tokens": "4"}
    whole = ask(settings=settings, parameters=settings, stream=False, exclude_input_in_output=False)
    assert tensors_of(whole) == [{"text_output": [b"1 2 3 4 5 6"]}]
    short = ask(settings=settings, parameters=settings, stream=True, exclude_input_in_output=True)
    pieces = tensors_of(short)
    assert b"".join(piece["text_output"][0] for piece in pieces) == b" 3 4 5 6"


FRONTEND = {"frequency_penalty": 0, "ignore_eos": False, "n": 1, "presence_penalty": 0, "top_p": 1}

COMPLETION = {**FRONTEND, "temperature": 0, "best_of": 1, "max_tokens": 4}

CHAT = {**FRONTEND, "temperature": 0, "logprobs": False, "max_tokens": 4}

NEWER_COMPLETION = {**FRONTEND, "temperature": 0, "max_tokens": 4}

NO_LOG_PROBS = {"return_logprobs": False}


@pytest.mark.contract(
    "vllm_model input",
    "text_input stream sampling_parameters exclude_input_in_output return_finish_reason "
    "return_num_input_tokens return_num_output_tokens",
)
@pytest.mark.contract(
    "vllm_model output", "text_output finish_reason num_input_tokens num_output_tokens"
)
@pytest.mark.parametrize(
    ("settings", "more"), [(COMPLETION, {}), (CHAT, {}), (NEWER_COMPLETION, NO_LOG_PROBS)]
)
def test_tritons_openai_frontend(ask: Ask, settings: dict[str, Any], more: dict[str, bool]) -> None:
    """Counts per response: it adds them up. ``more``: what newer ones send as tensors."""
    wants = {"return_num_input_tokens": True, "return_num_output_tokens": True, **more}
    whole = ask(settings=settings, stream=False, exclude_input_in_output=True, **wants)
    [answer] = tensors_of(whole)
    assert answer == {
        "text_output": [b" 3 4 5 6"],
        "num_input_tokens": [2],
        "num_output_tokens": [4],
    }
    kinds = {each.name(): each.as_numpy().dtype for each in whole.responses[0].output_tensors}
    assert kinds["num_input_tokens"] == kinds["num_output_tokens"] == np.uint32
    pieces = tensors_of(ask(settings=settings, stream=True, exclude_input_in_output=True, **wants))
    assert sum(piece["num_output_tokens"][0] for piece in pieces) == 4
    assert {piece["num_input_tokens"][0] for piece in pieces} == {2}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("REPORT_CUSTOM_METRICS", "metrics of inflight's own are always reported: leave it out"),
        ("ENABLE_VLLM_HEALTH_CHECK", "tensorrt_llm always says whether it takes requests: leave"),
    ],
)
def test_what_configs_of_vllms_backend_say_is_told_what_is_in_its_place(
    key: str, hint: str
) -> None:
    with (
        pytest.raises(ConfigurationError, match=f"unknown setting '{key}': {hint}"),
        vllm_model(**{key: "true"}),
    ):
        pass


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_last_response_that_cannot_be_sent_is_an_error(ask: Ask, is_streaming: bool) -> None:
    sender = ask(settings={"max_tokens": 3}, stream=is_streaming, sender=FailingSender(flags=1))
    assert str(sender.responses[-1].error) == "the request could not be relayed"
    assert len(tensors_of(ask(settings={"max_tokens": 3}))) == 1


def test_several_answers_come_side_by_side(ask: Ask) -> None:
    settings = {"n": 3, "max_tokens": 2, "temperature": 0}
    wants = {"return_finish_reason": True, "return_num_output_tokens": True}
    assert tensors_of(ask(settings=settings, **wants)) == [
        {
            "text_output": [b"1 2 3 4"] * 3,
            "finish_reason": [b"length"] * 3,
            "num_output_tokens": [2] * 3,
        }
    ]
    pieces = tensors_of(ask(settings=settings, stream=True, **wants))
    assert [b"".join(each) for each in zip(*(p["text_output"] for p in pieces), strict=True)] == [
        b" 3 4"
    ] * 3
    assert pieces[0]["finish_reason"].count(b"None") >= 2  # whose first token has not come
    assert pieces[-1]["finish_reason"] == [b"length"] * 3


def test_why_an_answer_ended_is_said_in_vllms_words(ask: Ask) -> None:
    reasons = [
        tensors_of(ask(settings=settings, return_finish_reason=True))[0]["finish_reason"]
        for settings in ({"max_tokens": 2}, {"stop": "5"})
    ]
    assert reasons == [[b"length"], [b"stop"]]
    pieces = tensors_of(ask(settings={"max_tokens": 9}, stream=True, return_finish_reason=True))
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons == [[b"None"]] * (len(pieces) - 1) + [[b"length"]]


def test_settings_may_be_parameters_of_the_request(ask: Ask, server: Server) -> None:
    [answer] = tensors_of(ask(parameters={"max_tokens": "3", "temperature": 0}))
    assert answer["text_output"] == [b"1 2 3 4 5"]
    assert len(tensors_of(ask())[0]["text_output"][0].split()) == 2 + 16  # vLLM's default


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"settings": {"surprise": 1}}, "'surprise' is not supported"),
        ({"parameters": {"surprise": 1}}, "'surprise' is not supported"),
        ({"settings": {"n": 3}, "parameters": {"n": 2}}, "'n' is not what 'sampling_parameters'"),
        ({"settings": {}, "parameters": {"n": 1}}, "'n' is not what 'sampling_parameters' says"),
        ({"settings": {"n": 10**6}}, "'num_return_sequences' is 1000000, outside 1..4"),
        ({"settings": {"n": 0}}, "'num_return_sequences' is 0"),
        ({"prompt": ""}, "'text_input' is empty"),
        ({"prompt": None, "stream": True}, "'text_input' is missing"),
        (
            {"stream": True, "exclude_input_in_output": False},
            "'exclude_input_in_output' must be true",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    ask: Ask, request_: dict[str, Any], message: str
) -> None:
    assert message in error_of(ask(**request_))[0]


@pytest.mark.parametrize(
    ("parameters", "prefix"), [({}, ""), ({"inflight_error_codes": True}, "[UNAVAILABLE] ")]
)
def test_errors_keep_their_code(ask: Ask, server: Server, parameters: Any, prefix: str) -> None:
    """... and carry it in the message for clients that ask for that."""
    server.model._queue.drain()
    message, code = error_of(ask(parameters=parameters))
    assert message.startswith(f"{prefix}the server is shutting down")
    assert code == FakePbUtils.TritonError.UNAVAILABLE


@pytest.fixture
def ends(tmp_path: Path, tokenizer: None) -> None:
    """The model of this folder ends texts with 8 or 9, its tokenizer with 99."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "99"}))


@pytest.mark.parametrize(
    ("settings", "answer", "reason"),
    [
        ({}, b" 3 4 5 6 7", b"stop"),
        ({"ignore_eos": True}, b" 3 4 5 6 7 8 9 10", b"length"),
        ({"stop_token_ids": [6, 7]}, b" 3 4 5", b"stop"),
        ({"stop_token_ids": [10], "ignore_eos": True}, b" 3 4 5 6 7 8 9", b"stop"),
        ({"stop_token_ids": ["6"]}, None, b"must be a list of token ids"),
        ({"stop_token_ids": [1000]}, None, b"outside the vocabulary"),
    ],
)
def test_ends_of_the_checkpoint_and_of_the_client(
    ends: None, ask: Ask, settings: dict[str, Any], answer: bytes | None, reason: bytes
) -> None:
    sender = ask(
        settings={"max_tokens": 8, "temperature": 0, **settings},
        stream=False,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    if answer is None:
        assert reason.decode() in error_of(sender)[0]
        return
    assert tensors_of(sender) == [
        {
            "text_output": [answer],
            "finish_reason": [reason],
            "num_output_tokens": [len(answer.split())],
        }
    ]


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
def ask_real(folder: Path, make_server: MakeServer) -> Iterator[Ask]:
    """``vllm_model`` over it."""
    config = EngineConfig(
        device="cpu", max_batch_size=4, max_num_tokens=64, max_tokens_in_paged_kv_cache=384
    )
    engine: Any = Engine.load(folder, config)
    make_server(engine, gpt_model_path=str(folder))
    with vllm_model(gpt_model_path=str(folder)) as ask_real:
        yield ask_real


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
    folder: Path, ask_real: Ask, is_streaming: bool, num_top: Any
) -> None:
    """Every response says those of its tokens, and as many as it counts."""
    wants = {"return_logprobs": True, "return_num_output_tokens": True}
    settings = {**DRAWN, "n": 2, "logprobs": num_top}
    wants |= {"return_cumulative_logprob": True, "stream": is_streaming}
    responses = tensors_of(ask_real(PROMPT, settings, **wants, exclude_input_in_output=True))
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


def test_what_is_greedy_reads_as_its_tokens(ask_real: Ask) -> None:
    """As vLLM's own tests have it: the likeliest tokens are the text."""
    wants = {"return_logprobs": True, "exclude_input_in_output": True}
    whole = {"max_tokens": 9, "ignore_eos": True, "logprobs": 0}
    [answer] = tensors_of(ask_real(PROMPT, {"temperature": 0, **whole}, **wants))
    stop = " ".join(answer["text_output"][0].decode().split()[4:6])
    for settings in (whole, {**whole, "stop": stop, "logprobs": 1}):
        [answer] = tensors_of(ask_real(PROMPT, {"temperature": 0, **settings}, **wants))
        rows = json.loads(answer["logprobs"][0])
        assert [[each["rank"] for each in row.values()] for row in rows] == [[1]] * len(rows)
        text = "".join(each["decoded_token"] for row in rows for each in row.values())
        assert text == answer["text_output"][0].decode() + str(settings.get("stop", ""))
        assert len(rows) == (6 if "stop" in settings else 9)


@pytest.fixture
def counting(server: Server) -> Iterator[Ask]:
    """``vllm_model`` over an engine that knows no log probabilities; without a tokenizer."""
    with vllm_model() as ask_real:
        yield ask_real


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
    with vllm_model(tokenizer_dir=str(tmp_path), gpt_model_path="unread") as ask_real:
        refused = message_of(ask_real(settings={"logprobs": 1}, return_logprobs=True))
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
