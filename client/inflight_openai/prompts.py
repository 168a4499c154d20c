"""Text and messages to token ids and back, with the server's tokenizer and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from inflight_client.errors import InvalidArgument
from inflight_openai.chat import (
    ChatTemplate,
    find_templates,
    for_template,
    special_tokens,
    with_objects,
)
from inflight_openai.errors import TOO_LONG, ApiError, bad_field
from inflight_openai.special_tokens import Marks, SpecialTokens

_MAX_CHARACTERS_PER_TOKEN = 128
_NONE: frozenset[str] = frozenset()
_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte's token of tokenizers with byte fallback


class Token(NamedTuple):
    """``text`` has U+FFFD for a part of a character; ``data`` has its bytes, or is None where the
    tokenizer does not tell."""

    text: str
    data: bytes | None


TokenOf = Callable[[int], Token]


def token_by_id(token_id: int) -> Token:
    """The token with its id as text, as vLLM writes it: other tokens may have the same text."""
    text = f"token_id:{token_id}"
    return Token(text, text.encode())


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's limits in tokens; ``end_id`` (-1: none) and ``stop_token_ids`` end an answer."""

    max_input_len: int
    max_seq_len: int
    vocab_size: int
    end_id: int
    stop_token_ids: tuple[int, ...] = ()

    @property
    def context_words(self) -> str:
        """Beginning of an error."""
        return f"This model's maximum context length is {self.max_seq_len} tokens. However, "

    def check(self, num_prompt: int, max_tokens: int, param: str) -> None:
        """`ApiError` if the server would refuse so many tokens of ``param`` and of its answer.

        In OpenAI's words: clients search them, and the numbers, to shorten what they send.
        """
        words = self.context_words
        if num_prompt > self.max_input_len:
            raise ApiError(
                400,
                f"{words}your {param} resulted in {num_prompt} tokens, and at most "
                f"{self.max_input_len} are taken. Please reduce the length of the {param}.",
                param,
                TOO_LONG,
            )
        total = num_prompt + max_tokens
        if total > self.max_seq_len:
            raise ApiError(
                400,
                f"{words}you requested {total} tokens ({num_prompt} in the {param}, {max_tokens} "
                f"in the completion). Please reduce the length of the {param} or completion.",
                "max_tokens",
                TOO_LONG,
            )


class PromptReader:
    """The model as clients see it: its name, limits, tokenizer and chat template."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        tokenizer: Any,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        default_sampling: Mapping[str, float],
    ) -> None:
        self.name = name
        self.limits = limits
        self.default_sampling = default_sampling
        self.token: TokenOf = TokenReader(tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template
        if template is not None or tool_template is not None:
            self._special = SpecialTokens(tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether messages can be served."""
        return self._template is not None

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``; `ApiError` if it cannot fit."""
        self._check_size(text, param)
        # The batch call gives the interpreter lock back while it works.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without special tokens."""
        text: str = self._tokenizer.decode(ids)
        return text

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a chat; only the template writes special tokens. ``variables``: others of
        the template. ``tools``: those that the model may call."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise ApiError(
                400,
                "the model has no chat template: use /v1/completions, "
                "or start inflight openai with --chat-template",
                "messages",
            )
        messages = for_template(messages, template.knows)
        try:
            text, marks = self._render(template, messages, variables or {}, tools)
        except ValueError as error:
            raise bad_field("messages", f"refused by the chat template: {error}") from None
        except RecursionError:
            raise bad_field("messages", "nested too deeply") from None
        if marks is None:
            return self.encode(text, "messages", add_special_tokens=add_special_tokens)
        self._check_size(text, "messages")
        return self._special.encode(text, marks, add_special_tokens=add_special_tokens)

    def _check_size(self, text: str, param: str) -> None:
        if len(text) > self.limits.max_input_len * _MAX_CHARACTERS_PER_TOKEN:
            words = f"{self.limits.context_words}you sent {len(text)} characters in the {param}."
            raise ApiError(400, words, param, TOO_LONG)

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[str, Marks | None]:
        """Arguments of tool calls are objects, as most templates expect, or else as they were sent
        (DeepSeek's template joins the text); `ValueError` if the template refuses both."""
        with_arguments = with_objects(messages)
        try:
            return self._render_marked(template, with_arguments, variables, tools)
        except ValueError as error:
            if with_arguments is messages:
                raise
            try:
                return self._render_marked(template, messages, variables, tools)
            except ValueError:
                raise error from None

    def _render_marked(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[str, Marks | None]:
        """The text, and the marks in it, if it needs any."""
        marks = self._special.marks_for([*messages, variables, tools])
        if marks is None:
            return template.render(messages, variables, tools or None), None
        marked = [
            self._special.mark(
                message, marks, template.separators if message["role"] == "assistant" else _NONE
            )
            for message in messages
        ]
        marked_tools = self._special.mark(tools, marks) or None
        text = template.render(marked, self._special.mark(variables, marks), marked_tools)
        return self._special.unescaped(text, marks), marks


def make_prompt_reader(
    description: Mapping[str, Any], served_name: str | None, chat_template: Path | None
) -> PromptReader:
    """From the answer to ``describe``; `InvalidArgument` names what is missing or broken."""
    files = description["files"]
    if "tokenizer.json" not in files:
        raise InvalidArgument(
            "the server's model has no tokenizer: it serves token ids only, not text."
        )
    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    except Exception as error:  # the library raises bare Exception for a bad file
        raise InvalidArgument(f"tokenizer.json of the server cannot be read: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limits = Limits(
        int(description["max_input_len"]),
        int(description["max_seq_len"]),
        int(description["vocab_size"]),
        int(description["end_id"]),
        tuple(map(int, description.get("stop_token_ids", ()))),  # none from older servers
    )
    if chat_template is None:
        template, tool_template = find_templates(files)
    else:
        template = tool_template = ChatTemplate(_read_text(chat_template), special_tokens(files))
    return PromptReader(
        served_name or str(description["model"]),
        limits,
        tokenizer,
        template,
        tool_template,
        description.get("default_sampling", {}),  # none from older servers
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--chat-template {path} cannot be read: {error}.") from None


class TokenReader:
    """Texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str())["decoder"]
        letters = _letters() if "ByteLevel" in set(_types(decoder)) else ""
        self._letter_to_byte = {letter: byte for byte, letter in enumerate(letters)}

    def text(self, token_id: int) -> str:
        """The text of a token behind another one; special tokens have theirs."""
        # A decoder drops a space that a text begins with, so the token is made the second one.
        once: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def __call__(self, token_id: int) -> Token:
        """A token by its id."""
        text = self.text(token_id)
        return Token(text, self._part(token_id) if _REPLACEMENT in text else text.encode())

    def _part(self, token_id: int) -> bytes | None:
        """The bytes of a token that holds parts of characters."""
        name: str = self._tokenizer.id_to_token(token_id) or ""
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        found = [self._letter_to_byte.get(letter) for letter in name]
        known = [byte for byte in found if byte is not None]
        return bytes(known) if known and len(known) == len(found) else None


def _types(decoder: Any) -> Iterator[str]:
    """The types of a decoder in tokenizer.json and of its parts."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for each in decoder.get("decoders") or ():
            yield from _types(each)


def _letters() -> str:
    """GPT-2's table: the letter for each byte in names of byte-level tokens, which is the byte
    itself if printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
