"""llama.cpp, by the package ``xllamacpp``: its server's slots and batching, without HTTP.

The model is a GGUF file. Threads are those of ``OMP_NUM_THREADS``, else all.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

from peer_parts.work import Budget, Done


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        import xllamacpp

        count = budget.max_batch_size
        params = xllamacpp.CommonParams()
        params.model.path = budget.model_folder
        params.n_parallel = count
        params.n_ctx = max(budget.kv_tokens, budget.max_seq_len)
        params.kv_unified = True  # requests share it, as they do elsewhere
        params.n_gpu_layers = 0
        params.cache_prompt = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads()
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(count)

    def facts(self) -> dict[str, Any]:
        """Version."""
        return {"version": metadata.version("xllamacpp"), "threads": num_threads()}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`; a thread waits for each request."""
        start = time.perf_counter()
        counts = list(self._pool.map(self._complete, prompts, output_lens))
        return Done(time.perf_counter() - start, sum(counts))

    def _complete(self, prompt: list[int], length: int) -> int:
        answer = self._server.handle_completions({
            "prompt": prompt,
            "n_predict": length,
            "max_tokens": length,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        })  # fmt: skip
        if "usage" not in answer:
            raise RuntimeError(f"a request failed: {answer}")
        count: int = answer["usage"]["completion_tokens"]
        return count


def num_threads() -> int:
    """What torch would take."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
