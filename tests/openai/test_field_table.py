"""Every field that clients are known to send: what asks for nothing costs nobody an answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from client.openai.front import DESCRIPTION

from inflight_openai.errors import ApiError
from inflight_openai.field_table import CHAT, COMPLETION, GROUP_BY_NAME, GROUPS, Action, FieldGroup
from inflight_openai.fields import Body, UnknownFields
from inflight_openai.parsing import GenerationJob, parse_chat, parse_completion
from inflight_openai.prompts import make_prompt_reader

READER = make_prompt_reader(DESCRIPTION, None, None)
USER = {"role": "user", "content": "1 2"}
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": "demo", "prompt": "1 2"},
    CHAT: {"model": "demo", "messages": [USER]},
}
ROUTER = {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False}
ROUTER |= {"continue_final_message": False, "skip_special_tokens": True, "stream": False}
THINKING = {"separate_reasoning": True, "stream_reasoning": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def parse(call: str, body: Body) -> GenerationJob:
    return parse_chat(body, READER, None) if call == CHAT else parse_completion(body, READER)


def job(call: str, fields: dict[str, Any], *, is_strict: bool = True) -> GenerationJob:
    raw = json.dumps(NEEDED[call] | fields).encode()
    return parse(call, Body(raw, UnknownFields(is_strict=is_strict)))


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    "fields",
    [
        ROUTER | THINKING,
        {"tools": TOOLS, "tool_choice": "none", "functions": TOOLS, "function_call": "none"},
        {"tool_choice": "auto", "function_call": "auto", "top_logprobs": 0},
        {"reasoning_effort": "high", "chat_template_kwargs": {}},  # no word of this template
        {"enable_thinking": False, "thinking": {"type": "enabled"}, "think": True},
        {"enable_thinking": "", "thinking": {}, "think": "", "reasoning": {"exclude": True}},
        {"metadata": [], "user": False, "store": "", "stop_token_ids": {}, "n_predict": -1},
        {"nvext": {"greed_sampling": None}, "options": {"num_ctx": 9, "temperature": None}},
        {"do_sample": True, "num_beams": 1, "num_predict": -1},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
        {"safety_identifier": "u", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit"}, "moderation": None},
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "low"},
        {"tools": [], "functions": [], "parallel_tool_calls": True, "modalities": ["text"]},
        {"n": 1, "best_of": 1, "suffix": "", "logit_bias": [], "stop": "", "logprobs": False},
        {"temperature": None, "seed": None, "response_format": {}, "structured_outputs": {}},
        {"response_format": {"type": "text"}, "stream_options": {"include_usage": False}},
        {"spaces_between_special_tokens": True, "use_beam_search": False, "length_penalty": 1.2},
        {"bad_words": [], "include_stop_str_in_output": False, "priority": 3, "detokenize": True},
        {"prompt_logprobs": None, "return_token_ids": False, "echo": False, "documents": []},
        {"guided_json": None, "guided_regex": "", "guided_choice": [], "guided_grammar": None},
        {"guided_decoding_backend": "outlines", "add_generation_prompt": True},
        {"num_ctx": 4096, "keep_alive": "5m", "options": {"num_ctx": 4096, "num_thread": 2}},
        {"typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "repeat_penalty": 1},
        {"provider": {"order": ["x"]}, "transforms": [], "reasoning": {"effort": "low"}},
        {"nvext": {"annotations": ["request_id"]}, "usage": {"include": True}},
        {"surprise": None, "another": [], "third": False, "fourth": ""},
    ],
)
def test_what_asks_for_nothing_changes_nothing(call: str, fields: dict[str, Any]) -> None:
    """Even where unknown names are refused."""
    assert job(call, fields) == job(call, {})


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("tools", TOOLS),
        ("tool_choice", "required"),
        ("functions", TOOLS),
        ("best_of", 2),
        ("web_search_options", {"search_context_size": "low"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("allowed_token_ids", [5]),
        ("detokenize", False),  # true where it is left out
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("logits_processors", ["x"]),
        ("return_hidden_states", True),
        ("lora_path", "x"),
        ("typical_p", 0.9),
        ("typical_p", True),
        ("mirostat", 2),
        ("tfs", 0.5),
        ("options", {"num_ctx": 4096, "temperature": 0}),
        ("nvext", {"greed_sampling": True}),
        ("stop_sequences", ["x"]),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(call: str, name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        job(call, {name: value}, is_strict=False)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message


def test_unknown_names_pass_with_one_line_each_or_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No value is logged, nor what is no name, nor an endless number of names."""
    unknown = UnknownFields()
    fields: dict[str, Any] = {"surprise": "secret", "stream_options": {"odd": 1}, "stream": True}
    fields |= {"structured_outputs": {"later": 1}, "my private words": 1, "x" * 65: 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse(CHAT, Body(json.dumps(NEEDED[CHAT] | fields).encode(), unknown))
        many = {f"name{i}": 1 for i in range(200)}
        parse(CHAT, Body(json.dumps(NEEDED[CHAT] | many).encode(), unknown))
    lines = [record.getMessage() for record in caplog.records]
    names = ["structured_outputs.later", "stream_options.odd", "surprise", "(no name of a field)"]
    assert [
        line.partition("the field ")[2].partition(" of a request")[0] for line in lines[:4]
    ] == names
    assert len(lines) == 100
    assert not any(word in "".join(lines) for word in ("secret", "private", "xxx"))
    for name in ("surprise", "stream_options", "structured_outputs", "my private words"):
        given = {"stream": True, name: fields[name]}
        with pytest.raises(ApiError, match="Unrecognized request argument") as caught:
            job(CHAT, given)
        assert (caught.value.status, caught.value.code) == (400, "unknown_parameter")


def test_switches_of_a_template_reach_it() -> None:
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    files = {**DESCRIPTION["files"], "chat_template.jinja": template}  # type: ignore[dict-item]
    reader = make_prompt_reader({**DESCRIPTION, "files": files}, None, None)

    def text(**fields: Any) -> str:
        body = Body(json.dumps(NEEDED[CHAT] | fields).encode())
        return reader.decode(parse_chat(body, reader, None).prompts[0])

    assert text() == "||"
    assert text(reasoning_effort="low", enable_thinking=False) == "low|False|"
    assert text(thinking={"type": "enabled", "budget_tokens": 5}) == "|True|True"
    assert text(thinking={"type": "disabled"}) == "|False|False"
    assert text(thinking={"type": "auto"}) == text(thinking={}) == text(think="") == "||"
    assert text(reasoning={"effort": "none"}) == "none|False|False"
    assert text(reasoning={"effort": "low", "max_tokens": 5}) == "low||"
    assert text(reasoning={"enabled": True}) == "|True|True"
    assert text(think=True) == "|True|True"
    assert text(think="low") == "low|True|True"
    own = {"reasoning_effort": "high", "enable_thinking": True}
    assert text(reasoning_effort="low", enable_thinking=False, chat_template_kwargs=own) == (
        "high|True|"
    )


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
def test_the_table_says_what_parsing_reads(call: str) -> None:
    class Watched(Body):
        taken: set[str]

        def take(self, name: str, default: Any = None) -> Any:
            self.taken.add(name)
            return super().take(name, default)

    body = Watched(json.dumps(NEEDED[call]).encode())
    body.taken = set()
    parse(call, body)

    def is_read(group: FieldGroup) -> bool:
        return group.action is Action.HONOURED and group.call in ("", call)

    assert body.taken == {name for group in GROUPS if is_read(group) for name in group.names}


def test_every_name_stands_in_the_table_once() -> None:
    assert len(GROUP_BY_NAME) == sum(len(group.names) for group in GROUPS)
    for group in GROUPS:
        assert set(group.neutral) <= set(group.names)


GUIDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "guided_json": ({"guided_json": {"a": 1}}, "json_schema", '{"a":1}'),
    "guided_json as text": ({"guided_json": '{"a": 1}'}, "json_schema", '{"a": 1}'),
    "guided_regex": ({"guided_regex": "a+"}, "regex", "a+"),
    "guided_choice": ({"guided_choice": ["a.b", "c"]}, "regex", r"(a\.b|c)"),
    "guided_grammar": ({"guided_grammar": "root ::= 'a'"}, "ebnf_grammar", "root ::= 'a'"),
    "guided_json_object": ({"guided_json_object": True}, "json_schema", '{"type":"object"}'),
    "json": ({"structured_outputs": {"json": {"a": 1}}}, "json_schema", '{"a":1}'),
    "choice": ({"structured_outputs": {"choice": ["a"], "regex": None}}, "regex", "(a)"),
    "regex": ({"regex": "a", "ebnf": None}, "regex", "a"),
    "ebnf": ({"ebnf": "root ::= 'a'"}, "ebnf_grammar", "root ::= 'a'"),
    "json_schema": ({"json_schema": '{"a": 1}'}, "json_schema", '{"a": 1}'),
    "TensorRT-LLM's": ({"response_format": {"type": "regex", "regex": "a"}}, "regex", "a"),
}


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
@pytest.mark.parametrize("name", GUIDED)
def test_guides_of_other_servers_reach_the_guided_decoding(call: str, name: str) -> None:
    fields, kind, guide = GUIDED[name]
    values = job(call, fields).values
    assert values["guided_decoding_guide_type"] == kind
    assert values["guided_decoding_guide"] == guide


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
def test_a_prompt_keeps_its_last_tokens(call: str) -> None:
    def prompts(**fields: Any) -> tuple[tuple[int, ...], ...]:
        return job(call, fields).prompts

    [whole] = prompts()
    assert prompts(truncate_prompt_tokens=2) == (whole[-2:],)
    assert prompts(truncate_prompt_tokens=99) == prompts(truncate_prompt_tokens=-1) == (whole,)
    assert prompts(truncate_prompt_tokens=-1, max_tokens=98) == (whole[-2:],)
