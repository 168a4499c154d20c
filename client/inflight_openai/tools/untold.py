"""Tools for models whose chat template knows none: told within the messages, calls and results too.

The words are those that many models were trained with (Hermes' and Qwen's templates).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inflight_openai.tools.formats import ToolFormat

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query. You are provided with function
signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write nothing but this, with the name of the function and its arguments as
JSON:
{call}
"""


def tell_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    calls: ToolFormat,
    *,
    knows_calls: bool,
) -> list[Mapping[str, Any]]:
    """``messages`` with ``tools`` before the text of the first one, which may be the user's: some
    templates know no system.

    ``knows_calls``: the template writes calls and results in messages by itself.
    """
    told = list(messages if knows_calls else map(_plain(calls), messages))
    if tools and told:
        listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools)
        example = written_call(calls, "<function-name>", "<args-json-object>")
        introduction = _INTRODUCTION.format(tools=listed, call=example)
        first = told[0]
        told[0] = {**first, "content": f"{introduction}\n{first.get('content') or ''}"}
    return told


def written_call(calls: ToolFormat, name: str, arguments: str) -> str:
    """A call as the model writes it."""
    begin = f"{calls.start}{calls.before_name}{name}{calls.before_arguments}"
    return f"{begin}{arguments}{calls.after_arguments}{calls.end}"


def _plain(calls: ToolFormat) -> Any:
    def plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            return {"role": "user", "content": text}
        if not message.get("tool_calls"):
            return message
        texts = [message.get("content") or ""]
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            texts.append(written_call(calls, function["name"], text))
        return {"role": "assistant", "content": "\n".join(filter(None, texts))}

    return plain
