"""Exactly one final for every request, under any order of everything that can end one, and nothing
held any more when it leaves.

The engine takes a step only when told to, so that what happens between two steps is chosen here:
hypothesis writes the story, the rules must hold whatever it is.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend.triton.conftest import MakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manager_harness import GUARANTEED, MAX_UTILIZATION, Recorder, request, running
from support.triton_harness import (
    WAIT,
    Gate,
    Server,
    error_of,
    ids_of,
    responses_of,
    text_of,
    wait_until,
)
from support.triton_stories import (
    KINDS,
    LONGEST,
    NUM_NAMES,
    SteppedEngine,
    StrictSender,
    demo_story,
    sequences_of,
    story,
)
from support.triton_stub import CountingEngine, FakePbUtils, FakeRequest, FakeSender
from tokenizers import Tokenizer, models, pre_tokenizers

from inflight_backend.errors import InvalidRequest
from inflight_backend.manager import statistics
from inflight_backend.manager.parameters import KvCacheConfig, TrtGptModelOptionalParams
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.validation import validate
from inflight_backend.triton import frontend
from inflight_backend.triton.frontend import copy_request
from inflight_backend.triton.queue import RequestIds
from inflight_backend.triton_io.request import TritonRequest
from inflight_protocol.tensors import make_inputs
from inflight_recorder import recorder as recorder_module
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch

pytestmark = pytest.mark.slow

names = st.integers(0, NUM_NAMES - 1)


def acts_with(forms: list[str], kinds: list[str]) -> st.SearchStrategy[Any]:
    """What may happen: requests of these forms, steps that go like this, and all that ends one."""
    return st.one_of(
        st.tuples(
            st.just("send"), names, st.integers(1, 20), st.integers(1, LONGEST),
            st.sampled_from(forms),
        ),
        st.tuples(st.just("stop"), names),
        st.tuples(st.just("cancel"), names),
        st.tuples(st.just("expire"), names),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("step"), st.sampled_from(["ok", "ok", "ok", *kinds])),
        st.tuples(st.just("step"), st.just("ok")),
    )  # fmt: skip


acts = acts_with(["plain", "plain", "sequences", "drafts"], list(KINDS))

demo_acts = acts_with(["plain", "sequences", "beams", "guided"], ["raise", "exit"])


@pytest.mark.case(56, 57, 58, 59, 60, 61, 62, 66, 67, 86, 87, 89, 99, 117, 118)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("overlap", ["off", "on"])
@settings(max_examples=60, deadline=None)
@given(story_acts=st.lists(acts, min_size=4, max_size=40), is_unloaded=st.booleans())
def test_one_final_whatever_happens(
    overlap: str, policy: str, story_acts: list[Any], is_unloaded: bool
) -> None:
    with story(policy, overlap) as told:
        for act, *arguments in story_acts:
            getattr(told, act)(*arguments)
        told.finish(is_unloaded)


@pytest.mark.case(56, 57, 60, 62, 67, 86, 89, 117, 118)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@settings(max_examples=12, deadline=None)
@given(story_acts=st.lists(demo_acts, min_size=4, max_size=30), is_unloaded=st.booleans())
def test_one_final_with_beams_and_guides(
    policy: str, story_acts: list[Any], is_unloaded: bool
) -> None:
    with demo_story(policy) as told:
        for act, *arguments in story_acts:
            getattr(told, act)(*arguments)
        told.finish(is_unloaded)


@pytest.mark.case(118)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_one_broken_sequence_ends_its_request_when_the_others_have_ended(overlap: str) -> None:
    with story("guaranteed_no_evict", overlap) as told:
        told.send(1, 4, 20, "sequences")
        for kind in ("ok", "ok", "one not a number", "ok"):  # the last tells of the one before
            told.step(kind)
        sender, queue = told.sent[0][1], told.server.model._queue
        # Else the others run on in vain.
        wait_until(lambda: bool(queue._stops) or sender.is_final.is_set())
        for _ in range(4):
            told.step("ok")
        assert sender.is_final.wait(WAIT)
        told.finish(is_unloaded=False)
        assert "logits are not finite" in str(told.sent[0][1].responses[-1].error)


@pytest.mark.case(126)
@pytest.mark.parametrize("form", ["plain", "sequences"])
def test_the_end_of_the_drain_time_frees_before_it_tells(form: str) -> None:
    with story("guaranteed_no_evict", "off") as told:
        told.send(1, 4, 40, form)
        told.step("ok")
        assert told.sent[0][1].has_response.wait(WAIT)
        told.send(2, 4, 40)  # now there is room in the queue
        told.step("ok")
        told.server.end_all()
        wait_until(lambda: bool(told.server.model._queue._stops))
        for _ in range(60):
            told.step("ok")
        for _, sender in told.sent:
            assert sender.is_final.wait(WAIT)
            assert sender.responses[-1].error is not None
            assert "this answer is not complete" in str(sender.responses[-1].error)
        told.finish(is_unloaded=False)


@pytest.mark.case(92, 118)
def test_a_send_that_raises_is_told_when_its_request_is_free() -> None:
    with story("guaranteed_no_evict", "off") as told:
        told.send(1, 4, 40)
        sender = told.sent[0][1]
        real, failures = sender.send, [RuntimeError("shm full")]

        def fail_once(response: Any = None, flags: int = 0) -> None:
            if failures:
                raise failures.pop()
            real(response, flags)

        sender.send = fail_once  # type: ignore[method-assign]
        for _ in range(4):
            told.step("ok")
        model = told.server.model
        wait_until(lambda: not failures)
        wait_until(
            lambda: bool(model._queue._stops) or not model._manager.get_num_active_requests()
        )
        told.finish(is_unloaded=False)
        assert str(sender.responses[-1].error) == "the response could not be sent"
        assert len(told.server.engine.batches) < 20, "it is stopped, not served to its end"


@pytest.mark.case(63)
def test_stops_for_ids_never_seen_are_not_remembered(make_server: MakeServer) -> None:
    server = make_server(CountingEngine())
    for number in range(2000):
        server.send(f"never {number}", stop=True)
    assert server.model._queue._stops == set()
    assert server.model._frontend._ids._name_to_number == {}


@pytest.mark.case(64)
def test_ids_are_compared_and_not_hashed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strings of equal hash, which a map of hashes would take for one."""

    class Same(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    ids = RequestIds()
    first, second = ids.reserve(Same("a")), ids.reserve(Same("b"))
    assert first != second
    assert (ids.find(Same("a")), ids.find(Same("b"))) == (first, second)


@pytest.mark.case(65)
def test_a_huge_id_is_refused_and_a_line_break_does_no_harm(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(CountingEngine())
    refused = server.ask("x" * 1_000_000, input_ids=[1], request_output_len=1)
    assert str(refused.responses[0].error) == (
        "the request id has 1000000 characters, more than 1024"
    )
    name = "a\nERROR faked line\x1b[2J"
    assert ids_of(server.ask(name, input_ids=[1], request_output_len=2)) == [1, 2, 3]
    server.ask(name, stop=True)
    assert "faked" not in caplog.text


@pytest.mark.case(75)
def test_all_clients_vanish_at_once(make_server: MakeServer) -> None:
    engine = SteppedEngine(num_blocks=400)
    server = make_server(engine, max_batch_size="64")
    senders = [StrictSender() for _ in range(80)]
    for number, sender in enumerate(senders):
        server.send(
            f"{number}", sender=sender, input_ids=[1], request_output_len=99, streaming=True
        )
    for _ in range(3):
        engine.steps.grant("ok")
    for sender in senders:
        sender.cancelled = True
    server.model._frontend.check_cancelled()
    engine.steps.grant("ok")
    for sender in senders:
        assert sender.is_final.wait(WAIT)
        assert (sender.num_finals, sender.violations) == (1, [])
    assert len(engine.batches) <= 4, "one iteration later everything is free"
    assert server.model._manager._batcher.is_idle_and_intact()
    engine.steps.let_go()


def test_what_is_not_free_in_time_is_ended_all_the_same(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_LAST_SECONDS", 0.05)
    gate.clear()
    sender = server.send(input_ids=[1], request_output_len=5, streaming=True)
    wait_until(lambda: server.model._manager.get_num_active_requests() == 1)
    server.model._frontend.end_all("leaving")
    assert sender.is_final.is_set(), "its step has not returned"
    assert str(sender.responses[-1].error) == "leaving"


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
    (tensors,) = responses_of(server.ask(outputs=named, input_ids=[4], request_output_len=1))
    assert tensors["batch_index"].tolist() == tensors["sequence_index"].tolist() == [[0]]


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
    limits = server.model._manager.limits
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_return_sequences": 0}, "'num_return_sequences' is 0, outside 1..4"),
        ({"num_return_sequences": 10**6}, "'num_return_sequences' is 1000000, outside 1..4"),  # 29
        ({"num_return_sequences": np.ones((1, 2), np.int32)}, "must be one INT32, got 2 of int32"),
        ({"stop_words": ["x"] * 10_000}, "'stop_words' holds 10000 texts, more than 256"),  # 33
        ({"stop_words": ["x" * 2**20]}, "'stop_words' holds 1048576 characters, more than"),  # 34
        ({"stop_words": [b"\xff"]}, "'stop_words' is not valid UTF-8"),
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
def test_stop_words_in_the_text_end_the_request(
    make_server: MakeServer, tokenizer: None, is_streaming: bool
) -> None:
    """Far below the token limit; an empty word is passed over."""
    server = make_server(CountingEngine(before_step=lambda _: time.sleep(0.01)))
    sender = server.ask(
        outputs=("text_output", "finish_reason"), text_input="5", max_tokens=200,
        stream=is_streaming, stop_words=["", "9 10"], exclude_input_in_output=True,
    )  # fmt: skip
    assert text_of(sender) == " 6 7 8 "
    assert responses_of(sender)[-1]["finish_reason"].item() == b"stop_words"
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
    assert responses_of(sender)[-1]["finish_reason"].item() == b"stop_words"


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


LENGTHS = np.array([[1], [3]], np.int32)

PROMPTS = np.array([[4, 0, 0], [10, 11, 12]], np.int32)  # the first one is padded


def ask(server: Server, **tensors: Any) -> FakeSender:
    request = FakeRequest({name: np.asarray(tensor) for name, tensor in tensors.items()})
    server.model.execute([request])
    assert request.sender.is_final.wait(WAIT)
    return request.sender


def answers_of(sender: FakeSender) -> dict[tuple[int, int], list[int]]:
    """Tokens by row and sequence."""
    answers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tensors in responses_of(sender):
        sequence = tensors["sequence_index"].item() if "sequence_index" in tensors else 0
        place = tensors["batch_index"].item(), sequence
        answers[place] += tensors["output_ids"].reshape(-1).tolist()
    return answers


@pytest.mark.contract("tensorrt_llm input", "input_lengths")
@pytest.mark.case(20)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_each_row_gets_its_own_answer(server: Server, is_streaming: bool) -> None:
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[2], [4]], np.int32),
        exclude_input_in_output=np.array([[True], [True]]),
        streaming=np.array([[is_streaming]] * 2),
    )
    assert answers_of(sender) == {(0, 0): [5, 6], (1, 0): [13, 14, 15, 16]}


@pytest.mark.contract("tensorrt_llm output", "batch_index sequence_index")
def test_rows_and_sequences_together(server: Server) -> None:
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[1], [1]], np.int32),
        num_return_sequences=np.array([[1], [2]], np.int32),
        exclude_input_in_output=np.array([[True], [True]]),
    )
    assert answers_of(sender) == {(0, 0): [5], (1, 0): [13], (1, 1): [13]}
    assert not server.model._frontend._groups


def test_a_bad_row_refuses_all_before_any_starts(server: Server) -> None:
    num_before = len(server.engine.batches)
    sender = ask(
        server,
        input_ids=PROMPTS,
        input_lengths=LENGTHS,
        request_output_len=np.array([[1], [0]], np.int32),
    )
    assert error_of(sender)[0].startswith("'request_output_len' is 0")
    assert len(server.engine.batches) == num_before
    assert server.model._frontend.num_live == 0


def test_another_number_of_rows_is_refused_by_name() -> None:
    inputs = {"input_ids": PROMPTS, "temperature": np.ones((1, 1), np.float32)}
    with pytest.raises(InvalidRequest, match=r"'temperature' has shape \[1, 1\], but the prompt"):
        TritonRequest.from_inputs("", inputs, frozenset())


@pytest.mark.case(79)
@pytest.mark.parametrize("policy", [GUARANTEED, MAX_UTILIZATION])
def test_a_request_that_fills_the_pool_and_short_ones_both_progress(
    policy: CapacitySchedulerPolicy,
) -> None:
    """It needs all 16 blocks; short ones come before and after it without end, and end one by one:
    never is the pool empty by itself."""
    recorder = Recorder()
    ended: list[int] = []
    next_id = [2]

    def length_of(request_id: int) -> int:
        return 4 + request_id % 5

    def keep_coming(request_id: int, is_final: bool) -> None:
        if is_final:
            ended.append(request_id)
            if next_id[0] < 400 and 1 not in ended:
                recorder.pending.append(request(next_id[0], [7], length_of(next_id[0])))
                next_id[0] += 1

    recorder.on_response = keep_coming
    engine = CountingEngine(num_blocks=16, tokens_per_block=4, max_seq_len=64, max_num_tokens=64)
    params = TrtGptModelOptionalParams(max_batch_size=4)
    recorder.pending = [request(100_000 + i, [7], length_of(i)) for i in range(3)]
    recorder.pending.insert(2, request(1, [1] * 4, 60))
    with running(recorder, engine, policy, params=params):
        recorder.wait_for_finals(1)
        recorder.wait_for_finals(*range(2, next_id[0]))
    assert recorder.tokens(1) == list(range(2, 62))
    position = ended.index(1)
    assert position < 100, "short ones overtook it without end"
    for i in range(2, next_id[0]):
        assert recorder.tokens(i) == list(range(8, 8 + length_of(i)))


@pytest.mark.case(81)
def test_prompts_of_64k_tokens_beside_generation_keep_token_gaps_bounded() -> None:
    """Every request that generates gets a token in every iteration, and no iteration is over the
    budget."""
    budget, length = 1024, 2**16
    sizes: list[tuple[int, int]] = []  # of iterations: tokens of chunks, requests that generate

    def measure(batch: ScheduledBatch) -> None:
        chunks = sum(len(chunk.tokens) for chunk in batch.context_chunks)
        sizes.append((chunks, len(batch.generation_slots)))

    engine = CountingEngine(
        num_blocks=5000,
        tokens_per_block=32,
        max_seq_len=length + 64,
        max_num_tokens=budget,
        before_step=measure,
    )
    recorder = Recorder([request(i, [10 * i], 200) for i in range(1, 9)])
    began: list[int] = []

    def add_long(request_id: int, is_final: bool) -> None:
        if len(recorder.tokens(1)) == 5 and not began:
            began.append(len(sizes))
            recorder.pending += [request(100 + k, [3 + k] * length, 2) for k in range(2)]

    recorder.on_response = add_long
    params = TrtGptModelOptionalParams(
        max_batch_size=16,
        enable_chunked_context=True,
        kv_cache_config=KvCacheConfig(enable_block_reuse=True),
    )
    with running(recorder, engine, params=params):
        recorder.wait_for_finals(*range(1, 9), 100, 101)
    assert max(map(sum, sizes)) <= budget
    during = sizes[began[0] + 1 : began[0] + 2 * length // budget]
    assert min(num_generating for _, num_generating in during) == 8
    assert min(map(sum, during)) > budget - 8 - 32, "the long prompts did run beside them"


@pytest.mark.slow
@pytest.mark.case(84)
def test_many_tiny_requests_leave_nothing_behind(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one object per request; `benchmarks/tiny_requests.py` sends a million of them."""
    monkeypatch.setattr(recorder_module, "NUM_CHUNKS", 1)  # full soon
    monkeypatch.setattr(recorder_module, "CHUNK_ITERATIONS", 10)
    monkeypatch.setattr(statistics, "NUM_OBSERVATIONS", 100)
    engine = CountingEngine(num_blocks=16)
    server = make_server(engine, max_batch_size="64")

    def crowd(number: int) -> int:
        for start in range(0, number, 50):
            senders = [
                server.send(f"{start + i}", input_ids=[i], request_output_len=1, streaming=True)
                for i in range(50)
            ]
            for sender in senders:
                assert sender.is_final.wait(WAIT)
        engine.batches.clear()
        del senders, sender
        gc.collect()
        return sys.getallocatedblocks()

    crowd(500)
    first, last = crowd(500), [crowd(2000) for _ in range(4)][-1]
    # Counts of the whole process go up and down by a thousand; a leak would be 8,000.
    assert last - first < 4000, f"{last - first} objects kept of 8,000 requests"
