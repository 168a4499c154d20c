"""Text and token ids with the tokenizer that the server describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from support.openai_front import DESCRIPTION, FILES, parse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_client.errors import InvalidArgument
from inflight_openai.errors import ApiError
from inflight_openai.prompts import Token, TokenReader, make_prompt_reader
from inflight_openai.responses import TextOffsets, chat_log_probs, completion_log_probs
from inflight_openai.triton_client import TokenLogProbs


def test_token_text_keeps_its_leading_space() -> None:
    """Else the `text_offset` of a completion is short by one for every word before."""
    words = ["\N{LOWER ONE EIGHTH BLOCK}Hello", "\N{LOWER ONE EIGHTH BLOCK}wor", "ld", "!"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Metaspace()
    description = DESCRIPTION | {"files": {"tokenizer.json": tokenizer.to_str()}}
    reader = make_prompt_reader(description, None, None)
    assert [reader.token(token).text for token in range(4)] == [" Hello", " wor", "ld", "!"]


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
def test_a_text_that_does_not_fit_is_refused_in_openai_s_words(
    kind: str, text: str, max_tokens: int, param: str, words: str
) -> None:
    """LiteLLM, Cline and others look for OpenAI's words or its code, to shorten what they send."""
    template = "{{ bos_token }}{{ messages[0].content }}"
    files = {**FILES, "chat_template.jinja": template}
    reader = make_prompt_reader({**DESCRIPTION, "files": files}, None, None)
    content = text if kind == "prompt" else [{"role": "user", "content": text}]
    with pytest.raises(ApiError) as caught:
        parse(reader, {"model": "demo", kind: content, "max_tokens": max_tokens})
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == (param or kind)
    assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")
    assert words.format(kind) in error.message


def test_the_prompt_of_an_encoder_takes_no_room_of_the_answer() -> None:
    reader = make_prompt_reader({**DESCRIPTION, "start_ids": [7]}, None, None)
    with pytest.raises(ApiError) as caught:
        parse(reader, {"model": "demo", "prompt": "x" * 9, "max_tokens": 100})
    assert caught.value.message.endswith(
        "you requested 101 tokens (1 that every answer begins with, 100 in the completion). "
        "Please reduce the length of the completion."
    )


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(9, 91), (99, 1)])
def test_a_prompt_and_an_answer_may_fill_the_context(num_prompt: int, max_tokens: int) -> None:
    reader = make_prompt_reader(DESCRIPTION, None, None)
    body = {"model": "demo", "prompt": [5] * num_prompt, "max_tokens": max_tokens}
    assert parse(reader, body).max_tokens == max_tokens


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has no tokenizer"):
        make_prompt_reader({**DESCRIPTION, "files": {}}, None, None)
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json of the server"):
        make_prompt_reader({**DESCRIPTION, "files": {"tokenizer.json": "{}"}}, None, None)
    with pytest.raises(InvalidArgument, match="--chat-template"):
        make_prompt_reader(DESCRIPTION, None, tmp_path / "none.jinja")


TEXT = "a é🎈b\n"


def byte_level() -> Tokenizer:
    """A token for each byte, named by a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Four letters, and bytes for all others."""
    vocab = {letter: number for number, letter in enumerate(["<unk>", "a", "b", " ", "Ã"])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    token_of = TokenReader(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    rows = [TokenLogProbs(token_id, -1.0, [(token_id, -1.0)]) for token_id in ids]
    chat = ChoiceLogprobs.model_validate(json.loads(json.dumps(chat_log_probs(rows, token_of))))
    assert chat.content is not None
    assert b"".join(bytes(row.bytes or ()) for row in chat.content).decode() == TEXT
    assert bytes(chat.content[3].top_logprobs[0].bytes or ()) == "é".encode()[1:]
    choice = {"index": 0, "finish_reason": "stop", "text": TEXT}
    choice["logprobs"] = completion_log_probs(rows, token_of, TextOffsets(), has_top=True)
    told = CompletionChoice.model_validate(choice).logprobs
    assert told is not None
    assert told.text_offset == [0, 1, 2, 2, 3, 3, 3, 3, 4, 5]
    offsets = TextOffsets()  # one by one, as a stream has them
    streamed = [completion_log_probs([row], token_of, offsets, has_top=False) for row in rows]
    assert [place for each in streamed for place in each["text_offset"]] == told.text_offset
    assert told.tokens == ["a", " ", "\ufffd", "\ufffd", *["\ufffd"] * 4, "b", "\n"]


def test_an_incomplete_character_counts_as_one() -> None:
    parts = {0: Token("\ufffd", b"\xf0\x9f"), 1: Token("a", b"a"), 2: Token("\ufffd", b"\xe9")}
    tokens = parts | {3: Token("?", None), 4: Token("é", "é".encode())}
    rows = [TokenLogProbs(token_id, -1.0) for token_id in (0, 1, 2, 4, 0, 3, 1)]
    told = completion_log_probs(rows, tokens.__getitem__, TextOffsets(), has_top=False)
    assert told["text_offset"] == [0, 1, 2, 3, 4, 5, 6]


def test_bytes_of_special_and_unknown_tokens() -> None:
    level, fallback = TokenReader(byte_level()), TokenReader(byte_fallback())
    eos = byte_level().get_vocab()["<eos>"]
    assert level(eos) == Token("<eos>", b"<eos>")
    assert level(eos + 1) == Token("", b""), "a row of the embedding without a token"
    assert fallback(4) == Token("Ã", "Ã".encode()), "no letter that stands for a byte"
    tokenizer = Tokenizer(models.WordLevel({"\ufffd": 0}, unk_token="\ufffd"))
    assert TokenReader(tokenizer)(0) == Token(" \ufffd", None)
