"""Answers and events, read back with the types of the `openai` package."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import Token
from inflight_openai.responses import (
    Choice,
    EventWriter,
    Head,
    new_choices,
    whole_answer,
)
from inflight_openai.triton_client import Piece, TokenLogProbs

PIECES = [
    Piece(0, "Gr", 1, [TokenLogProbs(5, -0.5, [(5, -0.5), (9, -1.5)])]),
    Piece(
        1,
        'a "q"\n',
        2,
        [
            TokenLogProbs(6, -1.0, [(6, -1.0), (5, -3.0)]),
            TokenLogProbs(7, -4.0, [(6, 0.0), (8, -2.0)]),
        ],
        "end_id",
    ),
    Piece(0, "", 1, [TokenLogProbs(8, -0.25, [(8, -0.25), (10, -2.5)])]),
    Piece(0, "üße", 1, [TokenLogProbs(9, 0.0, [(9, 0.0), (5, -9.0)])], "length"),
]
TEXTS = {5: "Gr", 6: "a ", 7: '"q"\n'}
UMLAUT = "ü".encode()
PARTS = {8: Token("\ufffd", UMLAUT[:1]), 9: Token("\ufffdße", UMLAUT[1:] + "ße".encode())}
PARTS[10] = Token("\ufffd", None)
TOKENS = PARTS | {number: Token(text, text.encode()) for number, text in TEXTS.items()}


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("end_id", "stop"),
        ("stop_words", "stop"),
        ("length", "length"),
        ("timed_out", "length"),
        ("cancelled", "stop"),
    ],
)
def test_finish_reason(reason: str, shown: str) -> None:
    choice = Choice()
    for piece in (Piece(0, "a", 1), Piece(0, "b", 1, reason=reason)):
        choice.add(piece)
    assert choice.finish_reason == shown


def request(*, is_chat: bool, num_log_probs: int | None = None) -> GenerationRequest:
    return GenerationRequest(
        is_chat=is_chat,
        prompts=((1, 2, 3),),
        max_tokens=3,
        values={},
        num_answers=2,
        is_streaming=True,
        includes_usage=True,
        has_log_probs=num_log_probs is not None,
        num_top_log_probs=num_log_probs or 0,
    )


def head(is_chat: bool) -> Head:
    return Head("id", 1700000000, "m", is_chat)


def events(
    is_chat: bool, num_log_probs: int | None = None, this: GenerationRequest | None = None
) -> list[dict[str, Any]]:
    """All events of a stream of `PIECES`, as a client reads them."""
    this = this or request(is_chat=is_chat, num_log_probs=num_log_probs)
    writer = EventWriter(head(is_chat), this, TOKENS.__getitem__)
    choices = new_choices(this)
    written = b"".join(writer.opening(i) for i in range(2))
    for piece in PIECES:
        choices[piece.index].add(piece)
        written += writer.piece(piece.index, piece, choices[piece.index])
    written += b"".join(writer.end(i, choices[i]) for i in range(2)) + writer.usage()
    blocks = written.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_the_events_of_a_chat() -> None:
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events(True)]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        assert chunk.usage is None
    assert texts == {0: "Grüße", 1: 'a "q"\n'}
    assert [c.choices[0].delta.role for c in chunks[:3]] == ["assistant", "assistant", None]
    reasons = {c.choices[0].index: c.choices[0].finish_reason for c in chunks[-3:-1]}
    assert reasons == {0: "length", 1: "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("is_chat", [True, False])
def test_running_usage(is_chat: bool) -> None:
    """As vLLM does: programs that measure count the tokens of an event by it."""
    this = dataclasses.replace(request(is_chat=is_chat), has_running_usage=True)
    told = [event["usage"]["completion_tokens"] for event in events(is_chat, this=this)]
    # Two events begin a chat, two are of its ends, and the last is of the usage alone.
    assert told == [*([0, 0] if is_chat else []), 1, 3, 4, 5, 5, 5, 5]
    assert {event["usage"]["prompt_tokens"] for event in events(is_chat, this=this)} == {3}


def test_the_events_of_a_completion() -> None:
    chunks = events(False)
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Grüße", 1: 'a "q"\n'}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [row["choices"][0]["finish_reason"] for row in chunks[-3:-1]] == ["length", "stop"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_token_ids_as_vllm_has_them(is_chat: bool) -> None:
    this = dataclasses.replace(
        request(is_chat=is_chat, num_log_probs=0), has_token_ids=True, shows_ids=True, num_answers=1
    )
    piece = Piece(0, "Gr", 1, [TokenLogProbs(5, -0.5)], token_ids=[5])
    choices = [Choice()]
    choices[0].add(piece)
    whole = whole_answer(head(is_chat), this, choices, TOKENS.__getitem__)
    writer = EventWriter(head(is_chat), this, TOKENS.__getitem__)
    parts = [writer.opening(0), writer.piece(0, piece, choices[0])]
    opening, event = (json.loads(part.removeprefix(b"data: ")) for part in parts)
    for answer, first in ((whole, whole), (event, opening)):
        prompt_ids = (first if is_chat else first["choices"][0])["prompt_token_ids"]
        assert list(prompt_ids) == [1, 2, 3]
        [choice] = answer["choices"]
        assert choice["token_ids"] == [5]
        rows = choice["logprobs"]
        assert (rows["content"][0]["token"] if is_chat else rows["tokens"][0]) == "token_id:5"


def test_echo() -> None:
    """Two prompts, two answers to each."""
    this = dataclasses.replace(request(is_chat=False), prompts=((1,), (2,)), echoes=("a ", ""))
    pieces = [Piece(index, f"b{index}", 1) for index in range(4)]
    writer = EventWriter(head(is_chat=False), this, TOKENS.__getitem__)
    choices = new_choices(this)
    written = b"".join(writer.opening(index) for index in range(4))
    for piece in pieces:
        choices[piece.index].add(piece)
        written += writer.piece(piece.index, piece, choices[piece.index])
    rows = whole_answer(head(is_chat=False), this, choices, TOKENS.__getitem__)["choices"]
    wanted = ["a b0", "a b1", "b2", "b3"]
    assert [row["text"] for row in rows] == wanted
    texts = [""] * 4
    for block in written.decode().split("\n\n")[:-1]:
        [choice] = json.loads(block.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == wanted


@pytest.mark.parametrize("is_chat", [True, False])
def test_log_probabilities(is_chat: bool) -> None:
    this = request(is_chat=is_chat, num_log_probs=2)
    choices = new_choices(this)
    for piece in PIECES:
        choices[piece.index].add(piece)
    body = whole_answer(head(is_chat), this, choices, TOKENS.__getitem__)
    streamed = [e["choices"][0] for e in events(is_chat, 2) if e["choices"]]
    if is_chat:
        first = ChatCompletion.model_validate(body).choices[0]
        assert first.logprobs is not None
        assert first.logprobs.content is not None
        rows = [(row.token, row.logprob, row.bytes) for row in first.logprobs.content]
        assert rows == [
            ("Gr", -0.5, [71, 114]),
            ("\ufffd", -0.25, [0xC3]),  # half a character: a client puts the bytes together
            ("\ufffdße", 0.0, [0xBC, *"ße".encode()]),
        ]
        tops = [
            (row.top_logprobs[1].token, row.top_logprobs[1].logprob)
            for row in first.logprobs.content
        ]
        assert tops == [("\ufffdße", -1.5), ("\ufffd", -2.5), ("Gr", -9.0)]
        parts = [row["logprobs"]["content"] for row in streamed if row["logprobs"]]
        assert sum(map(len, parts)) == 5
        return
    whole = Completion.model_validate(body).choices[1].logprobs
    assert whole is not None
    assert (whole.tokens, whole.token_logprobs) == (["a ", '"q"\n'], [-1.0, -4.0])
    assert whole.text_offset == [0, 2]
    # What was drawn is told even where it is not among the likeliest.
    assert whole.top_logprobs == [
        {"a ": -1.0, "Gr": -3.0},
        {"a ": 0.0, "\ufffd": -2.0, '"q"\n': -4.0},
    ]
    none = whole_answer(
        head(is_chat), request(is_chat=False, num_log_probs=0), choices, TOKENS.__getitem__
    )
    assert none["choices"][1]["logprobs"]["top_logprobs"] is None
    rows_of_first = [row["logprobs"] for row in streamed if row["index"] == 0 and row["logprobs"]]
    offsets = [row["text_offset"] for row in rows_of_first]
    assert offsets == [[0], [2], [2]]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_whole_answer_has_every_key_of_openai_s(is_chat: bool) -> None:
    """Null or not: clients with types of their own fail for a key that is missing."""
    this = request(is_chat=is_chat)
    body = whole_answer(head(is_chat), this, new_choices(this), TOKENS.__getitem__)
    keys = {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert set(body) == keys
    choice = body["choices"][0]
    assert set(choice) == {"index", "logprobs", "finish_reason", "message" if is_chat else "text"}
    assert not is_chat or set(choice["message"]) == {"role", "content", "refusal"}
