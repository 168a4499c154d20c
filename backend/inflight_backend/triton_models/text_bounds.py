"""Bounds of one request to ``preprocessing`` or ``postprocessing``, of texts and of tables.

Rows are padded to the longest, so a long one beside many short ones makes a table much larger than
the texts were.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.sampling_validation import MAX_WORDS
from inflight_backend.triton_io.texts import MAX_TEXT_SIZE

MAX_CHARACTERS = 2**22
"""Characters of all prompts, some million tokens; it takes seconds to encode them."""

MAX_TOKENS = 2**22
"""Tokens to decode."""


def check_prompts(name: str, texts: Sequence[str]) -> None:
    """`InvalidRequest` for more characters than are encoded at once."""
    num_characters = sum(map(len, texts))
    if num_characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"'{name}' holds {num_characters} characters, more than {MAX_CHARACTERS}"
        )


def check_words(name: str, rows: Sequence[Sequence[str]]) -> None:
    """`InvalidRequest` for a row with more words than `tensorrt_llm` takes."""
    for row in rows:
        num_characters = sum(map(len, row))
        if len(row) > MAX_WORDS:
            raise InvalidRequest(f"'{name}' holds {len(row)} texts in a row, more than {MAX_WORDS}")
        if num_characters > MAX_TEXT_SIZE:
            raise InvalidRequest(
                f"'{name}' holds {num_characters} characters in a row, more than {MAX_TEXT_SIZE}"
            )


def check_answers(name: str, num_tokens: int) -> None:
    """`InvalidRequest` for more tokens than are decoded at once."""
    if num_tokens > MAX_TOKENS:
        raise InvalidRequest(f"'{name}' asks for {num_tokens} tokens, more than {MAX_TOKENS}")
