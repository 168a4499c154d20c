"""Forbid tokens by the text so far: repeated n-grams, and the last token of words begun.

Rules: ``reference.ban_repeated_ngrams`` and ``reference.ban_words``. N-grams: one program per row
and chunk of the text; each lane compares the n - 1 tokens at its place with the last ones. Words:
one program per word. A forbidden logit becomes -inf; several programs may write the same one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inflight_kernels import launch
from inflight_kernels.launch import Argument

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

_CHUNK = 256
_WORD_CHUNK = 32  # tokens compared at a time


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "sizes_ptr"])
def _ban_repeated_ngrams_kernel(
    logits_ptr,
    slots_ptr,  # [N] int64
    lengths_ptr,  # [N] int64
    sizes_ptr,  # [N] int32
    history_ptr,  # [S, L] int32
    vocabulary,
    stride_logits,
    stride_history,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    starts = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    size = tl.load(sizes_ptr + row)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    history_ptr += tl.load(slots_ptr + row) * stride_history
    matches = (starts + size <= length) & (size > 0)
    for offset in range(size - 1):
        wanted = tl.load(history_ptr + tl.maximum(length - size + 1 + offset, 0))
        found = tl.load(history_ptr + starts + offset, mask=matches, other=-1)
        matches = matches & (found == wanted)
    ends = tl.load(history_ptr + starts + size - 1, mask=matches, other=0)
    is_token = matches & (ends >= 0) & (ends < vocabulary)
    forbidden = tl.full([CHUNK], -float("inf"), tl.float32)
    tl.store(logits_ptr + row * stride_logits + ends, forbidden, mask=is_token)


@triton.jit(
    do_not_specialize=["stride_words"],
    do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr"],
)
def _ban_words_kernel(
    logits_ptr,
    rows_ptr,  # [S] int32
    lengths_ptr,  # [N] int64
    words_ptr,  # [W, K] int32
    word_lengths_ptr,  # [W] int32
    word_slots_ptr,  # [W] int32
    history_ptr,  # [S, L] int32
    vocabulary,
    stride_logits,
    stride_words,
    stride_history,
    CHUNK: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64)
    slot = tl.load(word_slots_ptr + word).to(tl.int64)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    if row >= 0:
        num_before = tl.load(word_lengths_ptr + word) - 1
        start = tl.load(lengths_ptr + row).to(tl.int32) - num_before
        words_ptr += word * stride_words
        history_ptr += slot * stride_history + start
        num_equal = 0
        for first in range(0, num_before, CHUNK):
            offs = first + tl.arange(0, CHUNK)
            is_compared = (offs < num_before) & (start >= 0)
            wanted = tl.load(words_ptr + offs, mask=is_compared, other=0)
            found = tl.load(history_ptr + offs, mask=is_compared, other=0)
            num_equal += tl.sum((is_compared & (wanted == found)).to(tl.int32), axis=0)
        last = tl.load(words_ptr + num_before)
        if (start >= 0) & (num_equal == num_before) & (last < vocabulary):
            tl.store(logits_ptr + row * stride_logits + last, -float("inf"))


def ban_repeated_ngrams(
    logits: torch.Tensor,  # [N, V] float32, changed in place
    slots: torch.Tensor,  # [N] int64
    lengths: torch.Tensor,  # [N] int64: tokens so far
    sizes: torch.Tensor,  # [N] int32: n; 0: off
    history: torch.Tensor,  # [S, L] int32
    max_length: int,  # no less than the largest length
) -> None:
    """Forbid what would repeat an n-gram; see ``reference.ban_repeated_ngrams``.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("logits", logits, ("N", "V"), (torch.float32,), launch.check_rows),
        Argument("slots", slots, ("N",), (torch.int64,)),
        Argument("lengths", lengths, ("N",), (torch.int64,)),
        Argument("sizes", sizes, ("N",), (torch.int32,)),
        Argument("history", history, ("S", "L"), (torch.int32,)),
    )
    num_rows, vocabulary = logits.shape
    if num_rows == 0 or max_length == 0:
        return
    _ban_repeated_ngrams_kernel[(launch.cdiv(max_length, _CHUNK), num_rows)](
        logits,
        slots,
        lengths,
        sizes,
        history,
        vocabulary,
        logits.stride(0),
        history.stride(0),
        CHUNK=_CHUNK,
        num_warps=4,
        **launch.LAUNCH_OPTIONS,
    )


def ban_words(
    logits: torch.Tensor,  # [N, V] float32, changed in place
    rows: torch.Tensor,  # [S] int32: row of logits of each slot, -1: none
    lengths: torch.Tensor,  # [N] int64: tokens so far
    words: torch.Tensor,  # [W, K] int32
    word_lengths: torch.Tensor,  # [W] int32, 1 to K
    word_slots: torch.Tensor,  # [W] int32
    history: torch.Tensor,  # [S, L] int32
) -> None:
    """Forbid the ends of words that the text has begun; see ``reference.ban_words``.

    Raises ValueError naming the argument that does not fit.
    """
    launch.check_arguments(
        Argument("logits", logits, ("N", "V"), (torch.float32,), launch.check_rows),
        Argument("rows", rows, ("S",), (torch.int32,)),
        Argument("lengths", lengths, ("N",), (torch.int64,)),
        Argument("words", words, ("W", "K"), (torch.int32,)),
        Argument("word_lengths", word_lengths, ("W",), (torch.int32,)),
        Argument("word_slots", word_slots, ("W",), (torch.int32,)),
        Argument("history", history, ("S", "L"), (torch.int32,)),
    )
    num_words = words.shape[0]
    if num_words == 0 or len(logits) == 0:
        return
    _ban_words_kernel[(num_words,)](
        logits,
        rows,
        lengths,
        words,
        word_lengths,
        word_slots,
        history,
        logits.shape[1],
        logits.stride(0),
        words.stride(0),
        history.stride(0),
        CHUNK=_WORD_CHUNK,
        num_warps=1,
        **launch.LAUNCH_OPTIONS,
    )
