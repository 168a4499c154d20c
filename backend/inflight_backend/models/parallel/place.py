"""The place of a rank among those that run one model; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.parameters import Ranges

MAX_RANKS = 1024
WHOLE_EXPERTS = "expert_parallel, which cuts no expert"
"""What works where the numbers of experts cannot be divided."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of rank ``rank`` among ``tensor_size * pipeline_size``.

    ``pipeline_size`` stages hold neighbouring layers each, and ``tensor_size`` ranks of a stage a
    part of each layer. Stages are numbered by rank: the first ranks are those of the first stage.
    ``splits_experts``: a rank holds whole experts; else columns of all of them.
    """

    rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    splits_experts: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_rank(self) -> int:
        """Among the ranks of the stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """Which of the pipeline, from 0."""
        return self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        """True if it embeds tokens, and makes logits."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the last layer is its own."""
        return self.stage == self.pipeline_size - 1

    def layers_of(self, num_layers: int) -> range:
        """The layers of its stage; `ConfigurationError` for more stages than layers."""
        if num_layers < self.pipeline_size:
            raise ConfigurationError(
                f"pipeline_parallel_size is {self.pipeline_size}, and the model has only "
                f"{num_layers} layers"
            )
        first, end = (
            num_layers * stage // self.pipeline_size for stage in (self.stage, self.stage + 1)
        )
        return range(first, end)

    def part_of(self, count: int, what: str, way_out: str = "") -> range:
        """Its equal part of ``count``; `ConfigurationError`, which names ``what`` and what else
        works, if there are no equal parts."""
        if count % self.tensor_size:
            raise ConfigurationError(
                f"tensor_parallel_size is {self.tensor_size}, which does not divide the {count} "
                f"{what} of the model; use a divisor of {count}{way_out}"
            )
        size = count // self.tensor_size
        return range(self.tensor_rank * size, (self.tensor_rank + 1) * size)

    def kv_heads_of(self, count: int) -> range:
        """Its part of ``count`` heads of keys and values: one of them where there are fewer than
        ranks, which several ranks then hold."""
        if count >= self.tensor_size:
            return self.part_of(count, "heads of keys and values")
        if self.tensor_size % count:
            raise ConfigurationError(
                f"tensor_parallel_size is {self.tensor_size}, and the model has {count} heads of "
                f"keys and values; use a divisor or a multiple of {count}"
            )
        first = self.tensor_rank * count // self.tensor_size
        return range(first, first + 1)

    def vocabulary_of(self, vocab_size: int) -> range:
        """The tokens whose rows of embedding and head it holds; the last rank may have fewer."""
        size = -(-vocab_size // self.tensor_size)
        if size * (self.tensor_size - 1) >= vocab_size:
            raise ConfigurationError(
                f"tensor_parallel_size is {self.tensor_size}, too many for a vocabulary of "
                f"{vocab_size} tokens"
            )
        first = self.tensor_rank * size
        return range(first, min(first + size, vocab_size))


ALONE = Place()


def ranges_of(part: range, size: int = 1, start: int = 0) -> Ranges:
    """The rows of ``part`` of things that have ``size`` rows each, the first at ``start``."""
    return ((start + part.start * size, start + part.stop * size),)
