"""A token through the gated delta rule: answers and states those of the reference."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels import reference
from inflight_kernels.ops.attention.delta_step import delta_step


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((3, 2, 4, 128, 128), torch.bfloat16),
        ((2, 3, 3, 16, 24), torch.float32),  # of no power of two
        ((1, 1, 2, 8, 40), torch.float16),
        ((0, 1, 1, 16, 16), torch.float32),
    ],
)
def test_answers_and_states(
    device: torch.device,
    generator: torch.Generator,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
) -> None:
    """Rows of a projection, several steps; the states of other rows stay as they are."""
    num_texts, key_heads, heads, key_dim, value_dim = sizes
    parts = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    states = torch.randn(6, heads, key_dim, value_dim, generator=generator).to(device)
    expected_states = states.clone()
    slots = torch.tensor([4, 0, 3], device=device)[:num_texts]
    for _ in range(3):
        mixed = torch.randn(num_texts, sum(parts), generator=generator).to(device, dtype)
        query, key, value = torch.split(mixed, parts, dim=1)
        taken = (
            query.view(num_texts, key_heads, key_dim),
            key.view(num_texts, key_heads, key_dim),
            value.view(num_texts, heads, value_dim),
            -torch.rand(num_texts, heads, generator=generator).to(device),
            torch.rand(num_texts, heads, generator=generator).to(device),
        )
        found = delta_step(*taken, states, slots, 1e-6)
        expected = reference.delta_step(*taken, expected_states, slots, 1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def test_chunks_are_steps(generator: torch.Generator) -> None:
    """The form that computes many tokens at once, over more than one chunk."""
    num_tokens, heads, key_dim, value_dim = 150, 2, 8, 5
    query, key = (torch.randn(num_tokens, 1, key_dim, generator=generator) for _ in range(2))
    value = torch.randn(num_tokens, heads, value_dim, generator=generator)
    decay = -3 * torch.rand(num_tokens, heads, generator=generator)
    strength = torch.rand(num_tokens, heads, generator=generator)
    state = torch.randn(heads, key_dim, value_dim, generator=generator)
    units = reference.delta_heads(query, key, heads, 1e-6)
    found, last = reference.delta_chunks(*units, value, decay, strength, state)
    states, slots = state[None].clone(), torch.tensor([0])
    for token in range(num_tokens):
        q, k, v, g, b = (each[token, None] for each in (query, key, value, decay, strength))
        step = reference.delta_step(q, k, v, g, b, states, slots, 1e-6)
        torch.testing.assert_close(found[token], step[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, states[0], rtol=1e-4, atol=1e-4)
