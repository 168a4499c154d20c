"""Chats: from messages as OpenAI's clients send them to the text of a prompt.

The template comes with the checkpoint, and is rendered as `transformers` does: sandboxed and
immutable Jinja, blocks trimmed, loop controls, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now`` and ``{% generation %}`` blocks. A sandbox does not bound time
and memory, so a worker process renders (``python -m inflight_openai.chat``), and the kernel ends it
at its limits.

Templates expect messages as `transformers` passes them on: without keys that are null, and with the
arguments of a tool call as an object. OpenAI's clients send null for such keys (an answer of the
`openai` package, given back whole) and the arguments as JSON text.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight_client.errors import InvalidArgument


def for_template(
    messages: Sequence[Mapping[str, Any]], knows: Callable[[str], bool]
) -> list[Mapping[str, Any]]:
    """``messages`` for a template; ``knows`` tells whether its source holds a word.

    ``developer`` is OpenAI's newer name of the role ``system``: a template without it would refuse
    such messages, or drop their text. One without tool calls would write "None" for the content of
    messages that hold nothing else.
    """
    found = []
    for message in messages:
        if message["role"] == "developer" and not knows("developer"):
            message = {**message, "role": "system"}
        if message.get("content") is None and not knows("tool_calls"):
            message = {**message, "content": ""}
        found.append(message)
    return found


def with_objects(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """``messages`` with the arguments of tool calls as objects; itself if there are none."""
    if not any("tool_calls" in message for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_call(each) for each in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _call(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call whose arguments are an object, if their text is one."""
    function = value["function"]
    try:
        arguments = json.loads(function.get("arguments"))
    except (TypeError, ValueError, RecursionError):  # it is no text, or none of JSON
        return value
    if not isinstance(arguments, dict):
        return value
    return {**value, "function": {**function, "arguments": arguments}}


RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that the front sets itself."""

MAX_SECONDS = 5.0
"""CPU time of the worker for one rendering."""

MAX_BYTES = 512 * 2**20
"""Address space of the worker."""

MAX_CHARACTERS = 16 * 2**20
"""Of a rendered text."""

_SPLIT_AT = re.compile(r"""\b(?:split|partition|startswith|endswith)\(\s*(['"])(.+?)\1""")


class ChatTemplate:
    """A chat template with the special tokens that it may name. Thread-safe.

    There are as many workers as renderings at the same time. They end with this object.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`InvalidArgument` if ``source`` is not a Jinja template."""
        self._source = source
        self._setup = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "seconds": MAX_SECONDS,
        }
        self._idle: list[_Worker] = []
        self.separators = frozenset(text for _, text in _SPLIT_AT.findall(source))
        """Where it splits texts, for example to drop the thoughts of earlier answers."""
        try:
            self._idle.append(_Worker(self._setup))
        except ValueError as error:
            raise InvalidArgument(f"the chat template is not valid Jinja ({error}).") from None

    def knows(self, word: str) -> bool:
        """Whether its source holds ``word``, such as a role."""
        return word in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt that asks for the next message; `ValueError` if the template refuses them, or
        needs more time or memory than there is.

        ``variables``: others of the template, such as Qwen3's ``enable_thinking``. ``tools``:
        what the model may call, as in OpenAI's API.
        """
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._setup)
        question = {"messages": messages, "variables": variables or {}, "tools": tools}
        answer = worker.ask(question)
        self._idle.append(worker)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]


class _Worker:
    """A process that renders one template: a line of JSON in, a line of JSON out."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """`ValueError` if the template does not compile."""
        self._seconds = setup["seconds"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight_openai.chat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could quote a message
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process; the worker ends with its input
        )
        weakref.finalize(self, _end, self._process)
        if error := self.ask(setup).get("error"):
            raise ValueError(error)

    def ask(self, question: Mapping[str, Any]) -> dict[str, str]:
        """The worker's answer; `ValueError` if it was ended at a limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps(question).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer: dict[str, str] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):  # the worker has ended, in the middle of a line or before it
            self._process.kill()
            if self._process.wait() == -signal.SIGPROF:
                raise ValueError(f"it takes longer than {self._seconds:g} s") from None
            raise ValueError("its process has ended") from None
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of itself it would not end before this process: `subprocess` keeps what runs, and its pipes
    open."""
    process.kill()
    with suppress(OSError), process:  # closes the pipes and waits
        pass


_DEFAULT = "default"
_FOR_TOOLS = "tool_use"
_FOLDER = "additional_chat_templates/"


def find_templates(files: Mapping[str, str]) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """The template among the tokenizer's files, and that for messages with tools: another where
    one is named ``tool_use``. None if there is none.

    As for `transformers`, ``chat_template.jinja`` and the folder of named ones come before the key
    ``chat_template`` of ``tokenizer_config.json``, whose value is a template or a list of named
    ones; last comes ``chat_template.json`` of models that see.
    """
    named = _templates_in_files(files)
    for name in ("tokenizer_config.json", "chat_template.json"):
        named = named or _named_templates(read_object(files, name).get("chat_template"))
    common = special_tokens(files)
    default, for_tools = (
        ChatTemplate(named[name], common) if name in named else None
        for name in (_DEFAULT, _FOR_TOOLS)
    )
    return default, for_tools or default


def _templates_in_files(files: Mapping[str, str]) -> dict[str, str]:
    named = {
        name.removeprefix(_FOLDER).removesuffix(".jinja"): text
        for name, text in files.items()
        if name.startswith(_FOLDER)
    }
    if text := files.get("chat_template.jinja"):
        named[_DEFAULT] = text
    return named


def _named_templates(value: Any) -> dict[str, str]:
    """By name; a single one is the default."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    return {
        str(each.get("name")): each["template"]
        for each in entries
        if isinstance(each.get("template"), str)
    }


def special_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """``bos_token`` and its like with their texts, as templates name them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_object(files, name).items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def read_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """A JSON object among the files; empty if it is missing. `InvalidArgument` if it is none."""
    try:
        content = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise InvalidArgument(f"{name} of the checkpoint is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{name} of the checkpoint holds no JSON object.")
    return content


# The worker process.


def _work() -> None:
    """Compile the template of the first line, then render it with each further line."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template, setup = environment.from_string(""), json.loads(sys.stdin.readline())
    common = {**setup["special_tokens"], **dict.fromkeys(RESERVED), "add_generation_prompt": True}

    def compile_source() -> str:
        nonlocal template
        template = environment.from_string(setup["source"])
        return ""

    _answer(compile_source, setup["seconds"])
    for line in sys.stdin:
        question = json.loads(line)
        own = common | question["variables"]
        own |= {name: question[name] for name in ("messages", "tools")}
        _answer(partial(template.render, own), setup["seconds"])


def _answer(work: Callable[[], str], seconds: float) -> None:
    """Write the text that ``work`` returns, or its error; after ``seconds`` of CPU time the kernel
    ends the process (SIGPROF), also in the middle of a call of C."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        answer = {"text": work()}
        if len(answer["text"]) > MAX_CHARACTERS:
            answer = {"error": f"the text has more than {MAX_CHARACTERS} characters"}
    except TemplateSyntaxError as error:
        answer = {"error": f"line {error.lineno}: {error.message}"}
    except (TemplateError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": f"it takes more than {MAX_BYTES >> 20} MB of memory"}
    except Exception as error:
        answer = {"error": f"it fails with {type(error).__name__}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _GenerationBlock(Extension):
    """Marks the assistant's own text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> Node:
        """Replace the block by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


if __name__ == "__main__":
    _work()
