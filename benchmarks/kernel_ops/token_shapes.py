"""Shapes of the token-wise benchmarks (K3): 8B and 13B, from one token to a full step, and the
batches that draw from their vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernel_ops.harness import Setting
from kernel_ops.paged_batch import LLAMA_8B, LLAMA_13B, TINY, Heads


@dataclass(frozen=True)
class TokenShape:
    """A model's widths and how many tokens pass."""

    heads: Heads
    hidden: int
    intermediate: int
    vocabulary: int
    num_tokens: int

    @property
    def parameters(self) -> dict[str, object]:
        """How the row is labelled."""
        return {"shape": self.heads.name, "tokens": self.num_tokens}


def token_shapes(setting: Setting) -> Iterator[TokenShape]:
    """All shapes of a run: the 13B's up to 64 tokens, since beyond only the widths differ."""
    if setting.is_dry:
        yield TokenShape(TINY, 80, 96, 100, 3)
        return
    for num_tokens in (1, 64, 1024, 8192):
        yield TokenShape(LLAMA_8B, 4096, 14336, 128256, num_tokens)
        if num_tokens <= 64:
            yield TokenShape(LLAMA_13B, 5120, 13824, 32000, num_tokens)


def logits_shapes(setting: Setting) -> Iterator[tuple[int, int]]:
    """(batch, vocabulary) of a run."""
    for vocabulary in [100] if setting.is_dry else [128256, 32000]:
        for batch in [2] if setting.is_dry else [1, 8, 64, 256]:
            yield batch, vocabulary
