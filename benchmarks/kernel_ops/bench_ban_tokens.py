"""Bans in every row (K3): microseconds and GB/s, each text read once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams, ban_words
from kernel_ops.harness import Row, Setting, num_bytes

_WORDS_PER_ROW, _WIDTH = 16, 4


def rows(setting: Setting) -> Iterator[Row]:
    """Texts of one length, with 3-grams and with words of four tokens."""
    device = setting.device
    vocabulary, length = (100, 20) if setting.is_dry else (128256, 2048)
    for batch in [2] if setting.is_dry else [1, 8, 64, 256]:
        logits = torch.randn(batch, vocabulary, device=device)
        history = torch.randint(0, 100, (batch, length), dtype=torch.int32, device=device)
        slots = torch.arange(batch, device=device)
        lengths = torch.full((batch,), length - 1, device=device)
        sizes = torch.full((batch,), 3, dtype=torch.int32, device=device)
        num_words = batch * _WORDS_PER_ROW
        words = torch.zeros(num_words, _WIDTH, dtype=torch.int32, device=device)
        word_lengths = torch.full((num_words,), _WIDTH, dtype=torch.int32, device=device)
        owners = slots.int().repeat_interleave(_WORDS_PER_ROW)
        parameters = {"batch": batch, "length": length}
        ngrams = partial(ban_repeated_ngrams, logits, slots, lengths, sizes, history, length)
        yield Row({**parameters, "kind": "3-grams"}, ngrams, num_bytes(history))
        bans = partial(
            ban_words, logits, slots.int(), lengths, words, word_lengths, owners, history
        )
        yield Row({**parameters, "kind": f"{_WORDS_PER_ROW} words"}, bans, 2 * num_bytes(words))
