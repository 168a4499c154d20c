"""Linears of quantised weights on the device, and whole engines of quantised checkpoints.

Kernels are compared with the product in float32 of what the numbers stand for. The checkpoints are
those of the tests (`tests/support/quantized.py`): in float32 their logits are those of a plain
checkpoint with the same values, in bfloat16 near them, and tokens of recorded steps are those of
eager ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_parts import checks, engine_checks
from gpu_parts.common import Row, Setting
from inflight_backend.engine import Engine
from inflight_kernels import reference

_FP8 = torch.float8_e4m3fn
_NUM_TOKENS = 12
_LAYERS = (
    ("int4", 128, ""),
    ("int4", 32, "zeros"),
    ("int4", 4096, ""),
    ("int4", 64, "order"),
    ("int4", 16, "codebook"),
    ("int8", 4096, ""),
    ("int8", 64, "zeros"),
    ("float8", 4096, ""),
    ("float8", 128, ""),
)
"""What values are, columns that share a scale, and what else there is."""
_BOTH = (("int8", 4096), ("float8", 4096), ("float8", 128))
"""Where x is of few bits, too."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIMITS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}
_ENGINE_LIMIT = 0.05  # in bfloat16, of the logits' deviation; 0.031 at most on an H100
_OF_8_BIT_INPUTS = {
    "ct-w8a8": 0.1,  # 0.059
    **dict.fromkeys(
        ("ct-fp8-tensor-static", "ct-fp8-channel-dynamic", "fbgemm_fp8", "fp8-blocks", "modelopt"),
        0.3,  # 0.19
    ),
}
"""The same where what linears read is rounded to 8 bits too."""
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def rows(setting: Setting) -> Iterator[Row]:
    """Kernels, then engines."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    yield from checks.rows(setting, _checks(setting))


def _checks(setting: Setting) -> Iterator[checks.Check]:
    tokens = (3,) if setting.is_dry else (1, 17, 64, 300)
    for kind, group_size, option in _LAYERS:
        for dtype in _DTYPES[:1] if setting.is_dry else _DTYPES:
            for num_tokens in tokens if dtype == torch.bfloat16 else tokens[:2]:
                name = f"{kind} groups of {group_size} {option} {dtype}, {num_tokens} tokens"
                run = partial(_linear, setting, kind, group_size, option, dtype, num_tokens)
                yield checks.Check(name, _LIMITS[dtype], run, has_rows=True)
    for kind, group_size in _BOTH:
        for num_tokens in tokens:
            name = f"{kind} groups of {group_size} for both, {num_tokens} tokens"
            run = partial(_both, setting, kind, group_size, num_tokens)
            yield checks.Check(name, 1e-2, run, has_rows=True)
    for kind, group_size, is_plain in (
        ("int4", 128, False),
        ("int8", 4096, False),
        ("float8", 128, False),
        ("float8", 128, True),
        ("int8", 4096, True),
    ):
        name = f"experts {kind} groups of {group_size}{', both' if is_plain else ''}"
        run = partial(_experts, setting, kind, group_size, is_plain=is_plain)
        yield checks.Check(name, 1e-2, run, has_rows=True)
    yield from _checks_of_heads(setting)
    yield checks.Check("the same bits again and again", 0.0, partial(_again, setting))
    if not checks.is_there("transformers"):  # it writes the checkpoints
        return
    support = import_module("support.quantized")
    schemes = {**support.SCHEMES, "ct-w8a8": support.W8A8}
    for name, scheme in list(schemes.items())[:2] if setting.is_dry else schemes.items():
        run = partial(_engine, setting, scheme, "float32")
        # What linears read is rounded to 8 bits there in any dtype.
        yield checks.Check(f"{name}, float32", 0.1 if name == "ct-w8a8" else 1e-4, run)
        run = partial(_engine, setting, scheme, "bfloat16")
        limit = _OF_8_BIT_INPUTS.get(name, _ENGINE_LIMIT)
        yield checks.Check(f"{name}, bfloat16", limit, run)
        run = partial(_recorded, setting, scheme)
        yield checks.Check(f"{name}, recorded against eager", 0.0, run)


def _checks_of_heads(setting: Setting) -> Iterator[checks.Check]:
    for (kind, group_size, option), by_rows in product(
        (("int4", 64, "order"), ("float8", 128, "")), (True, False)
    ):
        name = f"heads {kind} groups of {group_size} by {'rows' if by_rows else 'columns'}"
        run = partial(_heads, setting, kind, group_size, option, by_rows=by_rows)
        yield checks.Check(name, 5e-3, run, has_rows=True)


def _made(setting: Setting, kind: str, group_size: int, option: str, dtype: torch.dtype,
          num_rows: int) -> Any:  # fmt: skip
    """On the CPU."""
    columns = min(group_size, 256) if setting.is_dry else 4096
    columns = max(columns, 256)
    weights = import_module("support.quantized_weights")
    options = frozenset({option} if option else ())
    group_size = min(group_size, columns)
    generator = torch.Generator().manual_seed(3)
    return weights.random_weights(generator, kind, num_rows, columns, group_size, options, dtype)


def _linear(setting: Setting, kind: str, group_size: int, option: str, dtype: torch.dtype,
            num_tokens: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    op = import_module("inflight_kernels.ops.linear.quantized_linear")
    made = _made(setting, kind, group_size, option, dtype, 24 if setting.is_dry else 1000)
    wide = made.wide.to(setting.device)
    x = torch.randn(num_tokens, wide.shape[1]).to(dtype)
    expected = made.gathered(x).float().to(setting.device).double() @ wide.double().t()
    found = op.quantized_linear(x.to(setting.device), made.prepared(setting.device))
    return found, expected.float()


def _heads(
    setting: Setting, kind: str, group_size: int, option: str, *, by_rows: bool
) -> tuple[Tensor, Tensor]:
    op, heads = import_module("inflight_kernels.ops.linear.head_linear"), 4
    made = _made(setting, kind, group_size, option, torch.bfloat16, heads * 40)
    columns = made.wide.shape[1]
    order = None if made.order is None else made.order[0]
    wide = made.wide if order is None else made.wide[:, order.argsort()]
    wide = wide.view(heads, 40, columns).to(setting.device)
    x = torch.randn(20, heads, 40 if by_rows else columns).bfloat16().to(setting.device)
    expected = reference.head_linear(x.double(), wide.double(), by_rows=by_rows)
    found = op.head_linear(
        x,
        made.values.to(setting.device),
        made.scales.to(setting.device),
        group_size=made.group_size,
        by_rows=by_rows,
        order=None if order is None else order.to(setting.device),
    )
    return found.flatten(1), expected.float().flatten(1)


def _quantized(setting: Setting, kind: str, x: Tensor, is_whole: bool) -> tuple[Tensor, Tensor]:
    if kind == "int8":
        found: tuple[Tensor, Tensor] = import_module(
            "inflight_kernels.ops.linear.quantize_int8"
        ).quantize_int8(x)
        return found
    op = import_module("inflight_kernels.ops.linear.quantize_fp8")
    found = op.quantize_fp8(x, None if is_whole else 128)
    return found


def _both(setting: Setting, kind: str, group_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    op = import_module("inflight_kernels.ops.linear.quantized_linear")
    num_rows = 24 if setting.is_dry else 1000
    made = _made(setting, kind, group_size, "", torch.bfloat16, num_rows)
    wide = made.wide.to(setting.device)
    x = torch.randn(num_tokens, wide.shape[1], dtype=torch.bfloat16, device=setting.device)
    numbers, scales = _quantized(setting, kind, x, made.group_size == wide.shape[1])
    wide_x = reference.dequantize(numbers.cpu(), scales.cpu(), None, made.group_size)
    expected = wide_x.to(setting.device).double() @ wide.double().t()
    weight = made.prepared(setting.device, is_plain=True)
    return op.quantized_linear(numbers, weight, x_scales=scales), expected.float()


def _experts(
    setting: Setting, kind: str, group_size: int, *, is_plain: bool
) -> tuple[Tensor, Tensor]:
    """Groups of no, one and many rows."""
    op = import_module("inflight_kernels.ops.linear.quantized_linear")
    sizes = [0, 1, 3] if setting.is_dry else [0, 1, 300, 17, 0, 64]
    num_rows = 24 if setting.is_dry else 500
    made = _made(setting, kind, group_size, "", torch.bfloat16, num_rows * len(sizes))
    wide = made.wide.to(setting.device).double().view(len(sizes), num_rows, -1)
    starts = torch.tensor([0, *sizes], device=setting.device).cumsum(0).int()
    x = torch.randn(sum(sizes), wide.shape[2], dtype=torch.bfloat16, device=setting.device)
    scales, wide_x = None, x.double()
    if is_plain:
        x, scales = _quantized(setting, kind, x, made.group_size == wide.shape[2])
        wide_x = reference.dequantize(x.cpu(), scales.cpu(), None, made.group_size)
        wide_x = wide_x.to(setting.device).double()
    weight = made.prepared(setting.device, is_plain=is_plain)
    found = op.quantized_linear(x, weight, x_scales=scales, starts=starts)
    parts = zip(wide_x.tensor_split(starts[1:-1].tolist()), wide, strict=True)
    return found, torch.cat([rows_ @ own.t() for rows_, own in parts]).float()


def _again(setting: Setting) -> tuple[Tensor, Tensor]:
    """Programs that share columns add up in one order, and leave nothing for the next launch."""
    op = import_module("inflight_kernels.ops.linear.quantized_linear")
    made = _made(setting, "int4", 128, "", torch.bfloat16, 24 if setting.is_dry else 1000)
    weight = made.prepared(setting.device)
    x = torch.randn(5, weight.columns, dtype=torch.bfloat16, device=setting.device)
    found = [op.quantized_linear(x, weight) for _ in range(3 if setting.is_dry else 200)]
    return torch.cat(found), torch.cat([found[0]] * len(found))


def _folders(scheme: Any, folder: str) -> tuple[Path, Path]:
    """Of the quantised checkpoint, and of the plain one with the same values."""
    checkpoints = import_module("support.checkpoints")
    plain = checkpoints.write_checkpoint(
        Path(folder) / "plain", "llama-mha", attention_bias=True, **_SIZES
    )
    found: tuple[Path, Path] = import_module("support.quantized").write_quantized(
        plain, Path(folder) / "made", scheme
    )
    return found


def _engine(setting: Setting, scheme: Any, dtype: str) -> tuple[Tensor, Tensor]:
    """Logits of a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        quantised, expected = _folders(scheme, folder)
        config = engine_checks.make_config(setting, dtype, 1)
        config = replace(config, attention_backend="triton")
        text = engine_checks.make_prompts([9 if setting.is_dry else 60], 97)[0]
        found = engine_checks.logits(Engine.load(quantised, config), text)
        cpu = replace(engine_checks.on_cpu(config), dtype="float32")
        return found, engine_checks.logits(Engine.load(expected, cpu), text)


def _recorded(setting: Setting, scheme: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens with and without recorded steps."""
    lengths = [3, 9] if setting.is_dry else [1, 15, 33, 60]
    with tempfile.TemporaryDirectory() as folder:
        quantised, _ = _folders(scheme, folder)
        config = engine_checks.make_config(setting, "bfloat16", len(lengths))
        config = replace(config, attention_backend="triton", cuda_graph_mixed_tokens=0)
        found = []
        for is_recorded in (True, False):
            engine = Engine.load(quantised, replace(config, cuda_graph_mode=is_recorded))
            if is_recorded and not (setting.is_dry or engine.num_graphs):
                raise RuntimeError("no step could be recorded; stderr says why")
            prompts = engine_checks.make_prompts(lengths, 97)
            found.append(engine_checks.generate(engine, prompts, _NUM_TOKENS))
    return torch.tensor(found[0]), torch.tensor(found[1])
