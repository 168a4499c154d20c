"""The oracle of sampling: rules against the processors of transformers, draws against exact
probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as processors

from inflight_kernels import reference
from inflight_kernels.reference import COUNT_UNIT

VOCAB = 23
NUM_SLOTS = 9
TOKENS = st.integers(0, VOCAB - 1)
FEW_TOKENS = st.integers(0, 3)  # so that texts repeat themselves


@dataclass(frozen=True)
class Rules:
    """What one request wants, and the text so far."""

    text: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


RULES = st.builds(
    Rules,
    text=st.lists(FEW_TOKENS, max_size=4) | st.lists(FEW_TOKENS, min_size=12, max_size=40),
    bias=st.dictionaries(TOKENS, st.floats(-5, 5, width=32) | st.just(-torch.inf), max_size=4),
    repetition_penalty=st.floats(0.25, 4, width=32),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words=st.lists(st.lists(FEW_TOKENS, min_size=1, max_size=4), max_size=5),
    temperature=st.floats(0.125, 4, width=32),
    top_k=st.just(0) | st.integers(2, VOCAB + 5),
    top_p=st.just(1.0) | st.floats(0.0625, 1, width=32),
    min_p=st.just(0.0) | st.floats(2**-10, 1, width=32),
)


def expected(rules: Rules, logits: Tensor) -> Tensor:
    """Probabilities of logits [V] by the processors of transformers, in the order of its
    `generate`; NaN where nothing may be drawn."""
    chain: list[object] = []
    if rules.bias:
        biases = {(token,): value for token, value in rules.bias.items()}
        chain.append(processors.SequenceBiasLogitsProcessor(biases))
    chain.append(processors.RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.no_repeat_ngram_size:
        chain.append(processors.NoRepeatNGramLogitsProcessor(rules.no_repeat_ngram_size))
    if rules.bad_words:
        # It passes over a word that is one longer than the text, unless told of one token alone.
        words = [word[-1:] if word[:-1] == rules.text else word for word in rules.bad_words]
        chain.append(processors.NoBadWordsLogitsProcessor(words))
    chain.append(processors.TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        chain.append(processors.TopKLogitsWarper(rules.top_k))
    chain.append(processors.TopPLogitsWarper(rules.top_p))
    chain.append(processors.MinPLogitsWarper(rules.min_p))
    ids, scores = torch.tensor([rules.text], dtype=torch.int64), logits[None].clone()
    for processor in chain:
        scores = processor(ids, scores)  # type: ignore[operator]
    return scores[0].softmax(-1, dtype=torch.float64)


def per_row(batch: list[Rules], name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([getattr(rules, name) for rules in batch], dtype=dtype)


def adjusted(batch: list[Rules], logits: Tensor, generator: torch.Generator) -> Tensor:
    """Logits [N, V] with everything that comes before the filters. The state of each row lies in a
    random slot; other slots hold numbers that must not matter."""
    logits = logits.clone()
    slots = torch.randperm(NUM_SLOTS, generator=generator)
    slots, unused = slots[: len(batch)], int(slots[-1])
    bias = torch.randn(NUM_SLOTS, VOCAB, generator=generator)
    counts = torch.randint(0, 5, (NUM_SLOTS, VOCAB), generator=generator, dtype=torch.int32)
    history = torch.randint(0, 4, (NUM_SLOTS, 48), generator=generator, dtype=torch.int32)
    words = [(unused, [0]), (unused, [1, 2])]
    bias[slots], counts[slots] = 0.0, 0
    for slot, rules in zip(slots.tolist(), batch, strict=True):
        for token, value in rules.bias.items():
            bias[slot, token] = value
        for token in rules.text:
            counts[slot, token] = 1 if token == 2 else COUNT_UNIT  # 1: seen, but not counted
        history[slot, : len(rules.text)] = torch.tensor(rules.text, dtype=torch.int32)
        words += [(slot, word) for word in rules.bad_words]
    penalties = torch.zeros(len(batch), 3)
    penalties[:, 0] = per_row(batch, "repetition_penalty")
    reference.adjust_logits(logits, slots, per_row(batch, "temperature"), bias, counts, penalties)
    lengths = torch.tensor([len(rules.text) for rules in batch])
    sizes = per_row(batch, "no_repeat_ngram_size", torch.int32)
    longest = int(lengths.max())
    reference.ban_repeated_ngrams(logits, slots, lengths, sizes, history, longest)
    rows = torch.full((NUM_SLOTS,), -1, dtype=torch.int32)
    rows[slots] = torch.arange(len(batch), dtype=torch.int32)
    reference.ban_words(
        logits,
        rows,
        lengths,
        torch.tensor([word + [0] * (4 - len(word)) for _, word in words], dtype=torch.int32),
        torch.tensor([len(word) for _, word in words], dtype=torch.int32),
        torch.tensor([slot for slot, _ in words], dtype=torch.int32),
        history,
    )
    return logits


@settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])
@given(batch=st.lists(RULES, min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_random_rules_leave_what_transformers_leaves(batch: list[Rules], seed: int) -> None:
    """Which tokens may be drawn in each row, and how likely each of them is."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(batch), VOCAB, generator=generator) * 3
    wanted = torch.stack([expected(*each) for each in zip(batch, logits, strict=True)]).float()
    each = [rules for rules in batch for _ in range(VOCAB)]
    log_probs = reference.log_probs_of_draws(
        adjusted(batch, logits, generator).repeat_interleave(VOCAB, dim=0),
        torch.arange(VOCAB).repeat(len(batch)),
        per_row(each, "temperature"),
        per_row(each, "top_k", torch.int32),
        per_row(each, "top_p"),
        per_row(each, "min_p"),
    ).view_as(wanted)
    is_possible = wanted.isfinite().all(dim=-1)
    found, wanted = log_probs[is_possible].exp(), wanted[is_possible]
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


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


def draw(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """All rows with the same parameters; by default row ``i`` has seed ``i``, position 0."""
    n = len(logits)
    return reference.sample(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.arange(n) if seeds is None else seeds,
        torch.zeros(n, dtype=torch.int64) if positions is None else positions,
    )


def test_uniform_is_splitmix64() -> None:
    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 1, 7, 100_000, 5]
    gamma = 0x9E3779B97F4A7C15
    expected = [
        (mix((mix((seed + gamma) % 2**64) + position * gamma) % 2**64) >> 40) / 2**24
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert reference.uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


@pytest.mark.parametrize("is_by_seed", [True, False])
def test_uniform_is_even(is_by_seed: bool) -> None:
    counting, fixed = torch.arange(65_536), torch.full((65_536,), 3)
    numbers = (
        reference.uniform(counting, fixed) if is_by_seed else reference.uniform(fixed, counting)
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    chi_square = ((counts - 1024).square() / 1024).sum()
    assert chi_square < 104  # 99.9 % of even draws: 63 degrees of freedom
    assert abs(torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 5, 0.0), (1.7, 12, 0.8), (0.8, 0, 0.6), (1.0, 90, 0.999)],
)
def test_draws_follow_the_warped_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    rules = Rules(temperature=temperature, top_k=top_k, top_p=top_p or 1.0)
    n = 20_000
    wanted = expected(rules, logits) * n
    tokens = draw(logits.expand(n, -1), temperature=temperature, top_k=top_k, top_p=top_p)
    counts = tokens.bincount(minlength=VOCAB).double()
    assert counts[wanted == 0].sum() == 0
    rare = wanted < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None])).clamp(min=1e-9)
    chi_square = ((observed - wanted).square() / wanted).sum()
    degrees = len(wanted) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 5, 0.9), (1.0, 1, 0.9), (1.0, 0, 0.0)]
)
def test_greedy_parameters(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens = draw(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_row_does_not_know_its_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    n = 48
    logits = torch.randn(n, VOCAB, generator=generator) * 2
    temperature = torch.rand(n, generator=generator) * 2
    temperature[::7] = 0
    top_k = torch.randint(0, 20, (n,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(n, generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    positions = torch.randint(0, 10_000, (n,), generator=generator)
    arguments = (logits, temperature, top_k, top_p, seeds, positions)
    together = reference.sample(*arguments)
    order = torch.randperm(n, generator=generator)
    assert torch.equal(reference.sample(*(x[order] for x in arguments)), together[order])
    for row in range(n):
        alone = reference.sample(*(x[row : row + 1] for x in arguments))
        assert alone.item() == together[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-38])
def test_rows_that_are_not_finite(temperature: float) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 7] = 30
    logits[1, 4] = torch.nan
    logits[2, 4] = torch.inf
    logits[3] = -torch.inf
    logits[4, :7] = -torch.inf  # allowed: forbidden tokens
    logits[4, 8:] = -torch.inf
    tokens = draw(logits, temperature=temperature, top_k=3, top_p=0.5)
    assert tokens.tolist() == [7, -1, -1, -1, 7, 7]


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.full((2_000, 4), 1.0)
    logits[:, 3] = -5.0
    assert set(draw(logits, top_k=2).tolist()) == {0, 1, 2}
    assert set(draw(logits, top_p=0.4).tolist()) == {0, 1, 2}
