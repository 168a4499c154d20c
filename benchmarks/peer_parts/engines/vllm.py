"""vLLM with dummy weights. Variants: "" (its defaults: compiled, graphs, FlashAttention 3),
"triton" (its attention in the Triton language) and "uncompiled" (graphs of decode steps only).
"""

from __future__ import annotations

import time
from importlib import import_module, metadata
from typing import Any

from peer_parts.work import Budget, Done

# Uncompiled: no Inductor, full graphs for pure decode batches.
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {"attention_backend": "FLASH_ATTN"},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "uncompiled": {
        "attention_backend": "FLASH_ATTN",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
    "fp8": {"attention_backend": "FLASH_ATTN", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def arguments(budget: Budget) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, the budget in its words."""
    return {
        "model": budget.model_folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_model_len": budget.max_seq_len,
        "max_num_seqs": budget.max_batch_size,
        "max_num_batched_tokens": budget.max_num_tokens,
        "block_size": budget.block_size,
        # Its check of free memory counts from the whole GPU; the cache is set in bytes.
        "gpu_memory_utilization": 0.45,
        "kv_cache_memory_bytes": budget.kv_bytes,
        **_VARIANTS[budget.variant],
    }


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        self._library = import_module("vllm")
        self._engine = self._library.LLM(**arguments(budget))

    def facts(self) -> dict[str, Any]:
        """Version and blocks of the cache."""
        cache = self._engine.llm_engine.vllm_config.cache_config
        return {
            "version": metadata.version("vllm"),
            "kv_blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
        }

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`."""
        return generate(self._library, self._engine, prompts, output_lens)


def generate(library: Any, engine: Any, prompts: list[list[int]], output_lens: list[int]) -> Done:
    """`PeerEngine.generate` of the ``engine``, an `LLM` of the module ``library``."""
    parameters = [
        library.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0, detokenize=False)
        for length in output_lens
    ]
    start = time.perf_counter()
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
    )
    seconds = time.perf_counter() - start
    return Done(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))
