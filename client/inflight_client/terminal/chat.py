"""`inflight chat`: a conversation with a server of OpenAI's API.

Lines that begin with ``/`` are commands (`HELP`). Ctrl-C, or ``/stop`` typed while an answer comes,
ends that answer; what there is of it stays in the conversation.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from inflight_client.errors import InflightError, InvalidArgument, ServerError
from inflight_protocol.sampling import SAMPLING_OPTIONS

HELP = """\
/set NAME VALUE   a field of each request, as temperature 0.7; without a value: the server's own
/set              what is set
/system TEXT      the system message; without a text: none
/stop             ends the answer that comes, as Ctrl-C does
/clear            a new conversation
/save FILE        the conversation as JSON; as text for a name that ends in .txt or .md
/help, /quit      this, and the end (Ctrl-D)
A line that ends in \\ goes on in the next one; so does everything between two lines of \"\"\"."""

SETTINGS = (
    *SAMPLING_OPTIONS,
    *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "bad_words"),
    *("ignore_eos", "logit_bias", "response_format", "reasoning_effort", "enable_thinking"),
    *("chat_template_kwargs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
    *("cache_salt", "user"),
)
"""What ``/set`` takes: a server passes over other names, and nobody would notice."""

_SEPARATOR = re.compile(r"\s*=\s*|\s+")  # of ``/set NAME VALUE``, or NAME=VALUE

_HISTORY_LINES = 1000
_BLOCK = '"""'


@dataclass
class Conversation:
    """What was said, and the settings of the next request."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        usage = {"include_usage": True}
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": usage,
            **self.settings,
        }

    def set(self, argument: str) -> str:
        """Set, or take back, a field of the requests; what to tell."""
        name, *values = _SEPARATOR.split(argument, maxsplit=1)
        text = "".join(values)
        if not name:
            told = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items()]
            return "\n".join(told) or "nothing is set"
        if name not in SETTINGS:
            return f"error: {name} cannot be set; there are {', '.join(sorted(SETTINGS))}"
        if not text.strip():
            self.settings.pop(name, None)
            return f"{name}: the server's own"
        try:
            self.settings[name] = json.loads(text)
        except ValueError:
            self.settings[name] = text.strip()
        return f"{name} = {json.dumps(self.settings[name])}"

    def save(self, path: Path) -> str:
        """Write the conversation; what to tell."""
        if path.suffix in (".txt", ".md"):
            text = "\n\n".join(f"{each['role']}: {each['content']}" for each in self.messages)
        else:
            text = json.dumps(self.body(), indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"{len(self.messages)} messages are in {path}"


class Chat:
    """Reads lines, sends them, writes the answers."""

    def __init__(
        self,
        client: httpx.Client,
        conversation: Conversation,
        write: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """``client``: with the address and the key; ``write`` takes what the model says, ``note``
        what is said about it."""
        self._client = client
        self._conversation = conversation
        self._write = write
        self._note = note
        self._is_terminal = sys.stdin.isatty()
        self._typed: list[str] = []  # while an answer came
        self._num_failed = 0

    def run(self) -> bool:
        """Until the end of the input, or ``/quit``; False if a message was not answered."""
        if self._is_terminal:
            self._note(f"{self._conversation.model}; /help tells the commands, Ctrl-D ends")
        for text in self._texts():
            if not text.startswith("/"):
                self._say(text)
            elif not self._obey(text):
                break
        return not self._num_failed

    def _obey(self, text: str) -> bool:
        """Carry out a command; False for the end."""
        name, _, argument = text.partition(" ")
        conversation, argument = self._conversation, argument.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/set":
            self._note(conversation.set(argument))
        elif name == "/system":
            conversation.system = argument
            self._note("the system message is set" if argument else "no system message")
        elif name == "/clear":
            conversation.messages.clear()
            self._note("a new conversation")
        elif name == "/save" and argument:
            self._note(conversation.save(Path(argument)))
        elif name == "/stop":
            self._note("no answer is coming")
        else:
            is_known = name in ("/help", "/save")
            self._note(HELP if is_known else f"error: {name} is no command; there are\n{HELP}")
        return True

    def _say(self, text: str) -> None:
        messages = self._conversation.messages
        messages.append({"role": "user", "content": text})
        answer, start = Answer(), time.monotonic()
        try:
            for piece in self._stream(answer):
                answer.first_at = answer.first_at or time.monotonic()
                self._write(piece)
                if self._wants_stop():
                    answer.is_stopped = True
                    break
        except KeyboardInterrupt:
            answer.is_stopped = True
        except InflightError as error:
            messages.pop()
            self._num_failed += 1
            self._note(f"error: {error}")
            return
        self._write("\n")
        messages.append({"role": "assistant", "content": answer.text})
        self._note(answer.summary(start))

    def _stream(self, answer: Answer) -> Iterator[str]:
        """The pieces of an answer; `InflightError` for a refusal."""
        body = self._conversation.body()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    yield from answer.read(event)
        except (httpx.HTTPError, ValueError) as error:
            raise unreachable(self._client, error) from None

    def _wants_stop(self) -> bool:
        """True if ``/stop`` was typed meanwhile; other lines are for later."""
        if not self._is_terminal or not select.select([sys.stdin], [], [], 0)[0]:
            return False
        lines = os.read(sys.stdin.fileno(), 2**16).decode(errors="replace").splitlines()
        self._typed += [line for line in lines if line.strip() and line.strip() != "/stop"]
        return any(line.strip() == "/stop" for line in lines)

    def _texts(self) -> Iterator[str]:
        """What is typed: a line, lines that go on, or a block."""
        while (line := self._line("> ")) is not None:
            if line.strip() == _BLOCK:
                lines: list[str] = []
                while (more := self._line(". ")) is not None and more.strip() != _BLOCK:
                    lines.append(more)
                line = "\n".join(lines)
            while line.endswith("\\"):
                more = self._line(". ")
                line = line[:-1] + "\n" + (more or "")
            if line.strip():
                yield line

    def _line(self, prompt: str) -> str | None:
        """The next line; None at the end. Ctrl-C drops what was typed."""
        if self._typed:
            return self._typed.pop(0)
        while True:
            try:
                return input(prompt if self._is_terminal else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                self._note("")


@dataclass
class Answer:
    """One answer as it comes."""

    text: str = ""
    is_thinking: bool = False
    first_at: float = 0.0
    num_pieces: int = 0
    num_tokens: int = 0
    reason: str = ""
    is_stopped: bool = False

    def read(self, event: Mapping[str, Any]) -> Iterator[str]:
        """What an event shows: thoughts, too, which are no part of the conversation."""
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        for choice in event.get("choices", ())[:1]:
            self.reason = choice.get("finish_reason") or self.reason
            delta = choice.get("delta", {})
            thoughts = delta.get("reasoning_content") or delta.get("reasoning")
            for piece, is_thought in ((thoughts, True), (delta.get("content"), False)):
                if not piece:
                    continue
                self.num_pieces += 1
                if self.is_thinking and not is_thought:
                    yield "\n\n"
                self.is_thinking = is_thought
                self.text += "" if is_thought else piece
                yield piece

    def summary(self, start: float) -> str:
        """How many tokens there were, how fast, and how it ended."""
        num_tokens = self.num_tokens or self.num_pieces
        parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
        if self.first_at:
            seconds = time.monotonic() - self.first_at
            if self.num_pieces > 1 and seconds > 0.05:  # a busy server sends several tokens at once
                num_later = num_tokens * (1 - 1 / self.num_pieces)
                parts.append(f"{num_later / seconds:.1f} tokens/s")
            parts.append(f"first after {(self.first_at - start) * 1e3:.0f} ms")
        if self.is_stopped:
            parts.append("stopped")
        elif self.reason == "length":
            parts.append("the maximum of tokens")
        return f"[{', '.join(parts)}]"


def connect(url: str, key: str | None) -> httpx.Client:
    """A client of OpenAI's API at ``url``, with or without ``/v1``; `InvalidArgument` if that is
    none."""
    base = url.rstrip("/").removesuffix("/v1")
    base = base if "://" in base else f"http://{base}"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        return httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600, connect=5))
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidArgument(f'--url "{url}": {error}.') from None


def first_model(client: httpx.Client) -> str:
    """The model that the server names first; `InflightError` without one."""
    try:
        response = client.get("/v1/models")
        if response.status_code != httpx.codes.OK:
            raise refusal(response)
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise unreachable(client, error) from None


def refusal(response: httpx.Response) -> ServerError:
    """The error that an answer tells."""
    try:
        return ServerError(str(response.json()["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return ServerError(f"the server answers {response.status_code}.")


def unreachable(client: httpx.Client, error: Exception) -> InflightError:
    """The error for an address that does not answer as OpenAI's API does."""
    reason = "no connection" if isinstance(error, httpx.TransportError) else "no OpenAI API"
    return ServerError(
        f"{client.base_url} does not answer ({reason}). `inflight serve` has OpenAI's API on port "
        "9000; name another address with --url."
    )


def remember_lines() -> None:
    """Lines of earlier runs come back with the arrow keys; they are in a file of the user's own."""
    with suppress(ImportError, OSError):
        import atexit
        import readline

        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        file = state / "inflight" / "chat_history"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
        readline.set_history_length(_HISTORY_LINES)
        atexit.register(lambda: readline.write_history_file(file))
