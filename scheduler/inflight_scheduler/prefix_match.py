"""What of a prompt is in the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The part of a prompt that is cached.

    ``block_ids`` are full blocks to share. ``copy_source`` is a block that starts like the rest
    of the prompt: a copy of it serves as the next block. ``num_tokens`` counts all those tokens.
    """

    block_ids: tuple[int, ...] = ()
    copy_source: int | None = None
    num_tokens: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks whose content is used, shared or copied."""
        return len(self.block_ids) + (self.copy_source is not None)


NO_MATCH = PrefixMatch()
