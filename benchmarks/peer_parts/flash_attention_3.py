"""FlashAttention 3 out of vLLM's wheel: the extension alone, with none of vLLM's Python.

The argument order is that of ``vllm/vllm_flash_attn/flash_attn_interface.py`` in vLLM 0.26.0.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path

import torch
from torch import Tensor

_NAME = "_vllm_fa3_C"


def load() -> None:
    """Make ``torch.ops._vllm_fa3_C`` known; ImportError says what is missing."""
    if _NAME in sys.modules:
        return
    path = _find()
    loader = ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module


def _find() -> Path:
    for folder in sys.path:
        path = Path(folder) / "vllm" / "vllm_flash_attn" / f"{_NAME}.abi3.so"
        if path.is_file():
            return path
    raise ImportError(f"no vllm/vllm_flash_attn/{_NAME}.abi3.so on the path: carry the peers")


def attend(
    query: Tensor,  # [T, H, D]
    keys: Tensor,  # [num_blocks, tokens_per_block, KVH, D], or [T, KVH, D] without a table
    values: Tensor,
    query_starts: Tensor,  # [S + 1] int32
    max_query_len: int,
    max_context: int,
    scale: float,
    *,
    context_lengths: Tensor | None = None,  # [S] int32, with a block table
    block_table: Tensor | None = None,  # [S, max_blocks] int32
    key_starts: Tensor | None = None,  # [S + 1] int32, without one
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention [T, H, D] of ragged queries; the last query sees the last key."""
    out, *_ = torch.ops._vllm_fa3_C.fwd(
        query, keys, values,
        None, None, None, out,  # new keys, new values, q_v
        query_starts, key_starts, None,
        None, context_lengths, max_query_len, max_context,
        block_table, None, None,  # batch index of the cache, left padding
        None, None, None,  # rotary: cosines, sines, lengths
        None, None, None,  # scales of an FP8 query, key and value
        scale, causal, *window, softcap,
        True, None, 0, None, 0,  # interleaved rotary, metadata, splits, pack heads, spare SMs
        None, 1, 0, None,  # attention sinks; context parallelism: size, rank, lengths
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def pose_as_flash_attn_interface() -> None:
    """A module ``flash_attn_interface`` over it: the name under which transformers, which must not
    have been imported yet, looks for it, and the package it believes it to come from."""
    load()
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.flash_attn_func = _padded  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = ragged  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = with_cache  # type: ignore[attr-defined]
    sys.modules["flash_attn_interface"] = module
    from transformers.utils import import_utils

    import_utils.PACKAGE_DISTRIBUTION_MAPPING["flash_attn_interface"] = ["flash-attn-3"]


def _padded(*_: object, **__: object) -> Tensor:
    """``flash_attn_func``, which transformers looks up; its paged batching never calls it."""
    raise AssertionError("transformers called padded attention in paged batching")


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """``flash_attn_varlen_func``: q [T, H, D], k and v [K, KVH, D]."""
    return attend(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale or q.shape[-1] ** -0.5,
        key_starts=cu_seqlens_k,
        causal=causal,
        window=window_size,
        softcap=softcap,
    )


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """``flash_attn_with_kvcache`` for one token of each request: q, k, v [B, 1, heads, D].

    vLLM builds its extension for ragged batches, so the new token is written here.
    """
    batch_size, size = len(q), k_cache.shape[1]
    lengths = cache_seqlens.long()
    blocks = block_table.gather(1, (lengths // size)[:, None])[:, 0].long()
    k_cache[blocks, lengths % size] = k[:, 0]
    v_cache[blocks, lengths % size] = v[:, 0]
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device)
    found = attend(
        q[:, 0],
        k_cache,
        v_cache,
        starts,
        1,
        block_table.shape[1] * size,
        softmax_scale or q.shape[-1] ** -0.5,
        context_lengths=cache_seqlens + 1,
        block_table=block_table,
        causal=causal,
        window=window_size,
    )
    return found[:, None]
