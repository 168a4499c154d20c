"""The form of an answer: whole or in pieces, cut at a stop word with all that goes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest
from inflight_backend.text.detokenizer import IncrementalDetokenizer
from inflight_backend.text.tokenizer import TextCodec
from inflight_backend.triton_io.outputs import choose_outputs
from inflight_backend.triton_io.stop_text import StopText, StopTokens
from inflight_backend.triton_io.token_stream import TextWriter, TokenStream

OUTPUTS = frozenset(
    {"output_ids", "sequence_length", "text_output", "finish_reason", "output_log_probs"}
    | {"cum_log_probs", "num_output_tokens", "generation_logits"}
)


class Sent:
    """A stream that keeps what is sent."""

    is_behind = False

    def __init__(self) -> None:
        self.responses: list[tuple[dict[str, Any], bool]] = []

    def send(self, tensors: dict[str, Any], *, is_final: bool) -> None:
        self.responses.append((tensors, is_final))

    def send_error(self, message: str, code: str = "INTERNAL") -> None:
        raise AssertionError(message)

    def end_with(self, message: str, code: str = "INTERNAL") -> None:
        raise AssertionError(message)

    def abandon(self, message: str) -> None:
        raise AssertionError(message)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A number is a token."""
    folder = tmp_path_factory.mktemp("numbers")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(50)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
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
def test_everything_ends_at_the_stop_word(codec: TextCodec, is_whole: bool) -> None:
    """The answer counts from 1, three tokens at a time; "5 6" is never to be seen."""
    sent = Sent()
    writer = TextWriter(IncrementalDetokenizer(codec, [40]), stop_text=StopText(["5 6"]))
    stream = TokenStream(sent, OUTPUTS, writer, is_whole=is_whole, ids=[40] if is_whole else [])
    hits = [
        stream.send(list(range(first, first + 3)), extras_of(first, 3), is_final=False)
        for first in (1, 4, 7)
    ]
    stream.send([10], extras_of(10, 1), is_final=True)
    assert hits == [False, True, False]
    assert stream.num_left_out == 4
    assert [is_final for _, is_final in sent.responses] == (
        [True] if is_whole else [False] * 3 + [True]
    )
    text = b"".join(t["text_output"].item() for t, _ in sent.responses).decode()
    assert text.strip() == "1 2 3 4"
    ids = [i for t, _ in sent.responses for i in t["output_ids"].reshape(-1).tolist()]
    assert ids == [40] * is_whole + [1, 2, 3, 4, 5, 6]
    log_probs = np.concatenate([t["output_log_probs"] for t, _ in sent.responses], axis=2)
    np.testing.assert_allclose(log_probs.reshape(-1), -np.arange(1, 7) / 10, rtol=1e-6)
    rows = sum(t["generation_logits"].shape[2] for t, _ in sent.responses)
    assert rows == 6
    counts = [tensors["num_output_tokens"].item() for tensors, _ in sent.responses]
    assert counts == ([6] if is_whole else [3, 3, 0, 0])
    last = sent.responses[-1][0]
    np.testing.assert_allclose(last["cum_log_probs"], [[-2.1]], rtol=1e-6)
    assert last["finish_reason"].item() == b"stop_words"
    if not is_whole:
        assert sent.responses[0][0]["finish_reason"].item() == b"not_finished"


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
    sent = Sent()
    writer = TextWriter(
        IncrementalDetokenizer(codec, [40]),
        stop_tokens=StopTokens([word]),
        stop_text=StopText(["3"]),
    )
    stream = TokenStream(sent, OUTPUTS, writer, is_whole=is_whole)
    for start in range(0, len(ids), num_at_once):
        some = ids[start : start + num_at_once]
        extras = extras_of(start + 1, len(some))
        stream.send(some, extras, is_final=start + len(some) == len(ids))
    said = b"".join(tensors["text_output"].item() for tensors, _ in sent.responses).decode()
    assert said.rstrip() == text
    assert [i for t, _ in sent.responses for i in t["output_ids"].reshape(-1).tolist()] == wanted
    counts = [tensors["num_output_tokens"].item() for tensors, _ in sent.responses]
    assert sum(counts) == len(wanted)
    rows = sum(tensors["output_log_probs"].shape[2] for tensors, _ in sent.responses)
    assert rows == len(wanted)


def test_a_stream_of_text_is_silent_when_it_has_nothing_to_say(codec: TextCodec) -> None:
    sent = Sent()
    writer = TextWriter(IncrementalDetokenizer(codec, [40]), stop_text=StopText(["1 2 9"]))
    stream = TokenStream(sent, frozenset({"text_output"}), writer)
    for token in (1, 2, 3):
        stream.send([token], {}, is_final=False)
    assert [tensors["text_output"].tolist() for tensors, _ in sent.responses] == [
        [b" "],
        [b"1 2 3"],
    ]


def test_outputs_are_those_named_or_asked_for_by_an_input() -> None:
    of_the_ensemble = frozenset(protocol.ENSEMBLE_OUTPUT_MAP.values())
    by_default = choose_outputs(frozenset(), is_text=False)
    assert {"output_ids", "sequence_length", "output_log_probs"} <= by_default
    assert "batch_index" in by_default
    assert not {"text_output", "finish_reason", "sequence_index", "stats"} & by_default
    assert choose_outputs(of_the_ensemble, is_text=True) >= {"text_output", "num_input_tokens"}
    named = frozenset({"text_output", "finish_reason", "sequence_index"})
    assert choose_outputs(named, is_text=True) == named
    with pytest.raises(InvalidRequest, match="output 'stats' cannot be requested here"):
        choose_outputs(named | {"stats"}, is_text=True)
