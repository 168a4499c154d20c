"""Linears of quantised weights beside the library's in bfloat16, and experts likewise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inflight_kernels import launch
from inflight_kernels.ops.linear.grouped_linear import grouped_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import (
    QuantizedWeight,
    Tile,
    choose_tile,
    prepare,
    quantized_linear,
)
from kernel_ops.harness import Row, Setting, num_bytes

# The four products of a layer of the 8B: rows of the weight, columns.
_WEIGHTS = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
}
_SWEPT = ("output", "gate_up", "down")
_TOKENS = (1, 8, 16, 64, 256, 1024)
_FP8 = torch.float8_e4m3fn


class Scheme(NamedTuple):
    """What values are, columns that share a scale (None: all), and how x is quantised, if it is."""

    values: torch.dtype
    group_size: int | None
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    scales: torch.dtype = torch.bfloat16


_SCHEMES = {
    "W4A16, groups of 128": Scheme(torch.uint8, 128),
    "W4A16, groups of 32": Scheme(torch.uint8, 32),
    "W4A16, groups of 128, float32 scales": Scheme(torch.uint8, 128, None, torch.float32),
    "W8A16": Scheme(torch.int8, None),
    "FP8 blocks, W8A16": Scheme(_FP8, 128, None, torch.float32),
    "FP8 blocks, W8A8": Scheme(_FP8, 128, partial(quantize_fp8, group_size=128), torch.float32),
    "INT8 W8A8": Scheme(torch.int8, None, quantize_int8, torch.float32),
}
_SWEPT_SCHEMES = ("W4A16, groups of 128", "W8A16", "FP8 blocks, W8A8", "INT8 W8A8")
# Rows of the weight, rounds' factor, stages, warps; programs per multiprocessor.
_FEW = tuple(
    (rows_, factor, stages, 4 if rows_ == 64 else 8)
    for rows_ in (64, 128)
    for factor in (1, 2)
    for stages in (3, 4, 6)
)
_PROGRAMS = (2, 3, 4, 6)
# Tokens, rows, stages, warps.
_MANY = (
    (128, 128, 3, 8),
    (128, 64, 4, 4),
    (64, 128, 4, 8),
    (64, 128, 4, 4),
    (64, 64, 4, 4),
    (256, 64, 3, 8),
    (128, 256, 3, 8),
)


def rows(setting: Setting) -> Iterator[Row]:
    """Products of the 8B by scheme, then those of experts; or a sweep of tiles."""
    weights = {"tiny": (32, 256)} if setting.is_dry else _WEIGHTS
    tokens = (3,) if setting.is_dry else _TOKENS
    names = _SWEPT_SCHEMES if setting.has_sweep else tuple(_SCHEMES)
    for label, (num_rows, columns) in weights.items():
        if setting.has_sweep and not setting.is_dry and label not in _SWEPT:
            continue
        wide = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
        for name in names:
            weight = _weight(setting, _SCHEMES[name], num_rows, columns)
            for num_tokens in tokens:
                x = torch.randn(num_tokens, columns, dtype=torch.bfloat16, device=setting.device)
                parameters = {"scheme": name, "weight": label, "tokens": num_tokens}
                if setting.has_sweep:
                    yield from _swept(parameters, _SCHEMES[name], weight, x)
                else:
                    library = partial(functional.linear, x, wide) if name == names[0] else None
                    yield _row(parameters, _SCHEMES[name], weight, x, library)
    if not setting.has_sweep:
        yield from _experts(setting)


def _weight(setting: Setting, scheme: Scheme, num_rows: int, columns: int) -> QuantizedWeight:
    width = columns // 2 if scheme.values == torch.uint8 else columns
    bits = torch.randint(0, 120, (num_rows, width), dtype=torch.uint8, device=setting.device)
    group_size = scheme.group_size or columns
    shape = (num_rows, columns // group_size)
    scales = torch.rand(shape, dtype=scheme.scales, device=setting.device)
    values = bits.view(scheme.values)
    return prepare(values, scales, group_size=group_size, is_plain=scheme.quantize is not None)


def _multiply(scheme: Scheme, weight: QuantizedWeight, x: Tensor, starts: Tensor | None) -> Tensor:
    """As an engine does it."""
    if scheme.quantize is None:
        return quantized_linear(x, weight, starts=starts)
    numbers, scales = scheme.quantize(x)
    return quantized_linear(numbers, weight, x_scales=scales, starts=starts)


def _moved(weight: QuantizedWeight, x: Tensor, num_rows: int) -> int:
    return num_bytes(weight.values, weight.scales, x) + 2 * len(x) * num_rows


def _row(
    parameters: dict[str, object],
    scheme: Scheme,
    weight: QuantizedWeight,
    x: Tensor,
    library: Callable[[], Tensor] | None,
) -> Row:
    num_rows = len(weight.values)
    return Row(
        parameters,
        partial(_multiply, scheme, weight, x, None),
        _moved(weight, x, num_rows),
        2 * x.numel() * num_rows,
        {} if library is None else {"bf16 library": library},
    )


def _swept(
    parameters: dict[str, object], scheme: Scheme, weight: QuantizedWeight, x: Tensor
) -> Iterator[Row]:
    """The product alone with other tiles than the chosen one, which comes first."""
    numbers, scales = (x, None) if scheme.quantize is None else scheme.quantize(x)
    num_tokens, num_rows = len(x), len(weight.values)
    for tile in dict.fromkeys(_tiles(weight, num_tokens, num_rows, numbers.dtype)):
        yield Row(
            {**parameters, "tile": list(tile)},
            partial(quantized_linear, numbers, weight, x_scales=scales, tile=tile),
            _moved(weight, numbers, num_rows),
            2 * x.numel() * num_rows,
        )


def _tiles(
    weight: QuantizedWeight, num_tokens: int, num_rows: int, dtype: torch.dtype
) -> Iterator[Tile]:
    chosen = choose_tile(weight, num_tokens, num_rows, dtype)
    yield chosen
    if num_tokens > 64:
        for tokens, rows_, stages, warps in _MANY:
            yield Tile(tokens, rows_, chosen.round_words, 1, stages, warps)
        return
    num_words, num_sms = weight.values.shape[1], launch.num_sms(weight.values.device)
    if num_tokens in (8, 16):  # the tile of 1
        return
    for rows_, factor, stages, warps in _FEW:
        round_words = factor * chosen.round_words
        for programs in _PROGRAMS:
            splits = programs * num_sms // launch.cdiv(num_rows, rows_)
            splits = max(min(splits, num_words // (2 * round_words)), 1)
            yield Tile(chosen.tokens, rows_, round_words, splits, stages, warps)


def _experts(setting: Setting) -> Iterator[Row]:
    """Gate and up of Qwen3-30B-A3B: 128 experts of 2,048 columns, 8 for each token."""
    count, size, columns = (4, 32, 256) if setting.is_dry else (128, 1536, 2048)
    wide = torch.randn(count, size, columns, dtype=torch.bfloat16, device=setting.device)
    for name in ("W4A16, groups of 128", "FP8 blocks, W8A8"):
        weight = _weight(setting, _SCHEMES[name], count * size, columns)
        for num_tokens in (2,) if setting.is_dry else (1, 8, 64, 512, 4096):
            num_rows = 8 * num_tokens
            x = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
            counts = torch.randint(count, (num_rows,)).bincount(minlength=count)
            starts = functional.pad(counts.cumsum(0), (1, 0)).int().to(setting.device)
            num_read = int((counts > 0).sum())
            read = num_bytes(weight.values, weight.scales) * num_read // count
            yield Row(
                {"scheme": f"experts, {name}", "tokens": num_tokens, "experts_read": num_read},
                partial(_multiply, _SCHEMES[name], weight, x, starts),
                read + num_bytes(x) + 2 * num_rows * size,
                2 * num_rows * size * columns,
                {"bf16 grouped": partial(grouped_linear, x, wide, starts)},
            )
