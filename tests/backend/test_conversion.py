"""Tokenizers, most of them no tokenizer.json: tokens and texts as the libraries made for them have.

The oracles are `transformers` for models of SentencePiece and for tekken, sentencepiece itself for
what `transformers` does not convert faithfully, and tiktoken for ranks.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from inflight_backend.errors import CheckpointError
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.text.conversion import _PATTERN_BY_CLASS, LLAMA3_PATTERN
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton.introspection import ModelInfo

CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich - 1234567,89 €.",
    "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを。日本語のテキストを分かち書きしません。",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。 数字123和ABC混排",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "นกกูรู บินไปในอากาศ ๑๒๓",
    "दिल्ली में आज मौसम अच्छा है।",
    "def f(x):\n\treturn {'a': x ** 2}  # Kommentar\n\n\n    pass\r\n",
    "a  b   c\t\td \u00a0 e\u3000f",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🙂‍↕️ and e\u0301 ﬁ ① Ⅷ",
    "I'M they'Ll WE'VE don't 12345678 3.14",
    " leading and trailing ",
    "   ",
    "",
    "\n",
)
SPECIAL = "<s>[INST] Hallo <|tool|>Welt</s> [/INST]"
UNSEEN = "\U0001d518\U0001d52b ☃ \U00012345 ʬ"
TEXTS = (*CORPUS, SPECIAL, UNSEEN)
LIMITS = RequestLimits(999, 99, 99, exclude_input_in_output=False, refusal_reason=lambda _: None)


def write(folder: Path, name: str, data: bytes, **config: Any) -> Path:
    """A folder with a tokenizer in the file ``name``, of a Llama."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def train(kind: str, **options: Any) -> bytes:
    """A small model of SentencePiece, by default like Llama's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        model_type=kind,
        minloglevel=2,
        **{
            "vocab_size": 700,
            "byte_fallback": True,
            "character_coverage": 0.98,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
            "allow_whitespace_only_pieces": True,
            "hard_vocab_limit": False,
            **options,
        },
    )
    return model.getvalue()


def encoded(codec: TextCodec, text: str) -> list[int]:
    return codec.encode_raw(text, add_special_tokens=True)


def assert_streams(codec: TextCodec, ids: Sequence[int], prompt: Sequence[int] = ()) -> None:
    """In pieces of every size the answer has the text that it has as a whole."""
    whole = codec.decode([*prompt, *ids])[len(codec.decode(prompt)) :]
    for size in (1, 2, 7):
        stream = IncrementalDetokenizer(codec, prompt)
        pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join([*pieces, stream.finish()]) == whole.rstrip("\ufffd")


def assert_equals_transformers(folder: Path) -> None:
    """Tokens, texts with and without special tokens, and streams."""
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    codec = TextCodec(folder)
    for text in TEXTS:
        ids = encoded(codec, text)
        assert ids == oracle(text)["input_ids"], text
        for skips in (True, False):
            assert codec.decode(ids, skip_special_tokens=skips) == oracle.decode(
                ids, skip_special_tokens=skips
            )
        assert_streams(codec, ids, encoded(codec, "Hallo"))
    assert_streams(codec, [each for text in TEXTS for each in encoded(codec, text)])


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        ({}, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}),
        (
            {"user_defined_symbols": ["[INST]", "[/INST]"], "control_symbols": ["<|tool|>"]},
            {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "eos_token": "</s>"},
        ),
        ({}, {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
        (
            {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
            | {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
            | {"user_defined_symbols": ["<mask>", "<start_of_turn>"]},
            {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<bos>"},
        ),
    ],
    ids=["llama", "legacy", "symbols", "no-prefix", "gemma"],
)
def test_a_model_of_sentencepiece(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any]
) -> None:
    assert_equals_transformers(
        write(tmp_path, "tokenizer.model", train("bpe", **options), **config)
    )


@pytest.mark.parametrize("kind", ["bytes", "byte fallback"])
def test_a_plain_tokenizer_json(tmp_path: Path, kind: str) -> None:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|tool|>"]
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        alphabet, special = [], [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False,
        limit_alphabet=300,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < 6]
    folder = write(
        tmp_path,
        "tokenizer.json",
        json.dumps(content).encode(),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert_equals_transformers(folder)


def test_texts_for_an_encoder_end(tmp_path: Path) -> None:
    """A model of T5's, as mT5 has it without a tokenizer.json."""
    data = train("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>")
    folder = write(
        tmp_path, "spiece.model", data, tokenizer_class="T5Tokenizer", eos_token="</s>", extra_ids=0
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    codec = TextCodec(folder)
    for text in ("Hallo Welt", "a"):
        assert encoded(codec, text) == [*oracle.encode(text), 1]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}],
    ids=["identity", "nfkc"],
)
def test_sentencepiece_itself_agrees(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """But for a space in front, which `transformers` takes for the one that is added, and for
    special tokens, which the library does not see in texts."""
    data = train(kind, **options)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    codec = TextCodec(write(tmp_path, "tokenizer.model", data))
    for text in (*CORPUS, UNSEEN):
        if text.startswith((" ", "\n")):
            continue
        ids = encoded(codec, text)
        assert ids == oracle.encode(text), text
        assert codec.decode(ids) == oracle.decode(ids)
        assert_streams(codec, ids)


def test_a_token_that_a_file_names_for_a_purpose_is_special(tmp_path: Path) -> None:
    """As the end of a turn, which some models of SentencePiece have for an ordinary piece."""
    data = train("bpe", user_defined_symbols=["[INST]", "[/INST]"])
    folder = write(tmp_path, "tokenizer.model", data, additional_special_tokens=["[/INST]"])
    codec = TextCodec(folder)
    ids = codec.encode_word("[INST]a[/INST]")
    assert codec.decode(ids) == "[INST]a"
    assert codec.decode(ids, skip_special_tokens=False) == "[INST]a[/INST]"


def test_tokens_that_other_files_add_or_rename(tmp_path: Path) -> None:
    """Of Phi-3 and Vicuna; the last has an id behind a gap."""
    entry = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
    added = {
        "2": {"content": "</s>", "special": False, **entry},
        "5": {"content": "<|tool|>", "special": True, **entry},
        "900": {"content": "[INST]", "special": True, **entry},
    }
    for kind in ("bpe", "unigram"):
        folder = write(tmp_path, "tokenizer.model", train(kind), added_tokens_decoder=added)
        (folder / "added_tokens.json").write_text('{"[/INST]": 901}')
        codec = TextCodec(folder)
        ids = encoded(codec, SPECIAL)
        assert {2, 5, 900, 901} <= set(ids)
        assert codec.decode([2, 5, 900, 901]) == "</s>[/INST]"
        assert codec.vocab_size == 902


def sentencepiece_as_gguf(data: bytes, path: Path, architecture: str) -> Path:
    """What llama.cpp's conversion makes of a model."""
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    numbers = range(model.vocab_size())
    kinds = (("is_unknown", 2), ("is_control", 3), ("is_unused", 5), ("is_byte", 6))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(each) for each in numbers])
    writer.add_token_scores([model.get_score(each) for each in numbers])
    writer.add_token_types(
        [next((kind for name, kind in kinds if getattr(model, name)(each)), 1) for each in numbers]
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_model_of_sentencepiece_in_a_gguf_file(tmp_path: Path, architecture: str) -> None:
    """Between special tokens as the library itself, which adds a space in front of one, too. Those
    of Phi-3 take the white space behind them."""
    data = train("bpe", control_symbols=["<|tool|>"])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    codec = TextCodec(sentencepiece_as_gguf(data, tmp_path / "model.gguf", architecture))
    for text in (*CORPUS, UNSEEN):
        ids = oracle.encode(text)
        assert encoded(codec, text) == [1, *ids, 2], text
        assert codec.decode([1, *ids, 2]) == oracle.decode(ids)
    behind = "Hallo" if architecture == "phi3" else "\n Hallo"
    ids = [1, *oracle.encode("a"), oracle.piece_to_id("<|tool|>"), *oracle.encode(behind), 2]
    assert encoded(codec, "a<|tool|>\n Hallo") == ids
    assert encoded(codec, "a<s> b") == [1, *oracle.encode("a"), 1, *oracle.encode(" b"), 2]
    assert codec.end_id == 2


def test_pairs_of_characters_in_a_gguf_file(tmp_path: Path) -> None:
    """As Gemma's own tokenizer has it: signs for spaces, bytes where there is no token."""
    oracle = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    oracle.normalizer = normalizers.Replace(" ", "\u2581")
    oracle.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*special, *(f"<0x{each:02X}>" for each in range(256))],
        show_progress=False,
    )
    oracle.train_from_iterator([each.replace("z", "") for each in CORPUS], trainer)
    content = json.loads(oracle.to_str())["model"]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    writer.add_token_list(tokens)
    kinds = [3, 3, 3, 2, 4, *[6] * 256]
    writer.add_token_types(kinds + [1] * (len(tokens) - len(kinds)))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    codec = TextCodec(path)
    for text in (*CORPUS, "a <|tool>\n\n b<bos>", "z\n\nZ", UNSEEN):
        assert encoded(codec, text) == [2, *oracle.encode(text).ids], text
        assert codec.decode(encoded(codec, text)[1:]) == text.replace("<bos>", "")


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
        ("qwen2", transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX),
        ("llama-bpe", signature(TikTokenConverter).parameters["pattern"].default),
        ("gpt-4o", tiktoken_ext.openai_public.o200k_base),
    ],
)
def test_byte_pairs_in_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cuts: Any
) -> None:
    """The oracles of their cuts: other libraries' ones of the models whose kind it is."""
    if callable(cuts) and not isinstance(cuts, pre_tokenizers.PreTokenizer):
        monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        cuts = cuts()["pat_str"]
    if isinstance(cuts, str):
        split = pre_tokenizers.Split(Regex(cuts), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cuts = pre_tokenizers.Sequence([split, level])
    oracle = Tokenizer(models.BPE())
    oracle.pre_tokenizer = cuts
    if kind == "qwen2":
        oracle.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|begin|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    oracle.train_from_iterator(CORPUS, trainer)
    content = json.loads(oracle.to_str())["model"]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(sorted(content["vocab"], key=content["vocab"].__getitem__))
    writer.add_token_types([3, 4] + [1] * (len(content["vocab"]) - 2))
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_bos_token_id(0)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    writer.add_chat_template(named)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    codec = TextCodec(path)
    begin = [0] if kind == "llama-bpe" else []
    for text in (*CORPUS, "<|tool|>1<|begin|>", UNSEEN):
        assert encoded(codec, text) == begin + oracle.encode(text).ids, text
    assert codec.decode([0, 1]) == "<|tool|>"
    files = json.loads(ModelInfo("m", path, LIMITS, codec).to_json())["files"]
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == named
    assert Tokenizer.from_str(files["tokenizer.json"]).encode("a b").ids == encoded(codec, "a b")


_PIECES = {
    "deepseek-llm": "Ab| caf|é|s|\n|\n| |12| Ա|բ| a|'|b| (|x|)|、| |漢が| \t ",
    "deepseek-coder": "Ab| cafés|\n|\n| |1|2| Աբ| a|'|b| (|x|)|、| |漢が| \t ",
    "deepseek-v3": "Ab| cafés|\n\n| |12| Աբ| a|'b| (|x|)、| |漢が| \t ",
    "qwen35": "Ab| cafés|\n\n| |1|2| Աբ| a|'b| (|x|)、| 漢が| \t ",
    "bloom": "Ab| cafés|\n\n| 12| Աբ| a'b| (|x|)、| 漢が| \t ",
    "seed-coder": "Ab| cafés|\n\n| |1|2| Աբ| a|'b| (|x|)、| 漢が| \t ",
    "command-r": "Ab| cafés|\n\n |1|2| Աբ| a|'|b| (|x|)、| 漢が| \t ",
    "default": "Ab| cafés|\n\n| |12| Աբ| a|'|b| |(|x|)、| 漢が| \t ",
}
"""What llama.cpp makes of a text with the tokens of `test_where_byte_level_tokenizers_cut`."""


@pytest.mark.parametrize("kind", _PIECES)
def test_where_byte_level_tokenizers_cut(tmp_path: Path, kind: str) -> None:
    """All that stands together in the text is a token."""
    pieces = _PIECES[kind].split("|")
    [(text, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("".join(pieces))
    ends = range(2, len(text) + 1)
    merges = dict.fromkeys(
        f"{text[first:middle]} {text[middle:last]}"
        for last in ends
        for first in range(last - 1)
        for middle in range(first + 1, last)
    )
    letters = pre_tokenizers.ByteLevel.alphabet()
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(sorted({*letters, *(each.replace(" ", "") for each in merges)}))
    writer.add_token_merges(list(merges))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    codec = TextCodec(path)
    assert [codec.decode([each]) for each in encoded(codec, "".join(pieces))] == pieces


def test_what_ends_an_answer_in_a_gguf_file(tmp_path: Path) -> None:
    """The ends of text, turn and message that it names, and special tokens that are known as one:
    an ordinary token of such a name is none."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["<s>", "</s>", "<|im_end|>", "<|end|>", "<turn>", "<message>", "a"])
    writer.add_token_types([3, 3, 3, 1, 3, 3, 1])
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(4)
    writer.add_eom_token_id(5)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    codec = TextCodec(path)
    assert (codec.end_id, codec.more_end_ids) == (1, (2, 4, 5))
    assert encoded(codec, "a<turn>") == [6, 4]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Tokens of bytes with their ranks, as tiktoken would train them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    letters = {letter: byte for byte, letter in transformers_letters()}
    return {
        bytes(letters[each] for each in text): number
        for text, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    }


def transformers_letters() -> Iterator[tuple[int, str]]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return iter(bytes_to_unicode().items())


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"}  # OPT
        | {"eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"},
    ],
    ids=["gpt2", "opt"],
)
def test_pairs_of_gpt2(tmp_path: Path, config: dict[str, Any]) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(tmp_path))
    assert TextCodec.load(write(tmp_path, "x", b"", **config), None) is not None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert_equals_transformers(tmp_path)
    (tmp_path / "merges.txt").unlink()
    assert TextCodec.load(tmp_path, None) is None


def lines(ranks: dict[bytes, int]) -> bytes:
    """The file of tiktoken."""
    rows = (base64.b64encode(token) + b" %d\n" % number for token, number in ranks.items())
    return b"".join(rows)


@pytest.mark.parametrize(
    ("name", "config", "pattern"),
    [
        ("tokenizer.model", {}, LLAMA3_PATTERN),  # Llama 3
        (
            "tiktoken.model",
            {"tokenizer_class": "TikTokenTokenizer"},
            _PATTERN_BY_CLASS["TikTokenTokenizer"],
        ),
    ],
    ids=["llama3", "kimi"],
)
def test_ranks_of_tiktoken(
    tmp_path: Path, ranks: dict[bytes, int], name: str, config: dict[str, Any], pattern: str
) -> None:
    added = {f"{len(ranks) + 2}": {"content": "<|tool|>", "special": True}}
    folder = write(tmp_path, name, lines(ranks), added_tokens_decoder=added, **config)
    special = {"<|tool|>": len(ranks) + 2}
    oracle = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    codec = TextCodec(folder)
    for text in TEXTS:
        ids = encoded(codec, text)
        assert ids == oracle.encode(text, allowed_special="all"), text
        assert codec.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
        assert_streams(codec, ids)
    assert codec.vocab_size == len(ranks) + 3
    assert codec.decode([len(ranks)], skip_special_tokens=False).startswith("<|reserved_token_")


@pytest.mark.parametrize("lists_special", [True, False])
def test_tekken(tmp_path: Path, ranks: dict[bytes, int], lists_special: bool) -> None:
    """Without a list of special tokens the file is of before v7."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|tool|>"]
    content: dict[str, Any] = {
        "config": {
            "pattern": LLAMA3_PATTERN,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": len(ranks) + 25 - 7,  # the last seven are padding
            "default_num_special_tokens": 25,
            "version": "v11",
        },
        "vocab": [
            {"rank": number, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, number in ranks.items()
        ],
    }
    if lists_special:
        content["special_tokens"] = [
            {"rank": number, "token_str": text, "is_control": True}
            for number, text in enumerate(special)
        ]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    codec = TextCodec(tmp_path)
    kept = {token: number for token, number in ranks.items() if number < len(ranks) - 7}
    oracle = tiktoken.Encoding("x", pat_str=LLAMA3_PATTERN, mergeable_ranks=kept, special_tokens={})
    for text in (*CORPUS, UNSEEN):
        wanted = [1, *(25 + each for each in oracle.encode(text, disallowed_special=()))]
        assert encoded(codec, text) == wanted, text
        assert codec.decode(wanted) == text
        assert_streams(codec, wanted[1:], wanted[:1])
    assert codec.encode_word("<s>[INST]</s>") == [1, 3, 2]
    number = 5 if lists_special else 19
    text = "<|tool|>" if lists_special else "[TOOL_CONTENT]"
    assert codec.encode_word(text + "<SPECIAL_24>") == [number, 24]
    assert codec.vocab_size == len(kept) + 25
    if lists_special:
        from transformers.integrations.mistral.tokenizer import MistralConverter

        converted = MistralConverter(str(tmp_path / "tekken.json")).converted()
        assert converted.get_vocab() == Tokenizer.from_str(codec.to_json()).get_vocab()
        for text in TEXTS:
            assert codec.encode_word(text) == converted.encode(text).ids


def test_clients_are_told_a_tokenizer_json(tmp_path: Path) -> None:
    data = train("bpe")
    codec = TextCodec(write(tmp_path, "tokenizer.model", data, add_bos_token=True, bos_token="<s>"))
    description = json.loads(ModelInfo("m", tmp_path, LIMITS, codec).to_json())
    told = Tokenizer.from_str(description["files"]["tokenizer.json"])
    assert told.encode(SPECIAL).ids == encoded(codec, SPECIAL)
    assert told.encode(SPECIAL).ids[0] == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.model", b"\x0a\xff\xff", "neither a model of SentencePiece nor ranks"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1", "run git lfs pull"),
        ("tokenizer.model", b"AA== 0\n?! 1\n", "is not Base64"),
        ("tokenizer.model", b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "neither BPE nor unigram"),
        ("tekken.json", b"{", "not valid JSON"),
        ("tekken.json", b'{"vocab": [], "config": {}}', "config: pattern is missing"),
        ("tekken.json", b'{"vocab": [1]}', "vocab must be a list of objects"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^{name}.*{message}"):
        TextCodec(write(tmp_path, name, data))


def test_a_token_that_is_there_with_another_id_is_named(tmp_path: Path) -> None:
    added = {"900": {"content": "<s>", "special": True}}
    folder = write(tmp_path, "tokenizer.model", train("bpe"), added_tokens_decoder=added)
    with pytest.raises(CheckpointError, match=r"'<s>' has the ids 1 and 900"):
        TextCodec(folder)
