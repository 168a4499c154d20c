"""Makes a tokenizer of what checkpoints have in the place of tokenizer.json.

* SentencePiece (``tokenizer.model``), of the kinds BPE and unigram;
* ranks of tiktoken (``tiktoken.model``, and some ``tokenizer.model``);
* GPT-2's ``vocab.json`` and ``merges.txt``;
* Mistral's ``tekken.json``, which is tiktoken's ranks with all that belongs to them.

The result is one of the library `tokenizers`, so that everything behind it (streams, guides, the
OpenAI front) knows one kind only. Conversions are those of `transformers`, except that a model of
SentencePiece keeps what its file says of spaces, whatever ``tokenizer_class`` is.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.text.tokenizer_files import MERGES, TEKKEN, VOCAB

_Parts = tuple[Tokenizer, dict[int, AddedToken]]
"""A tokenizer, and the tokens by id that it is to find in texts."""

_GPT2_END = "<|endoftext|>"
SPACE = "\u2581"  # how SentencePiece writes it
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class Converted(NamedTuple):
    """A tokenizer, and what of its texts' ends the file says: the text of ``bos_token`` and
    ``eos_token``, and whether texts begin with the first unless a file beside it says otherwise."""

    tokenizer: Tokenizer
    ends: Mapping[str, str]
    adds_bos: bool = False


def convert(
    path: Path,
    config: Mapping[str, Any],
    added: Mapping[int, AddedToken],
    special: Collection[str] = (),
) -> Converted:
    """The tokenizer in the file ``path``.

    ``config``: tokenizer_config.json. ``added``: tokens by id that the files beside it add, or
    rename. ``special``: texts of tokens that they name for some purpose. ``ValueError`` says why
    the file cannot be used.
    """
    if path.name == TEKKEN:
        tokenizer, tokens = _from_tekken(JsonReader.from_file(path), added)
        # As mistral_common, which reads no other file.
        found = Converted(tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, adds_bos=True)
    elif path.name == VOCAB:
        tokenizer, tokens = _from_pairs(path, added)
        found = Converted(tokenizer, dict.fromkeys(("bos_token", "eos_token"), _GPT2_END))
    elif _RANK_LINE.match(data := path.read_bytes()):
        tokenizer, tokens = _from_tiktoken(data, config, added)
        found = Converted(tokenizer, {})
    else:
        model = SentencePieceModel.parse(data)
        tokenizer, tokens = from_sentencepiece(model, config, added)
        found = Converted(tokenizer, model.ends)
    for text in {*special, *found.ends.values()}:
        number = tokenizer.token_to_id(text)
        if number is not None and number not in added:
            tokens[number] = AddedToken(text, normalized=False, special=True)
    add_tokens(tokenizer, tokens)
    return found


# SentencePiece. Its format is that of its sentencepiece_model.proto. The library's own reader
# demands the release of protobuf that it was generated with, which few servers have.

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
UNIGRAM_KIND, BPE_KIND = 1, 2


@dataclass(slots=True)
class SentencePieceModel:
    """What of a model its encoder needs. Defaults are those of the format."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """Text, score and type by id."""
    kind: int = UNIGRAM_KIND
    has_byte_fallback: bool = False
    has_space_behind: bool = False
    unknown_id: int = 0
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True
    ends: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"})

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        model = cls()
        try:
            for number, value in _fields(data):
                if number == 1:
                    model.pieces.append(_piece(value))
                elif number == 2:
                    trainer = dict(_fields(value))
                    model.kind = trainer.get(3, UNIGRAM_KIND)
                    model.has_space_behind = bool(trainer.get(24, 0))
                    model.has_byte_fallback = bool(trainer.get(35, 0))
                    model.unknown_id = trainer.get(40, 0)
                    told = {"bos_token": trainer.get(46), "eos_token": trainer.get(47)}
                    model.ends |= {name: text.decode() for name, text in told.items() if text}
                elif number == 3:
                    normalizer = dict(_fields(value))
                    model.charsmap = normalizer.get(2, b"")
                    model.adds_prefix = bool(normalizer.get(3, 1))
                    model.removes_spaces = bool(normalizer.get(4, 1))
        except (LookupError, TypeError, AttributeError, struct.error, UnicodeDecodeError):
            raise ValueError("neither a model of SentencePiece nor ranks of tiktoken") from None
        if not model.pieces:
            raise ValueError("neither a model of SentencePiece nor ranks of tiktoken")
        if model.kind not in (UNIGRAM_KIND, BPE_KIND) or model.has_space_behind:
            raise ValueError(
                "a model of SentencePiece that is neither BPE nor unigram, or that has spaces "
                "behind words, is not supported"
            )
        return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a message of protobuf: numbers, or bytes."""
    place = 0

    def read_varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        number, kind = divmod(read_varint(), 8)
        if kind == 0:
            yield number, read_varint()
            continue
        size = read_varint() if kind == 2 else {1: 8, 5: 4}[kind]
        if place + size > len(data):
            raise IndexError
        yield number, data[place : place + size]
        place += size


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = b"", 0.0, _NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = value
        elif number == 2:
            [score] = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return text.decode(), score, kind


def from_sentencepiece(
    model: SentencePieceModel, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> _Parts:
    """The tokenizer, and the tokens by id that it is to find in texts; ``config`` and ``added`` as
    of `convert`."""
    pieces = [
        (added[number].content if number in added else text, score, kind)
        for number, (text, score, kind) in enumerate(model.pieces)
    ]
    unknown = pieces[model.unknown_id][0]
    if model.kind == BPE_KIND:
        vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
        vocab |= {token.content: number for number, token in added.items()}
        merges = _merges({text: score for text, score, kind in pieces if kind == _NORMAL})
        tokenizer = Tokenizer(
            BPE(
                vocab,
                merges,
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=model.has_byte_fallback,
            )
        )
    else:
        scores = [(text, score) for text, score, _ in pieces]
        for number in range(len(scores), max(added, default=-1) + 1):
            name = added[number].content if number in added else _reserved(number)
            scores.append((name, 0.0))
        tokenizer = Tokenizer(Unigram(scores, model.unknown_id, model.has_byte_fallback))
    adds_prefix = config.get("add_prefix_space", model.adds_prefix)
    scheme = "never" if not adds_prefix else "always" if config.get("legacy") else "first"
    tokenizer.normalizer = _normalizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", left=1)] if adds_prefix else steps
    )
    named = {
        number: AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
        for number, (text, _, kind) in enumerate(pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    return tokenizer, named | dict(added)


def _normalizer(model: SentencePieceModel) -> Any:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps) if steps else None


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs that become a piece; those of a higher score come first."""
    number_of = {text: number for number, text in enumerate(scores)}
    found = [
        (-score, number_of[text], number_of[text[:size]], number_of[text[size:]], text, size)
        for text, score in scores.items()
        for size in range(1, len(text))
        if text[:size] in scores and text[size:] in scores
    ]
    return [(text[:size], text[size:]) for *_, text, size in sorted(found)]


# tiktoken.

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Llama 3 and others cut a text first: the file does not say it."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN_BY_CLASS = {
    "TikTokenTokenizer": "|".join(  # Kimi
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}


def _from_tiktoken(
    data: bytes, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> _Parts:
    number_of: dict[bytes, int] = {}
    for line in data.split(b"\n"):
        if line.strip():
            text, _, number = line.partition(b" ")
            number_of[_decoded(text)] = int(number)
    every = dict(added)
    for free in range(len(number_of), max(added, default=-1) + 1):
        every.setdefault(free, AddedToken(_reserved(free), normalized=False, special=True))
    pattern = _PATTERN_BY_CLASS.get(str(config.get("tokenizer_class")), LLAMA3_PATTERN)
    return _from_ranks(number_of, pattern, every)


_SPECIAL_BEFORE_V7 = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Of files that do not list them, by id (`mistral_common`, ``DEPRECATED_SPECIAL_TOKENS``)."""


def _from_tekken(reader: JsonReader, added: Mapping[int, AddedToken]) -> _Parts:
    """Special tokens have the first ids, and the bytes those behind them."""
    config = reader.section("config")
    names = dict(enumerate(_SPECIAL_BEFORE_V7))
    if "special_tokens" in reader:
        entries = reader.sections("special_tokens")
        names = {each.integer("rank", minimum=0): each.text("token_str") for each in entries}
    num_special = config.integer("default_num_special_tokens", default=len(names))
    special = {
        number: AddedToken(names.get(number, f"<SPECIAL_{number}>"), normalized=False, special=True)
        for number in range(num_special)
    }
    tokens = [each.text("token_bytes") for each in reader.sections("vocab")]
    size = config.integer("default_vocab_size", default=len(tokens) + num_special)
    number_of = {
        _decoded(text.encode()): num_special + number
        for number, text in enumerate(tokens[: size - num_special])
    }
    return _from_ranks(number_of, config.text("pattern"), special | dict(added))


def _from_ranks(
    number_of: Mapping[bytes, int], pattern: str, added: dict[int, AddedToken]
) -> _Parts:
    """The tokenizer of tokens that are bytes, which joins the pair with the lowest number first."""
    found = [
        (number, number_of[token[:size]], number_of[token[size:]], token, size)
        for token, number in number_of.items()
        for size in range(1, len(token))
        if token[:size] in number_of and token[size:] in number_of
    ]
    names = {token: token.decode("latin-1").translate(_TABLE) for token in number_of}
    merges = [(names[token[:size]], names[token[size:]]) for *_, token, size in sorted(found)]
    vocab = {names[token]: number for token, number in number_of.items()}
    vocab |= {token.content: number for number, token in added.items()}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, added


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError(f"{text[:40]!r} is not Base64") from None


def _byte_letters() -> str:
    """GPT-2's table: the letter for each byte in the names of byte-level tokens, which is the byte
    itself if printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_TABLE = dict(enumerate(_byte_letters()))


# GPT-2.


def _from_pairs(path: Path, added: Mapping[int, AddedToken]) -> _Parts:
    vocab, merges = BPE.read_file(str(path), str(path.with_name(MERGES)))
    vocab |= {token.content: number for number, token in added.items()}
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, dict(added)


# All.


def _reserved(number: int) -> str:
    return f"<|reserved_token_{number}|>"


def add_tokens(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken]) -> None:
    """Have ``tokens``, by id, found in texts; ``ValueError`` for one that has another id."""
    ordered: Sequence[tuple[int, AddedToken]] = sorted(tokens.items())
    tokenizer.add_tokens([token for _, token in ordered])
    for number, token in ordered:
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(f"the token {token.content!r} has the ids {number} and {found}")
