"""The kernel benchmarks in one process: K1, K2 and K3 of the benchmark matrix, or some ops alone.

python -m kernel_ops.run_all [op ...] --output kernels.json [--sweep | --dry-run]
"""

from __future__ import annotations

from kernel_ops.harness import run

OPS = (
    "paged_attention_generation",
    "paged_attention_context",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "quantize_fp8",
    "quantize_int8",
    "invariant_linear",
    "add_lora",
    "grouped_linear",
    "head_linear",
    "quantized_linear",
    "delta_step",
    "copy_blocks",
    "adjust_logits",
    "ban_tokens",
    "mask_logits",
    "sample",
)

if __name__ == "__main__":
    run(OPS, __doc__)
