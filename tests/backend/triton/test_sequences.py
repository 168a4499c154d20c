"""Several sequences for one prompt, and lists of words and texts that come with a request."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from support.triton_harness import WAIT, Server, error_of, ids_of, text_of
from support.triton_stub import CountingEngine, FakePbUtils, FakeSender
from tokenizers import Tokenizer, models, pre_tokenizers

from inflight_backend.errors import InvalidRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import validate
from inflight_backend.triton.frontend import copy_request
from inflight_backend.triton_io.request import Prompt
from inflight_protocol.tensors import make_inputs
from inflight_scheduler import ScheduledBatch


def sequences_of(sender: FakeSender) -> dict[int, list[int]]:
    """Tokens by ``sequence_index``."""
    found: dict[int, list[int]] = {}
    for response in sender.responses:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors}
        ids = tensors["output_ids"].reshape(-1).tolist()
        found.setdefault(int(tensors["sequence_index"].item()), []).extend(ids)
    return found


@pytest.mark.contract("tensorrt_llm input", "num_return_sequences")
@pytest.mark.parametrize("is_streaming", [True, False])
def test_several_sequences_are_one_request(server: Server, is_streaming: bool) -> None:
    sender = server.ask(
        "many", input_ids=[4], request_output_len=6, num_return_sequences=3,
        streaming=is_streaming, exclude_input_in_output=True, seed=2**64 - 1,
    )  # fmt: skip
    assert sequences_of(sender) == {i: [5, 6, 7, 8, 9, 10] for i in range(3)}
    seeds = {s.sampling.seed for batch in server.engine.batches for s in batch.setups}
    assert seeds == {-1, 0, 1}  # as signed numbers
    assert len(sequences_of(server.ask("many", input_ids=[4], num_return_sequences=2))) == 2
    named = ("output_ids", "sequence_length", "sequence_index", "batch_index")
    (response,) = server.ask(outputs=named, input_ids=[4], request_output_len=1).responses
    shapes = {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors}
    assert (shapes["batch_index"], shapes["sequence_index"]) == ([[0]], [[0]])


def test_a_number_of_sequences_of_another_type_is_refused() -> None:
    """Triton looks at types; a relay passes on what it got."""
    with pytest.raises(InvalidRequest, match="must be one INT32, got 1 of int64"):
        Prompt.read({"num_return_sequences": np.ones((1, 1), np.int64)})


def test_all_sequences_have_come_at_the_same_time() -> None:
    """Their deadlines count from then."""
    request = InferenceRequest(1, {"input_ids": np.ones((1, 1), np.int32)})
    request.created_ns -= 10**9
    copies = copy_request(request, [2, 3])
    assert [(each.request_id, each.created_ns - request.created_ns) for each in copies] == [
        (1, 0),
        (2, 0),
        (3, 0),
    ]


def test_sequences_share_what_is_read_of_long_lists(server: Server) -> None:
    """256 of them with a bias for each of 128 K tokens took 4 GB, and half a minute in which the
    server took no other request."""
    tensors = {
        "input_ids": [4],
        "embedding_bias": [0.5] * server.engine.vocab_size,
        "stop_words_list": [[7, 8], [2, -1]],
        "bad_words_list": [[3, 9], [1, 2]],
        "random_seed": 5,
    }
    request = InferenceRequest(1, make_inputs(tensors))
    limits = server.model._frontend._limits
    assert limits is not None
    first, second, third = (validate(one, limits) for one in copy_request(request, [2, 3]))
    assert first.sampling.bias is second.sampling.bias is third.sampling.bias
    assert len(first.sampling.bias) == server.engine.vocab_size
    assert first.stop_words is second.stop_words is third.stop_words
    assert first.sampling.bad_words is second.sampling.bad_words is third.sampling.bad_words
    assert [each.sampling.seed for each in (first, second, third)] == [5, 6, 7]
    assert first.tokens is not second.tokens


def test_a_copy_with_another_tensor_reads_its_own() -> None:
    request = InferenceRequest(1, make_inputs({"input_ids": [4], "random_seed": 1}))
    copy = request.copy(2)
    copy.replace_tensor("random_seed", np.array([[2]], np.uint64))
    for _ in range(2):
        seeds = [each.reading("random_seed", lambda seed: seed.item()) for each in (request, copy)]
        assert seeds == [1, 2]


def test_all_sequences_stop_together(server: Server, gate: threading.Event) -> None:
    gate.clear()
    other = server.send(input_ids=[1], request_output_len=3)  # so that one sequence has to wait
    sender = server.send(
        "many", input_ids=[4], request_output_len=200, num_return_sequences=4, streaming=True
    )
    text, _ = error_of(server.ask("many", input_ids=[4]))
    assert "still being processed" in text
    stopped = server.send("many", stop=True)
    gate.set()
    assert stopped.is_final.wait(WAIT)
    assert sender.is_final.wait(WAIT)
    assert sum(map(len, sequences_of(sender).values())) < 4 * 200
    assert other.is_final.wait(WAIT)
    assert ids_of(server.ask("many", input_ids=[50], request_output_len=1)) == [50, 51]


def test_one_broken_sequence_ends_its_request(server: Server, gate: threading.Event) -> None:
    gate.clear()
    real, num_steps = server.engine.execute, 0

    def fail_once(batch: ScheduledBatch) -> list[int]:
        nonlocal num_steps
        num_steps += 1
        tokens = real(batch)
        return [-1, *tokens[1:]] if num_steps == 3 else tokens

    server.engine.execute = fail_once  # type: ignore[method-assign]
    sender = server.send(input_ids=[4], request_output_len=100, num_return_sequences=3)
    gate.set()
    assert sender.is_final.wait(WAIT)
    text, _ = error_of(sender)
    assert "logits are not finite" in text
    assert ids_of(server.ask(input_ids=[50], request_output_len=1)) == [50, 51]
    assert not server.model._frontend._groups


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_return_sequences": 0}, "'num_return_sequences' is 0, outside 1..4"),
        ({"num_return_sequences": 10**6}, "'num_return_sequences' is 1000000, outside 1..4"),  # 29
        ({"num_return_sequences": np.ones((1, 2), np.int32)}, "must be one INT32, got 2 of int32"),
        ({"stop_words": ["x"] * 10_000}, "'stop_words' holds 10000 texts, more than 256"),  # 33
        ({"stop_words": ["x" * 2**20]}, "'stop_words' holds 1048576 characters, more than"),  # 34
        ({"stop_words": [b"\xff"]}, "'stop_words' holds a text that is not valid UTF-8"),
        ({"embedding_bias_words": ["1"]}, "must come together and have the same length"),
        (
            {"embedding_bias_words": [" "], "embedding_bias_weights": [1.0]},
            "'embedding_bias_words' holds a text without tokens",  # 37
        ),
        (
            {"embedding_bias_words": ["1"], "embedding_bias_weights": [float("nan")]},
            "'embedding_bias' holds NaN",
        ),
    ],
)
@pytest.mark.case(29, 33, 34, 37)
def test_bad_lists_end_with_invalid_arg(
    server: Server, values: dict[str, Any], message: str
) -> None:
    text, code = error_of(server.ask(text_input="1", **values))
    assert message in text
    assert code == FakePbUtils.TritonError.INVALID_ARG


@pytest.mark.parametrize("is_streaming", [True, False])
def test_stop_words_in_the_text_end_the_request(server: Server, is_streaming: bool) -> None:
    """Far below the token limit; an empty word is passed over."""
    sender = server.ask(
        outputs=("text_output", "finish_reason"), text_input="5", max_tokens=200,
        stream=is_streaming, stop_words=["", "9 10"], exclude_input_in_output=True,
    )  # fmt: skip
    assert text_of(sender) == " 6 7 8 "
    last = sender.responses[-1].output_tensors[-1]
    assert (last.name(), last.as_numpy().item()) == ("finish_reason", b"stop_words")
    # The engine may run on until the stop is heard, not to the end.
    assert server.engine._last_token[0] < 200


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize(("words", "num_new"), [(["no", "<end>"], 7), (["11<end>"], 7), (["9"], 4)])
def test_a_special_token_is_a_stop_word_though_no_text_shows_it(
    make_server: MakeServer, tmp_path: Path, words: list[str], num_new: int, is_streaming: bool
) -> None:
    """Chats are often asked to stop at such tokens: "<|eot_id|>", "</s>". That for unknown words is
    special, too, but no word that the tokenizer does not know."""
    vocab = {"<unk>" if i == 7 else str(i): i for i in range(12)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    server = make_server(CountingEngine())
    sender = server.ask(
        outputs=("text_output", "output_ids", "finish_reason"), text_input="5", max_tokens=50,
        stop_words=words, stream=is_streaming, exclude_input_in_output=True,
        stop_words_list=[[40], [1]],
    )  # fmt: skip
    assert ids_of(sender) == list(range(6, 6 + num_new))
    shown = {"no": "6 8 9 10 11", "11<end>": "6 8 9 10", "9": "6 8"}
    assert text_of(sender).split() == shown[words[0]].split()
    [reason] = [t for t in sender.responses[-1].output_tensors if t.name() == "finish_reason"]
    assert reason.as_numpy().item() == b"stop_words"


@pytest.mark.contract("tensorrt_llm input", "embedding_bias")
@pytest.mark.contract("ensemble input", "bad_words embedding_bias_words embedding_bias_weights")
def test_words_become_tokens(server: Server) -> None:
    bias = np.zeros(1000, np.float32)
    bias[3] = 0.5
    server.ask(
        text_input="5", max_tokens=1, bad_words=["7", "8 9", ""], embedding_bias=[bias],
        embedding_bias_words=["3", "4 6"], embedding_bias_weights=[1.0, -2.0],
        bad_words_list=[[1, 2], [2, -1]],
    )  # fmt: skip
    (setup,) = (s for batch in server.engine.batches for s in batch.setups)
    assert setup.sampling.bad_words == ((1, 2), (7,), (8, 9))
    assert setup.sampling.bias == ((3, 1.5), (4, -2.0), (6, -2.0))
