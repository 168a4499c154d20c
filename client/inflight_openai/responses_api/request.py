"""From the body of ``/v1/responses`` to that of a chat: the same fields under other names.

Nothing is stored, so what would refer to an earlier response is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inflight_openai.errors import ApiError, bad_field, kind_of, unsupported
from inflight_openai.generation import GenerationRequest, parse_chat
from inflight_openai.prompts import PromptReader
from inflight_openai.schema import UnknownFields, is_empty, read_object
from inflight_openai.settings import FrontSettings

_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_NOT_STORED = "nothing is stored here: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "background": _NOT_STORED,
    "prompt": "prompts are not stored here: send instructions and input",
    "n": "a response is one answer",
    "messages": "they are called input here",
}
_IGNORED = frozenset({"include", "truncation", "max_tool_calls", "store", "context_management"})
_LOG_PROBS = "message.output_text.logprobs"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_SHOWN = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature"),
    *("tool_choice", "tools", "top_p", "truncation", "user", "reasoning", "text", "top_logprobs"),
)
_DEFAULTS: dict[str, Any] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


def parse_response(
    raw: bytes, reader: PromptReader, unknown: UnknownFields, settings: FrontSettings
) -> GenerationRequest:
    """The request to ``/v1/responses``; `ApiError` names what is wrong."""
    content = read_object(raw)
    for name, why in _REFUSED.items():
        if not is_empty(content.get(name)) and (name, content[name]) != ("n", 1):
            raise unsupported(name, why)
    chat = _chat(content)
    try:
        request = parse_chat(json.dumps(chat).encode(), reader, unknown, settings)
    except ApiError as error:
        raise _renamed(error) from None
    shown = {name: content.get(name) for name in _SHOWN}
    shown |= {name: value for name, value in _DEFAULTS.items() if shown.get(name) is None}
    return replace(request, response_fields=shown, guide_field=_renamed_field(request.guide_field))


def _chat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat."""
    own = {"input", "instructions", "tools", "tool_choice", "text", *_IGNORED, *_REFUSED}
    chat = {_RENAMED.get(name, name): value for name, value in content.items() if name not in own}
    chat["messages"] = _messages(content)
    if tools := content.get("tools"):
        chat["tools"] = _tools(tools)
        chat["tool_choice"] = _choice(content.get("tool_choice"))
    text = content.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    chat["response_format"] = form
    include = content.get("include") or []
    if _LOG_PROBS in include or content.get("top_logprobs"):
        chat["logprobs"] = True
    return chat


def _choice(choice: Any) -> Any:
    """A choice of tools as chats have it: what names a function is in an object of its own."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        tools = list(map(_choice, tools)) if isinstance(tools, list) else tools
        content = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": content}
    name = choice.get("name") if choice.get("type") == "function" else None
    return {"type": "function", "function": {"name": name}} if name else choice


def _tools(tools: Any) -> Any:
    """Tools as chats have them: what describes a function is in an object of its own."""
    if not isinstance(tools, list):
        return tools
    found = []
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function":
            function = {key: each for key, each in tool.items() if key != "type"}
            tool = {"type": "function", "function": function}
        found.append(tool)
    return found


def _messages(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions := content.get("instructions"):
        if not isinstance(instructions, str):
            raise bad_field("instructions", f"expected a string, got {kind_of(instructions)}")
        messages.append({"role": "system", "content": instructions})
    items = content.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_field("input", "expected a string or a list of items")
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, place: str) -> None:
    """Append an item, or add it to the assistant's message that it belongs to."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        text = _content(item.get("content"), f"{place}.content")
        messages.append({"role": item.get("role"), "content": text})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":  # of earlier answers: templates drop it, too
        raise bad_field(
            place, "expected a message, function_call, function_call_output or reasoning"
        )


def _content(value: Any, place: str) -> Any:
    if not isinstance(value, list):
        return value
    parts: Sequence[Any] = value
    found = []
    for index, part in enumerate(parts):
        kind = _TEXT_PARTS.get(part.get("type", "")) if isinstance(part, dict) else None
        if kind is None:
            raise bad_field(f"{place}[{index}]", "only text is taken: input_text or output_text")
        found.append({"type": kind, kind: part.get(kind)})
    return found


def _renamed_field(name: str) -> str:
    for chat, own in (
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
    ):
        if name.startswith(chat):
            return own
    return name.replace(".function", "")


def _renamed(error: ApiError) -> ApiError:
    """``error`` with the name that its field has here."""
    if error.param is None:
        return error
    name = _renamed_field(error.param)
    message = error.message.replace(error.param, name)
    return ApiError(error.status, message, name, error.code)
