"""Checks of the kernels that change logits before a draw, and of what a draw tells.

At the vocabulary of an 8B, so that they are the kernels which its engine compiles. A forbidden
logit is -inf, which has no distance: it counts as one far below all others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from gpu_parts.common import Setting
from inflight_kernels import reference

_ROWS, _SLOTS, _LENGTH = 9, 12, 70
# Share of all that may be drawn. Sums in float32 are off by a fifth of it at most.
_NEAR = 5e-6
_LEAST_CLEAR = 0.75  # of the rows: of random ones more than nine tenths are


def where_clear(
    found: Tensor, expected: Tensor, arguments: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Both, alike in rows that may come out one way or the other; AssertionError if those are many.

    ``found`` and ``expected`` [N] are what `reference.sample` makes of ``arguments``. It sums in
    float64, the kernel in float32. Where the noise of a row falls on the boundary of two tokens, or
    top-p on that of two sets, they may draw different ones: one random batch of 80 rows in ten has
    such a row, and it would be taken for a fault.
    """
    is_clear = _is_clear(*arguments)
    if is_clear.float().mean() < _LEAST_CLEAR:
        raise AssertionError(f"only {int(is_clear.sum())} of {len(found)} rows can be compared")
    return torch.where(is_clear, found, expected), expected


def _is_clear(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """[N] bool: the token is the same with a little more or less of noise and top-p."""
    is_greedy = ~reference.is_drawn(temperature, top_k, top_p, min_p)
    temperature = torch.where(temperature == 0, 1.0, temperature)
    rows = torch.arange(len(logits), device=logits.device)
    noise = reference.uniform(seeds, positions).double()
    drawn = []
    for share in (1 - _NEAR, 1 + _NEAR):
        top_p_near = torch.where(top_p < 1, top_p * share, top_p)
        kept = reference.filtered(logits, rows, temperature, top_k, top_p_near, min_p)
        for shift in (-_NEAR, _NEAR):
            drawn.append(reference.draw(kept, (noise + shift).clamp(0, 1 - 1e-9)))
    tokens = torch.stack(drawn)
    return is_greedy | (tokens == tokens[0]).all(dim=0)


def _logits(setting: Setting) -> Tensor:
    return 4 * torch.randn(_ROWS, 50 if setting.is_dry else 128_256, device=setting.device)


def _slots(setting: Setting) -> Tensor:
    """A slot of each row, no two alike."""
    return torch.randperm(_SLOTS, device=setting.device)[:_ROWS]


def _texts(setting: Setting) -> Tensor:
    """[slots, tokens] int32 of three different tokens, so that n-grams and words repeat."""
    return torch.randint(3, (_SLOTS, _LENGTH), dtype=torch.int32, device=setting.device)


def _lengths(setting: Setting) -> Tensor:
    return torch.randint(_LENGTH - 10, _LENGTH, (_ROWS,), device=setting.device)


def _changed(
    logits: Tensor, change: Callable[[Tensor], None], expect: Callable[[Tensor], None]
) -> tuple[Tensor, Tensor]:
    """What both make of ``logits``. A change that changes nothing would prove nothing."""
    out, expected = logits.clone(), logits.clone()
    change(out)
    expect(expected)
    if torch.equal(expected, logits):
        raise AssertionError("nothing was to be changed")
    return out.clamp(min=-1e3), expected.clamp(min=-1e3)


def _penalties(setting: Setting) -> tuple[Tensor, Tensor]:
    op = import_module("inflight_kernels.ops.sampling.adjust_logits")
    logits, device = _logits(setting), setting.device
    tables = (_SLOTS, logits.shape[1])
    penalties = torch.tensor([[1.3, 0.5, -0.25], [1, 0, 0], [0.5, 0, 0]], device=device)
    arguments = (
        _slots(setting),
        torch.arange(_ROWS, device=device) / 4,
        torch.randn(tables, device=device),
        torch.randint(7, tables, dtype=torch.int32, device=device),
        penalties.repeat(_ROWS // 3, 1),
    )
    return _changed(
        logits,
        lambda x: op.adjust_logits(x, *arguments),
        lambda x: reference.adjust_logits(x, *arguments),
    )


def _ngrams(setting: Setting) -> tuple[Tensor, Tensor]:
    op = import_module("inflight_kernels.ops.sampling.ban_tokens")
    sizes = (torch.arange(_ROWS, device=setting.device) % 5).int()
    arguments = (_slots(setting), _lengths(setting), sizes, _texts(setting), _LENGTH)
    return _changed(
        _logits(setting),
        lambda x: op.ban_repeated_ngrams(x, *arguments),
        lambda x: reference.ban_repeated_ngrams(x, *arguments),
    )


def _words(setting: Setting) -> tuple[Tensor, Tensor]:
    op = import_module("inflight_kernels.ops.sampling.ban_tokens")
    device, count = setting.device, 60
    rows = torch.full((_SLOTS,), -1, dtype=torch.int32, device=device)
    rows[_slots(setting)] = torch.arange(_ROWS, dtype=torch.int32, device=device)
    lengths = torch.randint(1, 4, (count,), dtype=torch.int32, device=device)
    words = torch.randint(3, (count, 3), dtype=torch.int32, device=device)
    owners = (torch.arange(count, device=device) % _SLOTS).int()
    arguments = (rows, _lengths(setting), words, lengths, owners, _texts(setting))
    return _changed(
        _logits(setting),
        lambda x: op.ban_words(x, *arguments),
        lambda x: reference.ban_words(x, *arguments),
    )


def _masks(setting: Setting) -> tuple[Tensor, Tensor]:
    """Of three rows: half of the tokens, one that is forced, none."""
    op = import_module("inflight_kernels.ops.sampling.mask_logits")
    logits = _logits(setting)
    words = -(-logits.shape[1] // 32)
    masks = torch.randint(-(2**31), 2**31, (3, 2 + words), device=setting.device).int()
    masks[:, 0] = torch.tensor([3, 0, 2])
    masks[:, 1] = torch.tensor([-1, logits.shape[1] - 1, -1])
    masks[2, 2:] = 0
    return _changed(
        logits,
        lambda x: op.mask_logits(x, masks),
        lambda x: reference.mask_logits(x, masks),
    )


def _log_probs(setting: Setting) -> tuple[Tensor, Tensor]:
    """Of what min-p, and with it top-k or top-p, leave; tokens that differ are an error, but where
    either may be drawn."""
    op = import_module("inflight_kernels.ops.sampling.sample")
    device = setting.device
    kinds = torch.arange(_ROWS, device=device) % 3
    arguments = (
        _logits(setting),
        torch.full((_ROWS,), 1.5, device=device),
        torch.where(kinds == 1, 20, 0).int(),
        torch.where(kinds == 2, 0.9, 1.0),
        torch.arange(_ROWS, device=device),
        torch.arange(_ROWS, device=device) + 5,
        torch.full((_ROWS,), 0.02, device=device),
    )
    tokens, log_probs = op.sample_with_log_probs(*arguments)
    expected_tokens, expected = reference.sample_with_log_probs(*arguments)
    tokens, expected_tokens = where_clear(tokens, expected_tokens, arguments)
    if not torch.equal(tokens, expected_tokens):
        raise AssertionError(f"drew {tokens.tolist()} instead of {expected_tokens.tolist()}")
    return where_clear(log_probs, expected, arguments)


CHECKS: tuple[tuple[str, float, Callable[[Setting], tuple[Tensor, Tensor]]], ...] = (
    ("adjust_logits", 1e-6, _penalties),
    ("ban_repeated_ngrams", 0.0, _ngrams),
    ("ban_words", 0.0, _words),
    ("mask_logits", 0.0, _masks),
    ("log probabilities of draws", 1e-5, _log_probs),
)
"""Name, limit, and what makes the answer and what it should be."""
