"""FP8 weights are made while they stream in: same numbers, and never two forms of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inflight_backend.engine.memory_plan import PlanSettings, make_plan
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.layers import Fp8Weight, Parameter, quantize
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint

SIZES = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 16}


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint whose linears outweigh all else."""
    return checkpoint("qwen2-tied", **SIZES)


@torch.inference_mode()
def load(folder: Path, *, is_fp8: bool) -> dict[str, Parameter]:
    specs = decoder_parameters(ModelConfig.from_folder(folder))
    with Checkpoint(folder) as opened:
        return opened.load(specs, torch.bfloat16, "cpu", is_fp8=is_fp8)


def num_bytes(parameters: dict[str, Parameter]) -> int:
    tensors: list[Tensor] = []
    for parameter in parameters.values():
        tensors += parameter.rows if isinstance(parameter, Fp8Weight) else [parameter]
    return sum(tensor.nbytes for tensor in tensors)


def peak_bytes(call: Callable[[], Any], mapped_bytes: int) -> int:
    """The most memory that torch took at once while ``call`` ran: every allocation and every
    release, as the profiler books them. The file itself, which is mapped, is booked as well; it is
    left out by its size."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    results = profiled.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    assert events, "the profiler books no memory any more"
    taken = most = 0
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes.count(mapped_bytes) == sizes.count(-mapped_bytes) == 1
    for size in sizes:
        taken += 0 if abs(size) == mapped_bytes else size
        most = max(most, taken)
    del kept
    return most


def test_rows_are_those_of_the_whole_weight(folder: Path) -> None:
    plain, quantised = load(folder, is_fp8=False), load(folder, is_fp8=True)
    assert plain.keys() == quantised.keys()
    linears = [name for name, value in quantised.items() if isinstance(value, Fp8Weight)]
    assert {name.rpartition(".")[2] for name in linears} == {"weight"}
    assert len(linears) == 4 * ModelConfig.from_folder(folder).num_layers
    for name, value in quantised.items():
        weight = plain[name]
        assert isinstance(weight, Tensor)
        if isinstance(value, Fp8Weight):
            expected = quantize(weight)
            assert value.dtype == torch.bfloat16
            assert torch.equal(value.rows.values.float(), expected.values.float()), name
            assert torch.equal(value.rows.scales, expected.scales), name
        else:
            assert torch.equal(value, weight)


def test_the_peak_is_the_end_state_and_a_part_of_one_tensor(folder: Path) -> None:
    """All weights in bfloat16 first would take nearly twice as much."""
    load(folder, is_fp8=True)  # what torch takes once is no part of it
    end_state = num_bytes(load(folder, is_fp8=True))
    assert (
        end_state
        == make_plan(folder, PlanSettings(dtype="bfloat16", quantization="fp8")).weight_bytes
    )
    [file] = folder.glob("*.safetensors")
    largest = max(tensor.nbytes for tensor in load_file(file).values())
    peak = peak_bytes(lambda: load(folder, is_fp8=True), file.stat().st_size)
    assert end_state <= peak < end_state + largest
    quantised_later = peak_bytes(
        lambda: [quantize(p) for p in load(folder, is_fp8=False).values() if isinstance(p, Tensor)],
        file.stat().st_size,
    )
    assert quantised_later > end_state + 2 * largest, "the measure sees the other way"
