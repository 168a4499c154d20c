"""Every op in plain torch: the oracle of the Triton kernels and the path of a CPU.

All functions are pure unless they say otherwise, vectorised over the batch, and run on any device
torch knows. Names, shapes and layouts are those of the kernels beside this package:

* KV of a layer: ``key_cache`` and ``value_cache``, each
  [num_blocks, tokens_per_block, num_kv_heads, head_dim]
* block table: [num_sequences, max_blocks] int32; entries past the end of a sequence are ignored
* slot of a token in the cache: ``block_id * tokens_per_block + offset``
"""

from inflight_kernels.reference.attention import (
    AttentionPlan,
    Weighting,
    from_bytes,
    paged_attention_context,
    paged_attention_generation,
    plan_attention,
    relative_bias,
    to_bytes,
    write_kv,
)
from inflight_kernels.reference.elementwise import (
    ACTIVATIONS,
    activate,
    add_rms_norm,
    apply_rope,
    grouped_linear,
    layer_norm,
    rms_norm,
    rope_angles,
    rotate,
    silu_mul,
)
from inflight_kernels.reference.lora import add_lora
from inflight_kernels.reference.quantized import (
    dequantize,
    head_linear,
    pack_nibbles,
    quantize_int8,
    unpack_nibbles,
)
from inflight_kernels.reference.recurrence import delta_chunks, delta_heads, delta_step
from inflight_kernels.reference.sampling import (
    COUNT_UNIT,
    adjust_logits,
    ban_repeated_ngrams,
    ban_words,
    draw,
    filtered,
    greedy,
    is_drawn,
    log_probs_of_draws,
    mask_logits,
    sample,
    sample_with_log_probs,
    uniform,
)

__all__ = [
    "ACTIVATIONS",
    "COUNT_UNIT",
    "AttentionPlan",
    "Weighting",
    "activate",
    "add_lora",
    "add_rms_norm",
    "adjust_logits",
    "apply_rope",
    "ban_repeated_ngrams",
    "ban_words",
    "delta_chunks",
    "delta_heads",
    "delta_step",
    "dequantize",
    "draw",
    "filtered",
    "from_bytes",
    "greedy",
    "grouped_linear",
    "head_linear",
    "is_drawn",
    "layer_norm",
    "log_probs_of_draws",
    "mask_logits",
    "pack_nibbles",
    "paged_attention_context",
    "paged_attention_generation",
    "plan_attention",
    "quantize_int8",
    "relative_bias",
    "rms_norm",
    "rope_angles",
    "rotate",
    "sample",
    "sample_with_log_probs",
    "silu_mul",
    "to_bytes",
    "uniform",
    "unpack_nibbles",
    "write_kv",
]
