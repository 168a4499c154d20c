"""All kernel benchmarks in one process: K1, K2 and K3 of the benchmark matrix.

python -m kernel_ops.run_all --output kernels.json [--sweep | --dry-run]
"""

from __future__ import annotations

from kernel_ops import (
    bench_adjust_logits,
    bench_ban_tokens,
    bench_copy_blocks,
    bench_invariant_linear,
    bench_mask_logits,
    bench_paged_attention_context,
    bench_paged_attention_generation,
    bench_quantize_fp8,
    bench_rms_norm,
    bench_rope_write_kv,
    bench_sample,
    bench_silu_mul,
)
from kernel_ops.harness import run_all

BENCHMARKS = {
    "paged_attention_generation": bench_paged_attention_generation.rows,
    "paged_attention_context": bench_paged_attention_context.rows,
    "rms_norm": bench_rms_norm.rows,
    "rope_write_kv": bench_rope_write_kv.rows,
    "silu_mul": bench_silu_mul.rows,
    "quantize_fp8": bench_quantize_fp8.rows,
    "invariant_linear": bench_invariant_linear.rows,
    "copy_blocks": bench_copy_blocks.rows,
    "adjust_logits": bench_adjust_logits.rows,
    "ban_tokens": bench_ban_tokens.rows,
    "mask_logits": bench_mask_logits.rows,
    "sample": bench_sample.rows,
}

if __name__ == "__main__":
    run_all(BENCHMARKS, __doc__)
