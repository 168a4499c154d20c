"""Calls of tools and thoughts in the formats of the families, and guides that have them written.

Texts are those that models of each family write, or their templates and documentation show.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.guided_answers import accepts
from support.openai_front import CHAT, DESCRIPTION, parse

from inflight_backend.guided.guide import Guide, GuideType
from inflight_client.errors import InvalidArgument
from inflight_openai.errors import ApiError
from inflight_openai.generation import AnswerFormat, GenerationRequest
from inflight_openai.prompts import make_prompt_reader, token_by_id
from inflight_openai.responses import EventWriter, Head, PartsOfAnswer, WholeAnswer
from inflight_openai.schema import read_messages
from inflight_openai.tools.arguments import closed
from inflight_openai.tools.formats import FORMATS, ModelFormats, Thoughts, Tool, find_formats
from inflight_openai.triton_client import Piece

# ruff: noqa: RUF001 (tokens of DeepSeek have a bar that looks like another one)

THINK = Thoughts("<think>", "</think>")
F = ("f", '{"a": 1}')
G = ("g", '{"b": "]"}')
TOOLS = [Tool("f", {"type": "object", "properties": {"s": {"type": "string"}}})]
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "no call <tool", "no call <tool", []),
    ("hermes", "a <b>\n\n c ", "a <b>\n\n c ", []),
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": [{"c": 2}]}}\n</tool_call>'
        '\n<tool_call>\n{"arguments": {"a": 1}, "name": "g"}\n</tool_call>',
        "Hi.",
        [("f", '{"a": "}\\"", "b": [{"c": 2}]}'), ("g", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> done',
        "done",
        [F],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "<tool_call>\nnonsense", "<tool_call>\nnonsense", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cu', "", [("f", '{"a": "cu')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [F, ("g", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '{"answer": 4} and more', '{"answer": 4} and more', []),
    ("llama3_json", ' [{"x": "y"}, [1]] and', ' [{"x": "y"}, [1]] and', []),
    ("llama3_json", '{"answer": {"b": 1', '{"answer": {"b": 1', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
        '{"name": "g", "arguments": {"b": "]"}}]',
        "",
        [F, G],
    ),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "]"}', "", [F, G]),
    ("mistral_v11", 'ok [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "ok", [F]),
    ("mistral_v11", "[TOOL_CALLS]what is that", "[TOOL_CALLS]what is that", []),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
        '{"b": "]"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [F, G],
    ),
    (
        "deepseek_v31",
        'Let me.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "]"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Let me.",
        [F, G],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>'
        '{"b": "]"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [F, G],
    ),
    (
        "phi",
        '<|tool_call|>[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'
        "<|/tool_call|>",
        "",
        [F],
    ),
    ("phi", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [F]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [F]),
    ("pythonic", "[f(a=1), g(b=']')]", "", [F, G]),
    ("pythonic", "[f(a=[True, None])]", "", [("f", '{"a": [true, null]}')]),
    ("pythonic", "[1] is a reference", "[1] is a reference", []),
    ("pythonic", "no list", "no list", []),
    ("llama4_pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [F]),
    (
        "harmony",
        "<|channel|>commentary<|message|>Will call.<|end|><|start|>assistant to=functions.f"
        '<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "Will call.",
        [F],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done',
        "Done",
        [F],
    ),
    (
        "qwen3_coder",
        "ok\n<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n<parameter=s>\n7\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
        "</tool_call>",
        "ok",
        [("f", '{"a": 3, "s": "7"}'), ("g", "{}")],
    ),
    (
        "glm",
        "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "",
        [("f", '{"a": [1]}')],
    ),
]


def read(
    formats: ModelFormats, text: str, size: int, *, is_thinking: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thoughts and calls of an answer that arrives in pieces of ``size`` characters."""
    reader = formats.new_reader(TOOLS, is_guided=False, is_thinking=is_thinking)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in reader.feed(piece)] + list(reader.finish())
    texts, calls = {"content": "", "reasoning": ""}, dict[int, tuple[str, str]]()
    for part in parts:
        if part.kind == "call":
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (name + part.name, arguments + part.text)
        else:
            texts[part.kind] += part.text
    return texts["content"], texts["reasoning"], [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_of_each_family(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """However the text is cut into pieces."""
    for size in (1, 2, 5, 1000):
        assert read(ModelFormats(FORMATS[name], None), text, size) == (content, "", calls)


def test_every_format_is_read_by_a_case() -> None:
    assert {name for name, *_ in CASES} == set(FORMATS)


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\na  b\n</think>\n\nHi </think>", False, ("Hi </think>", "a  b", [])),
        ("a\n</think>\nHi", True, ("Hi", "a", [])),
        ("never ends </thin", True, ("", "never ends </thin", [])),
        ("<thin", False, ("<thin", "", [])),
        ("Hi <think> there", False, ("Hi <think> there", "", [])),
        (
            'a</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            True,
            ("", "a", [F]),
        ),
    ],
)
def test_thoughts(text: str, is_thinking: bool, expected: Any) -> None:
    formats = ModelFormats(FORMATS["hermes"], THINK)
    for size in (1, 3, 1000):
        assert read(formats, text, size, is_thinking=is_thinking) == expected


def test_thoughts_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert read(find_formats(lambda word: word in text, None), text, 1) == ("Hi", "hm", [])


@pytest.mark.parametrize(
    ("source", "calls", "begin"),
    [
        ("<tool_call> </think>", "hermes", "<think>"),
        ("<tool_call>\n<function=", "qwen3_coder", None),
        ("<tool_call> <arg_key> </think>", "glm", "<think>"),
        ("tools [TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [ARGS] [/THINK]", "mistral_v11", "[THINK]"),
        ("<｜tool▁calls▁begin｜> '```json' </think>", "deepseek_v3", "<think>"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "<think>"),
        ("<|channel|> <|message|>", "harmony", "<|channel|>analysis<|message|>"),
        ('tools {"name": function name, "parameters": d}', "llama3_json", None),
        ("nothing", "hermes", None),
    ],
)
def test_the_template_tells_the_format(source: str, calls: str, begin: str | None) -> None:
    found = find_formats(lambda word: word in source, None)
    assert found.calls is FORMATS[calls]
    assert (found.thoughts.begin if found.thoughts else None) == begin
    assert find_formats(lambda word: word in source, "phi").calls is FORMATS["phi"]
    with pytest.raises(InvalidArgument, match=r"--tool-parser other: .* choose one of harmony, "):
        find_formats(lambda word: False, "other")


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
GUIDED = [Tool("f", SCHEMA, is_strict=True), Tool("g", SCHEMA)]
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {{"a": {}}}}}\n</tool_call>'


def allowed(formats: ModelFormats, text: str, **choice: Any) -> bool:
    choice = {"must_call": False, "one_call": False, "is_thinking": False, **choice}
    structure = formats.structure(GUIDED, **choice)
    guide = json.dumps({"format": structure})
    return accepts(Guide(GuideType.STRUCTURAL_TAG, guide), text)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_guide_has_calls_written_in_the_format_of_the_family(name: str) -> None:
    """And the reader of that format reads them."""
    formats = ModelFormats(FORMATS[name], None)
    calls = formats.guided_calls
    one = f'{calls.before_name}f{calls.before_arguments}{{"a": 1}}{calls.after_arguments}'
    text = f"{calls.start}{one}{calls.end}"
    assert allowed(formats, text, must_call=True)
    assert allowed(formats, text)
    assert not allowed(formats, "text", must_call=True)
    assert not allowed(formats, text.replace("1", "100"), must_call=True)
    assert not allowed(formats, text.replace(one, one.replace("f", "h")), must_call=True)
    reader = formats.new_reader(GUIDED, is_guided=True, is_thinking=False)
    [*parts] = [*reader.feed(text), *reader.finish()]
    assert "".join(part.text for part in parts if part.kind == "call") == '{"a": 1}'


def test_guides_of_hermes() -> None:
    formats, thinks = ModelFormats(FORMATS["hermes"], None), ModelFormats(FORMATS["hermes"], THINK)
    call, two = HERMES.format("g", 7), HERMES.format("f", 1) + "\n" + HERMES.format("g", 2)
    for text in ("any text", f"Well: {call}", f"{two} and more", ""):
        assert allowed(formats, text)
    assert not allowed(formats, "Well: " + HERMES.format("f", 100))
    assert allowed(formats, two, must_call=True)
    assert not allowed(formats, two, must_call=True, one_call=True)
    assert not allowed(formats, f"{call} and more", one_call=True)
    assert allowed(thinks, f"<think>hm</think>\n\n{call}", must_call=True)
    assert allowed(thinks, f"hm</think>\n\n{call}", must_call=True, is_thinking=True)
    assert not allowed(thinks, call, must_call=True, is_thinking=True)
    content = {"type": "json_schema", "json_schema": SCHEMA}
    for text in ('{"a": 5}', call, f"<think>hm</think>{call}", '<think>hm</think>{"a": 5}'):
        assert allowed(thinks, text, content=content)
    assert not allowed(thinks, "any text", content=content)


A = {"properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        (A, '{"a": null, "b": 1}', False),
        ({"$defs": {"x": A}, "items": {"$ref": "#/$defs/x"}}, '[{"b": 1}]', False),
        ({"anyOf": [A, {"type": "integer"}]}, '{"b": 1}', False),
        (A | {"additionalProperties": True}, '{"b": 1}', True),
        (A | {"$id": "Output Format"}, '{"a": null}', True),
        ({"type": "object"}, '{"b": 1}', True),
        ({"allOf": [A, {"properties": {"b": {"type": "null"}}}]}, '{"a": null, "b": null}', True),
    ],
)
def test_arguments_have_no_names_that_the_schema_does_not_list(
    schema: dict[str, Any], text: str, is_allowed: bool
) -> None:
    content = json.dumps({"format": {"type": "json_schema", "json_schema": dict(closed(schema))}})
    assert accepts(Guide(GuideType.STRUCTURAL_TAG, content), text) == is_allowed


# Requests and answers.


READER = make_prompt_reader(DESCRIPTION | {"max_input_len": 2000, "max_seq_len": 2100}, None, None)
OFFERED = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "description": "does g"}},
]


OLDER = [each["function"] for each in OFFERED]


def asked(**fields: Any) -> GenerationRequest:
    return parse(READER, CHAT | {"tools": OFFERED} | fields)


def test_strict_tools_are_guided_where_calls_are_json() -> None:
    """A model that calls in Python is read in Python, unless it must call."""
    strict = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
    for words, is_guided in (("tools <tool_call>", True), ("tools <|python_start|>", False)):
        files = DESCRIPTION["files"] | {"chat_template.jinja": f"{{# {words} #}}x"}
        reader = make_prompt_reader(DESCRIPTION | {"files": files}, None, None)
        request = parse(reader, CHAT | strict)
        assert ("guided_decoding_guide" in request.values) == is_guided
        assert request.answer is not None
        [part, *_] = [*(own := request.answer.new_reader()).feed("[f(a=1)]"), *own.finish()]
        assert part.kind == ("content" if is_guided else "call")


def among(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": each}} for each in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_what_a_choice_of_tools_makes_of_a_request() -> None:
    assert asked(tool_choice="none") == parse(READER, dict(CHAT))
    auto = asked()
    assert auto.answer is not None
    assert "guided_decoding_guide" not in auto.values
    named = {"type": "function", "function": {"name": "g"}}
    some = among("g", mode="required")
    for choice, names in (("required", ["f", "g"]), (named, ["g"]), (some, ["g"])):
        request = asked(tool_choice=choice)
        guide = json.loads(str(request.values["guided_decoding_guide"]))
        [tags] = guide["format"]["elements"]
        assert [tag["begin"].split('"')[3] for tag in tags["tags"]] == names
        no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
        assert tags["tags"][-1]["content"]["json_schema"] == no_arguments  # of g: none are named
        assert tags["stop_after_first"] == (choice == named)
        assert request.guide_field == "tools"
    assert asked(tool_choice="required", parallel_tool_calls=False) != asked(tool_choice="required")
    assert asked(tool_choice=among("g")).prompts == asked(tools=OFFERED[1:]).prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": OFFERED * 400}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tool_choice": among("f", "h")}, "tool_choice"),
        ({"tool_choice": among()}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": among("f", mode="all")}, "tool_choice.allowed_tools.mode"),
        ({"functions": [{"name": "f"}]}, "functions"),  # beside tools
        ({"tools": None, "functions": [{"parameters": {}}]}, "functions[0].name"),
        ({"tools": None, "functions": OFFERED * 400}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": None, "functions": OLDER, "function_call": {"name": "h"}}, "function_call"),
        ({"tools": None, "functions": OLDER, "function_call": "required"}, "function_call"),
        ({"response_format": {"type": "ebnf", "ebnf": "root ::= 'a'"}}, "response_format"),
    ],
)
def test_a_bad_choice_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("choice", [None, {"name": "g"}])
def test_the_older_names_of_tools(choice: dict[str, str] | None) -> None:
    """OpenAI's ``functions``: one call, in messages and events of the older form."""
    fields = {"tools": None, "functions": OLDER, "function_call": choice}
    request = asked(**fields)
    tool_choice: dict[str, Any] = {"type": "function", "function": choice}
    newer = asked(parallel_tool_calls=False, tool_choice=tool_choice if choice else None)
    assert (request.prompts, request.values) == (newer.prompts, newer.values)
    head = Head("id", 1700000000, "m", is_chat=True)
    text = TEXT if choice is None else HERMES.format("g", 5)
    whole = WholeAnswer(head, request, token_by_id)
    events = EventWriter(head, request, token_by_id)
    piece = Piece(0, text, 9, reason="end_id")
    whole.add(piece)
    written = events.piece(piece) + events.ending()
    done = ChatCompletion.model_validate_json(whole.encode(), strict=True).choices[0]
    told = {"name": "", "arguments": ""}
    for block in written.decode().split("\n\n")[:-1]:
        chunk = ChatCompletionChunk.model_validate_json(block.removeprefix("data: "), strict=True)
        if (part := chunk.choices[0].delta.function_call) is not None:
            told["name"] += part.name or ""
            told["arguments"] += part.arguments or ""
    call = done.message.function_call
    assert call is not None
    assert call.model_dump() == told
    assert (told["name"], json.loads(told["arguments"])["a"]) == ("g" if choice else "f", 5)
    reason = "stop" if choice else "function_call"  # as with tools
    assert (done.finish_reason, chunk.choices[0].finish_reason) == (reason, reason)
    assert done.message.tool_calls is None


def test_older_calls_in_a_conversation_are_calls_of_tools() -> None:
    """As templates know them."""
    asked_for = {"name": "f", "arguments": '{"a": 1}'}
    older = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": asked_for},
        {"role": "function", "name": "f", "content": "5"},
    ]
    *_, call, result = read_messages(older)
    assert call["content"] is None
    [told] = call["tool_calls"]
    assert told["function"] == asked_for
    assert result == {
        "role": "tool",
        "name": "f",
        "content": "5",
        "tool_call_id": told["id"],
    }


TEXT = f"Hm. {HERMES.format('f', 5)}\n{HERMES.format('g', 6)}"


@pytest.mark.parametrize(
    ("fields", "content", "numbers", "reason"),
    [
        ({}, "Hm.", [5, 6], "tool_calls"),
        ({"parallel_tool_calls": False}, "Hm.", [5], "tool_calls"),
        ({"tool_choice": "none"}, TEXT, [], "stop"),
        ({"tool_choice": OFFERED[1]}, "Hm.", [5], "stop"),  # OpenAI's reason for a named one
    ],
)
def test_answers_with_calls(
    fields: dict[str, Any], content: str, numbers: list[int], reason: str
) -> None:
    """Whole ones, and the events of a stream put together as clients do it."""
    request = asked(**fields)
    head = Head("id", 1700000000, "m", is_chat=True)
    whole = WholeAnswer(head, request, token_by_id)
    events = EventWriter(head, request, token_by_id)
    written = b""
    for start in range(0, len(TEXT), 7):
        text, is_last = TEXT[start : start + 7], start + 7 >= len(TEXT)
        piece = Piece(0, text, 1, reason="end_id" if is_last else "")
        whole.add(piece)
        written += events.piece(piece)
    written += events.ending()
    done = ChatCompletion.model_validate_json(whole.encode(), strict=True).choices[0]
    functions = [each.function for each in done.message.tool_calls or [] if each.type == "function"]
    assert [json.loads(each.arguments)["a"] for each in functions] == numbers
    assert (done.message.content, done.finish_reason) == (content, reason)
    told, arguments, names = "", dict[int, str](), list[str | None]()
    for block in written.decode().split("\n\n")[:-1]:
        chunk = ChatCompletionChunk.model_validate_json(block.removeprefix("data: "), strict=True)
        told += chunk.choices[0].delta.content or ""
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            names += [call.function.name] if call.id else []
            assert not (call.id and call.function.arguments)  # OpenAI's come later
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert told == content
    assert names == ["f", "g"][: len(numbers)]
    assert [json.loads(text)["a"] for text in arguments.values()] == numbers
    assert chunk.choices[0].finish_reason == reason
    for text in arguments.values():
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("named", ["", "f"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_had_to_come_and_was_cut_off_is_no_text(name: str, named: str) -> None:
    """Its arguments are there as far as they got; a named tool is called wherever the cut is."""
    formats = ModelFormats(FORMATS[name], None)
    calls, arguments = formats.guided_calls, '{"a": 1}'
    text = f"{calls.start}{calls.before_name}f{calls.before_arguments}{arguments}"
    answer_format = AnswerFormat(
        lambda: formats.new_reader(GUIDED, is_guided=True, is_thinking=False),
        must_call=True,
        named=named,
    )
    request = replace(asked(), answer=answer_format)
    found = set()
    for end in range(len(text) + 1):
        answer = PartsOfAnswer(request)
        parts = [part for letter in text[:end] for part in answer.feed(letter)] + answer.finish()
        assert {part.kind for part in parts} <= {"call"}
        assert "".join(part.name for part in parts) == ("f" if parts or named else "")
        found.add("".join(part.text for part in parts))
        assert answer.finish_reason("length") == "length"
    assert found <= {arguments[:size] for size in range(len(arguments) + 1)}
    assert arguments in found
