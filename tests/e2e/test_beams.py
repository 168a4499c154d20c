"""Beams on the real server: over gRPC and HTTP, streaming or not, tokens or text."""

from __future__ import annotations

from typing import Any

import pytest
from e2e.conftest import ServeFactory
from e2e.test_sampling import PROMPT, generate, infer

pytestmark = pytest.mark.e2e

TOKENS = ("output_ids", "sequence_length")


def beams_of(response: dict[str, Any]) -> list[list[int]]:
    rows = zip(response["output_ids"][0], response["sequence_length"][0], strict=True)
    return [ids[:length].tolist() for ids, length in rows]


@pytest.mark.contract("tensorrt_llm parameter", "max_beam_width")
@pytest.mark.contract("ensemble input", "beam_width")
@pytest.mark.case(27, 28)
def test_beams_whole_and_as_they_grow(serve: ServeFactory) -> None:
    server = serve(settings={"max_beam_width": 3})
    ask: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 6, "beam_width": 3}
    whole = generate(server, "ensemble", **ask, length_penalty=1.0, return_log_probs=True)
    texts = whole["text_output"]
    assert len(set(texts)) == 3
    assert texts[0].startswith("1 2 3 4 5 6")
    assert len(whole["cum_log_probs"]) == 3

    named = (*TOKENS, "text_output", "finish_reason")
    stream = list(infer(server, *named, **ask, len_penalty=1.0, streaming=True))
    stream = [response for response in stream if response]
    assert [PROMPT + text.decode() for text in stream[-1]["text_output"]] == texts
    lengths = [max(map(len, beams_of(response))) for response in stream]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 6
    assert stream[-1]["finish_reason"].tolist() == [[b"length"]]

    (alone,) = infer(server, *TOKENS, **ask, len_penalty=1.0, exclude_input_in_output=True)
    assert beams_of(alone) == beams_of(stream[-1])
    (two,) = infer(server, *TOKENS, **ask, num_return_sequences=2)
    assert two["output_ids"].shape[:2] == (1, 2)
    error = generate(server, "ensemble", text_input=PROMPT, max_tokens=6, beam_width=4)["error"]
    assert "'beam_width' is 4, more than max_beam_width = 3" in error
