"""Bans in the Triton language against the reference."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.sampling.ban_tokens import ban_repeated_ngrams, ban_words

VOCAB = 30


def make_history(generator: torch.Generator, device: torch.device, length: int) -> torch.Tensor:
    """Texts of two different tokens: n-grams repeat."""
    history = torch.randint(0, 2, (5, length), generator=generator, dtype=torch.int32)
    return history.to(device)


@pytest.mark.parametrize("length", [3, 300])
def test_ngrams_equal_the_reference(
    device: torch.device, generator: torch.Generator, length: int
) -> None:
    history = make_history(generator, device, length)
    logits = torch.randn(5, VOCAB, generator=generator).to(device)
    slots = torch.tensor([4, 2, 0, 1, 3], device=device)
    lengths = torch.tensor([length, length - 1, 0, length - 2, 1], device=device)
    sizes = torch.tensor([3, 1, 2, 7, 0], dtype=torch.int32, device=device)
    arguments = (slots, lengths, sizes, history, length)
    expected = logits.clone()
    reference.ban_repeated_ngrams(expected, *arguments)
    ban_repeated_ngrams(logits, *arguments)
    assert torch.equal(logits, expected)
    assert torch.isinf(expected[1]).any()


def test_words_equal_the_reference(device: torch.device, generator: torch.Generator) -> None:
    history = make_history(generator, device, 20)
    words = torch.randint(0, 2, (60, 5), generator=generator, dtype=torch.int32).to(device)
    word_lengths = torch.randint(1, 6, (60,), generator=generator, dtype=torch.int32).to(device)
    words[torch.arange(60), word_lengths.long() - 1] = torch.arange(60, dtype=torch.int32) % VOCAB
    word_slots = (torch.arange(60, dtype=torch.int32, device=device) % 5).int()
    logits = torch.randn(3, VOCAB, generator=generator).to(device)
    rows = torch.tensor([1, -1, 0, -1, 2], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 2, 0], device=device)
    arguments = (rows, lengths, words, word_lengths, word_slots, history)
    expected = logits.clone()
    reference.ban_words(expected, *arguments)
    ban_words(logits, *arguments)
    assert torch.equal(logits, expected)
    assert torch.isinf(expected[0]).any()


def test_a_word_longer_than_what_is_compared_at_a_time(
    device: torch.device, generator: torch.Generator
) -> None:
    """The text has begun the first word; the second differs in its first token."""
    text = torch.randint(0, VOCAB, (1, 70), generator=generator, dtype=torch.int32)
    words = torch.cat((text[:, -66:], torch.tensor([[5]], dtype=torch.int32)), dim=1).repeat(2, 1)
    words[1, 0] = (words[1, 0] + 1) % VOCAB
    words[1, -1] = 6
    rows, slots = (torch.tensor(each, dtype=torch.int32) for each in ([0], [0, 0]))
    word_lengths, lengths = torch.tensor([67, 67], dtype=torch.int32), torch.tensor([70])
    logits = torch.zeros(1, VOCAB, device=device)
    arguments = (rows, lengths, words, word_lengths, slots, text)
    ban_words(logits, *(argument.to(device) for argument in arguments))
    assert torch.isinf(logits[0]).nonzero().flatten().tolist() == [5]
