"""The tokenizer in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from inflight_backend.errors import CheckpointError
from inflight_backend.gguf_files import GgufFile
from inflight_backend.text.conversion import (
    BPE_KIND,
    LLAMA3_PATTERN,
    SPACE,
    UNIGRAM_KIND,
    Converted,
    SentencePieceModel,
    add_tokens,
    from_sentencepiece,
)
from inflight_backend.text.gguf_metadata import BEGINNING, adds_bos, read_ends

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_QWEN2 = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", _DIGIT)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}{_REST}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LETTERS = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7ff"
    "\uab30-\uab6f\U00010d40-\U00010d8f\U00010570-\U000105bf\U00016e40-\U00016e7f\U0001d400-\U0001d7ff"
    "\U0001df00-\U0001dfff]]"
)
"""Those of alphabets with two cases which DeepSeek's first models cut at."""
_ASIAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_LETTERS}+",
    "\\s?[!-/:-~\u2018-\u201f\u3000-\u3002\uff01-\uff0f\uff1a-\uff5e]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_UNKNOWN_KIND = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")

_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys(("gigachat", "mellum", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (_DIGIT, _GPT2),
    ),
    **dict.fromkeys(BEGINNING, (LLAMA3_PATTERN,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "glm5", "chatglm-bpe"), (LLAMA3_PATTERN,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "kormo"),
        (_QWEN2,),
    ),
    "qwen35": (_QWEN35,),
    "bloom": (_BLOOM,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_O200K,)),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "default": _UNKNOWN_KIND,
    "falcon": (),
}
"""Where byte-level tokenizers cut a text first, each pattern within the parts of the one before, by
``tokenizer.ggml.pre``; for one without patterns see `_cuts`."""

_COMPOSING = ("qwen2", "deepseek-r1-qwen")
"""Those that compose characters first (NFC)."""


_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that do not take the white space behind them, as all others do: metadata does not
say so of any."""


def convert_gguf(file: GgufFile) -> Converted:
    """The tokenizer of an open file. `CheckpointError` names a kind that is not supported."""
    model = file.value(f"{_PREFIX}model")
    if model not in _KINDS:
        raise CheckpointError(
            f"{file.name}: tokenizer.ggml.model {model!r} is not supported; supported: "
            f"{', '.join(_KINDS)}"
        )
    tokenizer, tokens = _KINDS[model](file)
    add_tokens(tokenizer, tokens)
    return Converted(tokenizer, read_ends(file), adds_bos(file))


def _tokens(file: GgufFile) -> list[tuple[str, float, int]]:
    """Text, score and type by id."""
    texts = file.value(f"{_PREFIX}tokens", [])
    scores = file.value(f"{_PREFIX}scores") or [0.0] * len(texts)
    kinds = file.value(f"{_PREFIX}token_type") or [_NORMAL] * len(texts)
    if not len(texts) == len(scores) == len(kinds):
        raise CheckpointError(
            f"{file.name}: {len(texts)} tokenizer.ggml.tokens have {len(scores)} scores and "
            f"{len(kinds)} types"
        )
    return list(zip(texts, scores, kinds, strict=True))


def _byte_pairs(file: GgufFile) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """Of GPT-2's kind: tokens are bytes, merges are written down."""
    pre = file.value(f"{_PREFIX}pre", "default")
    if pre not in _PATTERNS:
        raise CheckpointError(
            f"{file.name}: tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{', '.join(_PATTERNS)}"
        )
    tokens = _tokens(file)
    merges = [_pair(each) for each in file.value(f"{_PREFIX}merges", [])]
    vocab = {text: number for number, (text, _, _) in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in BEGINNING))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(_PATTERNS[pre]))
    if pre in _COMPOSING:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _named(tokens)


def _named(tokens: list[tuple[str, float, int]]) -> dict[int, AddedToken]:
    """Those that texts may name."""
    return {
        number: AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
        for number, (text, _, kind) in enumerate(tokens)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }


def _cuts(patterns: tuple[str, ...]) -> list[Any]:
    """Falcon's, without patterns, goes on behind the step that makes letters of bytes."""
    if not patterns:
        return [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    return [
        *(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _pair(merge: str) -> tuple[str, str]:
    """The space between two tokens is the first behind the first character: a token may begin with
    one in vocabularies of more than bytes."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _pieces(kind: int, file: GgufFile) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """Of SentencePiece."""
    pieces = _tokens(file)
    unknown = next((number for number, each in enumerate(pieces) if each[2] == _UNKNOWN), 0)
    model = SentencePieceModel(
        pieces=pieces,
        kind=kind,
        has_byte_fallback=any(text == "<0x0A>" for text, _, _ in pieces),
        unknown_id=file.value(f"{_PREFIX}unknown_token_id", unknown),
        charsmap=bytes(file.value(f"{_PREFIX}precompiled_charsmap", [])),
        adds_prefix=bool(file.value(f"{_PREFIX}add_space_prefix", True)),
        removes_spaces=bool(file.value(f"{_PREFIX}remove_extra_whitespaces", False)),
        ends=read_ends(file),
    )
    tokenizer, tokens = from_sentencepiece(model, {}, {})
    if kind == BPE_KIND and model.adds_prefix:
        # SentencePiece's own way: in front of a space, too, and behind a special token.
        tokenizer.normalizer = normalizers.Prepend(SPACE)
    if file.value("general.architecture") == "phi3":
        tokens = {
            number: AddedToken(
                each.content,
                rstrip=each.content not in _NOT_STRIPPING,
                normalized=False,
                special=each.special,
            )
            for number, each in tokens.items()
        }
    return tokenizer, tokens


def _character_pairs(file: GgufFile) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """Of Gemma 4: merges are of characters, with a sign for spaces, in lines; a character without a
    token is its bytes."""
    tokens = _tokens(file)
    unknown = next((text for text, _, kind in tokens if kind == _UNKNOWN), None)
    merges = [_pair(each) for each in file.value(f"{_PREFIX}merges", [])]
    vocab = {text: number for number, (text, _, _) in enumerate(tokens)}
    model = BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, _named(tokens)


_KINDS: dict[str, Callable[[GgufFile], tuple[Tokenizer, dict[int, AddedToken]]]] = {
    "gpt2": _byte_pairs,
    "gemma4": _character_pairs,
    "llama": lambda file: _pieces(BPE_KIND, file),
    "t5": lambda file: _pieces(UNIGRAM_KIND, file),
}
