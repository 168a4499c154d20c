"""Requests with adapters through `GptManager`: by weights, by id, by name; and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.adapters import (
    ADAPTERS,
    NUM_TOKENS,
    World,
    greedy,
    prompts_of,
    to_wire,
    write_adapter,
)
from support.checkpoints import write_checkpoint
from support.command_runner import run
from support.gguf_writer import write_gguf
from support.manager_harness import BOTH_LOOPS, GUARANTEED, MAX_UTILIZATION, Recorder, running
from transformers import AutoModelForCausalLM

from inflight_backend.adapters.peft_folder import CONFIG
from inflight_backend.adapters.wire_tensors import read_wire_tensors
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.errors import CheckpointError, ConfigurationError, InvalidRequest
from inflight_backend.manager.gpt_manager import GptManager
from inflight_backend.manager.parameters import (
    KvCacheConfig,
    OverlapScheduler,
    PeftCacheManagerConfig,
    TrtGptModelOptionalParams,
    parse_parameters,
)
from inflight_backend.manager.wait_reasons import describe_wait
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_scheduler import CapacitySchedulerPolicy
from inflight_server.commands.recordings import replay
from inflight_server.commands.whatif import whatif

Tensors = dict[str, Any]
PARAMS = TrtGptModelOptionalParams(
    max_batch_size=16,
    device="cpu",
    kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=4),
)


@pytest.fixture(scope="module")
def wire(world: World) -> dict[str, Tensors]:
    """The weights of each adapter as tensors."""
    found = {}
    for name, answered in world.adapters.items():
        if answered.folder is not None:
            weights, config = to_wire(world.base, answered.folder, np.float32)
            found[name] = {"lora_weights": weights, "lora_config": config}
    return found


@pytest.fixture(scope="module")
def num_bytes(world: World, wire: dict[str, Tensors]) -> dict[str, int]:
    """What each adapter takes in the memory of the host."""
    engine = Engine.load(world.base, EngineConfig(device="cpu", enable_lora=True))
    return {
        name: engine.prepare_adapter(
            read_wire_tensors(
                each["lora_weights"], each["lora_config"], engine.model_config, torch.float32, 12,
                b"",
            )
        ).num_bytes
        for name, each in wire.items()
    }  # fmt: skip


def request(number: int, prompt: list[int], tensors: Tensors, **values: Any) -> InferenceRequest:
    made = InferenceRequest.from_tokens(number, prompt, values.pop("count", NUM_TOKENS), **values)
    for name, tensor in tensors.items():
        made.set_tensor(name, tensor)
    return made


def answers_of(recorder: Recorder, manager: GptManager, requests: list[InferenceRequest]) -> Any:
    """The answer to each, or its error."""
    recorder.pending += requests
    manager.wake()
    recorder.wait_for_finals(*(each.request_id for each in requests))
    found = []
    for each in requests:
        error = recorder.final_errors(each.request_id)[0]
        prompt = each.get_tensor("input_ids").size
        found.append(error or recorder.tokens(each.request_id)[prompt:])
    return found


@BOTH_LOOPS
@pytest.mark.parametrize("num_pages", [2, None])
def test_weights_once_then_by_id(
    world: World, wire: dict[str, Tensors], overlap: OverlapScheduler, num_pages: int | None
) -> None:
    """All kinds in one batch, and requests without one; one id is 0. Two pages hold the largest of
    them alone."""
    cache = PeftCacheManagerConfig(8, 12, num_device_pages=num_pages)
    recorder = Recorder()
    with running(
        recorder, world.base, params=PARAMS, overlap_scheduler=overlap,
        peft_cache_manager_config=cache,
    ) as manager:  # fmt: skip
        first: list[InferenceRequest] = []
        rest: list[InferenceRequest] = []
        expected_first: list[list[int]] = []
        expected_rest: list[list[int]] = []
        for number, (name, answered) in enumerate(world.adapters.items()):
            for place, prompt in enumerate(answered.prompts):
                values = {} if not name else {"lora_task_id": 10 * number}
                is_first = bool(name) and place == 0
                each = request(
                    100 * number + place, prompt, wire[name] if is_first else {}, **values
                )
                (first if is_first else rest).append(each)
                (expected_first if is_first else expected_rest).append(answered.answers[place])
        assert answers_of(recorder, manager, first) == expected_first
        assert answers_of(recorder, manager, rest) == expected_rest
        assert manager.adapters is not None
        assert all(entry.num_users == 0 for entry in manager.adapters.store._entries.values())
    last = recorder.stats[-1]
    assert last["LoRA adapters on the host"] == len(ADAPTERS)
    assert last["LoRA adapter loads"] >= len(ADAPTERS)
    assert (last["LoRA adapter evictions"] > 0) == (num_pages is not None)
    assert last["Used LoRA pages"] <= last["Max LoRA pages"]


def test_a_hundred_requests_by_id(world: World, wire: dict[str, Tensors]) -> None:
    """With weights once, which are loaded once."""
    prompts, answers = world.adapters["plain"].prompts, world.adapters["plain"].answers
    recorder = Recorder()
    with running(recorder, world.base, params=PARAMS) as manager:
        first = request(0, prompts[0], wire["plain"], lora_task_id=10)
        assert answers_of(recorder, manager, [first]) == answers[:1]
        rest = [request(i, prompts[i % 4], {}, lora_task_id=10) for i in range(1, 101)]
        assert answers_of(recorder, manager, rest) == [answers[i % 4] for i in range(1, 101)]
    assert recorder.stats[-1]["LoRA adapter loads"] == 1


@pytest.mark.case(42)
def test_what_is_refused(world: World, wire: dict[str, Tensors]) -> None:
    plain, other = wire["plain"], wire["rank-stabilized"]
    weights, config = plain["lora_weights"], plain["lora_config"]
    wrong_rank, wrong_layer, wrong_module = config.copy(), config.copy(), config.copy()
    wrong_rank[0, 0, 2], wrong_layer[0, 1, 1], wrong_module[0, 2, 0] = 65, 2, 9
    cases: list[tuple[Tensors, dict[str, Any], str]] = [
        ({}, {"lora_task_id": 10}, "LoRA task 10 not found in cache. Please send LoRA weights"),
        (plain, {}, "lora_task_id must be set for LoRA inference"),
        ({"lora_weights": weights}, {"lora_task_id": 1}, "must come together"),
        ({"lora_config": config}, {"lora_task_id": 1}, "must come together"),
        (plain | {"lora_config": config[:, 1:]}, {"lora_task_id": 1}, "14 rows and 'lora_config'"),
        (plain | {"lora_config": config[..., :2]}, {"lora_task_id": 1}, "3 or 4 of int32"),
        (plain | {"lora_config": config[0]}, {"lora_task_id": 1}, "the first dimension must be 1"),
        (plain | {"lora_config": wrong_rank}, {"lora_task_id": 1}, "rank 65 is outside 1..64"),
        (plain | {"lora_config": wrong_layer}, {"lora_task_id": 1}, "layer 2 is outside 0..1"),
        (
            plain | {"lora_config": wrong_module},
            {"lora_task_id": 1},
            "module 9 (cross_attn_q) is not enabled; layer 0 has 0 attn_qkv, 1 attn_q",
        ),
        (plain | {"lora_weights": weights[..., :400]}, {"lora_task_id": 1}, "has 400 numbers"),
        (
            plain | {"lora_weights": np.full_like(weights, np.nan)},
            {"lora_task_id": 1},
            "a number that is not finite",
        ),
        (
            plain | {"lora_config": np.concatenate((config, config[:, :1]), 1),
                     "lora_weights": np.concatenate((weights, weights[:, :1]), 1)},
            {"lora_task_id": 1},
            "is there twice",
        ),
        (other, {"lora_task_id": 7}, "'lora_task_id' 7 is in the cache with other weights"),
        ({}, {"lora_name": "x"}, "LoRA x is not supported, we currently support []"),
        ({}, {"lora_name": "x", "lora_task_id": 7}, "exclude one another"),
    ]  # fmt: skip
    recorder, prompt = Recorder(), [1, 2, 3]
    with running(recorder, world.base, params=PARAMS) as manager:
        answers_of(recorder, manager, [request(0, prompt, plain, lora_task_id=7)])
        requests = [
            request(number, prompt, tensors, **values)
            for number, (tensors, values, _) in enumerate(cases, start=1)
        ]
        found = answers_of(recorder, manager, requests)
        for (_, _, message), error in zip(cases, found, strict=True):
            assert message in error
        # What is refused leaves nothing.
        assert manager.adapters is not None
        assert len(manager.adapters.store) == 1


@pytest.mark.case(41)
def test_without_lora(world: World, wire: dict[str, Tensors]) -> None:
    recorder = Recorder()
    with running(recorder, world.base, params=PARAMS, enable_lora=False) as manager:
        asked = [
            request(1, [1], wire["plain"], lora_task_id=0),
            request(2, [1], {}, lora_name="mine"),
        ]
        by_id, by_name = answers_of(recorder, manager, asked)
        assert "'lora_task_id' is not supported by this server, which runs without LoRA" in by_id
        assert by_name == "LoRA feature is not enabled."


def save_prefetched(folder: Path, tensors: Tensors) -> None:
    folder.mkdir(parents=True)
    for name, tensor in tensors.items():
        np.save(folder / f"model.{name}.npy", tensor)


def test_at_start_by_id_and_by_name(world: World, wire: dict[str, Tensors], tmp_path: Path) -> None:
    """``lora_prefetch_dir`` and ``lora_modules``; a prefetched id may come with its weights."""
    save_prefetched(tmp_path / "0", wire["plain"])
    save_prefetched(tmp_path / "12", wire["dora"])
    # As its converter saves bfloat16.
    rounded = torch.from_numpy(wire["plain"]["lora_weights"]).bfloat16()
    saved = rounded.view(torch.int16).numpy().view("V2")
    save_prefetched(tmp_path / "13", wire["plain"] | {"lora_weights": saved})
    modules = {name: str(world.adapters[name].folder) for name in ADAPTERS}
    cache = PeftCacheManagerConfig(lora_prefetch_dir=str(tmp_path))
    recorder = Recorder()
    with running(
        recorder, world.base, params=PARAMS, lora_modules=modules, peft_cache_manager_config=cache
    ) as manager:
        requests, expected = [], []
        for place, name in enumerate(ADAPTERS):
            answered = world.adapters[name]
            requests.append(request(place, answered.prompts[0], {}, lora_name=name))
            expected.append(answered.answers[0])
        for task_id, name in ((0, "plain"), (12, "dora")):
            prompts, answers = world.adapters[name].prompts, world.adapters[name].answers
            for place, tensors in enumerate(({}, wire[name]), start=1):
                number = 100 + 10 * task_id + place
                requests.append(request(number, prompts[place], tensors, lora_task_id=task_id))
                expected.append(answers[place])
        assert answers_of(recorder, manager, requests) == expected
        same = wire["plain"] | {"lora_weights": rounded.float().numpy()}
        [answer] = answers_of(recorder, manager, [request(500, [1], {}, lora_task_id=13)])
        [again] = answers_of(recorder, manager, [request(501, [1], same, lora_task_id=13)])
        assert answer == again


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("twelve", {}, "the folder 'twelve' is no task id"),
        ("1", {"lora_config": np.zeros((1, 14, 5), np.int32)}, "the adapter 1 cannot be used"),
        ("1", {"host_cache_size": 1000}, "Cache is full"),
    ],
)
def test_prefetched_that_cannot_be_used(
    world: World, wire: dict[str, Tensors], tmp_path: Path, name: str, changes: Any, message: str
) -> None:
    changes = dict(changes)
    size = changes.pop("host_cache_size", 2**30)
    save_prefetched(tmp_path / name, wire["plain"] | changes)
    cache = PeftCacheManagerConfig(lora_prefetch_dir=str(tmp_path), host_cache_size=size)
    params = replace(PARAMS, peft_cache_manager_config=cache)
    with (
        pytest.raises(ConfigurationError, match=message),
        running(Recorder(), world.base, params=params),
    ):
        pass


def test_cached_text_is_that_of_one_adapter(
    world: World, wire: dict[str, Tensors], num_bytes: dict[str, int]
) -> None:
    """Also of an id that comes again with other weights, once its first ones were evicted."""
    plain, other = wire["plain"], wire["patterns"]
    prompt, size = [*range(40)], max(num_bytes["plain"], num_bytes["patterns"])  # either fits
    cache = PeftCacheManagerConfig(host_cache_size=size)
    recorder, number = Recorder(), 0
    with running(recorder, world.base, params=PARAMS, peft_cache_manager_config=cache) as manager:

        def ask(tensors: Tensors, **values: Any) -> tuple[Any, int]:
            nonlocal number
            number += 1
            each = request(number, prompt, tensors, **values, return_perf_metrics=True)
            (answer,) = answers_of(recorder, manager, [each])
            return answer, recorder.last(number, "kv_cache_reused_blocks")

        first, reused = ask(plain, lora_task_id=1)
        assert reused == 0
        assert ask({}, lora_task_id=1) == (first, 10)
        assert ask({})[1] == 0
        second, reused = ask(other, lora_task_id=2)
        assert (reused, second != first) == (0, True)
        error, _ = answers_of(recorder, manager, [request(99, prompt, {}, lora_task_id=1)]), 0
        assert "not found in cache" in error[0]
        assert ask(other, lora_task_id=1) == (second, 10)


@pytest.mark.case(43)
def test_loaded_and_unloaded_while_it_runs(world: World, tmp_path: Path) -> None:
    assert world.adapters["dora"].folder is not None
    root = world.adapters["dora"].folder.parent
    recorder = Recorder()
    with running(recorder, world.base, params=PARAMS, lora_root=str(root)) as manager:
        service = manager.adapters
        assert service is not None
        service.load("mine", "dora")
        prompts, answers = world.adapters["dora"].prompts, world.adapters["dora"].answers
        requests = [request(i, prompt, {}, lora_name="mine") for i, prompt in enumerate(prompts)]
        assert answers_of(recorder, manager, requests) == answers
        service.unload("mine")
        (error,) = answers_of(recorder, manager, [request(9, [1], {}, lora_name="mine")])
        assert "LoRA mine is not supported" in error
        (root / "pipe").mkdir()
        os.mkfifo(root / "pipe" / CONFIG)
        refusals: list[tuple[Callable[[], None], str]] = [
            (lambda: service.load("x", "../../etc"), "does not lie below lora_root"),
            (lambda: service.load("../../etc", "../../etc"), "does not lie below lora_root"),
            (lambda: service.load("x", "/etc"), "does not lie below lora_root"),
            (lambda: service.load("x", "a\0b"), "is no folder"),
            (lambda: service.load("x", "base"), "^base/adapter_config.json cannot be read"),
            (lambda: service.load("x", "pipe"), "^pipe/adapter_config.json cannot be read"),
            (lambda: service.unload("mine"), "there is no adapter 'mine'"),
        ]
        for act, message in refusals:
            with pytest.raises(InvalidRequest, match=message):
                act()
        with ThreadPoolExecutor() as pool:  # one is faster than the others
            calls = [pool.submit(service.load, "same", "dora") for _ in range(4)]
        errors = [str(call.exception()) for call in calls if call.exception() is not None]
        assert errors == ["there is an adapter 'same' already; unload it first"] * 3
        assert len(service.store) == 1


@pytest.mark.contract(
    "tensorrt_llm parameter",
    "lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction "
    "lora_cache_host_memory_bytes lora_prefetch_dir",
)
def test_parameters_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "multi_lora.json").write_text('{"mine": "/adapters/mine"}')
    raw = {
        "gpt_model_path": "/model",
        "lora_cache_optimal_adapter_size": "16",
        "lora_cache_max_adapter_size": "32",
        "lora_cache_gpu_memory_fraction": "0.1",
        "lora_cache_host_memory_bytes": "1000",
        "lora_prefetch_dir": "/adapters",
        "lora_modules": str(tmp_path / "multi_lora.json"),
        "enable_lora": "true",
    }
    params = TrtGptModelOptionalParams.from_parameters(parse_parameters(raw))
    expected = PeftCacheManagerConfig(16, 32, 0.1, None, 1000, "/adapters")
    assert params.peft_cache_manager_config == expected
    assert (params.enable_lora, params.lora_modules) == (True, {"mine": "/adapters/mine"})
    with pytest.raises(ConfigurationError, match="must be a JSON object of names and folders"):
        TrtGptModelOptionalParams.from_parameters(
            parse_parameters(raw | {"lora_modules": '{"mine": 3}'})
        )


def _note_reasons(manager: GptManager, ids: list[int], reasons: list[str]) -> None:
    """On the loop's thread."""
    reasons += [describe_wait(manager._batcher, each)["reason"] for each in ids]


@pytest.mark.parametrize(
    "policy",
    [MAX_UTILIZATION, pytest.param(GUARANTEED, marks=pytest.mark.slow)],
    ids=lambda each: each.name,
)
def test_a_recording_with_adapters_is_decided_again(
    world: World, wire: dict[str, Tensors], num_bytes: dict[str, int], tmp_path: Path,
    policy: CapacitySchedulerPolicy,
) -> None:  # fmt: skip
    """Two ids have the same weights, one gets others after an eviction; two pages are too few for
    all at once, and who waits for them is told so."""
    sent = [(1, "plain"), (2, "plain"), (3, "patterns"), (4, "dora")]
    size = sum(num_bytes[name] for _, name in sent)
    sent += [(5, "plain"), (6, "dora"), (7, "patterns"), (1, "rank-stabilized")]
    cache = PeftCacheManagerConfig(8, 12, num_device_pages=2, host_cache_size=size)
    file, recorder, prompt = tmp_path / "r.jsonl", Recorder(), [*range(20)]
    reasons: list[str] = []
    with running(
        recorder, world.base, policy, params=PARAMS, record_file=str(file),
        peft_cache_manager_config=cache,
    ) as manager:  # fmt: skip
        for turn, (task_id, name) in enumerate(sent):
            others = [each for each in (1, 2, 3, 4) if each != task_id] if turn == 3 else []
            requests = [
                request(10 * turn, prompt, wire[name], lora_task_id=task_id),
                request(10 * turn + 1, prompt, {}),
                *(
                    request(10 * turn + 2 + each, prompt[:each], {}, lora_task_id=each)
                    for each in others
                ),
            ]
            if turn == 3:
                ids = [each.request_id for each in requests]
                note = partial(_note_reasons, manager, ids, reasons)
                for each in ids:
                    recorder.when(each, 1, note)
            errors = answers_of(recorder, manager, requests)
            assert not any(isinstance(each, str) for each in errors), errors
    assert any("waiting for adapter pages: needs 2, free " in each for each in reasons), reasons
    assert recorder.stats[-1]["LoRA host cache evictions"] > 0
    assert recorder.stats[-1]["LoRA adapter wait time"] > 0
    assert max(each.get("LoRA requests waiting", 0) for each in recorder.stats) > 0
    done = run(replay, file)
    assert done.stdout.startswith("identical, "), done.output
    done = run(whatif, file)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_64_adapters_in_turn_over_memory_for_8(world: World, tmp_path: Path) -> None:
    """Four streams of each, some of them stopped; the weights are sent once, later the id."""
    model: Any = AutoModelForCausalLM.from_pretrained(world.base, dtype=torch.float32)
    linears = [
        (module_id, layer, getattr(part, name))
        for layer, block in enumerate(model.model.layers)
        for module_id, part, name in (
            (1, block.self_attn, "q_proj"),
            (5, block.mlp, "gate_proj"),
            (6, block.mlp, "down_proj"),
        )
    ]
    generator, prompts = torch.Generator().manual_seed(3), prompts_of(4, 7)
    requests: list[InferenceRequest] = []
    expected: list[list[int]] = []
    stops: dict[int, int] = {}
    for task_id in range(64):
        rows, config = [], []
        before = [linear.weight.data.clone() for _, _, linear in linears]
        for module_id, layer, linear in linears:
            rank = 1 + (task_id + layer) % 8
            a = torch.randn(rank, linear.in_features, generator=generator) / 4
            b = torch.randn(linear.out_features, rank, generator=generator) / 4
            rows.append(torch.cat((a.flatten(), b.flatten())).numpy())
            config.append([module_id, layer, rank])
            linear.weight.data += b @ a
        weights = np.zeros((1, len(rows), max(map(len, rows))), np.float32)
        for number, row in enumerate(rows):
            weights[0, number, : len(row)] = row
        tensors = {"lora_weights": weights, "lora_config": np.array([config], np.int32)}
        answers = greedy(model, prompts, NUM_TOKENS)
        for number, prompt in enumerate(prompts):
            request_id = 4 * task_id + number
            requests.append(
                request(request_id, prompt, {} if number else tensors, lora_task_id=task_id,
                        is_streaming=True)
            )  # fmt: skip
            if float(torch.rand((), generator=generator)) < 0.3:
                stops[request_id] = int(torch.randint(1, NUM_TOKENS - 1, (), generator=generator))
        expected += answers
        for (_, _, linear), weight in zip(linears, before, strict=True):
            linear.weight.data = weight
    assert len({tuple(each) for each in expected}) > 200
    recorder = Recorder()
    cache = PeftCacheManagerConfig(8, 8, num_device_pages=8)
    with running(
        recorder, world.base, MAX_UTILIZATION, params=PARAMS, max_batch_size=24,
        overlap_scheduler=OverlapScheduler.ON, peft_cache_manager_config=cache,
        kv_cache_config=KvCacheConfig(max_tokens=240, tokens_per_block=4),
    ) as manager:  # fmt: skip
        for request_id, num_responses in stops.items():
            recorder.when(request_id, num_responses, partial(recorder.stops.add, request_id))
        answers_of(recorder, manager, requests)
        batcher, service = manager._batcher, manager.adapters
        assert service is not None
        assert batcher._adapters is not None
        places = batcher._adapters.places
        assert batcher.is_idle_and_intact()
        assert places.num_used_pages <= 8
        assert places.num_evictions >= 56
        assert len(service.store) == 64
        assert all(entry.num_users == 0 for entry in service.store._entries.values())
        engine: Any = manager.engine
        assert len(engine._adapters.table._loaded) == len(places)
    num_cut = 0
    for each, answer in zip(requests, expected, strict=True):
        tokens = recorder.tokens(each.request_id)
        assert recorder.final_errors(each.request_id) == [""]
        if each.request_id not in stops:
            assert tokens == answer
        assert tokens == answer[: len(tokens)]
        num_cut += len(tokens) < len(answer)
    assert num_cut > 30
    assert recorder.total("Paused Requests") > 0


@pytest.mark.slow
def test_over_a_gguf_file(world: World, wire: dict[str, Tensors], tmp_path: Path) -> None:
    """Whose rows of queries and keys are in another order; by tensors and by name."""
    base = write_checkpoint(tmp_path / "base", "llama-mha")
    folder, file, prompts = tmp_path / "adapter", tmp_path / "demo.gguf", prompts_of(3, 2)
    expected = write_adapter(base, folder, 5, prompts, NUM_TOKENS, **ADAPTERS["plain"])
    write_gguf(base, file, "llama")
    weights, config = to_wire(base, folder, np.float32)
    tensors = {"lora_weights": weights, "lora_config": config}
    recorder = Recorder()
    with running(recorder, file, params=PARAMS, lora_modules={"mine": str(folder)}) as manager:
        requests = [
            *(request(i, each, tensors, lora_task_id=1) for i, each in enumerate(prompts)),
            *(request(9 + i, each, {}, lora_name="mine") for i, each in enumerate(prompts)),
        ]
        assert answers_of(recorder, manager, requests) == [*expected, *expected]
    write_adapter(base, folder, 5, **ADAPTERS["dora"])
    with (
        pytest.raises(CheckpointError, match=r"use_dora needs the weight model.layers.0.*GGUF"),
        running(recorder, file, params=PARAMS, lora_modules={"mine": str(folder)}),
    ):
        pass


@pytest.mark.slow
@BOTH_LOOPS
@pytest.mark.parametrize("width", [1, 3])
def test_as_the_model_that_it_is_merged_into(
    world: World, tmp_path: Path, width: int, overlap: OverlapScheduler
) -> None:
    """Beams, drafts, prompts in chunks, penalties, pauses: each row has the adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(world.base, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(model, world.adapters["plain"].folder)
    adapted.merge_and_unload().save_pretrained(tmp_path)
    prompts = [[*each, *each, *each] for each in prompts_of(6, 9)]
    asked: list[dict[str, Any]] = [
        {},
        {"beam_width": width},
        {"repetition_penalty": 1.3},
        {"beam_width": min(width, 2)},
        {},
        {"min_length": 9},
    ]

    def answers(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
        name = {"lora_name": "mine"} if options else {}
        recorder = Recorder()
        with running(
            recorder, folder, MAX_UTILIZATION, params=PARAMS, max_beam_width=width,
            overlap_scheduler=overlap, max_num_tokens=16, enable_chunked_context=True,
            speculative_decoding_config=SpeculativeDecodingConfig(mode="ngram", max_draft_len=3),
            kv_cache_config=KvCacheConfig(max_tokens=160, tokens_per_block=4), **options,
        ) as manager:  # fmt: skip
            recorder.pending += [
                request(number, prompt, {}, count=30, **values, **name)
                for number, (prompt, values) in enumerate(zip(prompts, asked, strict=True))
            ]
            manager.wake()
            recorder.wait_for_finals(*range(6))
        assert all(recorder.final_errors(number) == [""] for number in range(6))
        totals = {key: recorder.total(key) for key in ("Paused Requests", "Draft Tokens")}
        return [recorder.tokens(number) for number in range(6)], totals

    folder = world.adapters["plain"].folder
    found, totals = answers(world.base, lora_modules={"mine": str(folder)})
    assert found == answers(tmp_path)[0]
    assert all(totals.values()), totals
