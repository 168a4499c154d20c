"""A checkpoint's chat template: messages to the text of a prompt.

The environment is the one in which `transformers` renders templates (`apply_chat_template`), since
templates are written for it: sandboxed and immutable Jinja, blocks trimmed, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, and `{% generation %}` blocks. Beyond that
it is bounded, since a template comes with a checkpoint that somebody else has made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser

from inflight_client.errors import InvalidArgument
from inflight_openai.bounded_jinja import MAX_SECONDS, BoundedEnvironment, join_bounded, limits

_DEFAULT = "default"
_SOUGHT = re.compile(r"""\b(?:split|partition|startswith|endswith)\(\s*(['"])(.+?)\1""")

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that the front sets itself."""


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`InvalidArgument` if ``source`` is not a Jinja template."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidArgument(
                f"the chat template is not valid Jinja (line {error.lineno}: {error.message})."
            ) from None
        self._special_tokens = dict(special_tokens)
        self._source = source
        self.sought = frozenset(text for _, text in _SOUGHT.findall(source))
        """Where it divides texts, as one that takes thoughts out of earlier answers."""

    def knows(self, word: str) -> bool:
        """Whether it has a ``word`` of messages, such as a role: else it cannot write it."""
        return word in self._source

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that asks for the next message; `ValueError` if the template refuses them.

        ``variables``: more that the template may know, such as Qwen3's ``enable_thinking``.
        """
        known = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        pieces = self._template.generate(known)
        try:
            with limits(MAX_SECONDS):
                return join_bounded(pieces)
        except (TemplateError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # `RecursionError`, or `SystemError` if it meets the time limit
            raise ValueError(f"it fails with {type(error).__name__}") from None


def find_template(files: Mapping[str, str]) -> ChatTemplate | None:
    """The template among the tokenizer's files; None if there is none.

    ``chat_template.jinja`` comes before the key ``chat_template`` of ``tokenizer_config.json``,
    whose value is a template or a list of named ones.
    """
    config = read_object(files, "tokenizer_config.json")
    source: Any = files.get("chat_template.jinja") or config.get("chat_template")
    if isinstance(source, list):
        named = {
            each.get("name"): each.get("template") for each in source if isinstance(each, dict)
        }
        source = named.get(_DEFAULT)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens(files))


def special_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """``bos_token`` and its like with their texts, as templates name them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_object(files, name).items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def read_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """A JSON object among the files; empty if it is missing. `InvalidArgument` if it is none."""
    try:
        content = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise InvalidArgument(f"{name} of the checkpoint is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{name} of the checkpoint holds no JSON object.")
    return content


class _GenerationBlock(Extension):
    """Marks the assistant's own text for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> Node:
        """Replace the block by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Piece by piece where options may make it much larger than ``value``, which is bounded."""
    if not options:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    return join_bounded(json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value))


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
