"""What the front makes of the tokenizer that the server tells."""

from __future__ import annotations

import json

import pytest
from client.openai.front import DESCRIPTION
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import BPE

from inflight_client.openai.errors import ApiError
from inflight_client.openai.fields import Body
from inflight_client.openai.parsing import parse_completion
from inflight_client.openai.prompts import make_prompt_reader


def test_the_text_of_a_token_has_the_space_that_it_begins_with() -> None:
    """Else the `text_offset` of a completion is short by one for every word before."""
    words = ["\N{LOWER ONE EIGHTH BLOCK}Hello", "\N{LOWER ONE EIGHTH BLOCK}wor", "ld", "!"]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = Metaspace()
    description = DESCRIPTION | {"files": {"tokenizer.json": tokenizer.to_str()}}
    reader = make_prompt_reader(description, None, None)
    assert [reader.token(token).text for token in range(4)] == [" Hello", " wor", "ld", "!"]


def test_the_text_of_a_token_of_the_demo_model() -> None:
    reader = make_prompt_reader(DESCRIPTION, None, None)
    ids = reader.encode("a b", "prompt", add_special_tokens=False)
    assert [reader.token(token).text for token in ids] == ["a", " ", "b"]


def test_an_answer_ends_with_all_that_the_server_names() -> None:
    """A client may name more, and ignore those of the model alone."""
    description = DESCRIPTION | {"stop_token_ids": [7, 9]}
    reader = make_prompt_reader(description, None, None)
    for fields, wanted in (
        ({}, {"end_id": 1, "stop_token_ids": [7, 9]}),
        ({"stop_token_ids": [5, 9]}, {"end_id": 1, "stop_token_ids": [5, 7, 9]}),
        ({"ignore_eos": True}, {}),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {"stop_token_ids": [5]}),
    ):
        body = Body(json.dumps({"model": "demo", "prompt": "1", **fields}).encode())
        values = dict(parse_completion(body, reader).values)
        assert values.pop("runtime_top_p") == 1.0
        assert values == wanted
    for bad in (5, ["5"], [258], [-1], [True]):
        body = Body(json.dumps({"model": "demo", "prompt": "1", "stop_token_ids": bad}).encode())
        with pytest.raises(
            ApiError, match="stop_token_ids: expected a list of token ids"
        ) as caught:
            parse_completion(body, reader)
        assert caught.value.param == "stop_token_ids"
