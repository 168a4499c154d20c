"""Chats: messages as OpenAI's clients send them, and templates as `transformers` renders them."""

from __future__ import annotations

import json
import os
import signal
from functools import lru_cache
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from support.openai_front import DESCRIPTION, FILES
from transformers.utils.chat_template_utils import render_jinja_template

from inflight_client.errors import InvalidArgument
from inflight_openai import chat
from inflight_openai.chat import ChatTemplate, find_templates, special_tokens
from inflight_openai.errors import ApiError
from inflight_openai.prompts import PromptReader, make_prompt_reader
from inflight_openai.schema import read_messages

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


@lru_cache
def reader_of(template: str) -> PromptReader:
    """A reader with the demo model's tokenizer, which has a token for each byte."""
    files = {"tokenizer.json": FILES["tokenizer.json"], "chat_template.jinja": template}
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
def test_an_answer_of_the_openai_package_is_a_message(more: dict[str, Any]) -> None:
    """As ``message.model_dump()`` of the `openai` package writes it, with all keys there are."""
    answer = ChatCompletionMessage(role="assistant", content="a").model_dump() | more
    assert "tool_calls" in answer
    assert rendered(LLAMA, USER, answer, USER) == "user:u;assistant:a;user:u;"


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_empty_assistant_content_renders_as_nothing(message: dict[str, Any]) -> None:
    for template in (LLAMA, CHATML):
        told = rendered(template, USER, {"role": "assistant", **message}, USER)
        assert told == "user:u;assistant:;user:u;"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_arguments_of_a_tool_call_become_an_object(
    content: dict[str, Any],
) -> None:
    assert rendered(LLAMA, USER, call(ARGUMENTS, **content)) == f"user:u;f:{ARGUMENTS};"
    assert rendered(LLAMA, USER, call(json.loads(ARGUMENTS))) == f"user:u;f:{ARGUMENTS};"


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "[" * 10_000])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    assert rendered(LLAMA, call(text)) == f"f:{json.dumps(text)};"


def test_a_template_that_joins_text_gets_arguments_as_text() -> None:
    assert rendered(DEEPSEEK, USER, call(ARGUMENTS, content=None)) == f"u;<{ARGUMENTS}>"


def test_a_refusal_of_both_forms_of_arguments_is_reported_once() -> None:
    refusing = LLAMA.replace("== 1", "== 2")
    with pytest.raises(ApiError, match="refused by the chat template: one call at a time"):
        rendered(refusing, call(ARGUMENTS))


def test_a_template_without_tools_is_told_of_them_in_messages() -> None:
    written = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
    result = {"role": "tool", "tool_call_id": "c", "content": "cold"}
    told = rendered(CHATML, USER, call(ARGUMENTS, content=None), result)
    assert told == f"user:u;assistant:{written};user:<tool_response>\ncold\n</tool_response>;"
    reader = reader_of(CHATML)
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = reader.encode_messages(read_messages([USER]), tools=tools)
    text = b"".join(reader.token(each).data or b"" for each in ids).decode()
    assert text.startswith("user:# Tools")
    assert json.dumps(tools[0]) in text
    assert text.endswith("\nu;")


def test_developer_is_system_for_templates_without_that_role() -> None:
    """They would drop its text, or refuse it."""
    developer = {"role": "developer", "content": "d"}
    assert rendered(SILENT, developer, USER) == "d;u;"
    assert rendered(CHATML, developer, USER) == "system:d;user:u;"
    assert rendered(CHATML + "{# developer #}", developer, USER) == "developer:d;user:u;"


def test_a_refusal_part_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert rendered(CHATML, {"role": "assistant", "content": parts}) == "assistant:a\nno;"
    with pytest.raises(ApiError) as caught:
        rendered(CHATML, {"role": "assistant", "content": [{"type": "refusal"}]})
    assert caught.value.param == "messages[0].content[0].refusal"


FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": FUNCTION}


@pytest.mark.parametrize("role", ["", "root", "system\n", "<|end|>", "User", 5, None])
def test_an_unknown_role_is_named(role: object) -> None:
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
def test_a_wrong_type_in_a_message_is_named(role: str, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": role, "content": "x", **wrong}])
    assert (caught.value.status, caught.value.param) == (400, f"messages[0].{param}")
    assert caught.value.message.startswith(f"messages[0].{param}: ")


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'exact'.\n"},
    {"role": "user", "content": "Ein Wort: ümläut 🙂 {{ not.a.template }}"},
    {"role": "assistant", "content": "  yes  "},
    {"role": "user", "content": "and?"},
]
LISTS = "{% set a = ['x' * 1000] * 9999 %}{% set b = [a] * 9999 %}"
DOUBLED = (
    "{%% set n = namespace(x='x') %%}{%% for i in range(99) %%}{%% set n.x = %s %%}{%% endfor %%}"
)
# The constructs of the templates of Llama 2 and 3, Mistral, Qwen2 and Qwen3.
TEMPLATES = {
    "chatml": "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ bos_token + '[INST] ' + system + m['content'].strip() + ' [/INST]' }}{% endfor %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|h|>' + message['role'] + '\n\n' + message['content'] | trim + '<e>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}",
    "tools": "{%- if tools is not none %}{{ tools | tojson }}{%- endif %}\n"
    "    {%- for m in messages %}\n        {{- m | tojson(indent=2) }}\n    {%- endfor %}\n",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% set ns.last = m.content %}{% endfor %}{{ ns.last }}|{{ strftime_now('%Y') }}",
    # Mistral since v3: filters that get Jinja's context.
    "selectattr": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m == users[-1] %}{{ m.content }}{% endif %}{% endfor %}"
    "{{ messages | map(attribute='role') | map('upper') | join(',') }}"
    "{{ messages | rejectattr('role', 'in', ['user', 'system']) | first | tojson }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\nb\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_like_transformers(name: str) -> None:
    [wanted], _ = render_jinja_template(
        [CONVERSATION], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(CONVERSATION) == wanted


TOOL = {
    "type": "function",
    "function": {"name": "wetter", "parameters": {"type": "object", "description": "<ü>"}},
}


def test_tools_reach_the_template_as_from_transformers() -> None:
    template = TEMPLATES["tools"]
    [wanted], _ = render_jinja_template(
        [CONVERSATION], tools=[TOOL], chat_template=template, add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(template, TOKENS).render(CONVERSATION, tools=[TOOL]) == wanted


def test_the_text_of_a_tool_is_no_special_token() -> None:
    reader = reader_of("{{ tools[0].name }}")
    ids = reader.encode_messages([USER], tools=[{"name": "<|begin|>"}])
    assert [reader.token(each).text for each in ids] == list("<|begin|>")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.missing.deep }}", "missing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_a_refusal_of_a_template_is_a_value_error(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source, TOKENS).render(CONVERSATION)


@pytest.mark.fast(2)
@pytest.mark.case(107)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ strftime_now.__globals__.x }}", "unsafe"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "longer",
        ),
        ("{{ 'x' * 10**9 * messages | length }}", "memory|longer"),
        ("{{ 9 ** (99999999 * messages | length) }}", "longer"),  # in C
        ("{{ messages[0].role.ljust(10**9) }}", "memory|longer"),
        ("{{ '{:>999999999}'.format(messages) }}", "unsupported"),
        ("{{ messages | tojson(indent=99999999) }}", "memory|longer"),
        ("{{ 'x' * (messages | length * 4200000) }}", "more than 16777216 characters"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "fails with"),
        (LISTS + "{{ b ~ messages }}", "memory|longer"),
        (DOUBLED % "n.x ~ n.x", "memory|longer"),
        (DOUBLED % "[n.x, n.x]" + "{{ n.x }}", "memory|longer"),
        ("{{ range(9999) | map('center', 16000000) | list | length }}", "memory|longer"),
    ],
)
def test_hostile_templates_end_soon_and_small(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the worker, which the kernel ends; the next message has another one."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    guarded = "{% if messages | length == 4 %}" + source + "{% else %}fine{% endif %}"
    template = ChatTemplate(guarded, TOKENS)
    with pytest.raises(ValueError, match=reason):
        template.render(CONVERSATION)
    assert template.render(CONVERSATION[:1]) == "fine"


@pytest.mark.case(107)
def test_a_template_that_is_hostile_to_the_compiler_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jinja computes constants when it compiles."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3)
    with pytest.raises(InvalidArgument, match=r"longer than 0\.3 s"):
        ChatTemplate("{{ 9 ** 999999999 }}", {})


def test_a_worker_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].role }}", {})
    [worker] = template._idle
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    with pytest.raises(ValueError, match="its process has ended"):
        template.render(CONVERSATION)
    assert template.render(CONVERSATION) == "system"


def test_a_template_that_is_gone_leaves_no_process() -> None:
    template = ChatTemplate("x", {})
    process = template._idle[0]._process
    assert process.poll() is None
    del template
    assert process.returncode is not None


def test_a_broken_template_says_where() -> None:
    with pytest.raises(InvalidArgument, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


def files(config: dict[str, Any], **more: str) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps(config), **more}


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
FOLDER = "additional_chat_templates"


@pytest.mark.parametrize(
    ("given", "wanted", "with_tools"),
    [
        (files({"chat_template": "c"}), "c", "c"),
        (files({"chat_template": "c"}, **{"chat_template.jinja": "j"}), "j", "j"),
        (files({"chat_template": NAMED}), "d", "t"),
        (files({"chat_template": NAMED[:1]}), None, "t"),
        (files({"chat_template": NAMED}, **{"chat_template.jinja": "j"}), "j", "j"),
        (
            files({}, **{"chat_template.jinja": "j", f"{FOLDER}/tool_use.jinja": "f"}),
            "j",
            "f",
        ),
        (files({}, **{"chat_template.json": '{"chat_template": "p"}'}), "p", "p"),
        (
            files({"chat_template": "c"}, **{"chat_template.json": '{"chat_template": "p"}'}),
            "c",
            "c",
        ),
        (files({}), None, None),
        ({}, None, None),
    ],
)
def test_find_templates(given: dict[str, str], wanted: str | None, with_tools: str | None) -> None:
    found = find_templates(given)
    told = tuple(each.render(CONVERSATION) if each else None for each in found)
    assert told == (wanted, with_tools)


def test_special_tokens_may_be_texts_or_objects() -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": None, "x": "y"}
    assert special_tokens(files(config)) == TOKENS


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_without_an_object_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        find_templates({"tokenizer_config.json": text})
