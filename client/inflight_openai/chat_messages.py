"""Messages of a chat: from what OpenAI's clients send to what chat templates are written for.

Templates know messages as `transformers` hands them on: a key that says nothing is not there, and
the arguments of a tool call are an object. OpenAI's clients send null for such keys (an answer of
the `openai` package, given back whole) and the arguments as a text of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from inflight_openai.errors import bad_field
from inflight_openai.fields import checked_text, kind_of
from inflight_openai.settings import MAX_MESSAGES

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_KINDS = ("text", "refusal")
"""Kinds of parts of a message; the text of each stands under the name of its kind."""

_TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning")
"""What else a message may say, as text."""


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat with their content as text; `ApiError` names the faulty one."""
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "expected a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise bad_field("messages", f"{len(value)} messages, at most {MAX_MESSAGES} are taken")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def for_template(
    messages: Sequence[Mapping[str, Any]], knows: Callable[[str], bool]
) -> list[Mapping[str, Any]]:
    """``messages`` for a template of which ``knows`` tells whether it has a word.

    ``developer`` is OpenAI's newer name of the role ``system``: a template without it would refuse
    such messages, or leave their text out and say nothing. One that has no tool calls would write
    "None" for the content of messages that hold nothing else.
    """
    return [_for_template(message, knows) for message in messages]


def with_objects(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """``messages`` with the arguments of tool calls as objects; itself if there are none."""
    if not any(isinstance(message.get("tool_calls"), list) for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_call(each) for each in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(name, "expected an object with role and content")
    role = checked_text(f"{name}.role", value.get("role"))
    if role not in ROLES:
        raise bad_field(f"{name}.role", f"expected one of {', '.join(ROLES)}")
    _check_kinds(name, value)
    content = value.get("content")
    # A template may ask whether there are tool calls, and not whether they are null or none.
    message = {key: each for key, each in value.items() if each is not None}
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if isinstance(content, list):
        parts = enumerate(content)
        message["content"] = "\n".join(_part(f"{name}.content[{i}]", part) for i, part in parts)
    elif content is not None or role != "assistant":
        checked_text(f"{name}.content", content)
    elif "tool_calls" not in message:
        message["content"] = ""
    elif "content" in value:
        message["content"] = None  # beside tool calls some templates ask for it
    return message


def _check_kinds(name: str, message: Mapping[str, Any]) -> None:
    """`ApiError` names what is of the wrong kind; null says nothing."""
    for key in _TEXTS:
        if message.get(key) is not None:
            checked_text(f"{name}.{key}", message[key])
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, NoneType)):
        raise bad_field(f"{name}.tool_calls", f"expected a list, got {kind_of(calls)}")
    for i, call in enumerate(calls or ()):
        place = f"{name}.tool_calls[{i}]"
        if not isinstance(call, dict):
            raise bad_field(place, f"expected an object, got {kind_of(call)}")
        for key in ("id", "type"):
            if call.get(key) is not None:
                checked_text(f"{place}.{key}", call[key])
        _check_function(f"{place}.function", call.get("function"))
    if message.get("function_call") is not None:
        _check_function(f"{name}.function_call", message["function_call"])


def _check_function(name: str, value: Any) -> None:
    """A call of a function: its name, and its arguments as text or as an object."""
    if not isinstance(value, dict):
        raise bad_field(name, f"expected an object, got {kind_of(value)}")
    checked_text(f"{name}.name", value.get("name"))
    if not isinstance(value.get("arguments"), (dict, NoneType)):
        checked_text(f"{name}.arguments", value["arguments"])


def _for_template(message: Mapping[str, Any], knows: Callable[[str], bool]) -> Mapping[str, Any]:
    if message["role"] == "developer" and not knows("developer"):
        return {**message, "role": "system"}
    if message.get("content") is None and not knows("tool_calls"):
        return {**message, "content": ""}
    return message


def _part(name: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _KINDS:
        raise bad_field(name, 'only parts of the form {"type": "text", "text": ...} are taken')
    return checked_text(f"{name}.{kind}", value.get(kind))


def _call(value: Any) -> Any:
    """A tool call whose arguments are an object, if their text is one."""
    function = value["function"]
    if not isinstance(function.get("arguments"), str):
        return value
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return value
    if not isinstance(arguments, dict):
        return value
    return {**value, "function": {**function, "arguments": arguments}}
