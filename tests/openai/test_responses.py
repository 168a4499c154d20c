"""Answers and events, read back with the types of the `openai` package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inflight_openai.generation import GenerationRequest
from inflight_openai.prompts import Token
from inflight_openai.responses import EventWriter, Head, WholeAnswer, finish_reason
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
    assert finish_reason(reason) == shown


def request(*, is_chat: bool, num_log_probs: int | None = None) -> GenerationRequest:
    return GenerationRequest(
        model="m",
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


def whole(this: GenerationRequest, pieces: Sequence[Piece] = PIECES) -> dict[str, Any]:
    """The body of an answer that consists of ``pieces``."""
    answer = WholeAnswer(head(this.is_chat), this, TOKENS.__getitem__)
    for piece in pieces:
        answer.add(piece)
    body: dict[str, Any] = json.loads(answer.encode())
    return body


def events(this: GenerationRequest, pieces: Sequence[Piece] = PIECES) -> list[dict[str, Any]]:
    """All events of a stream of ``pieces``, as a client reads them."""
    writer = EventWriter(head(this.is_chat), this, TOKENS.__getitem__)
    written = b"".join([*map(writer.piece, pieces), writer.ending()])
    blocks = written.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each answer of a completion."""
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_the_events_of_a_chat() -> None:
    chunks = [
        ChatCompletionChunk.model_validate(event, strict=True)
        for event in events(request(is_chat=True))
    ]
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
    told = [event["usage"]["completion_tokens"] for event in events(this)]
    # Two events begin a chat, two are of its ends, and the last is of the usage alone.
    assert told == [*([0, 0] if is_chat else []), 1, 3, 4, 5, 5, 5, 5]
    assert {event["usage"]["prompt_tokens"] for event in events(this)} == {3}


def test_the_events_of_a_completion() -> None:
    chunks = events(request(is_chat=False))
    assert texts_of(chunks) == {0: "Grüße", 1: 'a "q"\n'}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [row["choices"][0]["finish_reason"] for row in chunks[-3:-1]] == ["length", "stop"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_token_ids_as_vllm_has_them(is_chat: bool) -> None:
    this = dataclasses.replace(
        request(is_chat=is_chat, num_log_probs=0), has_token_ids=True, shows_ids=True, num_answers=1
    )
    pieces = [Piece(0, "Gr", 1, [TokenLogProbs(5, -0.5)], token_ids=[5])]
    answer = whole(this, pieces)
    opening, event, *_ = events(this, pieces)
    for told, first in ((answer, answer), (event, opening)):
        prompt_ids = (first if is_chat else first["choices"][0])["prompt_token_ids"]
        assert list(prompt_ids) == [1, 2, 3]
        [choice] = told["choices"]
        assert choice["token_ids"] == [5]
        rows = choice["logprobs"]
        assert (rows["content"][0]["token"] if is_chat else rows["tokens"][0]) == "token_id:5"


@pytest.mark.parametrize("num_pieces", [4, 0])
def test_echo(num_pieces: int) -> None:
    """Two prompts, two answers to each."""
    this = dataclasses.replace(request(is_chat=False), prompts=((1,), (2,)), echoes=("a ", ""))
    pieces = [Piece(index, f"b{index}", 1) for index in range(num_pieces)]
    wanted = ["a b0", "a b1", "b2", "b3"] if pieces else ["a ", "a ", "", ""]
    assert [row["text"] for row in whole(this, pieces)["choices"]] == wanted
    assert texts_of(events(this, pieces)) == dict(enumerate(wanted))


@pytest.mark.parametrize(
    ("prompt", "echo", "wanted"),
    [
        ((5, 6, 7), 'Gra "q"\n', [0, 2, 4, 8]),
        ((5, 6, 7), 'a "q"\n', [0, 0, 2, 6]),  # without the token that begins a text
        ((6, 5), "Gra Gr", [2, 4, 6]),  # with what was cut off for the model
        ((8, 9, 6), "üßea ", [0, 0, 3, 5]),  # parts of one character
        ((9, 6), "\ufffdßea ", [0, 3, 5]),
    ],
)
def test_offsets_of_an_echo_point_into_its_text(
    prompt: tuple[int, ...], echo: str, wanted: list[int]
) -> None:
    this = dataclasses.replace(
        request(is_chat=False, num_log_probs=0), prompts=(prompt,), echoes=(echo,), num_answers=1
    )
    told = tuple(TokenLogProbs(token_id, -1.0) for token_id in prompt[1:])
    pieces = [Piece(0, "Gr", 1, [TokenLogProbs(5, -0.5)], "length", prompt=told)]
    assert whole(this, pieces)["choices"][0]["logprobs"]["text_offset"] == wanted
    rows = [event["choices"][0]["logprobs"] for event in events(this, pieces) if event["choices"]]
    assert [place for row in rows if row for place in row["text_offset"]] == wanted


@pytest.mark.parametrize("is_chat", [True, False])
def test_log_probabilities(is_chat: bool) -> None:
    this = request(is_chat=is_chat, num_log_probs=2)
    body = whole(this)
    streamed = [event["choices"][0] for event in events(this) if event["choices"]]
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
    told = Completion.model_validate(body).choices[1].logprobs
    assert told is not None
    assert (told.tokens, told.token_logprobs) == (["a ", '"q"\n'], [-1.0, -4.0])
    assert told.text_offset == [0, 2]
    # What was drawn is told even where it is not among the likeliest.
    assert told.top_logprobs == [
        {"a ": -1.0, "Gr": -3.0},
        {"a ": 0.0, "\ufffd": -2.0, '"q"\n': -4.0},
    ]
    none = whole(request(is_chat=False, num_log_probs=0))
    assert none["choices"][1]["logprobs"]["top_logprobs"] is None
    rows_of_first = [row["logprobs"] for row in streamed if row["index"] == 0 and row["logprobs"]]
    offsets = [row["text_offset"] for row in rows_of_first]
    assert offsets == [[0], [2], [2]]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_whole_answer_has_every_key_of_openai_s(is_chat: bool) -> None:
    """Null or not: clients with types of their own fail for a key that is missing."""
    body = whole(request(is_chat=is_chat), [])
    keys = {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert set(body) == keys
    choice = body["choices"][0]
    assert set(choice) == {"index", "logprobs", "finish_reason", "message" if is_chat else "text"}
    assert not is_chat or set(choice["message"]) == {"role", "content", "refusal"}
