"""What the front makes of the tokenizer that the server tells."""

from __future__ import annotations

import json
from functools import partial

import pytest
from client.openai.front import DESCRIPTION
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import BPE

from inflight_openai.errors import ApiError
from inflight_openai.fields import Body
from inflight_openai.parsing import parse_chat, parse_completion
from inflight_openai.prompts import make_prompt_reader


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


@pytest.mark.parametrize(
    ("text", "max_tokens", "param", "words"),
    [
        # Tokens are <|begin|> and the bytes.
        (
            "x" * 9,
            91,
            "max_tokens",
            "you requested 101 tokens (10 in the {}, 91 in the completion)",
        ),
        ("x" * 120, 1, "", "your {} resulted in 121 tokens, and at most 99 are taken"),
        ("x" * 20_000, 1, "", " characters in the {}."),
    ],
)
@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_text_that_does_not_fit_is_refused_in_the_words_that_clients_look_for(
    kind: str, text: str, max_tokens: int, param: str, words: str
) -> None:
    """OpenAI's own, with its code: LiteLLM, Cline and others look for one or the other, to shorten
    what they send."""
    template = "{{ bos_token }}{{ messages[0].content }}"
    files = {**DESCRIPTION["files"], "chat_template.jinja": template}  # type: ignore[dict-item]
    reader = make_prompt_reader({**DESCRIPTION, "files": files}, None, None)
    content = text if kind == "prompt" else [{"role": "user", "content": text}]
    body = Body(json.dumps({"model": "demo", kind: content, "max_tokens": max_tokens}).encode())
    parse = partial(parse_chat, default_max_tokens=None) if kind == "messages" else parse_completion
    with pytest.raises(ApiError) as caught:
        parse(body, reader)
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == (param or kind)
    assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")
    assert words.format(kind) in error.message


def test_what_fits_to_the_last_token_is_taken() -> None:
    reader = make_prompt_reader(DESCRIPTION, None, None)
    for num_prompt, max_tokens in ((9, 91), (99, 1)):
        fields = {"prompt": [5] * num_prompt, "max_tokens": max_tokens}
        body = Body(json.dumps({"model": "demo", **fields}).encode())
        assert parse_completion(body, reader).max_tokens == max_tokens
