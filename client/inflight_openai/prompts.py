"""From text and messages to token ids, with the tokenizer and the limits the server told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight_client.errors import InvalidArgument
from inflight_openai.chat_messages import for_template, with_objects
from inflight_openai.chat_template import ChatTemplate, find_template, special_tokens
from inflight_openai.errors import TOO_LONG, ApiError, bad_field
from inflight_openai.fields import checked_text
from inflight_openai.special_tokens import Marks, SpecialTokens
from inflight_openai.tokens import TokenOf, TokenReader

_MAX_BYTES_PER_TOKEN = 128
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows, in tokens, and the token that ends an answer (-1: none), with those
    that do so beside it."""

    max_input_len: int
    max_seq_len: int
    vocab_size: int
    end_id: int
    stop_token_ids: tuple[int, ...] = ()

    @property
    def context_words(self) -> str:
        """How such an error begins."""
        return f"This model's maximum context length is {self.max_seq_len} tokens. However, "

    def check(self, num_prompt: int, max_tokens: int, param: str) -> None:
        """`ApiError` if the server would refuse so many tokens of ``param`` and of its answer.

        In OpenAI's words: clients look for them, some for the numbers, to shorten what they send.
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
        self, name: str, limits: Limits, tokenizer: Any, template: ChatTemplate | None
    ) -> None:
        self.name = name
        self.limits = limits
        self.token: TokenOf = TokenReader(tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        if template is not None:
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
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The ids of a chat; the template alone writes special tokens. ``variables``: more that
        it may know."""
        if self._template is None:
            raise ApiError(
                400,
                "the model has no chat template: use /v1/completions, "
                "or start inflight openai with --chat-template",
                "messages",
            )
        messages = for_template(messages, self._template.knows)
        try:
            text, marks = self._render(self._template, messages, variables or {})
        except ValueError as error:
            raise bad_field("messages", f"refused by the chat template: {error}") from None
        checked_text("messages", text)
        if marks is None:
            return self.encode(text, "messages", add_special_tokens=add_special_tokens)
        self._check_size(text, "messages")
        return self._special.encode(text, marks, add_special_tokens=add_special_tokens)

    def _check_size(self, text: str, param: str) -> None:
        if len(text) > self.limits.max_input_len * _MAX_BYTES_PER_TOKEN:
            words = f"{self.limits.context_words}you sent {len(text)} characters in the {param}."
            raise ApiError(400, words, param, TOO_LONG)

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> tuple[str, Marks | None]:
        """The arguments of tool calls as most templates want them, else as they were sent
        (DeepSeek's put the text together); `ValueError` if the template refuses both."""
        with_arguments = with_objects(messages)
        try:
            return self._render_marked(template, with_arguments, variables)
        except ValueError as error:
            if with_arguments is messages:
                raise
            try:
                return self._render_marked(template, messages, variables)
            except ValueError:
                raise error from None

    def _render_marked(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> tuple[str, Marks | None]:
        """The text, and the marks in it, if it needs any."""
        marks = self._special.marks_for([*messages, variables])
        if marks is None:
            return template.render(messages, variables), None
        try:
            marked = [
                self._special.mark(
                    message, marks, template.sought if message["role"] == "assistant" else _NONE
                )
                for message in messages
            ]
            text = template.render(marked, self._special.mark(variables, marks))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        return self._special.unescaped(text, marks), marks


def make_prompt_reader(
    description: Mapping[str, Any], served_name: str | None, chat_template: Path | None
) -> PromptReader:
    """From what the server says of itself; `InvalidArgument` names what is missing or broken."""
    from tokenizers import Tokenizer  # of the extra; the rest of the client does without

    files = description["files"]
    if "tokenizer.json" not in files:
        raise InvalidArgument(
            "the server's model has no tokenizer.json: it serves token ids only, not text."
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
        tuple(map(int, description.get("stop_token_ids", ()))),  # an older server tells none
    )
    if chat_template is None:
        template = find_template(files)
    else:
        template = ChatTemplate(_read_text(chat_template), special_tokens(files))
    return PromptReader(served_name or str(description["model"]), limits, tokenizer, template)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--chat-template {path} cannot be read: {error}.") from None
