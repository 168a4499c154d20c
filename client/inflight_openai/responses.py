"""Answers as OpenAI's clients read them: whole ones, events of a stream, log probabilities.

Of an event only the text and the index change from token to token, so the rest is encoded once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import Token, TokenOf, token_by_id
from inflight_openai.triton_client import Piece, TokenLogProbs

DONE = b"data: [DONE]\n\n"

_CONTINUING = bytes(range(0x80, 0xC0))  # in UTF-8, never the first byte of a character


class TextOffsets:
    """Where the tokens of an answer begin in its text; tokens of one character share its place."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, tokens: Iterable[Token]) -> list[int]:
        """The offsets of the next ``tokens``."""
        offsets = []
        for text, data in tokens:
            if data is None or data[:1] not in _CONTINUING:
                self._offset += len(self._decoder.decode(b"", final=True))  # stays incomplete
            offsets.append(self._offset)
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


def usage(request: GenerationRequest, num_new: int) -> dict[str, int]:
    """Tokens of the prompts, and ``num_new`` of the answers."""
    num_prompt = sum(map(len, request.prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def _echoes(request: GenerationRequest) -> list[str]:
    """What each answer begins with."""
    echoes = request.echoes or [""] * len(request.prompts)
    return [echo for echo in echoes for _ in range(request.num_answers)]


class WholeAnswer:
    """Collects the pieces of the answers to one request, for one body."""

    def __init__(self, head: Head, request: GenerationRequest, token_of: TokenOf) -> None:
        self.num_tokens = 0
        self._head = head
        self._request = request
        self._token_of = token_of
        self._texts = _echoes(request)
        self._pieces: list[list[Piece]] = [[] for _ in self._texts]

    def add(self, piece: Piece) -> None:
        """Append the next piece."""
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
            "choices": [self._choice(index) for index in range(len(self._pieces))],
            "usage": usage(request, self.num_tokens),
            "system_fingerprint": None,  # some clients (MLCommons') need the key
        }

    def _choice(self, index: int) -> dict[str, Any]:
        request, pieces = self._request, self._pieces[index]
        text = self._texts[index] + "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": index}
        if request.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if request.has_token_ids:
            choice["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            if not request.is_chat:
                choice["prompt_token_ids"] = request.prompts[index // request.num_answers]
        choice["logprobs"] = None
        if request.has_log_probs:
            rows = [row for piece in pieces for row in piece.log_probs]
            choice["logprobs"] = log_probs(request, rows, self._token_of, TextOffsets())
        reasons = (piece.reason for piece in pieces if piece.reason)
        choice["finish_reason"] = finish_reason(next(reasons, ""))
        return choice


class EventWriter:
    """Writes the events of one stream."""

    def __init__(self, head: Head, request: GenerationRequest, token_of: TokenOf) -> None:
        self._request = request
        self._token_of = token_of
        self._start = f'data: {json.dumps(head.fields(is_chunk=True))[:-1]}, "choices": ['
        self._num_new = 0
        self._text_key = '"delta": {"content": ' if request.is_chat else '"text": '
        self._text_end = "}" if request.is_chat else ""
        echoes = _echoes(request)
        self._reasons = [""] * len(echoes)
        self._offsets = [TextOffsets() for _ in echoes]
        self._opening = b"".join(self._open(index, echo) for index, echo in enumerate(echoes))

    def piece(self, piece: Piece) -> bytes:
        """The event of ``piece``, behind those that open the stream; empty if it adds nothing yet.

        Takes every piece in order, as it counts the usage so far.
        """
        self._num_new += piece.num_tokens
        self._reasons[piece.index] = self._reasons[piece.index] or piece.reason
        if not piece.text and not piece.log_probs and not piece.token_ids:
            return b""
        rows = "null"
        if self._request.has_log_probs:
            offsets = self._offsets[piece.index]
            rows = json.dumps(log_probs(self._request, piece.log_probs, self._token_of, offsets))
        content = f"{self._text_key}{json.dumps(piece.text)}{self._text_end}"
        if self._request.has_token_ids:
            content += f', "token_ids": {json.dumps(list(piece.token_ids))}'
        opening, self._opening = self._opening, b""
        return opening + self._event(piece.index, content, rows, "null")

    def ending(self) -> bytes:
        """The last event of each answer, and that of the usage if the client asked for it."""
        content = '"delta": {}' if self._request.is_chat else '"text": ""'
        events = [
            self._event(index, content, "null", f'"{finish_reason(reason)}"')
            for index, reason in enumerate(self._reasons)
        ]
        if self._request.includes_usage:
            numbers = json.dumps(usage(self._request, self._num_new))
            events.append(f'{self._start}], "usage": {numbers}}}\n\n'.encode())
        return self._opening + b"".join(events)

    def _open(self, index: int, echo: str) -> bytes:
        """The first event of an answer: the role in a chat, and the prompt's text or ids if the
        request asks for them; empty without any of these."""
        request = self._request
        prompt = request.prompts[index // request.num_answers]
        ids = f', "prompt_token_ids": {json.dumps(prompt)}' if request.has_token_ids else ""
        if request.is_chat:
            content = '"delta": {"role": "assistant", "content": ""}'
            return self._event(index, content, "null", "null", of_event=ids)
        if not (echo or ids):
            return b""
        return self._event(index, f'"text": {json.dumps(echo)}{ids}', "null", "null")

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
            return f', "usage": {json.dumps(usage(self._request, self._num_new))}'
        return ', "usage": null' if self._request.includes_usage else ""


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
        {**entry(row.token_id, row.log_prob), "top_logprobs": [entry(*each) for each in row.top]}
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


def _likeliest(row: TokenLogProbs, token_of: TokenOf) -> dict[str, float]:
    """By text; the likeliest of several tokens with the same text (parts of characters) counts."""
    found: dict[str, float] = {}
    for token_id, log_prob in [*row.top, (row.token_id, row.log_prob)]:
        found.setdefault(token_of(token_id).text, log_prob)
    return found
