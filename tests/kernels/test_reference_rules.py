"""All rules of a row at once, with random parameters: what may be drawn, and how likely it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as processors

from inflight_kernels import reference
from inflight_kernels.reference import COUNT_UNIT

VOCAB = 23
TOKENS = st.integers(0, VOCAB - 1)
FEW_TOKENS = st.integers(0, 3)  # so that texts repeat themselves


@dataclass(frozen=True)
class Rules:
    """What one request wants, and the text so far."""

    text: list[int]
    bias: dict[int, float]
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words: list[list[int]]
    temperature: float
    top_k: int
    top_p: float
    min_p: float


RULES = st.builds(
    Rules,
    text=st.lists(FEW_TOKENS, min_size=5, max_size=30),
    bias=st.dictionaries(TOKENS, st.floats(-5, 5, width=32), max_size=4),
    repetition_penalty=st.floats(0.25, 4, width=32),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words=st.lists(st.lists(FEW_TOKENS, min_size=1, max_size=4), max_size=5),
    temperature=st.floats(0.125, 4, width=32),
    top_k=st.just(0) | st.integers(2, VOCAB + 5),
    top_p=st.just(1.0) | st.floats(0.0625, 1, width=32),
    min_p=st.just(0.0) | st.floats(2**-10, 1, width=32),
)


def expected(rules: Rules, logits: Tensor) -> Tensor:
    """Probabilities [V] by the processors of transformers, in the order of its `generate`."""
    chain: list[object] = [
        processors.RepetitionPenaltyLogitsProcessor(rules.repetition_penalty),
        processors.TemperatureLogitsWarper(rules.temperature),
        processors.TopPLogitsWarper(rules.top_p),
        processors.MinPLogitsWarper(rules.min_p),
    ]
    if rules.top_k:
        chain.insert(2, processors.TopKLogitsWarper(rules.top_k))
    if rules.bad_words:
        chain.insert(1, processors.NoBadWordsLogitsProcessor(rules.bad_words))
    if rules.no_repeat_ngram_size:
        chain.insert(1, processors.NoRepeatNGramLogitsProcessor(rules.no_repeat_ngram_size))
    if rules.bias:
        biases = {(token,): value for token, value in rules.bias.items()}
        chain.insert(0, processors.SequenceBiasLogitsProcessor(biases))
    ids, scores = torch.tensor([rules.text]), logits[None].clone()
    for processor in chain:
        scores = processor(ids, scores)  # type: ignore[operator]
    return scores[0].softmax(-1)


def adjusted(rules: Rules, logits: Tensor) -> Tensor:
    """Logits [1, V] with everything that comes before the filters."""
    row, slot = logits[None].clone(), torch.tensor([0])
    bias = torch.zeros(1, VOCAB)
    for token, value in rules.bias.items():
        bias[0, token] = value
    counts = torch.tensor(rules.text).bincount(minlength=VOCAB).int()[None] * COUNT_UNIT
    penalties = torch.tensor([[rules.repetition_penalty, 0.0, 0.0]])
    temperature = torch.tensor([rules.temperature])
    reference.adjust_logits(row, slot, temperature, bias, counts, penalties)
    length = torch.tensor([len(rules.text)])
    history = torch.tensor([rules.text], dtype=torch.int32)
    size = torch.tensor([rules.no_repeat_ngram_size], dtype=torch.int32)
    reference.ban_repeated_ngrams(row, slot, length, size, history, len(rules.text))
    if rules.bad_words:
        words = torch.zeros(len(rules.bad_words), 4, dtype=torch.int32)
        for number, word in enumerate(rules.bad_words):
            words[number, : len(word)] = torch.tensor(word)
        lengths = torch.tensor([len(word) for word in rules.bad_words], dtype=torch.int32)
        owners = torch.zeros(len(words), dtype=torch.int32)
        reference.ban_words(
            row, torch.zeros(1, dtype=torch.int32), length, words, lengths, owners, history
        )
    return row


@settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
@given(rules=RULES, seed=st.integers(0, 2**31))
def test_random_rules_leave_what_transformers_leaves(rules: Rules, seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = expected(rules, logits)
    assume(wanted.isfinite().all())  # something may be drawn
    each = torch.arange(VOCAB)
    log_probs = reference.log_probs_of_draws(
        adjusted(rules, logits).expand(VOCAB, -1),
        each,
        torch.full((VOCAB,), rules.temperature),
        torch.full((VOCAB,), rules.top_k, dtype=torch.int32),
        torch.full((VOCAB,), rules.top_p),
        torch.full((VOCAB,), rules.min_p),
    )
    assert torch.equal(log_probs.exp() > 0, wanted > 0)
    torch.testing.assert_close(log_probs.exp(), wanted, atol=1e-5, rtol=1e-4)
