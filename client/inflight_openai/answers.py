"""What OpenAI's clients expect to read: whole answers, and the events of a stream.

Of an event only the text and the index change from token to token, so the rest is written once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight_openai.log_probs import TokenLogProbs, TokenPlaces, for_chat, for_completion
from inflight_openai.parsing import GenerationJob
from inflight_openai.tokens import TokenOf, token_by_id
from inflight_openai.upstream import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    places: TokenPlaces = field(default_factory=TokenPlaces)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    reason: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append what a response brought."""
        self.texts.append(piece.text)
        self.num_tokens += piece.num_tokens
        self.log_probs.extend(piece.log_probs)
        self.token_ids.extend(piece.token_ids)
        self.reason = self.reason or piece.reason

    @property
    def finish_reason(self) -> str:
        """``stop`` where the model or a stop word ended the answer, ``length`` where a limit did:
        of tokens, or of time."""
        return "length" if self.reason in ("length", "timed_out") else "stop"


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in all objects of one answer; ``created`` in seconds since 1970."""

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


def new_choices(job: GenerationJob) -> list[Choice]:
    """The answers of a job, with nothing but the texts of their prompts, if those are wanted."""
    echoes = job.echoes or [""] * len(job.prompts)
    return [Choice([echo]) for echo in echoes for _ in range(job.num_answers)]


def usage(job: GenerationJob, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens read and written."""
    return _usage(job, sum(choice.num_tokens for choice in choices))


def _usage(job: GenerationJob, num_new: int) -> dict[str, int]:
    num_prompt = sum(map(len, job.prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def whole_answer(
    head: Head, job: GenerationJob, choices: Sequence[Choice], token_of: TokenOf
) -> dict[str, Any]:
    """The body of an answer that was not streamed."""
    rows = []
    for index, choice in enumerate(choices):
        text = "".join(choice.texts)
        log_probs = None
        if job.has_log_probs:
            log_probs = _log_probs(job, choice.log_probs, token_of, TokenPlaces())
        content: dict[str, Any] = {"text": text}
        if job.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        if job.has_token_ids:
            content |= {"token_ids": choice.token_ids}
        if job.has_token_ids and not job.is_chat:
            content |= {"prompt_token_ids": job.prompts[index // job.num_answers]}
        rows.append(
            {
                "index": index,
                **content,
                "logprobs": log_probs,
                "finish_reason": choice.finish_reason,
            }
        )
    prompt_ids = {"prompt_token_ids": job.prompts[0]} if job.has_token_ids and job.is_chat else {}
    return {
        **head.fields(is_chunk=False),
        **prompt_ids,
        "choices": rows,
        "usage": usage(job, choices),
        "system_fingerprint": None,  # we have none, but some clients (MLCommons') ask for the key
    }


class EventWriter:
    """Writes the events of one stream."""

    def __init__(self, head: Head, job: GenerationJob, token_of: TokenOf) -> None:
        self._job = job
        self._token_of = token_of
        self._start = f'data: {json.dumps(head.fields(is_chunk=True))[:-1]}, "choices": ['
        self._num_new = 0
        self._text_key = '"delta": {"content": ' if job.is_chat else '"text": '
        self._text_end = "}" if job.is_chat else ""

    def opening(self, index: int) -> bytes:
        """The first event of an answer: the role in a chat, the text of the prompt if that is
        wanted, its ids if those are, else nothing."""
        job = self._job
        ids = ""
        if job.has_token_ids:
            ids = f', "prompt_token_ids": {json.dumps(job.prompts[index // job.num_answers])}'
        if job.is_chat:
            content = '"delta": {"role": "assistant", "content": ""}'
            return self._event(index, content, "null", "null", of_event=ids)
        echo = job.echoes[index // job.num_answers] if job.echoes else ""
        if not (echo or ids):
            return b""
        return self._event(index, f'"text": {json.dumps(echo)}{ids}', "null", "null")

    def piece(self, index: int, piece: Piece, choice: Choice) -> bytes:
        """What a response adds to its answer; nothing if that is no text yet. Every response, in
        order: the usage so far is counted here."""
        self._num_new += piece.num_tokens
        if not piece.text and not piece.log_probs and not piece.token_ids:
            return b""
        log_probs = "null"
        if self._job.has_log_probs:
            rows = _log_probs(self._job, piece.log_probs, self._token_of, choice.places)
            log_probs = json.dumps(rows)
        content = f"{self._text_key}{json.dumps(piece.text)}{self._text_end}"
        if self._job.has_token_ids:
            content += f', "token_ids": {json.dumps(list(piece.token_ids))}'
        return self._event(index, content, log_probs, "null")

    def end(self, index: int, choice: Choice) -> bytes:
        """The last event of an answer."""
        content = '"delta": {}' if self._job.is_chat else '"text": ""'
        return self._event(index, content, "null", f'"{choice.finish_reason}"')

    def usage(self, choices: Sequence[Choice]) -> bytes:
        """The event that ends a stream whose client asked for its usage."""
        if not self._job.includes_usage:
            return b""
        numbers = json.dumps(usage(self._job, choices))
        return f'{self._start}], "usage": {numbers}}}\n\n'.encode()

    def _event(
        self, index: int, content: str, log_probs: str, finish: str, of_event: str = ""
    ) -> bytes:
        """``content`` is of the choice, ``of_event`` stands beside the choices."""
        return (
            f'{self._start}{{"index": {index}, {content}, "logprobs": {log_probs}, '
            f'"finish_reason": {finish}}}]{of_event}{self._usage_so_far()}}}\n\n'
        ).encode()

    def _usage_so_far(self) -> str:
        """With usage asked for, every event has the field, else null in all but the last one."""
        if self._job.has_running_usage:
            return f', "usage": {json.dumps(_usage(self._job, self._num_new))}'
        return ', "usage": null' if self._job.includes_usage else ""


def error_event(body: dict[str, Any]) -> bytes:
    """An error in the middle of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


def _log_probs(
    job: GenerationJob, rows: Sequence[TokenLogProbs], token_of: TokenOf, places: TokenPlaces
) -> dict[str, Any]:
    token_of = token_by_id if job.shows_ids else token_of
    if job.is_chat:
        return for_chat(rows, token_of)
    return for_completion(rows, token_of, places, has_top=job.num_top_log_probs > 0)
