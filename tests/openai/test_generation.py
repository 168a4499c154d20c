"""Bodies to requests: prompts as ids, fields as tensors, guides, or an error that names a field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.openai_front import DESCRIPTION, FILES, parse

from inflight_openai.errors import ApiError
from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import PromptReader, make_prompt_reader

READER = make_prompt_reader(DESCRIPTION, None, None)


def completion(**fields: Any) -> GenerationRequest:
    return parse(READER, {"model": "demo", "prompt": "1 2", **fields})


def chat(reader: PromptReader = READER, **fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "1 2"}]
    return parse(reader, {"model": "demo", "messages": messages, **fields})


def test_defaults_of_a_completion() -> None:
    request = completion()
    assert [len(prompt) for prompt in request.prompts] == [4]  # <|begin|> and a token per byte
    assert (request.max_tokens, request.num_answers, request.is_streaming) == (16, 1, False)
    assert request.values == {"end_id": 1, "runtime_top_p": 1.0}  # it draws


def test_a_chat_may_fill_the_context() -> None:
    request = chat()
    assert len(request.prompts[0]) == 5  # <|begin|> of the template, once
    assert request.max_tokens == 95
    assert chat(max_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=8).max_tokens == 8
    for call in (chat, completion):
        assert call(max_completion_tokens=8, max_tokens=7).max_tokens == 8  # the newer name


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5}, {"runtime_top_p": 0.5}),
        ({"top_p": 0}, {"runtime_top_p": 1e-6}),  # the likeliest; the server's 0 leaves all
        ({"top_k": 5}, {"runtime_top_k": 5}),
        ({"top_k": -1}, {"runtime_top_k": 0}),
        ({"min_tokens": 2}, {"min_length": 2}),
        ({"seed": 7}, {"random_seed": 7}),
        ({"seed": -1}, {"random_seed": 2**64 - 1}),
        ({"sampling_seed": 7}, {"random_seed": 7}),  # SGLang's
        ({"seed": 8, "sampling_seed": 7}, {"random_seed": 8}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"bad_words": ["x"]}, {"bad_words": ["x"]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        # On the wire penalties count the prompt as well, and weigh whatever the temperature is.
        ({"presence_penalty": -2}, {"presence_penalty": -2.0, "prompt_ignore_length": 2**31 - 1}),
        (
            {"frequency_penalty": 0.5, "presence_penalty": 0, "temperature": 2},
            {
                "frequency_penalty": 0.25,
                "presence_penalty": 0.0,
                "temperature": 2.0,
                "prompt_ignore_length": 2**31 - 1,
            },
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"min_p": 0.1, "cache_salt": "me"}, {"min_p": 0.1, "cache_salt": "me"}),
        ({"stop": "x"}, {"stop_words": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_words": ["x", "y"]}),
        ({"stop": []}, {}),
        ({"n": 3}, {"num_return_sequences": 3}),
        ({"ignore_eos": True}, {"end_id": None}),
        ({"stop_token_ids": [9, 7, 9]}, {"stop_token_ids": [7, 9]}),
        ({"stop_token_ids": []}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type":"object"}',
            },
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},  # instructor's
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"a":1}'},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"a":1}'},
        ),
        (
            {"guided_json": {"properties": {"a": {}}}},  # closed, as xgrammar has it elsewhere
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"properties":{"a":{}},"additionalProperties":false}',
            },
        ),
    ],
)
def test_sampling_fields_become_tensors(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    usual = {"end_id": 1, "runtime_top_p": 1.0}
    wanted = {name: value for name, value in {**usual, **tensors}.items() if value is not None}
    for request in (completion(**fields), chat(**fields)):
        assert request.values == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (False, False)),
        ({"include_usage": None, "include_obfuscation": False}, (False, False)),
        ({"include_usage": True}, (True, False)),
        # As guidellm and aiperf send them, which count tokens by the usage of each event.
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),  # as vLLM has it
    ],
)
def test_stream_options(options: dict[str, Any], wanted: tuple[bool, bool]) -> None:
    for request in (
        completion(stream=True, stream_options=options),
        chat(stream=True, stream_options=options),
    ):
        assert (request.includes_usage, request.has_running_usage) == wanted


def test_log_probabilities() -> None:
    assert completion(logprobs=0).values["return_log_probs"] is True
    assert chat(logprobs=True, top_logprobs=0).has_log_probs
    assert not chat(logprobs=False).has_log_probs
    assert chat(logprobs=True, top_logprobs=5).values["num_top_log_probs"] == 5
    assert completion(logprobs=3).num_top_log_probs == 3
    assert "num_top_log_probs" not in completion(logprobs=0).values


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": "other"}, "model"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", {}]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"max_tokens": 10**4000}, "max_tokens"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"seed": 2**63}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x", 1]}, "bad_words[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_json": [1]}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"metadata": "m"}, "metadata"),
    ({"store": 1}, "store"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": []}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"echo": 1}, "echo"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 10**4}, "best_of"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{}] * 4097}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f g"}]}, "functions[0].name"),
    ({"enable_thinking": "no"}, "enable_thinking"),
    ({"prompt": "x"}, "prompt"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
]


@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [(completion, *fault) for fault in BAD_COMPLETIONS] + [(chat, *fault) for fault in BAD_CHATS],
)
def test_a_bad_field_is_named(call: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    error = caught.value
    assert (error.status, error.param) == (404 if fields == {"model": "other"} else 400, param)
    assert param in error.message or param == "model" or "chat template" in error.message
    assert len(error.message) < 160


def test_chat_template_kwargs(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token if enable_thinking else self_made }}")
    reader = make_prompt_reader(DESCRIPTION, None, path)
    assert chat(reader, chat_template_kwargs={"enable_thinking": True}).prompts == ((0,),)
    named = {"enable_thinking": False, "self_made": "12", "self": 1, "bos_token": ""}
    assert len(chat(reader, chat_template_kwargs=named).prompts[0]) == 2


def test_a_model_without_a_template_refuses_chats_only() -> None:
    files = {"tokenizer.json": FILES["tokenizer.json"]}
    bare = make_prompt_reader({**DESCRIPTION, "files": files}, "mine", None)
    assert parse(bare, {"model": "mine", "prompt": "1"}).prompts
    with pytest.raises(ApiError, match="--chat-template"):
        chat(bare, model="mine")


def test_logit_bias() -> None:
    bias: Any = completion(logit_bias={"5": -100, "257": 0.5}).values["embedding_bias"]
    assert (bias.shape, bias.dtype) == ((258,), "float32")
    assert (bias[5], bias[257], abs(bias).sum()) == (-100, 0.5, 100.5)


def test_echo_is_the_prompt_as_it_was_sent() -> None:
    assert completion(echo=True).echoes == ("1 2",)
    ids = READER.encode("3 4", "prompt", add_special_tokens=True)
    assert completion(prompt=ids, echo=True).echoes == ("<|begin|>3 4",), "each token in its place"
    assert completion(prompt=["ä", "5"], echo=True, n=2).echoes == ("ä", "5")
    assert completion(echo=False).echoes == ()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {"end_id": 1, "stop_token_ids": [7, 9]}),
        ({"stop_token_ids": [5, 9]}, {"end_id": 1, "stop_token_ids": [5, 7, 9]}),
        ({"ignore_eos": True}, {}),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {"stop_token_ids": [5]}),
    ],
)
def test_a_client_may_add_end_tokens_and_ignore_those_of_the_model(
    fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    reader = make_prompt_reader(DESCRIPTION | {"stop_token_ids": [7, 9]}, None, None)
    body = {"model": "demo", "prompt": "1", **fields}
    assert parse(reader, body).values == {"runtime_top_p": 1.0, **wanted}


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


@pytest.mark.parametrize("call", [chat, completion])
@pytest.mark.parametrize("name", GUIDED)
def test_guides_of_other_servers(call: Any, name: str) -> None:
    fields, kind, guide = GUIDED[name]
    values = call(**fields).values
    assert values["guided_decoding_guide_type"] == kind
    assert values["guided_decoding_guide"] == guide


@pytest.mark.parametrize("call", [chat, completion])
def test_truncate_prompt_tokens(call: Any) -> None:
    def cut(**fields: Any) -> tuple[tuple[int, ...], ...]:
        prompts: tuple[tuple[int, ...], ...] = call(**fields).prompts
        return prompts

    [whole] = cut()
    assert cut(truncate_prompt_tokens=2) == (whole[-2:],)
    assert cut(truncate_prompt_tokens=99) == cut(truncate_prompt_tokens=-1) == (whole,)
    assert cut(truncate_prompt_tokens=-1, max_tokens=98) == (whole[-2:],)


def test_thinking_fields_are_template_variables() -> None:
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    files = {**FILES, "chat_template.jinja": template}
    reader = make_prompt_reader({**DESCRIPTION, "files": files}, None, None)

    def text(**fields: Any) -> str:
        return reader.decode(chat(reader, **fields).prompts[0])

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


def test_what_a_request_does_not_say_the_server_says() -> None:
    told = {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 1.5}
    reader = make_prompt_reader({**DESCRIPTION, "default_sampling": told}, None, None)
    by_input = {"temperature": 0.5, "runtime_top_k": 20, "runtime_top_p": 0.25}
    by_input["repetition_penalty"] = 1.5
    assert chat(reader).values == {"end_id": 1, **by_input}
    own = chat(reader, temperature=0, top_p=1, top_k=-1).values
    assert own == {**by_input, "end_id": 1, "temperature": 0.0, "runtime_top_k": 0} | {
        "runtime_top_p": 1.0
    }
