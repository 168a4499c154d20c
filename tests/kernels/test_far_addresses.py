"""Numbers that lie more than 2^31 places behind where a tensor begins: large pools, and activations
of very many tokens. Offsets of 32 bits would not reach them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import pytest
import torch
from triton import knobs

from inflight_kernels.ops.attention.copy_blocks import copy_blocks
from inflight_kernels.ops.attention.paged_attention_context import paged_attention_context
from inflight_kernels.ops.attention.paged_attention_generation import paged_attention_generation
from inflight_kernels.ops.attention.rope_write_kv import rope_write_kv
from inflight_kernels.ops.linear.invariant_linear import invariant_linear
from inflight_kernels.ops.linear.quantize_fp8 import quantize_fp8
from inflight_kernels.ops.rms_norm import rms_norm
from inflight_kernels.ops.sampling.adjust_logits import adjust_logits
from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams
from inflight_kernels.ops.sampling.mask_logits import mask_logits
from inflight_kernels.ops.sampling.sample import sample
from inflight_kernels.ops.silu_mul import silu_mul

FAR = 2**31
NO_RESERVE = 0x4000  # of Linux: such memory counts where it is written only

Op = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by copying all memory of its arguments, on a CPU to where it is; and told to, it says
    where a number of 32 bits overflows, before an address is made of it."""
    if knobs.runtime.interpret:
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        careful = interpreter.InterpreterOptions(debug=True)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", careful)


def far_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that is nobody's until it is written."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def far_rows(near: torch.Tensor) -> torch.Tensor:
    """``near`` [3, n] with the last row beyond."""
    rows = far_memory((3, FAR // 2 + 64), near.dtype, near.device)[:, : near.shape[1]]
    assert 2 * rows.stride(0) > FAR
    return rows.copy_(near)


def sampled(logits: torch.Tensor) -> torch.Tensor:
    """With both filters."""
    ones = torch.ones(3, device=logits.device)
    numbers = torch.arange(3, device=logits.device)
    return sample(logits, ones, 20 * ones.int(), 0.9 * ones, numbers, numbers)


def masked(logits: torch.Tensor) -> torch.Tensor:
    mask_logits(logits, torch.tensor([[2, 5, 0, 0]], dtype=torch.int32, device=logits.device))
    return logits


def turned(x: torch.Tensor) -> torch.Tensor:
    """Query, key and value of one head each: the first as it comes out, the others in the cache."""
    heads, positions = x[:, None], torch.arange(3, device=x.device)
    keys, values = torch.zeros((2, 1, 16, 1, 64), dtype=x.dtype, device=x.device).unbind()
    cos_sin = torch.ones(3, 64, device=x.device)
    query = rope_write_kv(heads, heads, heads, cos_sin, positions, keys, values, positions)
    return torch.cat((query, keys[0, :3], values[0, :3]))


def attended(x: torch.Tensor) -> torch.Tensor:
    """By queries of a prompt and of three that generate."""
    cache = x[:1].contiguous() * torch.linspace(-1, 1, 16, device=x.device)[:, None].to(x.dtype)
    paged = cache.view(1, 16, 1, 64), cache.view(1, 16, 1, 64)
    tables = torch.zeros((3, 1), dtype=torch.int32, device=x.device)
    starts, lengths = tables[:2, 0] + torch.tensor([0, 3]).to(tables), tables[:, 0] + 16
    prompt = paged_attention_context(x[:, None], *paged, tables[:1], starts, lengths[:1], 1.0)
    return torch.cat((prompt, paged_attention_generation(x[:, None], *paged, tables, lengths, 1.0)))


OPS: dict[str, Op] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-5),
    "silu_mul": silu_mul,
    "quantize_fp8": lambda x: quantize_fp8(x)[0].float(),
    "invariant_linear": lambda x: invariant_linear(x, x[:2].contiguous()),
    "rope_write_kv": turned,
    "attention": attended,
    "sample": sampled,
    "mask_logits": masked,
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", OPS)
def test_rows(device: torch.device, generator: torch.Generator, name: str) -> None:
    dtype = torch.float32 if name == "mask_logits" else torch.bfloat16
    near = torch.randn(3, 64, generator=generator).to(device, dtype)
    far = far_rows(near)
    assert torch.equal(OPS[name](far), OPS[name](near))


def test_rows_of_tables(device: torch.device, generator: torch.Generator) -> None:
    """Of slots: a bias, and the text so far."""
    near = torch.randn(3, 1024, generator=generator).to(device)
    bias = far_memory((FAR // 1024 + 2, 1024), torch.float32, device)
    bias[-1] = 1.0
    ones, last = torch.ones(3, device=device), torch.full((3,), len(bias) - 1, device=device)
    logits, unchanged = far_rows(near), torch.tensor([[1.0, 0.0, 0.0]] * 3, device=device)
    adjust_logits(logits, last, ones, bias, None, unchanged)
    assert torch.equal(logits, near + 1.0)
    history = far_memory((FAR // 1024 + 2, 1024), torch.int32, device)
    history[-1, :4] = torch.tensor([7, 8, 9, 7], dtype=torch.int32)
    logits, lengths, sizes = far_rows(near), 0 * last + 4, (0 * last + 2).int()
    ban_repeated_ngrams(logits, last, lengths, sizes, history, 4)
    assert (logits == -torch.inf).nonzero().tolist() == [[row, 8] for row in range(3)]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float8_e4m3fn, 16), (torch.bfloat16, 64), (torch.bfloat16, 48)],
)
def test_blocks(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, block_size: int
) -> None:
    """They are written, copied and read at the end of a pool as at its beginning, whether a tile
    of keys lies in several of them, in one, or in parts of two."""
    query, key, value = (
        torch.randn(7, heads, 64, generator=generator).to(device, torch.bfloat16)
        for heads in (4, 2, 2)
    )
    shape = (block_size, 2, 64)
    num_blocks = FAR // torch.Size(shape).numel() + 4
    positions = torch.arange(7, device=device)
    cos_sin = torch.randn(7, 64, generator=generator).to(device)
    length = torch.tensor([7], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    answers = []
    for count in (4, num_blocks):
        keys, values = (far_memory((1, count, *shape), dtype, device) for _ in range(2))
        first, last = (torch.tensor([count - back], device=device) for back in (2, 1))
        slots = positions + block_size * first
        turned = rope_write_kv(query, key, value, cos_sin, positions, keys[0], values[0], slots)
        for cache in (keys, values):
            copy_blocks(cache, cache, first, last)
        paged = (keys[0], values[0], last[:, None].int())
        attend = partial(paged_attention_context, turned, *paged, starts, length, 0.125)
        answers += [attend(), paged_attention_generation(turned[6:], *paged, length, 0.125)]
    for near, far in zip(answers[:2], answers[2:], strict=True):
        assert torch.equal(near, far)
        assert bool(near.any())
