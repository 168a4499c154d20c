"""The table of what models of each family write to call tools, and to think before they answer.

A row says how a call is read, and how a guide has it written where the client wants one for
certain. Which row holds is told by words of the chat template, unless ``--tool-parser`` names one.
"""

# ruff: noqa: RUF001 (tokens of DeepSeek have a bar that looks like another one)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_client.errors import InvalidArgument
from inflight_openai.tools.arguments import closed
from inflight_openai.tools.harmony import HarmonyReader
from inflight_openai.tools.pythonic import PythonicReader
from inflight_openai.tools.reader import PlainReader, Reader, ThoughtReader
from inflight_openai.tools.tagged import TaggedReader
from inflight_openai.tools.xml_calls import XmlReader

Structure = dict[str, Any]
"""A format of a guide of type ``structural_tag``."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What stands around the thoughts at the beginning of an answer."""

    begin: str
    end: str
    behind: str = r"\s{0,4}"
    """Expression for what may stand between them and the rest."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: ``start``, then each call as ``before_name``, the name,
    ``before_arguments``, JSON, ``after_arguments``, with ``between`` two of them, then ``end``.

    ``openers`` begin calls within a text, ``fillers`` may stand around them; ``header``: expression
    for what stands before the arguments, unless the call is one JSON object. ``words``: a chat
    template that has all of them is of this format. ``read_by``: grammars that are not JSON.
    """

    words: tuple[str, ...]
    openers: tuple[str, ...] = ()
    fillers: tuple[str, ...] = ()
    header: str = ""
    may_be_bare: bool = False
    start: str = ""
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    between: str = ", "
    end: str = ""
    before_content: str = ""
    """Stands before an answer that is no call."""
    one_call: bool = False
    read_by: Callable[[Sequence[Tool]], Reader] | None = None


_NAME = r"(?P<name>[\w.:/-]+)"
_HERMES: dict[str, Any] = {
    "openers": ("<tool_call>",),
    "fillers": ("<tool_call>", "</tool_call>"),
    "before_name": '<tool_call>\n{"name": "',
    "after_arguments": "}\n</tool_call>",
    "between": "\n",
}
_DEEPSEEK: dict[str, Any] = {
    "openers": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "fillers": ("```", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "start": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
}

FORMATS: Mapping[str, ToolFormat] = {
    "harmony": ToolFormat(  # gpt-oss
        words=("<|channel|>", "<|message|>"),
        before_name="<|channel|>commentary to=functions.",
        before_arguments=" <|constrain|>json<|message|>",
        after_arguments="",
        before_content="<|channel|>final<|message|>",
        one_call=True,  # a token that ends the answer ends a call
        read_by=lambda tools: HarmonyReader(),
    ),
    "kimi_k2": ToolFormat(
        words=("<|tool_calls_section_begin|>",),
        openers=("<|tool_calls_section_begin|>",),
        fillers=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        header=rf"(?:functions\.)?{_NAME}:\d+\s*<\|tool_call_argument_begin\|>",
        start="<|tool_calls_section_begin|>",
        before_name="<|tool_call_begin|>functions.",
        before_arguments=":0<|tool_call_argument_begin|>",
        after_arguments="<|tool_call_end|>",
        between="",
        end="<|tool_calls_section_end|>",
    ),
    "deepseek_v3": ToolFormat(  # and R1
        words=("<｜tool▁calls▁begin｜>", "```json"),
        header=rf"function\s*<｜tool▁sep｜>{_NAME}\s*```json",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```<｜tool▁call▁end｜>",
        between="\n",
        **_DEEPSEEK,
    ),
    "deepseek_v31": ToolFormat(
        words=("<｜tool▁calls▁begin｜>",),
        header=rf"{_NAME}\s*<｜tool▁sep｜>",
        before_name="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        after_arguments="<｜tool▁call▁end｜>",
        between="",
        **_DEEPSEEK,
    ),
    "mistral_v11": ToolFormat(  # Mistral Small 3.2, Magistral, Devstral
        words=("[TOOL_CALLS]", "[ARGS]"),
        openers=("[TOOL_CALLS]",),
        fillers=("[TOOL_CALLS]",),
        header=rf"{_NAME}\s*(?:\[CALL_ID\]\w+)?\[ARGS\]",
        before_name="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        after_arguments="",
        between="",
    ),
    "mistral": ToolFormat(
        words=("[TOOL_CALLS]",),
        openers=("[TOOL_CALLS]",),
        fillers=("[TOOL_CALLS]",),
        start="[TOOL_CALLS][",
        end="]",
    ),
    "phi": ToolFormat(  # Phi-4-mini
        words=("<|tool|>",),
        openers=("<|tool_call|>", "functools["),
        fillers=("<|/tool_call|>",),
        start="<|tool_call|>[",
        end="]<|/tool_call|>",
    ),
    "granite": ToolFormat(  # 3.0 to 3.3; 4 is Hermes'
        words=("<|tool_call|>",),
        openers=("<|tool_call|>", "<tool_call>"),
        fillers=("<|tool_call|>", "<tool_call>"),
        start="<|tool_call|>[",
        end="]",
    ),
    "qwen3_coder": ToolFormat(  # and Qwen3.5
        words=("<tool_call>", "<function="),
        read_by=lambda tools: XmlReader({tool.name: tool.parameters for tool in tools}),
    ),
    "glm": ToolFormat(  # 4.5 and later
        words=("<tool_call>", "<arg_key>"),
        read_by=lambda tools: XmlReader({tool.name: tool.parameters for tool in tools}),
    ),
    "hermes": ToolFormat(words=("<tool_call>",), **_HERMES),  # and Qwen2.5, Qwen3, SmolLM3
    "llama4_pythonic": ToolFormat(
        words=("<|python_start|>",), read_by=lambda tools: PythonicReader()
    ),
    "pythonic": ToolFormat(  # Llama 3.2 with a template for it
        words=("[func_name1(params_name1=",), read_by=lambda tools: PythonicReader()
    ),
    "llama3_json": ToolFormat(
        words=('"parameters": ', "tools"),
        openers=("<|python_tag|>",),
        may_be_bare=True,
        before_arguments='", "parameters": ',
        between="; ",
    ),
}
"""By the names that ``--tool-parser`` takes; of those whose words a template has, the first one
holds."""

_GENERIC = "hermes"
"""Where the template says nothing: many models know it."""

_THOUGHTS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
)
_HARMONY_THOUGHTS = Thoughts(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", behind=""
)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """What one model writes."""

    calls: ToolFormat
    thoughts: Thoughts | None

    @property
    def is_harmony(self) -> bool:
        """True if no answer is plain text."""
        return self.calls is FORMATS["harmony"]

    def marks(self, *, has_tools: bool, is_guided: bool) -> list[str]:
        """Texts that the reader of an answer must see, though they may be special tokens."""
        found = [self.thoughts.begin, self.thoughts.end] if self.thoughts else []
        if has_tools:
            calls = self.guided_calls if is_guided else self.calls
            found += [*calls.openers, *calls.fillers, calls.start, calls.before_name]
            found += [calls.before_arguments, calls.after_arguments, calls.end]
        return [each for each in found if each]

    def new_reader(self, tools: Sequence[Tool], *, is_guided: bool, is_thinking: bool) -> Reader:
        """For one answer; ``is_thinking``: the prompt ends within thoughts."""
        if self.is_harmony:
            return HarmonyReader()
        reader: Reader = PlainReader()
        if tools:
            calls = self.guided_calls if is_guided else self.calls
            if calls.read_by is not None:
                reader = calls.read_by(tools)
            else:
                header = re.compile(calls.header) if calls.header else None
                reader = TaggedReader(
                    calls.openers, calls.fillers, header, may_be_bare=calls.may_be_bare
                )
        if self.thoughts is not None:
            begin, end = self.thoughts.begin, self.thoughts.end
            reader = ThoughtReader(begin, end, reader, is_inside=is_thinking)
        return reader

    @property
    def guided_calls(self) -> ToolFormat:
        """The format of calls that a guide has written: of grammars that are not JSON another."""
        return self.calls if self.writes_json else FORMATS[_GENERIC]

    @property
    def writes_json(self) -> bool:
        """Whether the arguments of calls are JSON, which a schema can guide."""
        return self.calls.read_by is None or self.is_harmony

    def structure(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        one_call: bool,
        is_thinking: bool,
        content: Structure | None = None,
    ) -> Structure:
        """The guide of an answer with calls of ``tools``, if there are any, or ``content``: free
        text if None. ``must_call``: nothing but calls."""
        calls = self.guided_calls
        parts = [self._calls(calls, tools, one_call=one_call or calls.one_call)] if tools else []
        if not must_call and content is not None:
            parts.append(_sequence(_constant(calls.before_content), content))
        if not must_call and content is None:
            parts = [self._free_text(calls, tools, one_call=one_call)]
        answer = parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
        if self.thoughts is None:
            return answer
        thoughts = self.thoughts
        end = [_constant(thoughts.end), {"type": "regex", "pattern": thoughts.behind}, answer]
        if is_thinking:
            return _sequence({"type": "any_text"}, *end)
        thinking = _sequence(_constant(thoughts.begin), {"type": "any_text"}, *end)
        return {"type": "or", "elements": [answer, thinking]}

    def _calls(self, calls: ToolFormat, tools: Sequence[Tool], *, one_call: bool) -> Structure:
        tags = {
            "type": "tags_with_separator",
            "tags": [_tag(calls, tool, calls.before_name, calls.after_arguments) for tool in tools],
            "separator": calls.between,
            "at_least_one": True,
            "stop_after_first": one_call,
        }
        return _sequence(_constant(calls.start), tags, _constant(calls.end))

    def _free_text(self, calls: ToolFormat, tools: Sequence[Tool], *, one_call: bool) -> Structure:
        """Text in which calls, once they begin, follow the schemas."""
        if self.is_harmony:
            text = _sequence(_constant(calls.before_content), {"type": "any_text"})
            elements = [self._calls(calls, tools, one_call=True), text]
            return {"type": "or", "elements": elements}
        begin, end = calls.start + calls.before_name, calls.after_arguments + calls.end
        return {
            "type": "triggered_tags",
            "triggers": [begin],
            "tags": [_tag(calls, tool, begin, end) for tool in tools],
            "stop_after_first": one_call,
        }


def _tag(calls: ToolFormat, tool: Tool, begin: str, end: str) -> Structure:
    schema = closed(tool.parameters) or {"type": "object"}
    return {
        "type": "tag",
        "begin": f"{begin}{tool.name}{calls.before_arguments}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": end,
    }


def _constant(text: str) -> Structure:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Structure) -> Structure:
    return {"type": "sequence", "elements": [each for each in elements if not _is_empty(each)]}


def _is_empty(each: Structure) -> bool:
    return each.get("value") == "" or each.get("pattern") == ""


def find_formats(knows: Callable[[str], bool], named: str | None) -> ModelFormats:
    """Those of a model whose chat template ``knows`` a word; ``named``: of calls, by the operator.

    `InvalidArgument` if there is no format of that name.
    """
    if named is not None and named not in FORMATS:
        raise InvalidArgument(
            f"--tool-parser {named}: there is none of that name; choose one of {', '.join(FORMATS)}"
        )
    fitting = (name for name, each in FORMATS.items() if all(map(knows, each.words)))
    calls = FORMATS[named or next(fitting, _GENERIC)]
    if calls is FORMATS["harmony"]:
        return ModelFormats(calls, _HARMONY_THOUGHTS)
    return ModelFormats(calls, next((each for each in _THOUGHTS if knows(each.end)), None))
