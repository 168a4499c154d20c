"""What the ops refuse, by name, and that they accept batches without rows. The attention ops have
tables of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from inflight_kernels.ops.attention.copy_blocks import copy_blocks
from inflight_kernels.ops.attention.delta_step import delta_step
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv
from inflight_kernels.ops.linear.grouped_linear import grouped_linear
from inflight_kernels.ops.linear.head_linear import head_linear
from inflight_kernels.ops.linear.invariant_linear import invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.linear.quantize_int8 import quantize_int8
from inflight_kernels.ops.linear.quantized_linear import prepare, quantized_linear
from inflight_kernels.ops.rms_norm import add_rms_norm
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits
from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams, ban_words
from inflight_kernels.ops.sampling.mask_logits import mask_logits
from inflight_kernels.ops.sampling.sample import sample
from inflight_kernels.ops.silu_mul import silu_mul, silu_mul_fp8

Arguments = dict[str, Any]
floats = torch.zeros
ints, longs = partial(torch.zeros, dtype=torch.int32), partial(torch.zeros, dtype=torch.int64)

# Arguments that fit, for a number of rows.
CALLS: dict[Callable[..., object], Callable[[int], Arguments]] = {
    adjust_logits: lambda rows: {
        "logits": floats(rows, 32), "slots": longs(rows), "temperature": floats(rows),
        "bias": floats(4, 32), "counts": ints(4, 32), "penalties": floats(rows, 3),
    },
    ban_repeated_ngrams: lambda rows: {
        "logits": floats(rows, 32), "slots": longs(rows), "lengths": longs(rows),
        "sizes": ints(rows), "history": ints(4, 9), "max_length": 9,
    },
    ban_words: lambda rows: {
        "logits": floats(rows, 32), "rows": ints(4), "lengths": longs(rows), "words": ints(5, 3),
        "word_lengths": ints(5), "word_slots": ints(5), "history": ints(4, 9),
    },
    copy_blocks: lambda rows: {
        "source": floats(2, 4, 16, 8), "destination": floats(2, 4, 16, 8),
        "source_blocks": longs(rows), "destination_blocks": longs(rows),
    },
    delta_step: lambda rows: {
        "query": floats(rows, 2, 16), "key": floats(rows, 2, 16), "value": floats(rows, 4, 8),
        "decay": floats(rows, 4), "strength": floats(rows, 4), "states": floats(5, 4, 16, 8),
        "slots": longs(rows), "eps": 1e-6,
    },
    grouped_linear: lambda rows: {
        "x": floats(rows, 32), "weight": floats(3, 8, 32), "starts": ints(4), "bias": floats(3, 8),
    },
    head_linear: lambda rows: {
        "x": floats(rows, 2, 32), "values": torch.zeros(10, 16, dtype=torch.uint8),
        "scales": floats(10, 1), "zeros": floats(10, 1), "group_size": 32, "by_rows": False,
        "order": ints(32), "codebook": floats(16),
    },
    invariant_linear: lambda rows: {
        "x": floats(rows, 32), "weight": floats(8, 32), "bias": floats(8),
    },
    mask_logits: lambda rows: {"logits": floats(2, 32), "masks": ints(rows, 3)},
    quantize_fp8: lambda rows: {"x": floats(rows, 32)},
    quantize_int8: lambda rows: {"x": floats(rows, 32)},
    quantized_linear: lambda rows: {
        "x": floats(rows, 32), "starts": ints(3), "bias": floats(16),
        "weight": prepare(torch.zeros(16, 32, dtype=torch.int8), floats(16, 1), group_size=32),
    },
    add_rms_norm: lambda rows: {
        "x": floats(rows, 32), "residual": floats(rows, 32), "weight": floats(32), "eps": 1e-5,
    },
    rope_write_kv: lambda rows: {
        "query": floats(rows, 4, 32), "key": floats(rows, 2, 32), "value": floats(rows, 2, 32),
        "cos_sin": floats(9, 32), "positions": longs(rows), "slot_mapping": longs(rows),
        "key_cache": floats(4, 16, 2, 32), "value_cache": floats(4, 16, 2, 32),
        "query_norm_weight": floats(32), "key_norm_weight": floats(32),
    },
    sample: lambda rows: {
        "logits": floats(rows, 32), "temperature": floats(rows), "top_k": ints(rows),
        "top_p": floats(rows), "seeds": longs(rows), "positions": longs(rows),
        "min_p": floats(rows),
    },
    silu_mul: lambda rows: {"gate_up": floats(rows, 32)},
}  # fmt: skip
# Dimensions of any size.
FREE = {
    "ban_repeated_ngrams logits 1", "ban_repeated_ngrams history 0",
    "ban_repeated_ngrams history 1", "ban_words logits 1",
    "ban_words words 1", "ban_words history 1", "copy_blocks source 1",
    "copy_blocks destination 1", "delta_step states 0", "grouped_linear x 0", "head_linear x 0",
    "invariant_linear x 0",
    "mask_logits logits 0", "mask_logits masks 0", "quantize_fp8 x 0", "quantize_fp8 x 1",
    "quantize_int8 x 0", "quantize_int8 x 1", "quantized_linear x 0",
    "rope_write_kv query 1", "rope_write_kv cos_sin 0", "sample logits 1", "silu_mul gate_up 0",
}  # fmt: skip
# Columns of a table.
STRIDED = {f"sample {name}" for name in ("temperature", "top_k", "top_p", "seeds", "min_p")}
OTHER_DTYPE = {
    torch.uint8: torch.int16,
    torch.float32: torch.float64,
    torch.int32: torch.int16,
    torch.int64: torch.int16,
}


def changed(
    op: Callable[..., object], name: str, tensor: torch.Tensor
) -> list[tuple[torch.Tensor, str]]:
    """The tensor with one thing wrong each, and what is said of it."""
    label = f"{op.__name__} {name}"
    changes = [
        (tensor[None], "shape must be"),
        (tensor.to(OTHER_DTYPE[tensor.dtype]), f"^{name}: dtype must be"),
    ]
    if op not in (quantize_fp8, quantize_int8, silu_mul):  # they have but one
        changes.append((tensor.to("meta"), "is on meta"))
    if label not in STRIDED:
        apart = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        changes.append((apart, f"^{name}: .*contiguous"))
    for dimension, size in enumerate(tensor.shape):
        if f"{label} {dimension}" not in FREE:
            shape = [*tensor.shape]
            shape[dimension] = size + 1
            changes.append(
                (tensor.new_zeros(shape), "shape must be|must hold gate and up|a multiple of 16")
            )
    return changes


@pytest.mark.parametrize("op", CALLS)
def test_every_tensor_must_fit(op: Callable[..., object]) -> None:
    arguments = CALLS[op](2)
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            for wrong, message in changed(op, name, tensor):
                with pytest.raises(ValueError, match=message):
                    op(**{**arguments, name: wrong})


X, FP8 = floats(2, 64), floats(2, 64).to(torch.float8_e4m3fn)
TOKEN_SCALES = floats(2, 1)
BYTES, PLAIN_BYTES = (
    prepare(torch.zeros(8, 64, dtype=torch.int8), floats(8, 2), group_size=32, is_plain=is_plain)
    for is_plain in (False, True)
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: copy_blocks(X, X, longs(1), longs(1)), "source: shape"),
        (lambda: invariant_linear(X, X, x_scales=TOKEN_SCALES), "x_scales: must be given with"),
        (lambda: invariant_linear(FP8, FP8, x_scales=TOKEN_SCALES), "weight_scales: must be given"),
        (lambda: quantize_fp8(floats(1, 32769)), "x: rows must have 1 to 32768 elements"),
        (lambda: quantize_fp8(floats(1, 0)), "x: rows must have 1 to 32768 elements"),
        (lambda: quantize_fp8(floats(1, 96), 48), "group_size: must be a power of two, not 48"),
        (lambda: quantize_int8(floats(1, 0)), "x: rows must have 1 to"),
        (lambda: quantized_linear(X, BYTES, x_scales=floats(2, 2)), "x_scales: must be given with"),
        (lambda: quantized_linear(FP8, BYTES, x_scales=floats(2, 2)), "x: of 8 bits goes with a"),
        (lambda: quantized_linear(X, PLAIN_BYTES), "x: of 8 bits goes with a plain weight"),
        (
            lambda: quantized_linear(X.to(torch.int8), PLAIN_BYTES, x_scales=floats(2, 2)),
            "x: of 8 bits needs a scale per row",
        ),
        (
            lambda: add_rms_norm(floats(1, 40000), floats(1, 40000), floats(40000), 1e-5),
            "x: rows may have up to 32768",
        ),
        (
            lambda: rope_write_kv(**{**CALLS[rope_write_kv](2), "query": floats(2, 4, 56)}),
            "query: head_dim must be a multiple of 16",
        ),
        (
            lambda: sample(**{**CALLS[sample](2), "logits": floats(2, 0)}),
            "logits: rows must have 1 to",
        ),
        (lambda: silu_mul_fp8(floats(1, 2 * 32769)), "quantised rows may have up to 65536"),
    ],
)
def test_other_bounds(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("op", CALLS)
def test_no_rows(op: Callable[..., object], device: torch.device) -> None:
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in CALLS[op](0).items()
    }
    out = op(**arguments)
    for tensor in out if isinstance(out, tuple) else (out,):
        assert tensor is None or len(tensor) == 0
