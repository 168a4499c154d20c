"""Messages as OpenAI's clients send them, rendered by templates that are written for others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client.openai.front import DESCRIPTION
from openai.types.chat import ChatCompletionMessage

from inflight_openai.chat_messages import read_messages
from inflight_openai.errors import ApiError
from inflight_openai.prompts import PromptReader, make_prompt_reader

USER = {"role": "user", "content": "u"}
ARGUMENTS = '{"city": "Köln"}'
# The constructs of real templates around messages that are more than a role and a text.
LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if not m.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{{ call.name }}:{{ call.arguments | tojson }};"
    "{% else %}{{ m.role }}:{{ m.content | trim }};{% endif %}{% endfor %}"
)
CHATML = "{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
SILENT = "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.content }};{% endif %}"
SILENT += "{% endfor %}"
DEEPSEEK = (
    "{% for m in messages %}{% if m.content is none %}"
    "{{ '<' + m.tool_calls[0]['function']['arguments'] + '>' }}"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


def reader_of(template: str) -> PromptReader:
    """A reader with the demo model's tokenizer, which has a token for each byte."""
    files = {"tokenizer.json": DESCRIPTION["files"]["tokenizer.json"]}  # type: ignore[index]
    files["chat_template.jinja"] = template
    return make_prompt_reader({**DESCRIPTION, "max_input_len": 9999, "files": files}, None, None)


def rendered(template: str, *messages: dict[str, Any]) -> str:
    """The text that the model reads."""
    reader = reader_of(template)
    ids = reader.encode_messages(read_messages(list(messages)))
    data = b"".join(reader.token(each).data or b"" for each in ids)
    return data.decode()


def call(arguments: object, **more: Any) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **more}


@pytest.mark.parametrize("more", [{}, {"tool_calls": []}, {"tool_calls": None}])
def test_an_answer_may_be_given_back_whole(more: dict[str, Any]) -> None:
    """As ``message.model_dump()`` of the `openai` package writes it, with all keys there are."""
    answer = ChatCompletionMessage(role="assistant", content="a").model_dump() | more
    assert "tool_calls" in answer
    assert rendered(LLAMA, USER, answer, USER) == "user:u;assistant:a;user:u;"


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_assistant_that_says_nothing_does_not_say_none(message: dict[str, Any]) -> None:
    for template in (LLAMA, CHATML):
        told = rendered(template, USER, {"role": "assistant", **message}, USER)
        assert told == "user:u;assistant:;user:u;"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_arguments_of_a_tool_call_reach_a_template_as_the_object_that_it_expects(
    content: dict[str, Any],
) -> None:
    assert rendered(LLAMA, USER, call(ARGUMENTS, **content)) == f"user:u;f:{ARGUMENTS};"
    assert rendered(LLAMA, USER, call(json.loads(ARGUMENTS))) == f"user:u;f:{ARGUMENTS};"


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "[" * 10_000])
def test_arguments_that_are_no_object_stay_a_text(text: str) -> None:
    assert rendered(LLAMA, call(text)) == f"f:{json.dumps(text)};"


def test_a_template_that_puts_the_text_of_arguments_together_gets_it() -> None:
    assert rendered(DEEPSEEK, USER, call(ARGUMENTS, content=None)) == f"u;<{ARGUMENTS}>"


def test_a_template_that_refuses_both_is_told_once() -> None:
    refusing = LLAMA.replace("== 1", "== 2")
    with pytest.raises(ApiError, match="refused by the chat template: one call at a time"):
        rendered(refusing, call(ARGUMENTS))


def test_a_template_without_tool_calls_writes_no_none_for_them() -> None:
    assert rendered(CHATML, USER, call(ARGUMENTS, content=None)) == "user:u;assistant:;"


def test_a_developer_is_the_system_where_a_template_knows_no_developer() -> None:
    """OpenAI's newer name: else the text is lost, or the template refuses it."""
    developer = {"role": "developer", "content": "d"}
    assert rendered(SILENT, developer, USER) == "d;u;"
    assert rendered(CHATML, developer, USER) == "system:d;user:u;"
    assert rendered(CHATML + "{# developer #}", developer, USER) == "developer:d;user:u;"


def test_a_refusal_is_a_text_as_well() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert rendered(CHATML, {"role": "assistant", "content": parts}) == "assistant:a\nno;"
    with pytest.raises(ApiError) as caught:
        rendered(CHATML, {"role": "assistant", "content": [{"type": "refusal"}]})
    assert caught.value.param == "messages[0].content[0].refusal"


FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": FUNCTION}


@pytest.mark.parametrize("role", ["", "root", "system\n", "<|end|>", "User", 5, None])
def test_a_role_that_nobody_has_is_named(role: object) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages([USER, {"role": role, "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages[1].role")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tool_call_id": []}, "tool_call_id"),
        ({"name": 5}, "name"),
        ({"refusal": False}, "refusal"),
        ({"reasoning_content": {}}, "reasoning_content"),
        ({"tool_calls": "x"}, "tool_calls"),
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [CALL, "x"]}, "tool_calls[1]"),
        ({"tool_calls": [CALL | {"id": 5}]}, "tool_calls[0].id"),
        ({"tool_calls": [CALL | {"function": None}]}, "tool_calls[0].function"),
        ({"tool_calls": [CALL | {"function": {}}]}, "tool_calls[0].function.name"),
        (
            {"tool_calls": [CALL | {"function": FUNCTION | {"arguments": [1]}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"function_call": "x"}, "function_call"),
        ({"function_call": FUNCTION | {"name": 5}}, "function_call.name"),
    ],
)
@pytest.mark.parametrize("role", ["assistant", "tool", "user"])
def test_what_is_of_the_wrong_kind_in_a_message_is_named(
    role: str, wrong: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": role, "content": "x", **wrong}])
    assert (caught.value.status, caught.value.param) == (400, f"messages[0].{param}")
    assert caught.value.message.startswith(f"messages[0].{param}: expected ")
