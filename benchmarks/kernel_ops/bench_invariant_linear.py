"""The linear of few tokens and of the deterministic mode, beside the library's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from inflight_kernels.ops.linear.invariant_linear import Tile, choose_tile, invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from kernel_ops.harness import Call, Row, Setting, num_bytes

# The four products of a layer of the 8B: rows of the weight, columns.
_WEIGHTS = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
}
_TOKENS = (1, 16, 64, 1024)
# Rows of the weight, bytes of columns, stages, warps: what a sweep tries for few tokens.
_TILES = ((64, 256, 4, 4), (64, 512, 3, 4), (64, 128, 6, 4), (32, 256, 5, 4), (128, 256, 3, 4))


def rows(setting: Setting) -> Iterator[Row]:
    """All four, in bfloat16 and in FP8."""
    weights = {"tiny": (32, 64)} if setting.is_dry else _WEIGHTS
    for name, (num_rows, columns) in weights.items():
        weight = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
        for num_tokens in (3,) if setting.is_dry else _TOKENS:
            x = torch.randn(num_tokens, columns, dtype=torch.bfloat16, device=setting.device)
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                chosen = choose_tile(num_tokens, dtype)
                swept = _TILES if setting.has_sweep and num_tokens <= 64 else ()
                for tile in (
                    chosen,
                    *(
                        Tile(chosen.tokens, rows_, size // dtype.itemsize, *rest)
                        for rows_, size, *rest in swept
                    ),
                ):
                    has_library = tile is chosen and not setting.is_dry
                    yield _row(name, x, weight, dtype, tile, has_library=has_library)


def _row(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    tile: Tile,
    *,
    has_library: bool,
) -> Row:
    (num_tokens, columns), num_rows = x.shape, len(weight)
    call: Call = partial(invariant_linear, x, weight, tile=tile)
    library: Call = partial(functional.linear, x, weight)
    if dtype == torch.float8_e4m3fn:
        (x, x_scales), (weight, scales) = quantize_fp8(x), quantize_fp8(weight)
        call = partial(
            invariant_linear, x, weight, x_scales=x_scales, weight_scales=scales, tile=tile
        )
        library = partial(
            torch._scaled_mm,
            x,
            weight.t(),
            scale_a=x_scales,
            scale_b=scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    return Row(
        {
            "weight": name,
            "tokens": num_tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "tile": list(tile),
        },
        call,
        num_bytes(x, weight) + 2 * num_tokens * num_rows,
        2 * num_tokens * num_rows * columns,
        {"library": library} if has_library else {},
    )
