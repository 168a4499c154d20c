"""Kernels joined to a program give what they give alone, on more threads than there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight_kernels.cpu.elementwise import NormWeights, add_norm_stage, add_rms_norm
from inflight_kernels.cpu.linear import linear, linear_stage, pack
from inflight_kernels.cpu.program import Program

SIZE, MOST_ROWS, NUM_LAYERS = 96, 24, 25


@pytest.fixture(params=[1, 4])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_see_what_those_before_them_wrote(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, norm = pack(draw(SIZE, SIZE)), draw(SIZE)
    entered, normed, added, *totals = torch.zeros(5, MOST_ROWS, SIZE, dtype=dtype)
    weights = NormWeights.of(norm, None, 1e-5)
    stages, x, residual = [], entered, entered
    for layer in range(NUM_LAYERS):
        total = totals[layer % 2]
        stages.append(linear_stage(x, weight, None, added))
        stages.append(add_norm_stage(added, residual, weights, normed, total))
        x, residual = normed, total
    program = Program(stages)
    for num_rows in (1, MOST_ROWS, 3):
        entered[:num_rows] = draw(num_rows, SIZE)
        program.run(num_rows)
        x = residual = entered[:num_rows]
        for _ in range(NUM_LAYERS):
            x, residual = add_rms_norm(linear(x, weight, None), residual, norm, 1e-5)
        assert torch.equal(normed[:num_rows], x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "few", "kinds"),
    [
        ("test_elementwise.py", "activations and dtype0", ("relu2", "relu and not relu2")),
        ("test_quantized_linear.py", "shape0 and dtype0", ("float8", "bits")),
    ],
)
def test_what_other_processes_compiled_is_told_apart(
    tmp_path: Path, file: str, few: str, kinds: tuple[str, str]
) -> None:
    """Compiled kinds are kept, one by one; a process finds those of two others."""
    for each in (*kinds, " or ".join(kinds)):
        command = ["-m", "pytest", "-q", str(Path(__file__).with_name(file))]
        done = subprocess.run(
            [sys.executable, *command, "-k", f"{few} and ({each})"],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
