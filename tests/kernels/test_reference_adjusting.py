"""Bias, penalties and bans against the logits processors of transformers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as processors

from inflight_kernels import reference
from inflight_kernels.reference import COUNT_UNIT

VOCAB = 23
NUM_SLOTS = 9


def random_texts(numbers: random.Random, num_rows: int, alphabet: int = VOCAB) -> list[list[int]]:
    """Texts of 0 to 40 tokens; few different tokens, so that they repeat themselves."""
    return [
        [numbers.randrange(alphabet) for _ in range(numbers.choice([0, 1, 2, 7, 40]))]
        for _ in range(num_rows)
    ]


def history_of(texts: list[list[int]], slots: list[int]) -> Tensor:
    """The texts in their slots, rubbish elsewhere."""
    history = torch.randint(0, VOCAB, (NUM_SLOTS, 48), dtype=torch.int32)
    for slot, text in zip(slots, texts, strict=True):
        history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return history


def apply_oracle(processor: object, texts: list[list[int]], logits: Tensor) -> Tensor:
    """A processor of transformers on each row by itself: it wants rows of one length."""
    rows = []
    for text, row in zip(texts, logits, strict=True):
        ids = torch.tensor([text], dtype=torch.int64)
        rows.append(processor(ids, row[None].clone())[0] if text else row)  # type: ignore[operator]
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(12))
def test_repetition_penalty_is_that_of_transformers(seed: int) -> None:
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = 5
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
    texts = random_texts(numbers, num_rows)
    penalty = numbers.choice([0.3, 1.0, 1.2, 5.0])
    counts = torch.zeros(NUM_SLOTS, VOCAB, dtype=torch.int32)
    for slot, text in zip(slots, texts, strict=True):
        for token in text:
            counts[slot, token] += 1 if numbers.random() < 0.3 else COUNT_UNIT
    logits = torch.randn(num_rows, VOCAB, generator=generator)
    expected = apply_oracle(processors.RepetitionPenaltyLogitsProcessor(penalty), texts, logits)
    settings = torch.tensor([[penalty, 0.0, 0.0]]).expand(num_rows, 3)
    temperature = torch.rand(num_rows, generator=generator)
    reference.adjust_logits(logits, slots, temperature, None, counts, settings)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("seed", range(6))
def test_presence_and_frequency_follow_the_formula(seed: int) -> None:
    """TensorRT-LLM's: logit / temperature - presence - frequency * count, the bias first."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 4
    slots = torch.tensor([3, 0, 8, 5])
    counts = torch.randint(0, 5, (NUM_SLOTS, VOCAB), generator=generator, dtype=torch.int32)
    settings = torch.randn(num_rows, 3, generator=generator)
    settings[:, 0] = 1 + settings[:, 0].abs()
    settings[0] = torch.tensor([1.0, 0.0, 0.0])
    temperature = torch.tensor([0.7, 0.0, 1.0, 2.5])
    bias = torch.randn(NUM_SLOTS, VOCAB, generator=generator)
    logits = torch.randn(num_rows, VOCAB, generator=generator)
    expected = torch.empty_like(logits)
    for row in range(num_rows):
        repetition, presence, frequency = settings[row].tolist()
        scale = float(temperature[row]) or 1.0
        for token in range(VOCAB):
            seen = int(counts[slots[row], token])
            logit = float(logits[row, token] + bias[slots[row], token]) / scale
            if seen:
                logit = logit * repetition if logit < 0 else logit / repetition
            if seen // COUNT_UNIT:
                logit -= presence + frequency * (seen // COUNT_UNIT)
            expected[row, token] = logit * scale
    reference.adjust_logits(logits, slots, temperature, bias, counts, settings)
    torch.testing.assert_close(logits, expected)


def test_bias_is_the_sequence_bias_of_transformers() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, VOCAB, generator=generator)
    bias = torch.zeros(NUM_SLOTS, VOCAB)
    bias[6, [1, 20]] = torch.tensor([3.5, -torch.inf])
    expected = apply_oracle(
        processors.SequenceBiasLogitsProcessor([[[1], 3.5], [[20], -float("inf")]]),
        [[5], [5]],
        logits,
    )
    expected[1] = logits[1]
    neutral = torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3)
    reference.adjust_logits(logits, torch.tensor([6, 2]), torch.ones(2), bias, None, neutral)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("seed", range(20))
def test_no_repeat_ngram_is_that_of_transformers(seed: int) -> None:
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = 6
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
    texts = random_texts(numbers, num_rows, alphabet=3)
    sizes = [numbers.choice([0, 1, 2, 3, 5]) for _ in texts]
    logits = torch.randn(num_rows, VOCAB, generator=generator)
    expected = torch.stack(
        [
            apply_oracle(processors.NoRepeatNGramLogitsProcessor(size), [text], row[None])[0]
            if size
            else row
            for text, size, row in zip(texts, sizes, logits, strict=True)
        ]
    )
    reference.ban_repeated_ngrams(
        logits,
        slots,
        torch.tensor([len(text) for text in texts]),
        torch.tensor(sizes, dtype=torch.int32),
        history_of(texts, slots.tolist()),
        max(len(text) for text in texts),
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_are_those_of_transformers(seed: int) -> None:
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = 4
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
    # transformers passes over a word that is one longer than the text, so texts are not short.
    texts = [[0, 1, 2, 0, 1, *text] for text in random_texts(numbers, num_rows, alphabet=3)]
    lists: list[list[list[int]]] = [
        [
            [numbers.randrange(3) for _ in range(numbers.randint(1, 4))]
            + [numbers.randrange(VOCAB)]
            for _ in range(row)  # the first row has none
        ]
        for row in range(num_rows)
    ]
    logits = torch.randn(num_rows, VOCAB, generator=generator)
    expected = torch.stack(
        [
            apply_oracle(processors.NoBadWordsLogitsProcessor(words), [text], row[None])[0]
            if words
            else row
            for text, words, row in zip(texts, lists, logits, strict=True)
        ]
    )
    flat = [
        (slot, word) for slot, words in zip(slots.tolist(), lists, strict=True) for word in words
    ]
    unused = (set(range(NUM_SLOTS)) - set(slots.tolist())).pop()
    flat.append((unused, [0, 1]))  # of a slot that draws nothing now
    width = max(len(word) for _, word in flat)
    rows = torch.full((NUM_SLOTS,), -1, dtype=torch.int32)
    rows[slots] = torch.arange(num_rows, dtype=torch.int32)
    reference.ban_words(
        logits,
        rows,
        torch.tensor([len(text) for text in texts]),
        torch.tensor([word + [0] * (width - len(word)) for _, word in flat], dtype=torch.int32),
        torch.tensor([len(word) for _, word in flat], dtype=torch.int32),
        torch.tensor([slot for slot, _ in flat], dtype=torch.int32),
        history_of(texts, slots.tolist()),
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.05, 0, 0.0), (0.3, 10, 0.95)])
def test_min_p_keeps_what_transformers_keeps(min_p: float, top_k: int, top_p: float) -> None:
    num_rows = 20
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(7)) * 3
    ids = torch.zeros(num_rows, 1, dtype=torch.int64)
    scores = processors.TemperatureLogitsWarper(0.8)(ids, logits)
    if top_k:
        scores = processors.TopPLogitsWarper(top_p)(
            ids, processors.TopKLogitsWarper(top_k)(ids, scores)
        )
    expected = processors.MinPLogitsWarper(min_p)(ids, scores).softmax(-1)
    drawn = torch.zeros(num_rows, VOCAB)
    for position in range(150):
        tokens = reference.sample(
            logits,
            torch.full((num_rows,), 0.8),
            torch.full((num_rows,), top_k, dtype=torch.int32),
            torch.full((num_rows,), top_p),
            torch.arange(num_rows),
            torch.full((num_rows,), position),
            torch.full((num_rows,), min_p),
        )
        drawn[torch.arange(num_rows), tokens] = 1
    assert not ((drawn > 0) & (expected == 0)).any()
    assert ((drawn > 0) | (expected < 0.12)).all()  # unseen in 150 draws: once in 10^8
