"""Tokens by themselves: parts of characters have no text, but bytes, and a place in the answer."""

from __future__ import annotations

import json

import pytest
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_openai.log_probs import TokenLogProbs, TokenPlaces, for_chat, for_completion
from inflight_openai.tokens import Token, TokenReader

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
def test_bytes_of_parts_make_up_the_text(tokenizer: Tokenizer) -> None:
    token_of = TokenReader(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    rows = [TokenLogProbs(token_id, -1.0, [(token_id, -1.0)]) for token_id in ids]
    chat = ChoiceLogprobs.model_validate(json.loads(json.dumps(for_chat(rows, token_of))))
    assert chat.content is not None
    assert b"".join(bytes(row.bytes or ()) for row in chat.content).decode() == TEXT
    assert bytes(chat.content[3].top_logprobs[0].bytes or ()) == "é".encode()[1:]
    choice = {"index": 0, "finish_reason": "stop", "text": TEXT}
    choice["logprobs"] = for_completion(rows, token_of, TokenPlaces(), has_top=True)
    told = CompletionChoice.model_validate(choice).logprobs
    assert told is not None
    assert told.text_offset == [0, 1, 2, 2, 3, 3, 3, 3, 4, 5]
    places = TokenPlaces()  # one by one, as a stream has them
    streamed = [for_completion([row], token_of, places, has_top=False) for row in rows]
    assert [place for each in streamed for place in each["text_offset"]] == told.text_offset
    assert told.tokens == ["a", " ", "\ufffd", "\ufffd", *["\ufffd"] * 4, "b", "\n"]


def test_a_part_that_nothing_completes_is_a_character_of_its_own() -> None:
    parts = {0: Token("\ufffd", b"\xf0\x9f"), 1: Token("a", b"a"), 2: Token("\ufffd", b"\xe9")}
    tokens = parts | {3: Token("?", None), 4: Token("é", "é".encode())}
    rows = [TokenLogProbs(token_id, -1.0) for token_id in (0, 1, 2, 4, 0, 3, 1)]
    told = for_completion(rows, tokens.__getitem__, TokenPlaces(), has_top=False)
    assert told["text_offset"] == [0, 1, 2, 3, 4, 5, 6]


def test_other_tokens_have_the_bytes_of_their_text_or_none() -> None:
    level, fallback = TokenReader(byte_level()), TokenReader(byte_fallback())
    eos = byte_level().get_vocab()["<eos>"]
    assert level(eos) == Token("<eos>", b"<eos>")
    assert level(eos + 1) == Token("", b""), "a row of the embedding without a token"
    assert fallback(4) == Token("Ã", "Ã".encode()), "no letter that stands for a byte"
    tokenizer = Tokenizer(models.WordLevel({"\ufffd": 0}, unk_token="\ufffd"))
    assert TokenReader(tokenizer)(0) == Token(" \ufffd", None)
