"""``/v1/responses``: bodies as chats, and answers as items and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.openai_front import DESCRIPTION, parse

from inflight_openai.errors import ApiError
from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import make_prompt_reader, token_by_id
from inflight_openai.responses import Head
from inflight_openai.responses_api.request import parse_response
from inflight_openai.responses_api.writer import ResponseWriter
from inflight_openai.schema import UnknownFields
from inflight_openai.settings import FrontSettings
from inflight_openai.triton_client import Piece

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}"
TEMPLATE += "{# tools <tool_call> </think> #}"
FILES = DESCRIPTION["files"] | {"chat_template.jinja": TEMPLATE}
LARGE = DESCRIPTION | {"max_input_len": 2000, "max_seq_len": 2100, "files": FILES}
READER = make_prompt_reader(LARGE, None, None)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


def read(**fields: Any) -> GenerationRequest:
    body = {"model": "demo", "input": "hi", **fields}
    return parse_response(json.dumps(body).encode(), READER, UnknownFields(), FrontSettings())


@pytest.mark.parametrize(
    ("response", "chat"),
    [
        ({}, {}),
        (
            {"instructions": "Be."},
            {"messages": [{"role": "system", "content": "Be."}, USER]},
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, {}),
        (
            {"max_output_tokens": 7, "temperature": 0.5, "top_k": 3, "store": True, "n": 1},
            {"max_tokens": 7, "temperature": 0.5, "top_k": 3},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        (
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "f"},
            },
            {
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        (
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            {
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
            },
        ),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (
            {
                "input": [
                    {"type": "message", **USER},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "cold"},
                ]
            },
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c",
                                "type": "function",
                                "function": {"name": "f", "arguments": "{}"},
                            },
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "cold"},
                ]
            },
        ),
    ],
)
def test_a_body_is_that_of_a_chat_in_other_words(
    response: dict[str, Any], chat: dict[str, Any]
) -> None:
    body = {"model": "demo", "messages": [USER], **chat}
    expected, found = parse(READER, body), read(**response)
    assert (found.prompts, found.max_tokens) == (expected.prompts, expected.max_tokens)
    assert (found.values, found.has_log_probs) == (expected.values, expected.has_log_probs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_a_bad_field_has_its_name_here(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>hm</think>Hello.\n{CALL}"


@pytest.mark.parametrize(("reason", "status"), [("end_id", "completed"), ("length", "incomplete")])
def test_an_answer_is_items_and_events(reason: str, status: str) -> None:
    """As the types of the `openai` package have them; what events add up to is the response."""
    request = read(tools=[{"type": "function", **FUNCTION}])
    head = Head("resp_1", 1700000000, "m", is_chat=True)
    writer = ResponseWriter(head, request, token_by_id, READER.count_tokens)
    written = b""
    for start in range(0, len(ANSWER), 5):
        text, is_last = ANSWER[start : start + 5], start + 5 >= len(ANSWER)
        written += writer.piece(Piece(0, text, 1, reason=reason if is_last else ""))
    blocks = (written + writer.ending()).decode().split("\n\n")[:-1]
    datas = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [block.partition("\n")[0] for block in blocks] == [f"event: {d['type']}" for d in datas]
    events: list[Any] = [TypeAdapter(ResponseStreamEvent).validate_python(data) for data in datas]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
    response = Response.model_validate(datas[-1]["response"])
    assert (datas[-1]["type"], response.status) == (f"response.{status}", status)
    assert [each.type for each in response.output] == ["reasoning", "message", "function_call"]
    statuses = [each["status"] for each in datas[-1]["response"]["output"]]
    assert statuses == ["completed", "completed", status]
    assert response.output_text == "Hello."
    deltas = {name: "" for name in ("reasoning_text", "output_text", "function_call_arguments")}
    for data in datas:
        if data["type"].endswith(".delta"):
            deltas[data["type"].split(".")[1]] += data["delta"]
    assert list(deltas.values()) == ["hm", "Hello.", '{"a": 1}']
    assert response.usage is not None
    assert response.usage.output_tokens == writer.num_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == READER.count_tokens("hm")
