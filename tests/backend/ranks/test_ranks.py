"""Managers whose engine is several processes: answers are those of one, and lost ranks end all."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.adapters import to_wire, write_world
from support.checkpoints import write_checkpoint
from support.families import write_family
from support.manager_harness import MAX_UTILIZATION, Recorder, request, running, serve
from support.quantized import SCHEMES, write_quantized
from support.server_process import free_ports

from inflight_backend.errors import ConfigurationError, EngineLost
from inflight_backend.manager.batcher import load_engine
from inflight_backend.manager.parameters import (
    KvCacheConfig,
    OverlapScheduler,
    TrtGptModelOptionalParams,
    parse_parameters,
)
from inflight_backend.models.parallel.collectives import GroupCollectives
from inflight_backend.ranks import leader, meeting
from inflight_backend.ranks.machines import Machines
from inflight_backend.ranks.messages import Begin
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_server.serve.settings import DEMO_MODEL

PARAMS = TrtGptModelOptionalParams(
    device="cpu",
    max_batch_size=8,
    max_seq_len=96,
    max_num_tokens=24,  # contexts come in chunks
    kv_cache_config=KvCacheConfig(max_tokens=160, tokens_per_block=4),
    speculative_decoding_config=SpeculativeDecodingConfig("ngram", 4, 3),
    stall_seconds=60.0,
)
LOST = str(EngineLost())
DEMO_VOCABULARY = 258


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def mixed_requests(count: int, vocabulary: int = 0) -> list[InferenceRequest]:
    """Greedy, seeded, penalised, biased, with stop words, with log probabilities and with prefixes
    that recur; for the demo model guided ones and drafts, two of three right; else of a
    ``vocabulary``."""
    dice = random.Random(5)
    of_demo: list[dict[str, Any]] = [
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9 ]{4,9}"},
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)},
        {"draft_input_ids": [222, 18, 21]},
    ]
    bias = np.random.default_rng(5).normal(0, 4, vocabulary or DEMO_VOCABULARY).astype(np.float32)
    unit = [dice.randrange(2, 97) for _ in range(7)]
    kinds: list[dict[str, Any]] = [
        {},
        {"runtime_top_k": 20, "temperature": 0.9, "random_seed": 7},
        {"runtime_top_p": 0.8, "temperature": 0.7, "random_seed": 2**63, "min_length": 5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3},
        {"return_log_probs": True, "return_context_logits": True},
        {"bad_words_list": np.array([[5, 6, 7], [1, 3, -1]], np.int32)},
        {"embedding_bias": bias, "return_log_probs": True},
        {"stop_words_list": np.array([[18, 19, *unit], [1, 2, 9, *[-1] * 6]], np.int32)},
        *([] if vocabulary else of_demo),
    ]
    return [
        request(
            number + 1,
            unit * 3 if number % 3 else [dice.randrange(2, 97) for _ in range(number % 29 + 1)],
            6 + number % 11,
            **kinds[number % len(kinds)],
        )
        for number in range(count)
    ]


def answers(requests: list[InferenceRequest], model: Path, **options: Any) -> list[Any]:
    """Tokens of each, and the sum of its log probabilities; none ends with an error."""
    recorder = serve(requests, model, MAX_UTILIZATION, **options)
    found = []
    for each in requests:
        sent = recorder.named_tensors[each.request_id][-1]
        log_probs = float(np.sum(sent["output_log_probs"])) if "output_log_probs" in sent else 0.0
        assert recorder.final_errors(each.request_id) == [""]
        found.append((recorder.tokens(each.request_id), pytest.approx(log_probs, rel=1e-5)))
    return found


def sized(tensor: int, pipeline: int = 1) -> TrtGptModelOptionalParams:
    return replace(PARAMS, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


@pytest.mark.slow
@pytest.mark.case(97)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_answers_are_those_of_one_process(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """Through chunks, pauses, reuse and drafts; the recording replays without ranks."""
    overlap = OverlapScheduler.ON if tensor == 4 or pipeline == 2 else OverlapScheduler.OFF
    file = tmp_path / "recording"
    params = replace(sized(tensor, pipeline), record_file=str(file), overlap_scheduler=overlap)
    expected = answers(mixed_requests(50), DEMO_MODEL, params=replace(PARAMS))
    assert answers(mixed_requests(50), DEMO_MODEL, params=params) == expected
    with open_recording(file) as recording:
        assert replay(recording).divergence is None


def write_ordered(folder: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain = write_checkpoint(folder / "plain", "llama-mha", **sizes)
    write_quantized(plain, folder, SCHEMES["gptq-order"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", {"tensor_parallel_size": 2}),
        ("gemma3", {"tensor_parallel_size": 2}),  # windows
        ("mixtral", {"tensor_parallel_size": 2, "expert_parallel": True}),
        ("deepseek_v3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),  # latents
        ("gptq-order", {"tensor_parallel_size": 2}),
    ],
)
def test_answers_of_families_are_those_of_one_process(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    folder = tmp_path
    if name in SCHEMES:
        write_ordered(tmp_path)
        folder = tmp_path / "quantised"
    else:
        write_family(tmp_path, name)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    requests = mixed_requests(30, vocabulary)
    expected = answers(requests, folder, params=PARAMS)
    assert answers(requests, folder, params=replace(PARAMS, **changes)) == expected


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_long_steps_of_a_pipeline(tmp_path: Path) -> None:
    """They run in parts, of which both stages have one at a time: with texts that end within a
    part or go on in the next, drafts, reuse, and others that generate meanwhile."""
    folder = write_checkpoint(
        tmp_path / "model", num_key_value_heads=4, max_position_embeddings=512
    )
    dice = random.Random(6)
    unit = [dice.randrange(2, 97) for _ in range(75)]
    kinds: list[dict[str, Any]] = [
        {},
        {"runtime_top_k": 20, "random_seed": 3},
        {"repetition_penalty": 1.3},
    ]
    requests = [
        request(
            number + 1,
            unit[: 5 + 6 * number] * (number % 4 + 1),
            3 + number % 5,
            **kinds[number % len(kinds)],
        )
        for number in range(12)
    ]
    long = replace(PARAMS, max_seq_len=512, max_num_tokens=400,
                   kv_cache_config=KvCacheConfig(max_tokens=4096, tokens_per_block=8))  # fmt: skip
    expected = answers(requests, folder, params=long)
    for tensor in (1, 2):
        params = replace(long, tensor_parallel_size=tensor, pipeline_parallel_size=2)
        assert answers(requests, folder, params=params) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_beams(tmp_path: Path, tensor: int, pipeline: int) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3", num_key_value_heads=2)
    requests = [
        request(
            number + 1, [3, 1, 4, 1, 5 + number], 9,
            streaming=False, beam_width=2 + number % 2, return_log_probs=True,
        )
        for number in range(4)
    ]  # fmt: skip
    expected = answers(requests, folder, params=PARAMS, max_beam_width=3)
    assert answers(requests, folder, params=sized(tensor, pipeline), max_beam_width=3) == expected


@pytest.mark.slow
def test_adapters_are_cut_like_their_linears(tmp_path: Path) -> None:
    """LoRA, DoRA and patterns, in mixed batches."""
    world = write_world(tmp_path)
    requests, expected = list[InferenceRequest](), []
    for number, answered in enumerate(world.adapters.values()):
        for place, prompt in enumerate(answered.prompts[:4]):
            each = request(
                100 * number + place + 1, prompt, len(answered.answers[place]), streaming=False
            )
            if answered.folder is not None:
                weights, config = to_wire(world.base, answered.folder, np.float32)
                each.set_tensor("lora_task_id", np.array([number], np.uint64))
                each.set_tensor("lora_weights", weights)
                each.set_tensor("lora_config", config)
            requests.append(each)
            expected.append(prompt + answered.answers[place])
    params = replace(sized(2, 2), max_num_tokens=None)
    recorder = serve(requests, world.base, params=params)
    assert [recorder.tokens(each.request_id) for each in requests] == expected


def ranks_of_this_process() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children()
        if each.status() != psutil.STATUS_ZOMBIE
        and "inflight_backend.ranks.worker" in each.cmdline()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "silence"), [(signal.SIGKILL, 0.0), (signal.SIGSTOP, 3.0)], ids=["killed", "hung"]
)
def test_a_lost_rank_ends_everything(tmp_path: Path, number: int, silence: float) -> None:
    """In some step, with requests that run and one that waits: each ends once, and new ones are
    refused."""
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=4096)
    params = replace(
        sized(2), max_batch_size=2, max_seq_len=4096, max_num_tokens=4096,
        kv_cache_config=KvCacheConfig(max_tokens=16_384), stall_seconds=max(silence, 2.0),
    )  # fmt: skip
    recorder = Recorder([request(each, [each], 4000) for each in (1, 2, 3)])
    with running(recorder, folder, params=params) as manager:
        steps = random.Random(int(number)).randrange(5, 40)
        while len(recorder.responses.get(1, ())) < steps:
            time.sleep(0.005)
        (victim,) = ranks_of_this_process()
        os.kill(victim.pid, number)
        since = time.monotonic()
        told: list[str] = []
        manager.when_lost(told.append)
        recorder.wait_for_finals(1, 2)
        assert time.monotonic() - since < silence + 15  # 1 s is the aim, on a machine of one's own
        assert not manager.health.is_healthy
        recorder.pending.append(request(4, [4], 5))
        manager.wake()
        recorder.wait_for_finals(3, 4)
        assert told == [LOST]
    assert [recorder.final_errors(each) for each in (1, 2, 3, 4)] == [[LOST]] * 4
    assert ranks_of_this_process() == []
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's, which finds what nobody has closed, at some time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_files() -> tuple[list[str], int]:
    """Of this process: what its descriptors are, and how many mappings of the ranks it has."""
    kinds = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            kinds.append(each.readlink().name.partition(":")[0])
    return sorted(kinds), Path("/proc/self/maps").read_text().count("memfd:inflight")


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["tensor", "pipeline"])
def test_losses_leave_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """In a process that loads the model again after each, and after one as it loads."""
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=4096)
    params = replace(
        sized(2) if part == "tensor" else sized(1, 2), max_seq_len=4096, max_num_tokens=4096,
        kv_cache_config=KvCacheConfig(max_tokens=16_384),
    )  # fmt: skip

    def lose() -> None:
        recorder = Recorder([request(1, [1], 4000)])
        with running(recorder, folder, params=params):
            while len(recorder.responses.get(1, ())) < 10:
                time.sleep(0.005)
            ranks_of_this_process()[0].kill()
            recorder.wait_for_finals(1)
        assert recorder.final_errors(1) == [LOST]

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("here")

    lose()  # the guard of the process has a pipe from now on
    before = open_files()
    for _ in range(3):
        lose()
        assert open_files() == before
    with monkeypatch.context() as patch:
        patch.setattr(leader.LeadingEngine, "load", fail)
        with pytest.raises(ConfigurationError, match="the ranks do not start: here"):
            serve([request(1, [1], 1)], folder, params=params)
    assert open_files() == before


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    """Here: columns that are sorted, which both ranks find out."""
    folder = write_checkpoint(tmp_path / "model", intermediate_size=111)
    with pytest.raises(ConfigurationError, match="does not divide the 111 inner numbers"):
        serve([request(1, [1], 1)], folder, params=sized(2))
    assert ranks_of_this_process() == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["before they meet", "as they meet", "in a collective"])
def test_a_rank_that_is_lost_while_loading_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever the first rank waits for then; a collective may wait for a day. Another model may be
    loaded in the same process."""
    folder = write_checkpoint(tmp_path / "model")

    def meet(begin: Begin) -> GroupCollectives:
        (victim,) = ranks_of_this_process()
        if moment == "before they meet":
            victim.kill()
        if moment == "as they meet":
            time.sleep(2)  # it has told where it is
            victim.suspend()
            threading.Timer(1, victim.kill).start()
        ranks = meeting.meet(begin)
        victim.kill()
        return ranks

    with monkeypatch.context() as patch:
        patch.setattr(leader, "meet", meet)
        patch.setattr(meeting, "_MEETING_SECONDS", 5.0)
        with pytest.raises(ConfigurationError, match=r"not start: rank 1 has ended \(SIGKILL\)"):
            serve([request(1, [1], 1)], folder, params=sized(2))
    assert ranks_of_this_process() == []
    serve([request(1, [1], 1)], folder, params=sized(2))


FRONT = ("inflight_client", "inflight_openai", "inflight_server", "starlette", "tritonclient")


@pytest.mark.slow
def test_ranks_behind_the_first_import_neither_front_nor_scheduling_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are started faster, and need less memory, for every device."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # Python's own list, on stderr
    serve([request(1, [1], 3)], write_checkpoint(tmp_path / "model"), params=sized(2))
    lines = capfd.readouterr().err.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"torch", "inflight_backend.engine.outputs"} <= names
    unwanted = (*FRONT, "inflight_backend.manager", "inflight_backend.triton", "transformers")
    assert not [
        name
        for name in names
        if any(name == each or name.startswith(f"{each}.") for each in unwanted)
    ]


@pytest.mark.contract("tensorrt_llm parameter", "gpu_device_ids")
@pytest.mark.parametrize(
    ("text", "others", "expected"),
    [
        ("0,1", {}, {"gpu_device_ids": (0, 1), "tensor_parallel_size": 2}),
        ("3, 1, 0, 2", {"pipeline_parallel_size": "2"},
         {"gpu_device_ids": (3, 1, 0, 2), "tensor_parallel_size": 2}),
        ("0,1", {"tensor_parallel_size": "4"}, r"names 2 GPUs .* num_nodes = 1, and .* is 4"),
        ("0,0", {}, "gpu_device_ids must be different numbers"),
        ("0,1;2,3", {}, "gpu_device_ids must be different numbers"),
    ],
)  # fmt: skip
def test_gpus_by_number(text: str, others: dict[str, str], expected: Any) -> None:
    parameters = parse_parameters({"gpt_model_path": "x", "gpu_device_ids": text, **others})
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            TrtGptModelOptionalParams.from_parameters(parameters)
        return
    found = TrtGptModelOptionalParams.from_parameters(parameters)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Which are two groups of processes here; a worker that is asked to stop ends the model."""
    folder = write_checkpoint(tmp_path / "model", num_key_value_heads=4)
    (port,) = free_ports(1)
    machines = Machines(2, "127.0.0.1", port)
    params = replace(sized(2, 2), machines=machines)
    command = [
        *(sys.executable, "-c", "from inflight_client.cli import main; main()", "worker"),
        *("--tp", "2", "--pp", "2", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port)),
    ]
    requests = [request(number + 1, [3, 1, 4 + number], 9) for number in range(4)]
    expected = answers(requests, folder, params=PARAMS)
    worker = subprocess.Popen(command, cwd=tmp_path)
    try:
        recorder = Recorder(requests)
        with running(recorder, folder, params=params) as manager:
            recorder.wait_for_finals(1, 2, 3, 4)
            assert [recorder.tokens(number) for number in (1, 2, 3, 4)] == [
                tokens for tokens, _ in expected
            ]
            assert len(ranks_of_this_process()) == 1
            recorder.pending.append(request(5, [5], 80))
            manager.wake()
            while not recorder.responses.get(5):
                time.sleep(0.005)
            worker.terminate()
            recorder.wait_for_finals(5)
        assert recorder.final_errors(5) == [LOST]
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.contract("tensorrt_llm parameter", "num_nodes")
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_nodes": "2"}, "num_nodes is 2: rank_address must say where"),
        ({"num_nodes": "2", "rank_address": "host"}, "got 'host'"),
        ({"num_nodes": "2", "rank_address": "host:65535"}, "got 'host:65535'"),
    ],
)
def test_addresses_of_machines(parameters: dict[str, str], message: str) -> None:
    raw = parse_parameters({"gpt_model_path": "x", **parameters})
    with pytest.raises(ConfigurationError, match=message):
        TrtGptModelOptionalParams.from_parameters(raw)


def test_a_server_for_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="mpirun has started 2 servers: use --world_size"):
        load_engine(DEMO_MODEL, PARAMS)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_name_of_the_first_machine_may_be_known_late(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """As that of a pod; it may have an address of either kind."""
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    answers_of_dns = [socket.gaierror(socket.EAI_NONAME, "not known"), None]
    ask = socket.getaddrinfo

    def getaddrinfo(name: str, *options: Any, **named: Any) -> Any:
        if name == "leader" and (error := answers_of_dns.pop(0)):
            raise error
        return ask(host if name == "leader" else name, *options, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (port,) = free_ports(1)
    with Machines(2, "leader", port).listening():
        socket.create_connection((host, port)).close()
    assert answers_of_dns == []


def test_ranks_of_machines() -> None:
    machines = Machines(num_nodes=2)
    assert [list(machines.ranks_of(node, 4)) for node in (0, 1)] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigurationError, match="num_nodes is 2, which does not divide the 3"):
        machines.ranks_of(0, 3)
    with pytest.raises(ConfigurationError, match="node_rank is 2"):
        machines.ranks_of(2, 4)
