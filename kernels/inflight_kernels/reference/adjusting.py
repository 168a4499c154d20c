"""What requests want done to their logits before the draw: bias, penalties, bans.

Rules and their order are TensorRT-LLM's (`cpp/tensorrt_llm/kernels/penaltyKernels.cu`,
`banRepeatNgram.cu`, `banBadWords.cu`): bias, temperature, repetition, presence, frequency, bans.
Here the temperature is divided out by `sample`, later, so additive penalties are multiplied by it.

State is kept per *slot*, [S, ...]; ``slots`` [N] says whose row of it each row of logits reads.
Everything changes ``logits`` in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNT_UNIT = 2
"""One occurrence in a table of counts; the lowest bit says that a token has been seen at all."""


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    counts: Tensor | None,
    penalties: Tensor,
) -> None:
    """Add ``bias`` and apply penalties for what was seen, to logits [N, V] float32.

    slots [N] int64; temperature [N] float32 (0 counts as 1: such a row is greedy); bias [S, V]
    float32; counts [S, V] int32 in units of `COUNT_UNIT`, odd for a token that was seen without
    being counted; penalties [N, 3] float32: repetition (a positive logit of a token seen is
    divided by it, a negative one multiplied), presence (subtracted once from tokens counted) and
    frequency (subtracted once per count). (1, 0, 0) changes nothing.
    """
    if bias is not None:
        logits += bias[slots]
    if counts is None:
        return
    seen = counts[slots]
    repetition, presence, frequency = (penalties[:, i, None] for i in range(3))
    penalized = torch.where(logits < 0, logits * repetition, logits / repetition)
    torch.where(seen > 0, penalized, logits, out=logits)
    number = (seen // COUNT_UNIT).float()
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
    logits -= scale * ((number > 0) * presence + number * frequency)


def ban_repeated_ngrams(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sizes: Tensor,
    history: Tensor,
    max_length: int,
) -> None:
    """Forbid the token that would repeat an n-gram of the text so far.

    lengths [N] int64: tokens so far; sizes [N] int32: n, 0 for rows without the rule; history
    [S, L] int32: the tokens of each slot; ``max_length`` is no less than the largest length.
    """
    if max_length == 0:
        return
    text = history[slots, :max_length]  # [N, L]
    starts = torch.arange(max_length, device=logits.device)
    # Where an n-gram begins whose last token is in the text.
    matches = (starts + sizes[:, None] <= lengths[:, None]) & (sizes[:, None] > 0)
    for offset in range(int(sizes.max()) - 1):
        is_compared = offset < sizes - 1
        last = (lengths - sizes + 1 + offset).clamp(0, max_length - 1)
        wanted = text.gather(1, last[:, None])
        found = text[:, (starts + offset).clamp(max=max_length - 1)]
        matches &= (found == wanted) | ~is_compared[:, None]
        if not matches.any():
            return
    ends = (starts + sizes[:, None] - 1).clamp(0, max_length - 1)
    rows, columns = matches.nonzero(as_tuple=True)
    logits[rows, text.gather(1, ends)[rows, columns].long()] = -torch.inf


def ban_words(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    words: Tensor,
    word_lengths: Tensor,
    word_slots: Tensor,
    history: Tensor,
) -> None:
    """Forbid the last token of each word whose other tokens end the text so far.

    rows [S] int32: row of logits of each slot, -1 for slots not drawn; lengths [N] int64: tokens so
    far; words [W, K] int32, padded behind ``word_lengths`` [W] int32 (>= 1); word_slots [W] int32:
    whose words they are; history [S, L] int32.
    """
    row = rows[word_slots.long()].long()
    is_drawn = row >= 0
    length = lengths[row.clamp(min=0)]
    start = length - (word_lengths - 1)  # where the text would have to begin like the word
    matches = is_drawn & (start >= 0)
    for offset in range(words.shape[1] - 1):
        position = (start + offset).clamp(0, history.shape[1] - 1)
        found = history[word_slots.long(), position]
        matches &= (found == words[:, offset]) | (offset >= word_lengths - 1)
    last = words.gather(1, (word_lengths.long() - 1)[:, None]).squeeze(1).long()
    logits[row[matches], last[matches]] = -torch.inf
