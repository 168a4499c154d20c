"""Chat templates against the environment they are written for: `transformers`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from inflight_client.errors import InvalidArgument
from inflight_openai import chat_template
from inflight_openai.chat_template import ChatTemplate, find_template, special_tokens

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
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
def test_renders_as_transformers_does(name: str) -> None:
    [wanted], _ = render_jinja_template(
        [CHAT], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(CHAT) == wanted


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
def test_what_a_template_refuses_is_a_value_error(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source, TOKENS).render(CHAT)


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
        ("{% for i in range(99999) %}{{ 'x' * 500000 }}{% endfor %}", "more than"),
        ("{{ 'x' * 10**9 }}", "result of '\\*'"),
        ("{{ 9 ** 999999999 }}", "result of '\\*\\*'"),
        ("{{ '%0999999999d' % 1 }}", "result of '%'"),
        ("{{ 'x'.ljust(10**9) }}", "too long"),
        ("{{ '{:>999999999}'.format(1) }}", "too long"),
        ("{{ 'x' | center(10**9) }}", "too long"),
        ("{{ ('x' * 10**6).replace('x', 'x' * 10**6) }}", "too long"),
        ("{{ ('x' * 10**6) | replace('x', 'x' * 10**6) }}", "too long"),
        ("{{ '%0999999999d' | format(1) }}", "too long"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "fails with"),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
            "{% endfor %}",
            "result of '~'",
        ),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
            "{% endfor %}",
            "result of '\\+'",
        ),
        # What follows would stop every thread for ever: it runs in C.
        (LISTS + "{{ b }}", "result of '\\*'"),
        (DOUBLED % "[n.x, n.x]" + "{{ n.x }}", "a value has more"),
        (DOUBLED % "(n.x, n.x)" + "{{ {n.x: 1} | length }}", "a value has more"),
        (DOUBLED % "{1: n.x, 2: n.x}" + "{{ n.x | tojson }}", "a value has more"),
        (DOUBLED % "dict(a=n.x, b=n.x)" + "{{ n.x == 1 }}", "a value has more"),
        ("{% macro f() %}{{ varargs }}{% endmacro %}" + DOUBLED % "f(n.x, n.x)", "more than"),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x %}"
            "{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
            "more than",
        ),
        (
            "{% set d = {1: '', 2: '', 3: 'x' * 999999, 4: 'x' * 999999} %}"
            "{{ [d.items()] * 99999 }}",
            "result of '\\*'",
        ),
        ("{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}", "result of '%'"),
        ("{{ messages | tojson(indent=99999999) }}", "more than"),
        # Each is within its bound.
        ("{{ range(9999) | map('center', 16000000) | list | length }}", "of memory"),
        (
            "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
            "{% set n.x = n.x + ['x' | center(16000000)] %}{% endfor %}",
            "of memory",
        ),
        ("{{ 9 ** 4000000 // 9 ** 2000000 }}", "result of '\\*\\*'"),
    ],
)
def test_hostile_templates_end_soon_and_small(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.3 if reason == "longer" else 60.0  # the others end long before
    monkeypatch.setattr(chat_template, "MAX_SECONDS", seconds)
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source, TOKENS).render(CHAT)
    assert sys.gettrace() is None


def test_a_broken_template_says_where() -> None:
    with pytest.raises(InvalidArgument, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


def files(config: dict[str, Any], **more: str) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps(config), **more}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (files({"chat_template": "c"}), "c"),
        (files({"chat_template": "c"}, **{"chat_template.jinja": "j"}), "j"),
        (
            files(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            ),
            "d",
        ),
        (files({"chat_template": [{"name": "tool_use", "template": "t"}]}), None),
        (files({}), None),
        ({}, None),
    ],
)
def test_the_template_is_found_where_checkpoints_keep_it(
    given: dict[str, str], wanted: str | None
) -> None:
    template = find_template(given)
    assert (template.render(CHAT) if template else None) == wanted


def test_special_tokens_are_texts_or_objects() -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": None, "x": "y"}
    assert special_tokens(files(config)) == TOKENS


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        find_template({"tokenizer_config.json": text})
