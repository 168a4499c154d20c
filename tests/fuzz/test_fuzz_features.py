"""Requests whose values are mostly allowed, on the demo model: what is accepted reaches the engine,
with beams, guides, drafts, logits and log probabilities, several requests side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzzing import assert_tells_nothing_internal, fuzzing
from support.triton_harness import WAIT, Server, ids_of, wait_until
from support.triton_stories import loaded, stepped_demo
from support.triton_stub import FakePbUtils, FakeRequest, FakeSender, FakeTensor

import inflight_protocol as protocol
from inflight_server.serve.settings import DEMO_MODEL

pytestmark = pytest.mark.slow

Tensors = dict[str, Any]

_SPECS = {spec.name: spec for spec in protocol.INPUTS}
_VOCAB_SIZE = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
_IDS = st.lists(st.integers(0, _VOCAB_SIZE - 1), min_size=1, max_size=20)
_WORDS = st.lists(st.sampled_from(["4", " 5", "1 2", "7 8 9", "\n", "é", "🎈"]), max_size=3)
_FLAGS = st.booleans()

# Values that are mostly allowed, each with one that never is where there is such a one.
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "end_id": st.integers(-1, _VOCAB_SIZE),
    "stop_token_ids": st.lists(st.integers(-1, _VOCAB_SIZE), max_size=3),
    "pad_id": st.integers(-1, _VOCAB_SIZE),
    "beam_width": st.integers(1, 4),
    "num_return_sequences": st.integers(1, 3),
    "temperature": st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    "runtime_top_k": st.sampled_from([0, 1, 2, 50, 100_000]),
    "runtime_top_p": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.5]),
    "runtime_top_p_min": st.sampled_from([1e-6, 0.5, 1.0]),
    "runtime_top_p_decay": st.sampled_from([0.1, 1.0]),
    "runtime_top_p_reset_ids": st.integers(-1, _VOCAB_SIZE),
    "min_p": st.sampled_from([0.0, 0.3, 1.0]),
    "len_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
    "early_stopping": _FLAGS,
    "beam_search_diversity_rate": st.sampled_from([0.0, 0.7]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
    "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
    "frequency_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
    "no_repeat_ngram_size": st.integers(0, 4),
    "min_length": st.integers(0, 15),
    "random_seed": st.integers(0, 2**64 - 1),
    "return_log_probs": _FLAGS,
    "num_top_log_probs": st.integers(0, 21),
    "return_log_prob_ranks": _FLAGS,
    "return_context_logits": _FLAGS,
    "return_context_log_probs": _FLAGS,
    "return_generation_logits": _FLAGS,
    "return_perf_metrics": _FLAGS,
    "return_num_input_tokens": _FLAGS,
    "return_num_output_tokens": _FLAGS,
    "return_finish_reason": _FLAGS,
    "exclude_input_in_output": _FLAGS,
    "draft_input_ids": _IDS,
    "embedding_bias": st.sampled_from([0.0, 5.0, -5.0, -float("inf")]).map(
        lambda value: [value] * _VOCAB_SIZE
    ),
    "embedding_bias_words": _WORDS,
    "stop_words": _WORDS,
    "bad_words": _WORDS,
    "guided_decoding_guide_type": st.sampled_from(["json", "json_schema", "regex", "ebnf_grammar"]),
    "guided_decoding_guide": st.sampled_from(["[0-9]+", "[ab]{2,5}", '{"type": "integer"}', "("]),
    "prompt_ignore_length": st.integers(0, 3),
    "priority": st.sampled_from([0.0, 0.5, 1.0]),
    "cache_salt": st.sampled_from(["", "a", "b"]),
    "max_queue_time_ms": st.sampled_from([1, 1000]),
    "allotted_time_ms": st.sampled_from([1, 1000]),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[Tensors, str]:
    """Tensors and request parameters."""
    names = draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=6, unique=True))
    if "guided_decoding_guide" in names:
        names.append("guided_decoding_guide_type")
    values = {name: draw(_VALUES[name]) for name in names}
    if "embedding_bias_words" in values:
        values["embedding_bias_weights"] = [1.5] * len(values["embedding_bias_words"])
    values["request_output_len"] = draw(st.integers(1, 12))
    values["streaming"] = draw(_FLAGS)
    if draw(_FLAGS):
        values["input_ids"] = draw(_IDS)
    else:
        values["text_input"] = draw(st.sampled_from(["1 2 3", "a", "é🎈", "5 6 7 8 " * 4]))
    parameters = draw(st.sampled_from(["{}", "{}", "{}", '{"error_codes": true}', '{"top_k": 3}']))
    return values, parameters


def send(server: Server, values: Tensors, parameters: str = "{}") -> FakeSender:
    request = FakeRequest({}, "", parameters=parameters)
    for name, value in values.items():
        dtype = protocol.DTYPE_TO_NUMPY[_SPECS[name].dtype]
        items = value if isinstance(value, list) else [value]
        if _SPECS[name].dtype == "STRING":
            items, dtype = [item.encode() for item in items], np.object_
        request._tensors.append(FakeTensor(name, np.array([items], dtype=dtype)))
    server.model.execute([request])
    return request.sender


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo model, whose steps run freely."""
    engine, steps = stepped_demo()
    steps.let_go()
    with loaded(engine, max_beam_width="3", tokenizer_dir=str(DEMO_MODEL)) as server:
        yield server
        server.model.finalize()


BEAMS = {"beam_width": 3, "input_ids": [1, 2], "request_output_len": 6}
GUIDED = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]+"}


@pytest.mark.case(6, 33, 122, 123)
@fuzzing
@given(several=st.lists(requests(), min_size=1, max_size=3))
@example([(BEAMS | {"return_generation_logits": True, "streaming": True}, "{}")])
@example([(BEAMS | GUIDED, "{}")])
def test_what_is_accepted_is_served_to_its_end(
    demo: Server, several: list[tuple[Tensors, str]]
) -> None:
    senders = [send(demo, values, parameters) for values, parameters in several]
    for sender in senders:
        assert sender.is_final.wait(WAIT), "a request without an end"
        errors = [response.error for response in sender.responses if response.error is not None]
        assert len(errors) <= 1
        for error in errors:
            message = str(error)
            assert "could not be" not in message, "an unexpected exception"
            assert "failed" not in message, "it reached the loop and raised there"
            assert_tells_nothing_internal(message)
            assert error.code != FakePbUtils.TritonError.INTERNAL
    manager = demo.model._manager
    wait_until(lambda: manager.get_num_active_requests() == 0)
    assert manager._batcher.is_idle_and_intact()
    assert manager.health.is_healthy
    alone = send(demo, {"input_ids": [50, 51], "request_output_len": 3})
    assert alone.is_final.wait(WAIT)
    assert len(ids_of(alone)) == 5
