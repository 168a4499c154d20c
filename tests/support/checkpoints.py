"""Small random checkpoints of every family, written by transformers, and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 199
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama3-biased-gqa8": (
        "Llama",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama-linear-rope-tied": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-some-windows": (
        "Mistral",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"num_attention_heads": 8, "head_dim": 14}),
    "qwen3-biased-tied": (
        "Qwen3",
        {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
"""Name -> family and what its configuration adds to the small one."""


def write_checkpoint(
    folder: Path, variant: str = "llama-mha", *, seed: int = 0, num_shards: int = 1, **changes: Any
) -> Path:
    """Write the checkpoint of a variant with seeded random weights; returns ``folder``.

    Every parameter is random, biases and norms too, and large enough for the most likely token to
    stand out. ``changes`` go into the configuration.
    """
    import transformers

    family, settings = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **settings, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    shard_size = num_bytes if num_shards == 1 else num_bytes // num_shards
    model.save_pretrained(folder, max_shard_size=shard_size + 1024)
    return folder


@cache
def load_oracle(folder: Path) -> Any:
    """The checkpoint in transformers, float32, in evaluation mode."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def oracle_tokens(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily, with its own cache, nothing stopping it."""
    answer = load_oracle(folder).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def oracle_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] float32 of the token that follows ``tokens``."""
    return prompt_logits(folder, tokens)[-1]


@torch.inference_mode()
def prompt_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] float32, of the token that follows each."""
    logits: torch.Tensor = load_oracle(folder)(torch.tensor([list(tokens)])).logits[0]
    return logits.float()
