"""Text and messages to token ids and back, with the server's tokenizer and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from inflight_openai.tools.formats import ModelFormats, Thoughts, find_formats
from inflight_openai.tools.untold import tell_tools

_MAX_CHARACTERS_PER_TOKEN = 128
_TAIL_TOKENS = 16  # in which the mark that begins thoughts is found
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
    """The server's limits in tokens; ``end_id`` (-1: none) and ``stop_token_ids`` end an answer.

    ``num_start_ids``: where an encoder reads the prompt, tokens that the answer's text begins with;
    None where the prompt is what it begins with.
    """

    max_input_len: int
    max_seq_len: int
    vocab_size: int
    end_id: int
    stop_token_ids: tuple[int, ...] = ()
    num_start_ids: int | None = None

    def room_after(self, num_prompt: int) -> int:
        """The longest answer to a prompt of so many tokens; it may be below 1."""
        taken = num_prompt if self.num_start_ids is None else self.num_start_ids
        return self.max_seq_len - taken

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
        if max_tokens > self.room_after(num_prompt):
            total, beginning = num_prompt + max_tokens, f"{num_prompt} in the {param}"
            shortened = f"{param} or completion"
            if self.num_start_ids is not None:
                total = self.num_start_ids + max_tokens
                beginning = f"{self.num_start_ids} that every answer begins with"
                shortened = "completion"
            raise ApiError(
                400,
                f"{words}you requested {total} tokens ({beginning}, {max_tokens} in the "
                f"completion). Please reduce the length of the {shortened}.",
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
        formats: ModelFormats,
        default_sampling: Mapping[str, float],
    ) -> None:
        self.name = name
        self.adapters: frozenset[str] = frozenset()  # as last heard from the server
        self.limits = limits
        self.default_sampling = default_sampling
        self.formats = formats
        self.token: TokenOf = TokenReader(tokenizer)
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._special_texts = frozenset(each.content for each in added if each.special)
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

    def count_tokens(self, text: str) -> int:
        """How many tokens ``text`` has."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def names(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls the tokens ``ids``."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def has_special(self, texts: Iterable[str]) -> bool:
        """Whether one of ``texts`` holds a special token, which is left out of answers."""
        return any(special in text for text in texts for special in self._special_texts)

    def ends_within(self, ids: Sequence[int], thoughts: Thoughts | None) -> bool:
        """Whether a prompt ends where thoughts have begun."""
        if thoughts is None:
            return False
        tail = self._tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return bool(tail.rstrip().endswith(thoughts.begin))

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
        if not template.knows("tools"):
            calls, knows_calls = self.formats.guided_calls, template.knows("tool_calls")
            messages = tell_tools(messages, tools, calls, knows_calls=knows_calls)
            tools = ()
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
    description: Mapping[str, Any],
    served_name: str | None,
    chat_template: Path | None,
    tool_parser: str | None = None,
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
        None if (start := description.get("start_ids")) is None else len(start),
    )
    if chat_template is None:
        template, tool_template = find_templates(files)
    else:
        template = tool_template = ChatTemplate(_read_text(chat_template), special_tokens(files))
    source = tool_template or template
    formats = find_formats(source.knows if source else lambda word: False, tool_parser)
    return PromptReader(
        served_name or str(description["model"]),
        limits,
        tokenizer,
        template,
        tool_template,
        formats,
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
