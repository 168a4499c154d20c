"""A checkpoint of any size to measure with: random weights, the same every time."""

from __future__ import annotations

from typing import Any

import torch


def random_llama(vocab_size: int, **shape: int) -> Any:
    """A Llama: see `random_model`."""
    return random_model("llama", vocab_size, **shape)


def random_model(model_type: str, vocab_size: int, **shape: int) -> Any:
    """transformers' model, without tokens of a beginning or an end; ``shape`` as its config has
    it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def num_parameters(model: Any) -> int:
    """Numbers in its weights."""
    return sum(parameter.numel() for parameter in model.parameters())
