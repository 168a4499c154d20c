"""The form of an answer: whole or in pieces, as beams, and cut at stop words of text."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from hypothesis import example, given
from hypothesis import strategies as st
from support.triton_harness import (
    Server,
    error_of,
    ids_of,
    responses_of,
    write_number_tokenizer,
)
from support.triton_stub import FakePbUtils, FakeSender

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.requests.sampling import MAX_WORD_TOKENS, MAX_WORDS
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.answer_stream import TextWriter, TokenStream
from inflight_backend.triton_io.sender import ResponseFactory, ResponseSender
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_server.serve.settings import DEMO_MODEL

OUTPUTS = frozenset(
    {"output_ids", "sequence_length", "text_output", "finish_reason", "output_log_probs"}
    | {"cum_log_probs", "num_output_tokens", "generation_logits"}
)


def stream_to(sender: FakeSender) -> ResponseSender:
    return ResponseSender(sender, ResponseFactory(FakePbUtils))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A number is a token."""
    folder = tmp_path_factory.mktemp("numbers")
    write_number_tokenizer(folder, 50)
    return TextCodec(folder)


def extras_of(first: int, num_tokens: int) -> dict[str, Any]:
    """As the batch manager sends them: token t has log probability -t / 10."""
    log_probs = -np.arange(first, first + num_tokens, dtype=np.float32)[None, None] / 10
    total = -sum(range(first + num_tokens)) / 10
    return {
        "output_log_probs": log_probs,
        "cum_log_probs": np.array([[total]], np.float32),
        "num_output_tokens": np.array([[num_tokens]], np.int32),
        "generation_logits": np.ones((1, 1, num_tokens, 3), np.float32) * log_probs[..., None],
    }


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("num_at_once", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("ids", "word", "text", "wanted"),
    [
        ([2, 3, 4, 5, 6], (2, 3, 4, 9), " 2", [2, 3]),
        ([2, 3, 4, 9], (2, 3, 4, 9), " 2", [2, 3]),
        ([3, 4, 5], (3, 9), "", [3]),
        ([1, 2, 3, 4, 5], (2, 9), " 1 2", [1, 2, 3]),
        ([1, 2, 3], (2, 3), " 1", [1, 2, 3]),
        ([1, 2, 4, 5], (2, 9), " 1 2 4 5", [1, 2, 4, 5]),
    ],
)
def test_a_text_inside_a_stop_word_of_tokens_ends_the_answer_first(
    codec: TextCodec,
    ids: list[int],
    word: tuple[int, ...],
    text: str,
    wanted: list[int],
    num_at_once: int,
    is_whole: bool,
) -> None:
    """The text "3" counts when it is complete, though its tokens may still become ``word``."""
    sent = FakeSender()
    writer = TextWriter(
        IncrementalDetokenizer(codec, [40]),
        stop_tokens=StopTokens([word]),
        stop_text=StopText(["3"]),
    )
    stream = TokenStream(stream_to(sent), OUTPUTS, text=writer, is_whole=is_whole)
    for start in range(0, len(ids), num_at_once):
        some = ids[start : start + num_at_once]
        extras = extras_of(start + 1, len(some))
        if start + len(some) == len(ids):
            stream.finish(stream.make_last(some, extras))
        else:
            stream.send(some, extras)
    responses = responses_of(sent)
    said = b"".join(tensors["text_output"].item() for tensors in responses).decode()
    assert said.rstrip() == text
    assert ids_of(sent) == wanted
    assert sum(tensors["num_output_tokens"].item() for tensors in responses) == len(wanted)
    rows = sum(tensors["output_log_probs"].shape[2] for tensors in responses)
    assert rows == len(wanted)


def test_a_stream_of_text_is_silent_when_it_has_nothing_to_say(codec: TextCodec) -> None:
    sent = FakeSender()
    writer = TextWriter(IncrementalDetokenizer(codec, [40]), stop_text=StopText(["1 2 9"]))
    stream = TokenStream(stream_to(sent), frozenset({"text_output"}), text=writer)
    for token in (1, 2, 3):
        stream.send([token], {})
    texts = [tensors["text_output"].tolist() for tensors in responses_of(sent)]
    assert texts == [[b" "], [b"1 2 3"]]


PROMPT = "1 2 3 4"


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """The demo model, which counts, with up to three beams; a response for each step."""
    config = EngineConfig(
        device="cpu", max_batch_size=4, max_beam_width=3, max_tokens_in_paged_kv_cache=1024
    )
    engine: Any = Engine.load(DEMO_MODEL, config)
    return make_server(
        engine, max_beam_width="3", tokenizer_dir=str(DEMO_MODEL), merge_responses="false"
    )


def texts_of(response: dict[str, np.ndarray[Any, Any]]) -> list[str]:
    return [text.decode() for text in response["text_output"]]


def test_one_text_per_beam_whole_or_as_it_grows(server: Server) -> None:
    ask: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 6, "beam_width": 3}
    (whole,) = responses_of(server.ask(**ask, return_log_probs=True))
    texts = texts_of(whole)
    assert len(set(texts)) == 3
    assert texts[0].startswith("1 2 3 4 5 6")
    assert whole["output_log_probs"].shape[:2] == (1, 3)
    assert whole["cum_log_probs"][0].tolist() == sorted(whole["cum_log_probs"][0], reverse=True)

    stream = responses_of(server.ask(**ask, stream=True))
    assert [PROMPT + text for text in texts_of(stream[-1])] == texts
    lengths = [len(texts_of(response)[0]) for response in stream]
    assert lengths == sorted(lengths), "each response holds everything so far"

    (two,) = responses_of(server.ask(**ask, num_return_sequences=2))
    assert texts_of(two) == texts[:2]
    assert "sequence_index" not in two
    error, _ = error_of(server.ask(**ask, num_return_sequences=4))
    assert "'num_return_sequences' is 4, more than 'beam_width' = 3" in error
    for name, value in (("include_stop_str_in_output", True), ("skip_special_tokens", False)):
        error, _ = error_of(server.ask(**{**ask, name: value}))
        assert f"'{name}' is not supported together with beams" in error


def test_tokens_batches_and_stop_words(server: Server) -> None:
    ask: dict[str, Any] = {"max_tokens": 8, "beam_width": 2, "exclude_input_in_output": True}
    named = ("output_ids", "sequence_length", "text_output")
    (free,) = responses_of(server.ask(text_input=PROMPT, outputs=named, **ask))
    assert free["output_ids"].shape[:2] == (1, 2)
    assert free["sequence_length"].shape == (1, 2)
    (stopped,) = responses_of(server.ask(text_input=PROMPT, outputs=named, stop_words=["7"], **ask))
    assert texts_of(free)[0].startswith(" 5 6 7")
    assert " 5 6 " in texts_of(stopped), "all that stands before the word, as without beams"
    assert not any("7" in text for text in texts_of(stopped))
    ids = free["output_ids"][0, 0, : free["sequence_length"][0, 0]].tolist()
    assert stopped["output_ids"].tolist() != free["output_ids"].tolist()
    assert ids[:2] == stopped["output_ids"][0, 0, :2].tolist()


def test_no_response_shows_the_beginning_of_a_stop_word(server: Server) -> None:
    """The model counts: 8, 9, 10, of which "9 1" ends the best beam."""
    ask: dict[str, Any] = {"max_tokens": 12, "beam_width": 2, "exclude_input_in_output": True}
    sender = server.ask(text_input="5 6 7", stop_words=["9 1"], stream=True, **ask)
    stream = [texts_of(response) for response in responses_of(sender)]
    assert len(stream) > 3
    assert not any("9" in text for texts in stream for text in texts)
    assert stream[-1][0].strip() == "8"


TEXT = st.text("abc", max_size=20)

WORDS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def until_stop(text: str, words: list[str]) -> str:
    places = [place for word in words if (place := text.find(word)) >= 0]
    return text[: min(places)] if places else text


@given(text=TEXT, words=WORDS, sizes=st.lists(st.integers(0, 5), max_size=20))
@example(text="cabc", words=["bc", "ab"], sizes=[])  # both are complete with one piece
@example(text="aabc", words=["abc", "ba"], sizes=[3])  # a shorter one may have begun later
def test_text_ends_before_the_first_word(text: str, words: list[str], sizes: list[int]) -> None:
    stop, left, rest = StopText(words), "", text
    expected = None
    for size in [*sizes, len(text)]:
        piece, rest = rest[:size], rest[size:]
        left += stop.push(piece, is_final=False)
        so_far = text.removesuffix(rest)
        if expected is None and any(word in so_far for word in words):
            expected = until_stop(so_far, words)
        # What has left can never be taken back, so it must be a beginning of the right answer.
        assert until_stop(text, words).startswith(left) or stop.is_hit
    left += stop.push("", is_final=True)
    # In pieces the word that is complete first counts, which may begin later than a longer one.
    assert stop.is_hit == (expected is not None)
    assert left == (text if expected is None else expected)


def test_only_what_may_become_a_word_is_held_back() -> None:
    stop = StopText(["abab!"])
    pieces = [stop.push(piece, is_final=False) for piece in ["xa", "b", "a", "c", "aba", "ba", "b"]]
    assert pieces == ["x", "", "", "abac", "", "ab", ""]
    assert stop.push("!zzz", is_final=False) == ""
    assert stop.is_hit


@given(
    ids=st.lists(st.integers(0, 2), max_size=15),
    words=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
    ),
)
def test_tokens_of_a_stop_word_are_never_decoded(
    ids: list[int], words: list[tuple[int, ...]]
) -> None:
    for end in range(1, len(ids) + 1):  # the request ends with the first word
        lengths = [len(w) for w in words if tuple(ids[max(end - len(w), 0) : end]) == w]
        if lengths:
            ids = ids[:end]
            expected = ids[: end - max(lengths)]
            break
    else:
        expected = ids
    stop = StopTokens(words)
    left = [token for i in ids for token in stop.push([i], is_final=False)]
    left += stop.push([], is_final=True)
    assert left == expected


def test_a_long_list_of_long_words_costs_no_more_than_itself() -> None:
    """A table of all that its words begin with took 76 MB, for each request and, with beams, for
    each text of each response."""
    words = tuple(tuple(range(first, first + MAX_WORD_TOKENS)) for first in range(MAX_WORDS))
    tracemalloc.start()
    try:
        stop = StopTokens(words)
        assert stop.push([9, 3, 4], is_final=False) == [9]
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("one two three", " three", "one two"),
        ("naïve café — über", "é", "naïve caf"),
        ("日本語のテキスト", "のテ", "日本語"),
        ("stop at 🙂🙃 faces", "🙃", "stop at 🙂"),
        ("no word here", "nowhere", "no word here"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.case(35)
def test_words_across_tokens_and_inside_characters(
    text: str, word: str, expected: str, size: int
) -> None:
    """In the demo's tokens, which are bytes."""
    byte_codec = TextCodec(DEMO_MODEL)
    ids = byte_codec.encode_word(text)
    writer = TextWriter(IncrementalDetokenizer(byte_codec, [5, 6]), stop_text=StopText([word]))
    written, num_used = "", 0
    for start in range(0, len(ids), size):
        piece, num_ids = writer.write(ids[start : start + size], start + size >= len(ids))
        written, num_used = written + piece, num_used + num_ids
        if writer.is_stopped:
            break
    assert written == expected
    # Tokens count up to the one that completed the word.
    assert byte_codec.decode(ids[:num_used]) == (expected + word if expected != text else text)
