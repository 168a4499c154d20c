"""Tokens by themselves, as log probabilities tell them: their text, and their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # what tokenizers with byte fallback call a byte


class Token(NamedTuple):
    """``text`` has U+FFFD where a part of a character stands, and ``data`` the bytes of that; None
    where the tokenizer does not tell."""

    text: str
    data: bytes | None


TokenOf = Callable[[int], Token]


def token_by_id(token_id: int) -> Token:
    """What vLLM's clients read instead of a token's text, where that may be of several tokens."""
    text = f"token_id:{token_id}"
    return Token(text, text.encode())


class TokenReader:
    """Texts and bytes of the tokens of ``tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str())["decoder"]
        letters = _letters() if "ByteLevel" in set(_types(decoder)) else ""
        self._letter_to_byte = {letter: byte for byte, letter in enumerate(letters)}

    def text(self, token_id: int) -> str:
        """The text of one token as it stands behind another, special ones included."""
        # A decoder drops a space that a text begins with, so the token is made the second one.
        once: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def __call__(self, token_id: int) -> Token:
        """A token by its id."""
        text = self.text(token_id)
        return Token(text, self._part(token_id) if _REPLACEMENT in text else text.encode())

    def _part(self, token_id: int) -> bytes | None:
        """The bytes of a token that are no whole characters."""
        name: str = self._tokenizer.id_to_token(token_id) or ""
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        found = [self._letter_to_byte.get(letter) for letter in name]
        known = [byte for byte in found if byte is not None]
        return bytes(known) if known and len(known) == len(found) else None


def _types(decoder: Any) -> Iterator[str]:
    """The types of a decoder of tokenizer.json and of those it is made of."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for each in decoder.get("decoders") or ():
            yield from _types(each)


def _letters() -> str:
    """The letter that stands for each byte in the names of byte-level tokens: itself if it can be
    printed, else one of those from 256 on (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
