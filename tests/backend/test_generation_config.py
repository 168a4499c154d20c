"""Sampling settings that requests do not say: the server's, else the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.requests.sampling import read_sampling
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.generation_config import read_default_sampling, to_inputs
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.request import Prompt
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import SamplingParams

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
LIMITS = RequestLimits(100, 99, 100, exclude_input_in_output=False, refusal_reason=lambda _: None)


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path)


def defaults(folder: Path, content: Any, overrides: str | None = None) -> dict[str, float]:
    """What is read from a generation_config.json with ``content``."""
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_default_sampling(folder, reads_checkpoint=True, overrides=overrides)


@pytest.mark.parametrize(
    ("content", "overrides", "expected"),
    [
        ({}, None, {}),
        (QWEN3, None, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        # As for transformers, numbers that shape a draw count where it says that it draws.
        ({**QWEN3, "do_sample": False}, None, {}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, None, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, None, {"top_p": 1.0}),
        ({"do_sample": True, "temperature": 0.6}, None, {"temperature": 0.6, "top_p": 1.0}),
        ({"do_sample": True, "top_k": -1, "top_p": None}, None, {"top_k": 0, "top_p": 1.0}),
        # The server's come first, one by one.
        (QWEN3, '{"top_k": 5}', {"temperature": 0.6, "top_k": 5, "top_p": 0.95}),
        ({}, '{"temperature": 0.7}', {"temperature": 0.7, "top_p": 1.0}),
        ({}, '{"no_repeat_ngram_size": 3}', {"no_repeat_ngram_size": 3}),
    ],
)
def test_who_says_what(
    tmp_path: Path, content: Any, overrides: str | None, expected: dict[str, float]
) -> None:
    assert defaults(tmp_path, content, overrides) == expected


def test_the_file_is_left_unread_when_asked(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**QWEN3, "top_k": "many"}))
    assert read_default_sampling(tmp_path, reads_checkpoint=False, overrides=None) == {}


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ({"do_sample": True, "top_p": 1.5}, None, r"top_p is 1.5, outside 0.0\.\.1.0; generation_"),
        ({"repetition_penalty": "1"}, None, "repetition_penalty must be a number"),
        ({"do_sample": True, "top_k": 2.5}, None, "top_k must be a whole number"),
        ({}, '{"top_k": true}', "default_sampling is .*top_k must be a whole number; write"),
        ({}, '{"temprature": 1}', "'temprature' is not one of temperature, top_k, top_p"),
        ({}, "0.7", "must be a JSON object"),
        ({}, "{", "default_sampling is '{'"),
        ({}, '{"temperature": NaN}', "temperature is nan"),
    ],
)
def test_a_value_that_no_request_could_send_is_named(
    tmp_path: Path, content: Any, overrides: str | None, message: str
) -> None:
    kind = CheckpointError if overrides is None else ConfigurationError
    with pytest.raises(kind, match=message):
        defaults(tmp_path, content, overrides)


def sampling_of(codec: TextCodec, told: dict[str, float], **sent: Any) -> SamplingParams:
    """The settings with which a request is sampled."""
    prompt = Prompt.read(make_inputs({"max_tokens": 3, "random_seed": 0, **sent}))
    request = prompt.make_request(1, codec, LIMITS, to_inputs(told))
    return read_sampling(request, 3, 100)


def test_a_text_has_the_defaults_that_it_does_not_say(codec: TextCodec) -> None:
    told = {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 2.0}
    assert sampling_of(codec, told, text_input="a") == SamplingParams(**told)  # type: ignore[arg-type]
    own = sampling_of(codec, told, text_input="a", runtime_top_k=3, temperature=0.0)
    assert (own.temperature, own.top_k, own.top_p) == (0.0, 3, 0.25)
    assert own.is_greedy


def test_ids_have_the_defaults_of_the_inputs(codec: TextCodec) -> None:
    """As with the end tokens: a client that tokenises itself says all of it."""
    assert sampling_of(codec, {"top_k": 20}, input_ids=[0]) == SamplingParams()


def test_a_search_with_beams_draws_nothing(codec: TextCodec) -> None:
    told = {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 2.0}
    searched = sampling_of(codec, told, text_input="a", beam_width=2)
    assert searched == SamplingParams(repetition_penalty=2.0)
