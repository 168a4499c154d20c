"""Answers as OpenAI's clients read them: whole ones, events of a stream, log probabilities.

Of an event only the text and the index change from token to token, so the rest is encoded once.
"""

from __future__ import annotations

import codecs
import json
import math
import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import Token, TokenOf, token_by_id
from inflight_openai.tools.reader import Part, PlainReader, Reader
from inflight_openai.triton_client import Piece, TokenLogProbs

_ID_LETTERS = string.ascii_letters + string.digits

DONE = b"data: [DONE]\n\n"

_CONTINUING = bytes(range(0x80, 0xC0))  # in UTF-8, never the first byte of a character


class TextOffsets:
    """Where the tokens of an answer begin in its text; tokens of one character share its place."""

    def __init__(self, start: int = 0) -> None:
        """``start``: below 0 if the first tokens have no place in the text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    def take(self, tokens: Iterable[Token]) -> list[int]:
        """The offsets of the next ``tokens``."""
        offsets = []
        for text, data in tokens:
            if data is None or data[:1] not in _CONTINUING:
                self._offset += len(self._decoder.decode(b"", final=True))  # stays incomplete
            offsets.append(max(self._offset, 0))
            self._offset += len(text if data is None else self._decoder.decode(data))
        return offsets


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all objects of one answer share; ``created`` in seconds since 1970."""

    answer_id: str
    created: int
    model: str
    is_chat: bool

    def fields(self, is_chunk: bool) -> dict[str, Any]:
        """The first fields of an object."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


def finish_reason(reason: str) -> str:
    """``length`` where a limit of tokens or of time ended the answer, else ``stop``."""
    return "length" if reason in ("length", "timed_out") else "stop"


class CachedTokens:
    """Counts the tokens of the prompts that were found in the cache: of several answers to one
    prompt, those of the first, as the prompt counts once."""

    def __init__(self, request: GenerationRequest) -> None:
        self._num_answers = request.num_answers
        self.number = 0

    def add(self, piece: Piece) -> None:
        """Take in one piece."""
        if piece.num_cached and piece.index % self._num_answers == 0:
            self.number += piece.num_cached


def usage(request: GenerationRequest, num_new: int, num_cached: int) -> dict[str, Any]:
    """Tokens of the prompts, ``num_cached`` of which were found in the cache, and ``num_new`` of
    the answers."""
    num_prompt = sum(map(len, request.prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _echoes(request: GenerationRequest) -> list[str]:
    """What each answer begins with."""
    echoes = request.echoes or [""] * len(request.prompts)
    return [echo for echo in echoes for _ in range(request.num_answers)]


class PartsOfAnswer:
    """Takes one answer apart, as its request wants it."""

    def __init__(self, request: GenerationRequest) -> None:
        self._format = request.answer
        self._reader: Reader = PlainReader() if self._format is None else self._format.new_reader()
        self._num_calls = 0
        self.is_older = self._format is not None and self._format.is_older

    def feed(self, text: str) -> list[Part]:
        """The parts that ``text``, the next of the answer, completes."""
        return list(filter(self._is_wanted, self._reader.feed(text)))

    def finish(self) -> list[Part]:
        """What was held back.

        An answer that had to call, but was cut off, has no text: what was held back is the
        beginning of a call. One of a named tool has its call in any case, with the arguments as
        far as they got."""
        parts = list(filter(self._is_wanted, self._reader.finish()))
        if self._format is None or not self._format.must_call:
            return parts
        parts = [part for part in parts if part.kind != "content"]
        if self._format.named and not self._num_calls:
            parts.append(Part("call", name=self._format.named))
        return parts

    def finish_reason(self, reason: str) -> str:
        """``tool_calls`` for an answer that ended by itself, with calls that the model chose."""
        shown = finish_reason(reason)
        is_chosen = self._format is not None and not self._format.named and self._num_calls
        if not (shown == "stop" and is_chosen):
            return shown
        return "function_call" if self.is_older else "tool_calls"

    def _is_wanted(self, part: Part) -> bool:
        if self._format is None:
            return True
        if part.kind == "call":
            if self._format.one_call and part.index > 0:
                return False
            self._num_calls = part.index + 1
        return part.kind != "reasoning" or self._format.has_thoughts


def new_call_id() -> str:
    """Of nine letters and digits: templates of Mistral's models refuse others."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _message(parts: Sequence[Part], *, is_older: bool) -> dict[str, Any]:
    """The message of a chat's choice; ``is_older``: with OpenAI's older ``function_call``."""
    texts = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind != "call":
            texts[part.kind] += part.text
            continue
        if part.name:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": new_call_id(), "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += part.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": texts["content"] if texts["content"] or not calls else None,
        "refusal": None,
    }
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls and is_older:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    return message


def _deltas(part: Part, *, is_older: bool) -> Iterator[dict[str, Any]]:
    """What one part adds to the message of a chat.

    The name of a call comes without arguments, as from OpenAI: older versions of LiteLLM add those
    beside a name to the call before.
    """
    if part.kind == "content":
        yield {"content": part.text}
    elif part.kind == "reasoning":
        yield {"reasoning_content": part.text}
    else:
        if part.name:
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": new_call_id(), "type": "function"}
            new = {**call, "function": function}
            yield {"function_call": function} if is_older else {"tool_calls": [new]}
        if part.text:
            more = {"arguments": part.text}
            added = {"index": part.index, "function": more}
            yield {"function_call": more} if is_older else {"tool_calls": [added]}


class WholeAnswer:
    """Collects the pieces of the answers to one request, for one body."""

    def __init__(self, head: Head, request: GenerationRequest, token_of: TokenOf) -> None:
        self.num_tokens = 0
        self._cached = CachedTokens(request)
        self._head = head
        self._request = request
        self._token_of = token_of
        self._texts = _echoes(request)
        self._pieces: list[list[Piece]] = [[] for _ in self._texts]

    def add(self, piece: Piece) -> None:
        """Append the next piece."""
        self._cached.add(piece)
        piece = _counted(self._request, piece)
        self.num_tokens += piece.num_tokens
        self._pieces[piece.index].append(piece)

    def encode(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body()).encode()

    def body(self) -> dict[str, Any]:
        """The body."""
        request = self._request
        has_prompt_ids = request.has_token_ids and request.is_chat
        return {
            **self._head.fields(is_chunk=False),
            **({"prompt_token_ids": request.prompts[0]} if has_prompt_ids else {}),
            **self._of_a_chat_s_prompt(),
            "choices": [
                {**self._choice(index), "index": place} for place, index in enumerate(self._shown())
            ],
            "usage": usage(request, self.num_tokens, self._cached.number),
            "system_fingerprint": None,  # some clients (MLCommons') need the key
        }

    def _shown(self) -> list[int]:
        """The answers that the client gets: of each prompt's the likeliest, by token."""
        request = self._request
        indexes = range(len(self._pieces))
        if request.num_shown is None:
            return list(indexes)
        shown: list[int] = []
        for start in indexes[:: request.num_answers]:
            own = indexes[start : start + request.num_answers]
            shown += sorted(own, key=self._likelihood, reverse=True)[: request.num_shown]
        return shown

    def _likelihood(self, index: int) -> float:
        pieces = self._pieces[index]
        num_tokens = sum(piece.num_tokens for piece in pieces)
        return pieces[-1].cum_log_prob / max(num_tokens, 1) if pieces else -math.inf

    def _of_a_chat_s_prompt(self) -> dict[str, Any]:
        if not self._request.is_chat or self._request.num_prompt_log_probs is None:
            return {}
        found = (piece.prompt for piece in self._pieces[0] if piece.prompt is not None)
        return {"prompt_logprobs": self._prompt_log_probs(next(found, None))}

    def _prompt_log_probs(self, prompt: Sequence[TokenLogProbs] | None) -> list[Any]:
        """vLLM's: for each token an object with the likeliest in its place and itself by id."""
        num_top = self._request.num_prompt_log_probs or 0
        rows: list[Any] = [None]  # nothing stands before the first
        for row in prompt or ():
            ranked = [(*each, rank) for rank, each in enumerate(row.top[:num_top], 1)]
            found = {
                str(token_id): {
                    "logprob": log_prob,
                    "rank": rank,
                    "decoded_token": self._token_of(token_id).text,
                }
                for token_id, log_prob, rank in [(row.token_id, row.log_prob, None), *ranked]
            }
            rows.append(found)
        return rows

    def _choice(self, index: int) -> dict[str, Any]:
        request, pieces = self._request, self._pieces[index]
        text = self._texts[index] + "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": index}
        answer = PartsOfAnswer(request)
        if request.is_chat:
            parts = [*answer.feed(text), *answer.finish()]
            choice["message"] = _message(parts, is_older=answer.is_older)
        else:
            choice["text"] = text
        if request.has_token_ids:
            choice["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            if not request.is_chat:
                choice["prompt_token_ids"] = request.prompts[index // request.num_answers]
        choice["logprobs"] = None
        prompt = next((piece.prompt for piece in pieces if piece.prompt is not None), None)
        if request.has_log_probs:
            rows = [row for piece in pieces for row in piece.log_probs]
            if request.echoes and prompt is not None:
                rows = _with_prompt(request, index, prompt) + rows
            offsets = _offsets(request, index, self._texts[index], self._token_of)
            choice["logprobs"] = log_probs(request, rows, self._token_of, offsets)
        if request.num_prompt_log_probs is not None and not request.is_chat:
            choice["prompt_logprobs"] = self._prompt_log_probs(prompt)
        reasons = (piece.reason for piece in pieces if piece.reason)
        choice["finish_reason"] = answer.finish_reason(next(reasons, ""))
        return choice


class EventWriter:
    """Writes the events of one stream."""

    def __init__(self, head: Head, request: GenerationRequest, token_of: TokenOf) -> None:
        self._request = request
        self._token_of = token_of
        self._start = f'data: {json.dumps(head.fields(is_chunk=True))[:-1]}, "choices": ['
        self._num_new = 0
        self._cached = CachedTokens(request)
        self._text_key = '"delta": {"content": ' if request.is_chat else '"text": '
        self._text_end = "}" if request.is_chat else ""
        echoes = _echoes(request)
        self._reasons = [""] * len(echoes)
        self._offsets = [
            _offsets(request, index, echo, token_of) for index, echo in enumerate(echoes)
        ]
        self._answers = [PartsOfAnswer(request) for _ in echoes]
        # An echo with log probabilities opens when these have come.
        self._late = dict(enumerate(echoes)) if request.echoes and request.has_log_probs else {}
        early = [] if self._late else enumerate(echoes)
        self._opening = b"".join(self._open(index, echo) for index, echo in early)

    def piece(self, piece: Piece) -> bytes:
        """The event of ``piece``, behind those that open the stream; empty if it adds nothing yet.

        Takes every piece in order, as it counts the usage so far.
        """
        self._cached.add(piece)
        piece = _counted(self._request, piece)
        self._num_new += piece.num_tokens
        self._reasons[piece.index] = self._reasons[piece.index] or piece.reason
        opening = self._open_late(piece) if piece.index in self._late else b""
        if not piece.text and not piece.log_probs and not piece.token_ids:
            return opening
        rows = "null"
        if self._request.has_log_probs:
            offsets = self._offsets[piece.index]
            rows = json.dumps(log_probs(self._request, piece.log_probs, self._token_of, offsets))
        if self._request.answer is None:
            contents = [f"{self._text_key}{json.dumps(piece.text)}{self._text_end}"]
        else:
            answer = self._answers[piece.index]
            parts = answer.feed(piece.text)
            contents = [
                f'"delta": {json.dumps(delta)}'
                for part in parts
                for delta in _deltas(part, is_older=answer.is_older)
            ]
        if not contents:
            if not piece.log_probs and not piece.token_ids:
                return opening
            contents = ['"delta": {}']
        if self._request.has_token_ids:
            contents[0] += f', "token_ids": {json.dumps(list(piece.token_ids))}'
        opening, self._opening = opening + self._opening, b""
        events = [self._event(piece.index, content, "null", "null") for content in contents[1:]]
        return opening + self._event(piece.index, contents[0], rows, "null") + b"".join(events)

    def ending(self) -> bytes:
        """The last event of each answer, and that of the usage if the client asked for it."""
        content = '"delta": {}' if self._request.is_chat else '"text": ""'
        events = []
        for index, (reason, answer) in enumerate(zip(self._reasons, self._answers, strict=True)):
            for part in answer.finish():
                for delta in _deltas(part, is_older=answer.is_older):
                    told = f'"delta": {json.dumps(delta)}'
                    events.append(self._event(index, told, "null", "null"))
            shown = f'"{answer.finish_reason(reason)}"'
            events.append(self._event(index, content, "null", shown))
        if self._request.includes_usage:
            numbers = json.dumps(usage(self._request, self._num_new, self._cached.number))
            events.append(f'{self._start}], "usage": {numbers}}}\n\n'.encode())
        return self._opening + b"".join(events)

    def _open_late(self, piece: Piece) -> bytes:
        """The first event of an answer that begins with its prompt and log probabilities."""
        rows = _with_prompt(self._request, piece.index, piece.prompt or ())
        told = log_probs(self._request, rows, self._token_of, self._offsets[piece.index])
        return self._open(piece.index, self._late.pop(piece.index), json.dumps(told))

    def _open(self, index: int, echo: str, rows: str = "null") -> bytes:
        """The first event of an answer: the role in a chat, and the prompt's text or ids if the
        request asks for them; empty without any of these."""
        request = self._request
        prompt = request.prompts[index // request.num_answers]
        ids = f', "prompt_token_ids": {json.dumps(prompt)}' if request.has_token_ids else ""
        if request.is_chat:
            nothing = '""' if request.answer is None else "null"  # it may have calls only
            content = f'"delta": {{"role": "assistant", "content": {nothing}}}'
            return self._event(index, content, "null", "null", of_event=ids)
        if not (echo or ids):
            return b""
        return self._event(index, f'"text": {json.dumps(echo)}{ids}', rows, "null")

    def _event(
        self, index: int, content: str, log_probs: str, finish: str, of_event: str = ""
    ) -> bytes:
        """``content``: fields of the choice; ``of_event``: fields beside the choices."""
        return (
            f'{self._start}{{"index": {index}, {content}, "logprobs": {log_probs}, '
            f'"finish_reason": {finish}}}]{of_event}{self._usage_so_far()}}}\n\n'
        ).encode()

    def _usage_so_far(self) -> str:
        """The field ``usage``, which all events have if the client asks for usage."""
        if self._request.has_running_usage:
            numbers = usage(self._request, self._num_new, self._cached.number)
            return f', "usage": {json.dumps(numbers)}'
        return ', "usage": null' if self._request.includes_usage else ""


def _counted(request: GenerationRequest, piece: Piece) -> Piece:
    """``piece`` without the token that the server makes at least."""
    if request.max_tokens > 0:
        return piece
    return Piece(piece.index, "", 0, reason="length", prompt=piece.prompt)


def _with_prompt(
    request: GenerationRequest, index: int, prompt: Sequence[TokenLogProbs]
) -> list[TokenLogProbs]:
    """Rows of the tokens of a prompt; the first has no log probability."""
    first = request.prompts[index // request.num_answers][0]
    return [TokenLogProbs(first, None), *prompt]


def _offsets(request: GenerationRequest, index: int, echo: str, token_of: TokenOf) -> TextOffsets:
    """For the text of an answer. What its echo lacks of the prompt's tokens (a beginning token that
    the tokenizer added, the space before a first word) or has beyond them (a beginning that was cut
    off) is at the beginning."""
    if not (request.echoes and request.has_log_probs):
        return TextOffsets()
    tokens = map(token_of, request.prompts[index // request.num_answers])
    parts = (token.text.encode() if token.data is None else token.data for token in tokens)
    return TextOffsets(len(echo) - len(b"".join(parts).decode(errors="replace")))


def error_event(body: dict[str, Any]) -> bytes:
    """An error in the middle of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


def log_probs(
    request: GenerationRequest,
    rows: Sequence[TokenLogProbs],
    token_of: TokenOf,
    offsets: TextOffsets,
) -> dict[str, Any]:
    token_of = token_by_id if request.shows_ids else token_of
    if request.is_chat:
        return chat_log_probs(rows, token_of)
    return completion_log_probs(rows, token_of, offsets, has_top=request.num_top_log_probs > 0)


def chat_log_probs(rows: Iterable[TokenLogProbs], token_of: TokenOf) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        text, data = token_of(token_id)
        return {"token": text, "logprob": log_prob, "bytes": None if data is None else list(data)}

    content = [
        {
            **entry(row.token_id, row.log_prob or 0.0),
            "top_logprobs": [entry(*each) for each in row.top],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def completion_log_probs(
    rows: Sequence[TokenLogProbs], token_of: TokenOf, offsets: TextOffsets, *, has_top: bool
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``offsets`` has taken the tokens before these.

    ``top_logprobs`` include the sampled token even if others are likelier, as OpenAI has it.
    """
    tokens = [token_of(row.token_id) for row in rows]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [row.log_prob for row in rows],
        "top_logprobs": [_likeliest(row, token_of) for row in rows] if has_top else None,
        "text_offset": offsets.take(tokens),
    }


def _likeliest(row: TokenLogProbs, token_of: TokenOf) -> dict[str, float] | None:
    """By text, None for the first token of a prompt; the likeliest of several tokens with the same
    text (parts of characters) counts."""
    if row.log_prob is None:
        return None
    found: dict[str, float] = {}
    for token_id, log_prob in [*row.top, (row.token_id, row.log_prob)]:
        found.setdefault(token_of(token_id).text, log_prob)
    return found
