"""Checkpoints as the original tools saved them (``tools/write_quantized_checkpoints.py``), against
the logits of the numbers that the tools themselves say the weights stand for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.engine_driver import EngineDriver, Job

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import parameter_tensors
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import OutputParams

DATA = Path(__file__).resolve().parents[2] / "data" / "quantized"
ROWS = sorted(path.name for path in DATA.iterdir())
CONFIG = EngineConfig(
    device="cpu", dtype="float32", max_batch_size=1, max_tokens_in_paged_kv_cache=64
)
_ROUNDS = {"ct_w8a8_smoothquant_gptq": 0.08, "ct_fp8_kv": 0.08, "modelopt_fp8_kv": 0.1}
"""Activations become integers, or a cache FP8: bounds of the mean, in deviations of the logits."""

_TOLD_BY_TENSORS = ("modelopt_int4_awq",)
"""For which linears there are factors of columns."""


def difference(row: str, config: EngineConfig) -> tuple[float, float]:
    """The largest and the root of the mean square, in units of the deviation."""
    wanted = load_file(DATA / row / "expected.safetensors")
    driver = EngineDriver(Engine.load(DATA / row, config))
    job = Job(wanted["tokens"].tolist(), outputs=OutputParams(context_logits=True))
    found = []
    for chunk in (17, 0):
        driver.step({job: chunk}, [])
        outputs = driver.engine.take_outputs()
        assert outputs is not None
        found += [torch.tensor(each.logits) for each in outputs.context_logits]
    off = (torch.cat(found) - wanted["logits"]) / wanted["logits"].std()
    return float(off.abs().max()), float(off.square().mean().sqrt())


@pytest.mark.fast(8)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_logits_are_those_that_the_tool_says(row: str, backend: str) -> None:
    config = replace(CONFIG, attention_backend=backend)
    largest, mean = difference(row, config)
    if row in _ROUNDS:
        assert mean < _ROUNDS[row]
    else:
        assert largest < 1e-4
    if row.endswith("fp8_kv"):
        assert make_plan(DATA / row, config).kv_cache_dtype == "fp8"
        assert difference(row, replace(config, kv_cache_dtype="model"))[0] < 1e-4


@pytest.mark.fast(6)
@pytest.mark.parametrize("row", ROWS)
def test_memory_is_what_is_planned(row: str) -> None:
    with Checkpoint(DATA / row) as opened:
        specs = decoder_parameters(opened.fit(read_model(DATA / row)))
        parameters = opened.load(specs, torch.bfloat16, "cpu", backend="compiled")
    taken = sum(each.nbytes for part in parameters.values() for each in parameter_tensors(part))
    config = replace(CONFIG, dtype="bfloat16", attention_backend="compiled")
    assert make_plan(DATA / row, config).weight_bytes == taken


@pytest.mark.parametrize("row", [row for row in ROWS if row not in _TOLD_BY_TENSORS])
def test_memory_is_planned_by_what_config_json_says(tmp_path: Path, row: str) -> None:
    """Of a checkpoint on the Hub whose weights are not here, nor the scales of a cache. (One says
    float32 of tables in float16.)"""
    for path in (DATA / row).glob("*.json"):
        shutil.copy(path, tmp_path)
    dtype = "bfloat16" if row == "awq_autoawq" else "float32"
    config = replace(CONFIG, kv_cache_dtype="model", dtype=dtype)
    wanted = make_plan(DATA / row, config).weight_bytes
    planned = make_plan(tmp_path, config, may_lack_weights=True)
    assert planned.file_bytes is None
    assert planned.weight_bytes == pytest.approx(wanted, abs=8)  # those of one layer
