"""OpenVINO GenAI with its continuous batching on a CPU.

The model is a GGUF file. Threads are those of ``OMP_NUM_THREADS``, else all. The variant says in
what it computes, "float32" or "bfloat16"; without one that is its choice. So is its cache, of 8
bits for each number.
"""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import numpy as np

from peer_parts.engines.llama_cpp import num_threads
from peer_parts.work import Budget, Done

_TYPES = {"float32": "f32", "bfloat16": "bf16"}


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = budget.max_batch_size
        scheduler.max_num_batched_tokens = budget.max_num_tokens
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._pipeline = openvino_genai.LLMPipeline(
            budget.model_folder,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=num_threads(),
            **({"INFERENCE_PRECISION_HINT": _TYPES[budget.variant]} if budget.variant else {}),
        )

    def facts(self) -> dict[str, Any]:
        """Version."""
        return {"version": metadata.version("openvino-genai"), "threads": num_threads()}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`; prompts and answers are of one length here."""
        length = max(output_lens)
        config = self._genai.GenerationConfig()
        config.max_new_tokens = length
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array(prompts, dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        start = time.perf_counter()
        answer = self._pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        return Done(seconds, sum(len(each) for each in answer.tokens))
