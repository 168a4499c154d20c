"""Pieces of text: their sum is the text, no piece ends inside a character, the prompt stays out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec


def _byte_level() -> Tokenizer:
    """One token per byte: every character outside ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def _sentence_piece() -> Tokenizer:
    """Llama-2 style: a space is part of the token, unknown characters fall back to bytes."""
    words = ["<unk>", "\u2581", "\u2581Hello", "\u2581wor", "ld", "!", "a", "b"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("byte_level")
    _byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return TextCodec(folder)


@pytest.fixture(scope="module")
def spaced_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("sentence_piece")
    _sentence_piece().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30)


@given(prompt=texts.filter(bool), answer=texts, data=st.data())
def test_sum_of_pieces_is_the_answer(
    codec: TextCodec, prompt: str, answer: str, data: st.DataObject
) -> None:
    ids = codec.encode(answer, 1000)
    detokenizer = IncrementalDetokenizer(codec, codec.encode(prompt, 1000))
    pieces = []
    while ids:  # merged responses carry several tokens at once
        num = data.draw(st.integers(1, 12))
        pieces.append(detokenizer.push(ids[:num]))
        ids = ids[num:]
    assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == answer


def test_spaces_between_pieces_survive(spaced_codec: TextCodec) -> None:
    hello, wor, ld = 2, 3, 4
    detokenizer = IncrementalDetokenizer(spaced_codec, [hello])
    pieces = [detokenizer.push([token]) for token in (wor, ld, hello)]
    assert pieces == [" wor", "ld", " Hello"]


def test_a_character_is_held_back_until_it_is_whole(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    smile = codec.encode("\N{GRINNING FACE}", 10)
    assert len(smile) == 4
    pieces = [detokenizer.push([token]) for token in smile]
    assert pieces == ["", "", "", "\N{GRINNING FACE}"]


@pytest.mark.case(7)
def test_half_a_character_is_left_out_at_the_end_and_continues_that_of_a_prompt(
    codec: TextCodec,
) -> None:
    euro = codec.encode("\N{EURO SIGN}", 10)
    detokenizer = IncrementalDetokenizer(codec, codec.encode("ab", 10) + euro[:2])
    assert detokenizer.push(euro[2:]) == "\N{EURO SIGN}"
    assert detokenizer.push(codec.encode("c", 10) + euro[:-1]) == "c"
    assert detokenizer.finish() == ""


def test_a_genuine_replacement_character_in_the_prompt_does_not_leak(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("ab\ufffd", 10))
    assert detokenizer.push(codec.encode("cd", 10)) == "cd"


@pytest.mark.parametrize("num_stray", [5, 50])
def test_bytes_that_are_no_character_are_told_and_what_follows_is_whole(
    codec: TextCodec, num_stray: int
) -> None:
    stray = codec.encode("\N{EURO SIGN}", 10)[1:2] * num_stray
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    tokens = stray + codec.encode("\N{GRINNING FACE} ok", 10)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join(pieces) == "\ufffd" * num_stray + "\N{GRINNING FACE} ok"
    assert num_stray == 5 or any(pieces[:num_stray]), "they are not withheld for ever"


@pytest.mark.parametrize("size", [1, 3, 11])
def test_tokens_that_all_end_inside_a_character(tmp_path: Path, size: int) -> None:
    """Pairs learnt from Japanese may hold the end of a character and the beginning of the next."""
    text = "いろはにほへとちりぬるをわかよたれそつねならむうゐのおくやま"
    data = text.encode()
    parts = [data[:1], *(data[i : i + 3] for i in range(1, len(data), 3))]
    tokenizer = _byte_level()
    names = ["".join(bytes_to_unicode()[byte] for byte in part) for part in parts]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer.model = models.BPE(vocab, [])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    detokenizer = IncrementalDetokenizer(TextCodec(tmp_path), [])
    ids = [vocab[name] for name in names]
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*pieces, detokenizer.finish()]) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert any(pieces[:-1]), "they are not withheld for ever"


def _bytes(text: str) -> list[int]:
    """Byte-fallback tokens of the sentence-piece tokenizer above."""
    return [8 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("prompt", "start"), [("", "\N{GRINNING FACE}"), ("\u00e9", "")], ids=["inside", "at the start"]
)
def test_a_stray_byte_does_not_swallow_the_rest(
    spaced_codec: TextCodec, prompt: str, start: str
) -> None:
    detokenizer = IncrementalDetokenizer(spaced_codec, [2, *_bytes(prompt)])
    tokens = [*_bytes(start), 8 + 0xE2] + [3] * 40
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    assert text.startswith(start)
    assert text.count("wor") == 40


def test_a_prompt_that_ends_in_emojis_does_not_spoil_the_answer(spaced_codec: TextCodec) -> None:
    smile = _bytes("\N{GRINNING FACE}")
    detokenizer = IncrementalDetokenizer(spaced_codec, [2, *smile, *smile])
    assert detokenizer.push([*smile, 3]) == "\N{GRINNING FACE} wor"


def test_special_tokens_are_no_text_and_do_not_pile_up(codec: TextCodec) -> None:
    assert codec.end_id == 256
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    assert detokenizer.push([codec.end_id]) == ""
    assert detokenizer.push([codec.end_id] * 100 + codec.encode(" b", 10)) == " b"
    assert len(detokenizer._window) < 20
    assert detokenizer.finish() == ""


def test_the_text_of_a_token_is_what_it_adds_to_others(
    codec: TextCodec, spaced_codec: TextCodec
) -> None:
    texts = ["<unk>", " ", " Hello", " wor", "ld", "!"]
    assert [spaced_codec.token_text(token) for token in range(6)] == texts
    ids = codec.encode("a bé", 10)
    assert [codec.token_text(token) for token in ids] == ["a", " ", "b", "\ufffd", "\ufffd"]
    assert codec.token_text(codec.end_id) == "<eos>"
    assert codec.token_text(codec.vocab_size) == "", "a row of the embedding without a token"
