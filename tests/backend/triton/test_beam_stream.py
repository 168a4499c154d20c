"""Beams on their way out: every response has all of them, as tokens and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import Server, error_of
from support.triton_stub import FakeSender

import inflight_backend
from inflight_backend.engine import Engine, EngineConfig

DEMO = Path(inflight_backend.__file__).parent / "demo_model"
PROMPT = "1 2 3 4"


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """The demo model, which counts, with up to three beams; a response for each step."""
    config = EngineConfig(
        device="cpu", max_batch_size=4, max_beam_width=3, max_tokens_in_paged_kv_cache=1024
    )
    engine: Any = Engine.load(DEMO, config)
    return make_server(engine, max_beam_width="3", tokenizer_dir=str(DEMO), merge_responses="false")


def responses_of(sender: FakeSender) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [
        {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}
        for response in sender.responses
    ]


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
