"""One token of each text through a gated delta rule, whose state is carried on in its place.

For each head, with q and k made unit vectors (and q divided by the root of their size), a matrix
S [key_dim, value_dim], a decay g <= 0 and a strength b, in float32:

    S = exp(g) S;    S += k (b (v - S^T k))^T;    out = S^T q

One program for each text, head and some columns of S, which it holds in registers: S is read and
written once, and that is nearly all there is to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_MAX_KEY_DIM = 256
_NUMBERS = 4096
"""Of S in a program: 32 registers for each of 128 threads."""


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _delta_step_kernel(
    out_ptr,  # [B, HEADS, VALUE_DIM] float32
    query_ptr,  # [B, HEADS // SHARE, KEY_DIM]
    key_ptr,
    value_ptr,  # [B, HEADS, VALUE_DIM]
    decay_ptr,  # [B, HEADS] float32
    strength_ptr,
    states_ptr,  # [num_rows, HEADS, KEY_DIM, VALUE_DIM] float32
    slots_ptr,  # [B]
    stride_query: tl.int64,  # whatever their size: one compiled kernel for any number of rows
    stride_key: tl.int64,
    stride_value: tl.int64,
    scale,
    eps,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_row, has_column = rows < KEY_DIM, columns < VALUE_DIM
    inner = (head // SHARE) * KEY_DIM + rows
    query = tl.load(query_ptr + row * stride_query + inner, mask=has_row, other=0.0)
    key = tl.load(key_ptr + row * stride_key + inner, mask=has_row, other=0.0)
    query, key = query.to(tl.float32), key.to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
    value = tl.load(
        value_ptr + row * stride_value + head * VALUE_DIM + columns, mask=has_column, other=0.0
    ).to(tl.float32)
    decay = tl.load(decay_ptr + row * HEADS + head)
    strength = tl.load(strength_ptr + row * HEADS + head)

    slot = tl.load(slots_ptr + row).to(tl.int64)
    places = rows[:, None] * VALUE_DIM + columns[None, :]
    states_ptr += (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
    mask = has_row[:, None] & has_column[None, :]
    state = tl.load(states_ptr + places, mask=mask, other=0.0) * tl.exp(decay)
    change = (value - tl.sum(state * key[:, None], axis=0)) * strength
    state += key[:, None] * change[None, :]
    tl.store(states_ptr + places, state, mask=mask)
    out = tl.sum(state * query[:, None], axis=0)
    tl.store(out_ptr + (row * HEADS + head) * VALUE_DIM + columns, out, mask=has_column)


def delta_step(
    query: torch.Tensor,  # [B, key heads, key_dim], the last two dimensions contiguous
    key: torch.Tensor,  # [B, key heads, key_dim]
    value: torch.Tensor,  # [B, heads, value_dim]; heads: a multiple of the key heads
    decay: torch.Tensor,  # [B, heads] float32
    strength: torch.Tensor,  # [B, heads] float32
    states: torch.Tensor,  # [num_rows, heads, key_dim, value_dim] float32; changed
    slots: torch.Tensor,  # [B] int64, rows of states; of equal ones any may win
    eps: float,
) -> torch.Tensor:
    """Answers [B, heads, value_dim] float32; ``eps`` is below the root where query and key are made
    unit vectors. Slots are not checked against the number of rows: they live on the device. Raises
    ValueError naming the argument that does not fit."""
    _check(query, key, value, decay, strength, states, slots)
    num_texts, heads, value_dim = value.shape
    key_heads, key_dim = query.shape[1:]
    out = torch.empty((num_texts, heads, value_dim), dtype=torch.float32, device=value.device)
    block_k = launch.next_power_of_2(key_dim)
    block_v = min(max(_NUMBERS // block_k, 16), launch.next_power_of_2(value_dim))
    if num_texts:
        _delta_step_kernel[(num_texts, launch.cdiv(value_dim, block_v), heads)](
            out,
            query,
            key,
            value,
            decay,
            strength,
            states,
            slots,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            key_dim**-0.5,
            eps,
            HEADS=heads,
            SHARE=heads // key_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
            **launch.LAUNCH_OPTIONS,
        )
    return out


@launch.once_in_a_row
def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise ValueError, naming the argument, unless all fit one another."""
    floats, wide = launch.FLOAT_DTYPES, (torch.float32,)
    sizes = launch.check_arguments(
        Argument("query", query, ("B", "key heads", "K"), floats, _check_heads),
        Argument("key", key, ("B", "key heads", "K"), (query.dtype,), _check_heads),
        Argument("value", value, ("B", "heads", "V"), (query.dtype,), _check_heads),
        Argument("decay", decay, ("B", "heads"), wide),
        Argument("strength", strength, ("B", "heads"), wide),
        Argument("states", states, ("S", "heads", "K", "V"), wide),
        Argument("slots", slots, ("B",), (torch.int64,)),
    )
    if sizes["heads"] % max(sizes["key heads"], 1):
        raise ValueError(
            f"value: has {sizes['heads']} heads, which must be a multiple of the "
            f"{sizes['key heads']} of query"
        )
    if sizes["K"] > _MAX_KEY_DIM:
        raise ValueError(f"query: heads may have up to {_MAX_KEY_DIM} numbers, got {sizes['K']}")


def _check_heads(name: str, heads: torch.Tensor) -> None:
    if heads.stride(2) != 1 or heads.stride(1) != heads.shape[2]:
        raise ValueError(f"{name}: the heads of a row must be contiguous")
