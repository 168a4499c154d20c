"""Limits that follow from a checkpoint, for the engine and for a memory plan made without torch."""

from __future__ import annotations

from inflight_backend.errors import ConfigurationError
from inflight_backend.models.config import ModelConfig

# Bounds of the Triton kernels, checked before they run so that the error can name the way out.
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256
_MAX_ROWS = 2**16 - 1  # along the second and third dimension of a launch
_LINEAR_STEP = 16
DEFAULT_NUM_TOKENS = 8192


def choose_seq_len(max_seq_len: int | None, model: ModelConfig) -> int:
    """``max_seq_len``, or the checkpoint's positions; `ConfigurationError` if it has fewer."""
    max_positions = model.max_position_embeddings
    chosen = max_seq_len or max_positions
    if chosen > max_positions:
        raise ConfigurationError(
            f"max_seq_len ({chosen}) is above the checkpoint's "
            f"max_position_embeddings ({max_positions})"
        )
    return chosen


def has_attention_kernels(model: ModelConfig) -> bool:
    """Whether the Triton kernels take the model's heads."""
    return model.head_dim % HEAD_DIM_STEP == 0 and model.head_dim <= MAX_HEAD_DIM


def choose_num_tokens(setting: int | None, max_seq_len: int, *, may_chunk: bool) -> int:
    """``max_num_tokens``: 8192, or where contexts are computed whole the longest one's."""
    return setting or (DEFAULT_NUM_TOKENS if may_chunk else max(DEFAULT_NUM_TOKENS, max_seq_len))


def check_rows(num_slots: int) -> None:
    """The Triton kernels on a GPU; ``num_slots`` rows may draw in one step."""
    if num_slots > _MAX_ROWS:
        raise ConfigurationError(
            f"max_batch_size * max_beam_width is {num_slots}, more than the {_MAX_ROWS} rows that "
            "a launch on a GPU may have; lower one of them"
        )


def check_fp8_linears(model: ModelConfig, dtype: str) -> None:
    """On CUDA the product takes bfloat16 out and dimensions that are multiples of 16 only."""
    if dtype != "bfloat16":
        raise ConfigurationError(f"quantization fp8 needs dtype bfloat16, not {dtype}")
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads * head_dim": model.query_size,
        "num_key_value_heads * head_dim": model.kv_size,
    }
    for name, size in sizes.items():
        if size % _LINEAR_STEP:
            raise ConfigurationError(
                f"quantization fp8 needs a {name} that is a multiple of {_LINEAR_STEP}; the "
                f"checkpoint's is {size}; use none"
            )
