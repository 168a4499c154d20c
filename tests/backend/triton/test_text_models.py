"""`preprocessing` and `postprocessing`, on the demo model's tokenizer: one token per byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.triton_stub import FakePbUtils, FakeRequest

from inflight_backend.errors import InvalidRequest
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_models.postprocessing import Postprocessor
from inflight_backend.triton_models.preprocessing import Preprocessor, read_start_ids
from inflight_backend.triton_models.preprocessing import TritonPythonModel as Preprocessing
from inflight_backend.triton_models.text_base import read_switch, respond
from inflight_server.serve.settings import DEMO_MODEL

CODEC = TextCodec(DEMO_MODEL)
BEGIN, END = 0, 1
PREPROCESS = Preprocessor(CODEC, adds_special_tokens=True)
POSTPROCESS = Postprocessor(CODEC, skips_special_tokens=True)


BART_CONFIG = {
    "architectures": ["BartForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": 9,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "max_position_embeddings": 16,
}


def ids(text: str) -> list[int]:
    return CODEC.encode_raw(text, add_special_tokens=False)


def strings(*rows: list[str]) -> Any:
    array = np.empty((len(rows), len(rows[0])), dtype=np.object_)
    for i, row in enumerate(rows):
        array[i] = [text.encode() for text in row]
    return array


def query(*prompts: str, **more: Any) -> dict[str, Any]:
    lengths = np.full((len(prompts), 1), 9, dtype=np.int32)
    return {"QUERY": strings(*([p] for p in prompts)), "REQUEST_OUTPUT_LEN": lengths, **more}


@pytest.mark.contract("preprocessing input", "QUERY REQUEST_OUTPUT_LEN")
@pytest.mark.contract("preprocessing output", "INPUT_ID REQUEST_INPUT_LEN")
def test_rows_are_padded_to_the_longest() -> None:
    out = PREPROCESS(query("12", "1 ü"))
    assert out["INPUT_ID"].tolist() == [
        [BEGIN, *ids("12"), END, END],  # <|end|> is also what pads
        [BEGIN, *ids("1 ü")],
    ]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[3], [5]]
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[9], [9]]
    assert out["OUT_END_ID"].tolist() == out["OUT_PAD_ID"].tolist() == [[END], [END]]
    assert {out[name].dtype for name in out if name != "EMBEDDING_BIAS"} == {np.dtype(np.int32)}


@pytest.mark.contract("preprocessing input", "DECODER_QUERY")
@pytest.mark.contract(
    "preprocessing output",
    "DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID",
)
def test_what_is_not_asked_for_is_neutral() -> None:
    out = PREPROCESS(query("12", "1"))
    assert out["BAD_WORDS_IDS"].shape == out["STOP_WORDS_IDS"].shape == (2, 2, 0)
    assert out["EMBEDDING_BIAS"].shape == (2, 0)
    assert out["DECODER_INPUT_ID"].tolist() == [[END], [END]]
    assert out["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1], [1]]
    assert "OUT_PROMPT_TABLE_EXTRA_IDS" not in out


def test_a_decoder_behind_an_encoder_starts_as_the_checkpoint_says(tmp_path: Path) -> None:
    config = BART_CONFIG | {"decoder_start_token_id": 2, "forced_bos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start_ids = read_start_ids(str(tmp_path))
    out = Preprocessor(CODEC, adds_special_tokens=True, start_ids=start_ids)(query("12", "1"))
    assert out["DECODER_INPUT_ID"].tolist() == [[2, 0], [2, 0]]
    assert out["REQUEST_DECODER_INPUT_LEN"].tolist() == [[2], [2]]
    # generation_config.json, which is newer, comes first; what it does not say stays.
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    assert read_start_ids(str(tmp_path)) == (7, 0)


@pytest.mark.contract("preprocessing input", "BAD_WORDS_DICT STOP_WORDS_DICT")
@pytest.mark.contract("preprocessing output", "BAD_WORDS_IDS STOP_WORDS_IDS")
def test_words_are_ids_and_ends() -> None:
    words = strings(["ab", "", "c"], ["d", "", ""])
    for name in ("STOP_WORDS", "BAD_WORDS"):
        inputs = {"STOP_WORDS_DICT": words} if name == "STOP_WORDS" else {"BAD_WORDS_DICT": words}
        assert PREPROCESS(query("1", "2", **inputs))[f"{name}_IDS"].tolist() == [
            [[*ids("ab"), *ids("c")], [2, 3, -1]],
            [[*ids("d"), 0, 0], [1, -1, -1]],
        ]


@pytest.mark.contract("preprocessing input", "EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS")
@pytest.mark.contract("preprocessing output", "EMBEDDING_BIAS")
def test_bias_words_weigh_on_their_tokens() -> None:
    out = PREPROCESS(
        query(
            "1",
            EMBEDDING_BIAS_WORDS=strings(["7", "a"]),
            EMBEDDING_BIAS_WEIGHTS=np.array([[2.5, -1.0]], dtype=np.float32),
        )
    )
    bias = out["EMBEDDING_BIAS"]
    assert bias.shape == (1, CODEC.vocab_size)
    assert {int(i): float(bias[0, i]) for i in np.flatnonzero(bias)} == {
        ids("7")[0]: 2.5,
        ids("a")[0]: -1.0,
    }


@pytest.mark.contract("preprocessing input", "END_ID PAD_ID")
def test_ids_of_the_client_win() -> None:
    out = PREPROCESS(
        query(
            "12",
            "1",
            END_ID=np.array([[-1], [5]], dtype=np.int32),
            PAD_ID=np.array([[7], [8]], dtype=np.int32),
            DECODER_QUERY=strings(["x"], ["y"]),
        )
    )
    assert out["OUT_END_ID"].tolist() == [[-1], [5]]
    assert out["OUT_PAD_ID"].tolist() == [[7], [8]]
    assert out["INPUT_ID"][1].tolist() == [BEGIN, *ids("1"), 8]
    assert out["DECODER_INPUT_ID"].tolist() == [[BEGIN, *ids("x")], [BEGIN, *ids("y")]]


@pytest.mark.contract("preprocessing input", "PROMPT_TABLE_EXTRA_ID")
@pytest.mark.contract("preprocessing output", "OUT_PROMPT_TABLE_EXTRA_IDS")
def test_an_id_of_a_prompt_table_marks_no_token_of_a_text() -> None:
    """As the peer's: it marks ids behind the vocabulary, which no text becomes."""
    extra = np.array([[3], [4]], dtype=np.uint64)
    found = PREPROCESS(query("12", "1", PROMPT_TABLE_EXTRA_ID=extra))["OUT_PROMPT_TABLE_EXTRA_IDS"]
    assert found.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert found.dtype == np.dtype(np.uint64)


@pytest.mark.contract("preprocessing parameter", "add_special_tokens")
def test_special_tokens_may_be_left_to_the_client() -> None:
    bare = Preprocessor(CODEC, adds_special_tokens=False)
    assert bare(query("12"))["INPUT_ID"].tolist() == [ids("12")]
    with pytest.raises(InvalidRequest, match="'QUERY' is empty"):
        bare(query(""))


def tokens(*rows: list[list[int]]) -> Any:
    return np.array(rows, dtype=np.int32)


@pytest.mark.contract("postprocessing input", "TOKENS_BATCH SEQUENCE_LENGTH")
@pytest.mark.contract("postprocessing output", "OUTPUT")
def test_answers_are_decoded_up_to_their_length() -> None:
    text = ids("grün")
    out = POSTPROCESS(
        {
            "TOKENS_BATCH": tokens([text, text], [[BEGIN, *text[:4]], [-1] * 5]),
            "SEQUENCE_LENGTH": np.array([[5, 2], [3, 0]], dtype=np.int32),
        }
    )
    assert [text.decode() for text in out["OUTPUT"]] == ["grün", "gr", "gr", ""]


@pytest.mark.contract(
    "postprocessing input",
    "CUM_LOG_PROBS OUTPUT_LOG_PROBS CONTEXT_LOGITS GENERATION_LOGITS BATCH_INDEX",
)
@pytest.mark.contract(
    "postprocessing output",
    "OUT_CUM_LOG_PROBS OUT_OUTPUT_LOG_PROBS OUT_CONTEXT_LOGITS OUT_GENERATION_LOGITS "
    "OUT_BATCH_INDEX",
)
def test_what_comes_beside_the_tokens_of_older_clients_comes_back() -> None:
    """Those of v0.5 send no length; those of v0.6 to v0.13 want these back as they are."""
    passed = {
        "CUM_LOG_PROBS": np.zeros((1, 1), np.float32),
        "OUTPUT_LOG_PROBS": np.zeros((1, 1, 2), np.float32),
        "CONTEXT_LOGITS": np.zeros((1, 1, 1), np.float32),
        "GENERATION_LOGITS": np.ones((1, 1, 1, 1), np.float32),
        "BATCH_INDEX": np.zeros((1, 1), np.int32),
    }
    out = POSTPROCESS({"TOKENS_BATCH": tokens([ids("12")]), **passed})
    assert out.pop("OUTPUT").tolist() == [b"12"]
    assert out == {
        "OUT_CUM_LOG_PROBS": passed["CUM_LOG_PROBS"],
        "OUT_OUTPUT_LOG_PROBS": passed["OUTPUT_LOG_PROBS"],
        "OUT_CONTEXT_LOGITS": passed["CONTEXT_LOGITS"],
        "OUT_GENERATION_LOGITS": passed["GENERATION_LOGITS"],
        "OUT_BATCH_INDEX": passed["BATCH_INDEX"],
    }
    with pytest.raises(InvalidRequest, match="'TOKENS_BATCH' is missing"):
        POSTPROCESS(passed)


@pytest.mark.contract("postprocessing parameter", "skip_special_tokens")
def test_special_tokens_may_be_shown() -> None:
    shown = Postprocessor(CODEC, skips_special_tokens=False)
    request = {
        "TOKENS_BATCH": tokens([[*ids("1"), END]]),
        "SEQUENCE_LENGTH": np.array([[2]], dtype=np.int32),
    }
    assert shown(request)["OUTPUT"].tolist() == [b"1<|end|>"]
    assert POSTPROCESS(request)["OUTPUT"].tolist() == [b"1"]


@pytest.mark.case(122)
@pytest.mark.parametrize(
    ("lengths", "ids_", "message"),
    [
        ([[1, 1]], [[5]], "'SEQUENCE_LENGTH' has shape"),
        ([[2]], [[5]], "from 0 to 1"),
        ([[-1]], [[5]], "from 0 to 1"),
        ([[1]], [[CODEC.vocab_size]], "'TOKENS_BATCH' holds an id outside"),
        ([[1]], [[-1]], "'TOKENS_BATCH' holds an id outside"),
        ([[2**22 + 1]], np.zeros((1, 2**22 + 1)), "asks for 4194305 tokens, more than 4194304"),
    ],
)
def test_bad_answers_are_named(lengths: list[list[int]], ids_: Any, message: str) -> None:
    inputs = {"TOKENS_BATCH": tokens(ids_), "SEQUENCE_LENGTH": np.array(lengths, dtype=np.int32)}
    with pytest.raises(InvalidRequest, match=message):
        POSTPROCESS(inputs)


@pytest.mark.parametrize("name", ["QUERY", "REQUEST_OUTPUT_LEN"])
def test_a_missing_tensor_is_named(name: str) -> None:
    """Triton counts the tensors of a request, so another one hides that this one is missing."""
    inputs = query("12", END_ID=np.array([[1]], np.int32))
    del inputs[name]
    with pytest.raises(InvalidRequest, match=f"'{name}' is missing"):
        PREPROCESS(inputs)


def test_a_bad_request_in_a_batch_fails_alone() -> None:
    bad = {"QUERY": np.array([[b"\xff"]], dtype=np.object_), "REQUEST_OUTPUT_LEN": np.ones((1, 1))}
    uneven = {**query("1", "2"), "END_ID": np.ones((1, 1), dtype=np.int32)}
    words = query(
        "1",
        EMBEDDING_BIAS_WORDS=strings(["7", "a"]),
        EMBEDDING_BIAS_WEIGHTS=np.ones((1, 1), dtype=np.float32),
    )
    requests = [FakeRequest(each) for each in (bad, query("1"), uneven, words)]
    responses = [respond(FakePbUtils, each, PREPROCESS) for each in requests]
    assert "not valid UTF-8" in str(responses[0].error)
    assert responses[1].error is None
    assert "first dimension" in str(responses[2].error)
    assert "differ in length" in str(responses[3].error)


@pytest.mark.parametrize("error", [ValueError("secret"), BaseException("a panic: secret")])
def test_a_failure_of_ours_in_a_batch_fails_one_request_and_says_nothing_else(
    error: BaseException,
) -> None:
    def convert(inputs: Any) -> Any:
        if inputs["QUERY"].item() == b"2":
            raise error
        return PREPROCESS(inputs)

    requests = [FakeRequest(query(text)) for text in "123"]
    responses = [respond(FakePbUtils, each, convert) for each in requests]
    assert [response.error is None for response in responses] == [True, False, True]
    assert str(responses[1].error) == "the request could not be served"
    assert responses[1].error.code == FakePbUtils.TritonError.INTERNAL


@pytest.mark.case(34, 122)
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (query("1" * 2**22, "1"), "'QUERY' holds 4194305 characters, more than 4194304"),
        (
            query("1" * 70_000, *["1"] * 255),
            "'QUERY' would become 256 rows of 70001 numbers each, more than 16777216 in all",
        ),
        (
            query("1", "2", STOP_WORDS_DICT=strings(["a"], ["b" * 4097])),
            "'STOP_WORDS_DICT' holds 4097 characters in a row, more than 4096",
        ),
        (
            query("1", BAD_WORDS_DICT=strings(["a"] * 1025)),
            "'BAD_WORDS_DICT' holds 1025 texts in a row, more than 1024",
        ),
        (
            query(
                "1",
                EMBEDDING_BIAS_WORDS=strings(["a"] * 1025),
                EMBEDDING_BIAS_WEIGHTS=np.ones((1, 1025), np.float32),
            ),
            "'EMBEDDING_BIAS_WORDS' holds 1025 texts in a row, more than 1024",
        ),
        (
            query("1", "1", DECODER_QUERY=strings(["1"], ["1" * 2**22])),
            "'DECODER_QUERY' holds 4194305 characters, more than 4194304",
        ),
    ],
)
def test_what_is_too_much_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        PREPROCESS(inputs)


def load(monkeypatch: pytest.MonkeyPatch, **parameters: Path) -> Preprocessing:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils)
    block = {"parameters": {key: {"string_value": str(v)} for key, v in parameters.items()}}
    model = Preprocessing()
    model.initialize({"model_config": json.dumps(block), "model_name": "preprocessing"})
    return model


@pytest.mark.parametrize(
    ("key", "text"),
    [("EXECUTION_ENV_PATH", "/env"), ("multimodal_model_path", "${multimodal_model_path}")],
)
def test_tritons_own_parameters_pass_and_those_that_nobody_filled(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str
) -> None:
    load(monkeypatch, gpt_model_path=DEMO_MODEL, **{key: Path(text)})


def answer(model: Preprocessing, inputs: dict[str, Any]) -> dict[str, Any]:
    [response] = model.execute([FakeRequest(inputs)])
    return {each.name(): each.as_numpy() for each in response.output_tensors}


@pytest.mark.parametrize("num_more", [0, 57])
def test_a_bias_is_as_long_as_the_models_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_more: int
) -> None:
    """A checkpoint may have more embeddings than its tokenizer has tokens: a padded vocabulary."""
    config = {"vocab_size": CODEC.vocab_size + num_more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(monkeypatch, tokenizer_dir=DEMO_MODEL, gpt_model_path=tmp_path)
    words = {"EMBEDDING_BIAS_WORDS": strings(["7"])}
    words["EMBEDDING_BIAS_WEIGHTS"] = np.ones((1, 1), dtype=np.float32)
    bias = answer(model, query("1", **words))["EMBEDDING_BIAS"]
    assert bias.shape == (1, CODEC.vocab_size + num_more)
    assert bias.sum() == 1


def test_the_checkpoints_other_ends_come_beside_the_end_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model, wherever its tokenizer lies; a client's own end id is the only one."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, END, 8]}))
    model = load(monkeypatch, tokenizer_dir=DEMO_MODEL, gpt_model_path=tmp_path)
    found = answer(model, query("12", "1"))
    assert found["OUT_END_ID"].tolist() == [[END], [END]]
    assert found["OUT_STOP_TOKEN_IDS"].tolist() == [[8, 9], [8, 9]]
    found = answer(model, query("12", "1", END_ID=np.array([[END], [5]], dtype=np.int32)))
    assert found["OUT_STOP_TOKEN_IDS"].shape == (2, 0)
    alone = load(monkeypatch, tokenizer_dir=DEMO_MODEL)
    assert answer(alone, query("1"))["OUT_STOP_TOKEN_IDS"].shape == (1, 0)


def test_switches() -> None:
    assert read_switch({}, "key", True)
    assert not read_switch({"key": ""}, "key", False)
    assert not read_switch({"key": "False"}, "key", True)
    with pytest.raises(InvalidRequest, match="key must be true or false"):
        read_switch({"key": "maybe"}, "key", True)
