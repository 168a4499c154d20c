"""Special tokens come from the chat template; in the text of a message they are ordinary text.

A template renders the client's texts and its own special tokens into one text, in which a tokenizer
takes every ``<|end|>`` for the token. So before rendering, special tokens in a client's text are
marked with characters that no text of the request holds. In the rendered text a marked special
token is the client's; each of the others is replaced by a placeholder, and a second tokenizer
without special tokens encodes the text without the marks.

The marks stand around a token, so that a template can still find it. A text without special tokens
gets no marks and is encoded as usual.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from inflight_openai.errors import bad_field

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode: never a text's


class Marks(NamedTuple):
    """Characters before and behind a special token in a client's text, and between that text and
    what may stand beside it."""

    before: str
    behind: str
    edge: str


class _Span(NamedTuple):
    start: int
    end: int
    token_id: int


class SpecialTokens:
    """The special tokens of a tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """Keeps a copy of ``tokenizer``."""
        added = tokenizer.get_added_tokens_decoder()
        names = {token_id: each.content for token_id, each in added.items() if each.special}
        secret = secrets.token_hex(16)  # no client can send it
        # Splits at added tokens as the tokenizer does, and does nothing else.
        self._finder = Tokenizer(WordLevel({secret: 0}, unk_token=secret))
        if tokenizer.normalizer is not None:
            self._finder.normalizer = tokenizer.normalizer
        self._finder.add_tokens(list(added.values()))
        self._id_of = {self._finder.token_to_id(text): number for number, text in names.items()}
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._placeholders = {
            is_normalized: AddedToken(f"{secret}{is_normalized:d}", normalized=is_normalized)
            for is_normalized in (False, True)
        }
        self._plain.add_tokens(list(self._placeholders.values()))
        self._is_normalized = {number: added[number].normalized for number in names}
        self._placeholder_ids = {
            self._plain.token_to_id(each.content) for each in self._placeholders.values()
        }
        self._unknown_id = _unknown_id(tokenizer)
        # Where a normalizer may make one of another text, every text is looked through.
        has_forms = tokenizer.normalizer is not None and any(self._is_normalized.values())
        self._heads = {""} if has_forms else {text[:2] for text in names.values()}
        self._halves = {
            half
            for text in names.values()
            for size in range((len(text) + 1) // 2, len(text))
            for half in (text[:size], text[-size:])
        }
        self._half_sizes = sorted(set(map(len, self._halves)))

    def marks_for(self, value: Any) -> Marks | None:
        """Marks for the texts in ``value``, an object of JSON; None if they need none."""
        texts = list(_texts(value))
        is_clean = not any(self._spans_by_text(texts).values())
        if is_clean and not any(self._begins(text) or self._ends(text) for text in texts):
            return None
        everything = "\n".join(texts)
        free = [
            mark
            for mark in _NONCHARACTERS
            if mark not in everything and _escaped(mark) not in everything
        ]
        if len(free) < len(Marks._fields):
            raise bad_field("messages", "too many of Unicode's noncharacters")
        return Marks(*free[: len(Marks._fields)])

    def mark(self, value: Any, marks: Marks, kept: frozenset[str] = frozenset()) -> Any:
        """``value`` with marks in its texts; the special tokens ``kept`` get none."""
        spans_by_text = self._spans_by_text(_texts(value))

        def marked(each: Any) -> Any:
            if isinstance(each, str):
                return self._marked(each, spans_by_text.get(each, ()), marks, kept)
            if isinstance(each, dict):
                return {marked(key): marked(inner) for key, inner in each.items()}
            if isinstance(each, list):
                return [marked(inner) for inner in each]
            return each

        return marked(value)

    def unescaped(self, text: str, marks: Marks) -> str:
        """``text``, in which a template may have written marks as JSON in ASCII does."""
        for mark in marks:
            text = text.replace(_escaped(mark), mark)
        return text

    def encode(self, text: str, marks: Marks, *, add_special_tokens: bool) -> list[int]:
        """The ids of a rendered text with marks; `ApiError` if the vocabulary has a special token
        for what is only text."""
        written: list[int] = []
        forged: set[int] = set()
        pieces: list[str] = []
        place = 0
        [spans] = self._spans([text])
        for start, end, token_id in spans:
            if text[start - 1 : start] == marks.before or text[end : end + 1] == marks.behind:
                forged.add(token_id)
                continue
            pieces += [text[place:start], self._placeholders[self._is_normalized[token_id]].content]
            written.append(token_id)
            place = end
        pieces.append(text[place:])
        clean = "".join(pieces).translate(dict.fromkeys(map(ord, marks)))
        # The batch call gives the interpreter lock back while it works.
        [found] = self._plain.encode_batch([clean], add_special_tokens=add_special_tokens)
        rest, is_wrong = iter(written), False
        ids: list[int] = []
        for token_id, is_added in zip(found.ids, found.special_tokens_mask, strict=True):
            if token_id in self._placeholder_ids:
                ids.append(next(rest))
                continue
            is_wrong |= token_id in forged and not is_added and token_id != self._unknown_id
            ids.append(token_id)
        if is_wrong or next(rest, None) is not None:
            raise bad_field("messages", "the text of a special token has no other tokens here")
        return ids

    def _spans_by_text(self, texts: Iterable[str]) -> dict[str, list[_Span]]:
        """The special tokens of each text that may have some, in one call of the tokenizer."""
        suspects = [text for text in texts if any(head in text for head in self._heads)]
        return dict(zip(suspects, self._spans(suspects), strict=True)) if suspects else {}

    def _spans(self, texts: Sequence[str]) -> list[list[_Span]]:
        """Where the special tokens of each text are."""
        return [
            [
                _Span(*place, self._id_of[number])
                for number, place in zip(found.ids, found.offsets, strict=True)
                if number in self._id_of
            ]
            for found in self._finder.encode_batch(texts, add_special_tokens=False)
        ]

    def _begins(self, text: str) -> bool:
        """Whether ``text`` begins with half of a special token or more, of which the rest may end
        the text before it: one of the two has half."""
        return any(text[:size] in self._halves for size in self._half_sizes)

    def _ends(self, text: str) -> bool:
        """Whether it ends so."""
        return any(text[-size:] in self._halves for size in self._half_sizes)

    def _marked(self, text: str, spans: Sequence[_Span], marks: Marks, kept: frozenset[str]) -> str:
        pieces, place = [], 0
        for start, end, _ in spans:
            if text[start:end] not in kept:
                pieces += [text[place:start], marks.before, text[start:end], marks.behind]
                place = end
        marked = "".join([*pieces, text[place:]])
        return marks.edge * self._begins(text) + marked + marks.edge * self._ends(text)


def _texts(value: Any) -> Iterator[str]:
    """Every text in an object of JSON, keys as well."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            left += each


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _unknown_id(tokenizer: Any) -> int | None:
    """The token for what the vocabulary has no other for; often a special one."""
    model = tokenizer.model
    if (number := getattr(model, "unk_id", None)) is not None:
        return int(number)
    name = getattr(model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)
