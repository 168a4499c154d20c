"""Fields that are ignored or refused, unknown ones, and bodies that are no JSON objects."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.openai_front import DESCRIPTION, parse

from inflight_client.terminal.chat import SETTINGS, Conversation
from inflight_openai.errors import ApiError
from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import make_prompt_reader
from inflight_openai.schema import (
    IGNORED,
    KNOWN_NAMES,
    NEUTRAL,
    REFUSED,
    CompletionBody,
    UnknownFields,
    read_body,
)

READER = make_prompt_reader(DESCRIPTION, None, None)
COMPLETION = {"model": "demo", "prompt": "1 2"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "1 2"}]}
ROUTER = {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False}
ROUTER |= {"continue_final_message": False, "skip_special_tokens": True, "stream": False}
THINKING = {"separate_reasoning": True, "stream_reasoning": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def read(
    call: dict[str, Any], fields: dict[str, Any], *, is_strict: bool = True
) -> GenerationRequest:
    return parse(READER, call | fields, UnknownFields(is_strict=is_strict))


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
def test_neutral_values_change_nothing(call: dict[str, Any], fields: dict[str, Any]) -> None:
    """Even where unknown names are refused."""
    assert read(call, fields) == read(call, {})


@pytest.mark.parametrize("call", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("tool_choice", "required"),
        ("function_call", "required"),
        ("web_search_options", {"search_context_size": "low"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
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
def test_a_value_that_would_change_the_answer_is_refused(
    call: dict[str, Any], name: str, value: Any
) -> None:
    with pytest.raises(ApiError) as caught:
        read(call, {name: value}, is_strict=False)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message


def test_unknown_names_are_logged_once_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No value is logged, nor what is no name, nor an endless number of names."""
    unknown = UnknownFields()
    fields: dict[str, Any] = {"surprise": "secret", "stream_options": {"odd": 1}, "stream": True}
    fields |= {"structured_outputs": {"later": 1}, "my private words": 1, "x" * 65: 1}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse(READER, CHAT | fields, unknown)
        many = {f"name{i}": 1 for i in range(200)}
        parse(READER, CHAT | many, unknown)
    lines = [record.getMessage() for record in caplog.records]
    names = ["surprise", "(no name of a field)", "structured_outputs.later", "stream_options.odd"]
    assert [
        line.partition("unknown field ")[2].partition(" of a request")[0] for line in lines[:4]
    ] == names
    assert len(lines) == 100
    assert not any(word in "".join(lines) for word in ("secret", "private", "xxx"))
    for name in ("surprise", "stream_options", "structured_outputs", "my private words"):
        given = {"stream": True, name: fields[name]}
        with pytest.raises(ApiError, match="Unrecognized request argument") as caught:
            read(CHAT, given)
        assert (caught.value.status, caught.value.code) == (400, "unknown_parameter")


def test_the_documentation_has_every_field() -> None:
    """And says of refused ones which values ask for nothing."""
    page = (Path(__file__).parents[2] / "docs/openai.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*?) \| .*? \| (honoured|ignored|refused)(.*) \|$", page, re.MULTILINE
    )
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    names.remove("logprobs")  # a number in completions, a flag in chats
    assert sorted(names) == sorted(KNOWN_NAMES)
    refused = [row for row in rows if row[1] == "refused"]
    of_chats = {"top_logprobs"}
    found = {name for row in refused for name in re.findall(r"`(\w+)`", row[0])}
    assert found == REFUSED - of_chats
    told = "".join(row[2] for row in refused)
    for name in NEUTRAL.keys() - of_chats:
        assert f"`{json.dumps({name: NEUTRAL[name][0]})[1:-1]}`" in told


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000),
        *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"prompt": "\\ud800"}'),
    ],
)
def test_a_body_must_be_a_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError, match="the body"):
        read_body(raw, CompletionBody, UnknownFields())


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [(COMPLETION, "top_logprobs", 2), (CHAT, "prompt", "x"), (CHAT, "echo", True)],
)
def test_a_field_of_the_other_call_is_refused(call: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name}: there is no such field of"):
        read(call, {name: value})


def test_the_chat_in_a_terminal_sets_fields_that_are_served_and_no_others() -> None:
    assert set(SETTINGS) <= KNOWN_NAMES - REFUSED - IGNORED
    conversation = Conversation("m")
    for name in ("temprature", "model", "stream"):
        told = conversation.set(f"{name} 1")
        assert told.startswith(f"error: {name} cannot be set; there are ")
    assert not conversation.settings
