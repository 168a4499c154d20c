"""What the machine can do: bandwidth of a copy and of reading, bf16 and FP8 matrix products.

Matrix products are also measured at the shapes of the 8B's linears and small batches, where real
steps run: no step is faster than the sum of its own products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu_parts.common import LLAMA_8B, Row, Setting
from inflight_backend.models.layers import Fp8Linear, Linear, is_refused, quantize

_LEAST_SHARE = 0.8
"""Of the nominal bandwidth: with less the GPU is shared or throttled."""


def rows(setting: Setting) -> Iterator[Row]:
    """Bandwidths, large products, then the linears of a step."""
    yield from _bandwidth(setting)
    size = 64 if setting.is_dry else 8192
    yield from _products(setting, "square", size, size, [size])
    if setting.is_dry:
        return
    hidden, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
    qkv = LLAMA_8B.query_size + 2 * LLAMA_8B.kv_size
    # 17: where FP8 products pick another kernel from so many rows on, fewer should be padded to it.
    batches = [1, 64, 256] if setting.is_quick else [1, 8, 16, 17, 32, 64, 128, 256, 1024, 8192]
    linears = (
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("qkv", qkv, hidden),
        ("output", hidden, LLAMA_8B.query_size),
    )
    yield from _products(setting, "head", LLAMA_8B.vocab_size, hidden, [1, 64, 256], has_fp8=False)
    for name, rows_, columns in linears:
        yield from _products(setting, name, rows_, columns, batches)
    # Where cuBLASLt's own choice for few rows is faster than cuBLAS's, the engine should take it.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for name, rows_, columns in linears:
            few = [batch for batch in batches if batch <= 256]
            yield from _products(setting, f"{name} cublaslt", rows_, columns, few, has_fp8=False)
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def _bandwidth(setting: Setting) -> Iterator[Row]:
    num_bytes = 2**12 if setting.is_dry else 2**32
    source = torch.randn(num_bytes // 4, device=setting.device)
    target = torch.empty_like(source)
    shares = []
    for name, call, moved in (
        ("copy", lambda: target.copy_(source), 2 * num_bytes),
        ("read (sum)", source.sum, num_bytes),
        ("read (max)", source.amax, num_bytes),
    ):
        rate = moved / time_seconds(setting, call)[0]
        shares += [rate / setting.card.nominal_bytes] if setting.card else []
        ratio = {"of_nominal": shares[-1]} if shares else {}
        yield {"what": name, **setting.figures(gb_per_s=rate / 1e9, **ratio)}
    if shares and max(shares) < _LEAST_SHARE:
        yield {"error": f"below {_LEAST_SHARE:.0%} of the card's nominal bandwidth: give it back"}
    # As small as what generation attention reads at batch 8. Were the L2 cleared by writing, what
    # is written back would show here: all other rows clear it by reading.
    small = source[: 2**23]
    for name, is_written in (("reading", False), ("writing", True)):
        seconds, note = time_seconds(setting, small.amax, clears_by_writing=is_written)
        figures = setting.figures(us=1e6 * seconds, gb_per_s=small.nbytes / seconds / 1e9)
        yield {"what": f"33 MB, L2 cleared by {name}", **figures, **note}


def _products(
    setting: Setting,
    name: str,
    num_rows: int,
    columns: int,
    batches: list[int],
    *,
    has_fp8: bool = True,
) -> Iterator[Row]:
    weight = torch.randn(num_rows, columns, dtype=torch.bfloat16, device=setting.device)
    plain, quantised = Linear(weight), Fp8Linear(weight) if has_fp8 else None
    for batch in batches:
        x = torch.randn(batch, columns, dtype=torch.bfloat16, device=setting.device)
        calls: list[tuple[str, Callable[[], object], int]] = [("bf16", partial(plain, x), 2)]
        if quantised is not None:
            calls.append(("fp8", partial(quantised, quantize(x)), 1))
        for kind, call, width in calls:
            seconds, note = time_seconds(setting, call)
            refused = kind == "fp8" and is_refused(batch, num_rows, columns)
            flops = 2 * batch * num_rows * columns
            moved = (num_rows * columns + batch * columns) * width + 2 * batch * num_rows
            yield {
                "what": f"{name} {kind}",
                "tokens": batch,
                **({"library": "refused"} if refused else {}),
                **note,
                **setting.figures(
                    us=1e6 * seconds,
                    tflop_per_s=flops / seconds / 1e12,
                    gb_per_s=moved / seconds / 1e9,
                ),
            }


def time_seconds(
    setting: Setting, call: Callable[[], object], *, clears_by_writing: bool = False
) -> tuple[float, Row]:
    """Median time on the device, L2 cleared before each call, and what its row should say of it; a
    dry run only calls."""
    from kernel_ops.harness import time_us

    if setting.is_dry:
        call()
        return 1.0, {}
    timing = time_us(call, clears_by_writing=clears_by_writing)
    return timing.us / 1e6, dict(timing.note)
