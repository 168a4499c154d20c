"""What every engine is asked to do, and with how much: the same for all, drawn from a seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

_TINY_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_LLAMA_8B_SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What an engine gets: tokens of KV cache, requests and tokens of one step, the model.

    28 GiB of KV in bf16, so that two engines fit a GPU of 80 GB and more beside one another.
    """

    is_dry: bool
    model_folder: str
    kv_tokens: int = 229_376
    max_batch_size: int = 256
    max_num_tokens: int = 16_384
    max_seq_len: int = 4096
    block_size: int = 64
    variant: str = ""

    @classmethod
    def tiny(cls, model_folder: str, variant: str = "") -> Budget:
        """What a dry run gets."""
        return cls(True, model_folder, 512, 4, 64, 128, 16, variant)

    @property
    def shape(self) -> dict[str, int]:
        """Keys of a Llama's ``config.json``."""
        return _TINY_SHAPE if self.is_dry else _LLAMA_8B_SHAPE

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache in bfloat16."""
        shape = self.shape
        width = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        return 2 * 2 * width * self.kv_tokens

    def to_json(self) -> str:
        """For the command line of a worker."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Done:
    """One run of a piece of work. ``num_tokens`` were generated, prompts not counted."""

    seconds: float
    num_tokens: int
    notes: dict[str, Any] = field(default_factory=dict)


class PeerEngine(Protocol):
    """An engine in a process of its own. Made once, then asked again and again."""

    def __init__(self, budget: Budget) -> None:
        """Load seeded random weights, take the cache, warm up; whatever raises makes a row."""

    def facts(self) -> dict[str, Any]:
        """Version and what it chose by itself."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """Greedy answers of exactly these lengths to requests that arrive together."""
