"""Steps at load: what requests need is compiled by then, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import oracle_tokens
from support.engine_driver import EngineDriver, Job

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.warmup import max_memory_batch, warm_up
from inflight_kernels.cpu.threads import is_available

KERNELS = [
    "_adjust_logits_kernel",
    "_ban_repeated_ngrams_kernel",
    "_ban_words_kernel",
    "_chunk_kernel",
    "_combine_splits_kernel",
    "_copy_blocks_kernel",
    "_mask_logits_kernel",
    "_paged_attention_context_kernel",
    "_paged_attention_generation_kernel",
    "_plan_work_kernel",
    "_rms_norm_kernel",
    "_rope_write_kv_kernel",
    "_sample_kernel",
    "_silu_mul_kernel",
]


@pytest.fixture(scope="module")
def results(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `step_keys` writes, from a process in which Triton does not interpret."""
    folder = checkpoint("qwen2-window", head_dim=16, intermediate_size=64)
    output = tmp_path_factory.mktemp("keys") / "keys.json"
    done = subprocess.run(
        [sys.executable, "-m", "support.step_keys", str(folder), "--output", str(output)],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        cwd=output.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "bfloat16", "fp8 cache", "deterministic"])
def test_requests_need_no_kernel_that_is_not_compiled_at_load(
    results: dict[str, Any], name: str
) -> None:
    result = results[name]
    has_own_linear = name in ("bfloat16", "deterministic")
    extra = ["_invariant_linear_kernel"] if has_own_linear else []
    assert result["first"] == sorted(KERNELS + extra)
    assert result["num_steps"] > 40
    assert result["later"] == []


@pytest.mark.parametrize("num_tokens", [3, 100])
def test_nothing_is_left_of_them(checkpoint: Callable[..., Path], num_tokens: int) -> None:
    """Also where a step holds less than a block, and texts end soon."""
    config = EngineConfig(
        device="cpu",
        max_batch_size=1,
        max_num_tokens=num_tokens,
        max_seq_len=21,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=24,
    )
    folder = checkpoint()
    engine = Engine.load(folder, config)
    warm_up(engine, max_memory_batch(engine.config))
    engine.prepare_thread()
    prompt = [3, 1, 4, 1, 5, 9]
    answer = EngineDriver(engine).generate([Job(prompt)], 6, chunk_size=3)
    assert answer == [oracle_tokens(folder, prompt, 6)]


COUNT = """
import sys
from pathlib import Path
import numba
from support.engine_driver import EngineDriver, Job
from inflight_backend.engine import Engine, EngineConfig
made, cfunc = [], numba.cfunc
numba.cfunc = lambda *arguments, **options: made.append(1) or cfunc(*arguments, **options)
engine = Engine.load(Path(sys.argv[1]), EngineConfig(device="cpu", attention_backend="compiled"))
engine.prepare_thread()
first = len(made)
EngineDriver(engine).generate([Job([3, 1, 4, 1, 5]), Job([9, 2, 6])], 6, chunk_size=3)
print(first, len(made) - first)
"""


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="nothing can be compiled here")
def test_requests_need_no_kernel_of_a_cpu_that_is_not_compiled_at_load(
    checkpoint: Callable[..., Path],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(checkpoint())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, later = map(int, done.stdout.split())
    assert first > 0
    assert later == 0
