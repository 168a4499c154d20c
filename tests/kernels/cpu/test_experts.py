"""A mixture of experts by compiled kernels, beside what it means."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from inflight_kernels import reference
from inflight_kernels.cpu.linear import grouped_linear, grouped_linear_stage, pack
from inflight_kernels.cpu.routed import experts as kernels

NUM_EXPERTS, TOP_K, SIZE, INNER = 6, 3, 64, 48


@pytest.mark.parametrize("is_normalized", [False, True])
def test_experts_of_the_largest_scores(generator: torch.Generator, is_normalized: bool) -> None:
    logits = 4 * torch.randn(9, NUM_EXPERTS, generator=generator)
    experts, weights = kernels.choose_experts(
        logits, TOP_K, is_normalized=is_normalized, norm_eps=0.25, scale=2.5
    )
    values, expected = logits.softmax(-1).topk(TOP_K)
    if is_normalized:
        values = values / (values.sum(-1, keepdim=True) + 0.25)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, 2.5 * values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_products_of_sorted_rows(
    generator: torch.Generator, num_tokens: int, dtype: torch.dtype
) -> None:
    """Of all experts but one, one of them with most tokens: linears, and the sum of answers."""
    x = torch.randn(num_tokens, SIZE, generator=generator).to(dtype)
    weight = torch.randn(NUM_EXPERTS, INNER, SIZE, generator=generator).to(dtype) / 8
    bias = torch.randn(NUM_EXPERTS, INNER, generator=generator)
    biases = bias.flatten()
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    logits[:, 1], logits[:, 4] = -9.0, 9.0
    weights, chosen = logits.softmax(-1).topk(TOP_K)
    rows = kernels.SortedRows.empty(num_tokens, TOP_K, NUM_EXPERTS)
    experts = chosen.int()
    kernels.sort_rows_stage(experts, rows).run()
    given = x[rows.tokens]
    inner = torch.empty(num_tokens * TOP_K, INNER, dtype=dtype)
    packed = pack(weight.flatten(0, 1))
    grouped_linear_stage(given, packed, biases, rows.starts, rows.active, inner).run()
    assert torch.equal(inner, grouped_linear(given, packed, rows.starts, biases))
    expected = reference.grouped_linear(given, weight, rows.starts, bias.to(dtype))
    rtol = 1e-4 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(inner, expected, rtol=rtol, atol=rtol)
    out = torch.empty(num_tokens, INNER, dtype=dtype)
    kernels.add_experts_stage(inner, weights, rows.places, out).run()
    for token in range(num_tokens):
        answers = [
            functional.linear(x[token], weight[expert], bias[expert].to(dtype)) * share
            for expert, share in zip(chosen[token], weights[token].to(dtype), strict=True)
        ]
        torch.testing.assert_close(out[token], sum(answers), rtol=rtol, atol=2 * rtol)
