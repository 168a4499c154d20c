"""Pieces of text: their sum is the text, no piece ends inside a character, the prompt stays out."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inflight_backend.errors import CheckpointError, InvalidRequest
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


def test_the_text_of_a_token_is_what_it_adds_to_others(
    codec: TextCodec, spaced_codec: TextCodec
) -> None:
    texts = ["<unk>", " ", " Hello", " wor", "ld", "!"]
    assert [spaced_codec.token_text(token) for token in range(6)] == texts
    ids = codec.encode("a bé", 10)
    assert [codec.token_text(token) for token in ids] == ["a", " ", "b", "\ufffd", "\ufffd"]
    assert codec.token_text(codec.end_id) == "<eos>"
    assert codec.token_text(codec.vocab_size) == "", "a row of the embedding without a token"


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


def test_half_a_character_at_the_end_is_left_out(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    assert detokenizer.push(codec.encode("b\N{EURO SIGN}", 10)[:-1]) == "b"
    assert detokenizer.finish() == ""


@pytest.mark.case(7)
def test_half_a_character_at_the_end_of_the_prompt(codec: TextCodec) -> None:  # case 7
    euro = codec.encode("\N{EURO SIGN}", 10)
    detokenizer = IncrementalDetokenizer(codec, codec.encode("ab", 10) + euro[:2])
    assert detokenizer.push(euro[2:]) == "\N{EURO SIGN}"
    assert detokenizer.push(codec.encode("c", 10)) == "c"


def test_a_genuine_replacement_character_in_the_prompt_does_not_leak(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("ab\ufffd", 10))
    assert detokenizer.push(codec.encode("cd", 10)) == "cd"


def test_bytes_that_never_become_a_character_are_not_withheld_for_ever(codec: TextCodec) -> None:
    lone = codec.encode("\N{EURO SIGN}", 10)[1:2]
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    assert "\ufffd" in detokenizer.push(lone * 50)


def _bytes(text: str) -> list[int]:
    """Byte-fallback tokens of the sentence-piece tokenizer above."""
    return [8 + byte for byte in text.encode()]


def test_a_stray_byte_does_not_swallow_the_rest(spaced_codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(spaced_codec, [2])
    tokens = _bytes("\N{GRINNING FACE}") + [8 + 0xE2] + [3] * 40
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    assert text.startswith("\N{GRINNING FACE}")
    assert text.count("wor") == 40


def test_a_stray_byte_at_the_start_does_not_swallow_the_answer(spaced_codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(spaced_codec, [2, *_bytes("\u00e9")])
    text = "".join(detokenizer.push([token]) for token in [8 + 0xE2] + [3] * 20)
    assert (text + detokenizer.finish()).count("wor") == 20


def test_a_prompt_that_ends_in_emojis_does_not_spoil_the_answer(spaced_codec: TextCodec) -> None:
    smile = _bytes("\N{GRINNING FACE}")
    detokenizer = IncrementalDetokenizer(spaced_codec, [2, *smile, *smile])
    assert detokenizer.push([*smile, 3]) == "\N{GRINNING FACE} wor"


def test_what_follows_bad_bytes_is_neither_lost_nor_doubled(codec: TextCodec) -> None:
    lone = codec.encode("\N{EURO SIGN}", 10)[1:2]
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    tokens = lone * 5 + codec.encode("\N{GRINNING FACE} ok", 10)
    text = "".join(detokenizer.push([token]) for token in tokens)
    assert text == "\ufffd" * 5 + "\N{GRINNING FACE} ok"


def test_many_special_tokens_do_not_pile_up(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    assert detokenizer.push([codec.end_id] * 100 + codec.encode(" b", 10)) == " b"
    assert len(detokenizer._window) < 20


def test_special_tokens_are_not_text(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a", 10))
    assert detokenizer.push([codec.end_id]) + detokenizer.finish() == ""
    assert codec.end_id == 256


def test_a_text_that_cannot_fit_is_refused_unread(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match="more than can fit max_input_len = 10 tokens"):
        codec.encode("a" * 10_000, 10)


@pytest.mark.case(104)
def test_tokenizer_and_embedding_must_match(codec: TextCodec) -> None:
    codec.check_fits(257)
    with pytest.raises(CheckpointError, match="257 tokens, the model's embedding only 256 rows"):
        codec.check_fits(256)


@pytest.mark.case(103, 104)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 99999}', "the checkpoint's end id, 99999, is outside .* 257 rows"),
        ('{"eos_token_id": [1099511627776]}', "end id, 1099511627776, is outside"),
        ('{"eos_token_id": true}', "'eos_token_id' must be a token id, or -1 for none, not true"),
        ('{"eos_token_id": -7}', "'eos_token_id' must be a token id, or -1 for none, not -7"),
        ('{"pad_token_id": false}', "'pad_token_id' must be a token id, or -1 for none, not false"),
        ('{"eos_token_id": [5, 300]}', "end id, 300, is outside .* 257 rows"),
        ('{"eos_token_id": [5, true]}', r"a token id, -1 for none, or a list .* not \[5, true\]"),
        ('{"eos_token_id": [5, -2]}', r"a token id, -1 for none, or a list .* not \[5, -2\]"),
        ('{"eos_token_id": "</s>"}', 'a token id, -1 for none, or a list of these, not "</s>"'),
        (json.dumps({"eos_token_id": [*range(65)]}), "holds 65 ids, more than 64"),
        ("[" * 100_000, "generation_config.json cannot be read"),
    ],
)
def test_an_impossible_end_id_is_found_at_load(tmp_path: Path, content: str, message: str) -> None:
    _byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        TextCodec(tmp_path).check_fits(257)


@pytest.mark.parametrize(
    ("files", "end_id", "more"),
    [
        ({"generation_config": [9, 7, 9, 8]}, 9, (7, 8)),
        ({"generation_config": 9, "config": [9, 7]}, 9, ()),
        ({"generation_config": None, "config": [9, 7]}, 9, (7,)),
        ({"generation_config": [7, 9], "eos_token": "<eos>"}, 256, (7, 9)),
        ({"generation_config": [7, 256], "eos_token": "<eos>"}, 256, (7,)),
        ({"config": -1, "eos_token": "<eos>"}, 256, ()),
        ({"config": [-1, 5], "eos_token": "<eos>"}, 256, (5,)),
        ({"eos_token": "<eos>"}, 256, ()),
    ],
)
def test_a_checkpoint_may_end_texts_with_several_tokens(
    tmp_path: Path, files: dict[str, Any], end_id: int, more: tuple[int, ...]
) -> None:
    """The tokenizer's is the first; the model's are in its own folder."""
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    tokenizer.mkdir()
    model.mkdir()
    _byte_level().save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "config.json").write_text('{"eos_token_id": 9}')
    for name, value in files.items():
        if name == "eos_token":
            content = json.dumps({"eos_token": value})
            (tokenizer / "tokenizer_config.json").write_text(content)
        else:
            (model / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    codec = TextCodec.load(model, str(tokenizer))
    assert codec is not None
    codec.check_fits(257)
    assert (codec.end_id, codec.more_end_ids) == (end_id, more)


def test_a_tokenizer_that_names_no_end_has_that_of_the_model(tmp_path: Path) -> None:
    """Else guides are refused for want of an end id, and who is told it ends answers nowhere."""
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    tokenizer.mkdir()
    model.mkdir()
    _byte_level().save(str(tokenizer / "tokenizer.json"))
    (model / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    codec = TextCodec(tokenizer, model)
    assert (codec.end_id, codec.more_end_ids) == (9, (7,))


def test_a_pad_id_that_is_not_there_is_none(tmp_path: Path) -> None:
    _byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"pad_token_id": 257, "eos_token_id": null}')
    codec = TextCodec(tmp_path)
    codec.check_fits(257)
    assert (codec.pad_id, codec.end_id) == (-1, -1)


@pytest.mark.case(81)
def test_a_long_text_stops_no_other_thread_while_it_is_encoded(codec: TextCodec) -> None:
    is_encoding = is_over = False
    num_turns = 0

    def take_turns() -> None:
        nonlocal num_turns
        while not is_over:
            time.sleep(0.001)
            num_turns += is_encoding

    thread = threading.Thread(target=take_turns)
    thread.start()
    is_encoding = True
    codec.encode("word " * 200_000, 1_000_000)
    is_encoding = False
    is_over = True
    thread.join()
    assert num_turns > 5, "with the interpreter lock held there is none, or one at its border"


def test_a_damaged_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextCodec(tmp_path)
    assert TextCodec.load(tmp_path / "nowhere", None) is None
