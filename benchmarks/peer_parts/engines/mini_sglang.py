"""mini-sglang with dummy weights, overlap scheduling, graphs and FlashInfer's attention."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch

from peer_parts.work import Budget, Done


def arguments(budget: Budget) -> dict[str, Any]:
    """Keyword arguments of `minisgl.llm.LLM`; its pages hold one token."""
    return {
        "dtype": torch.bfloat16,
        "attention_backend": "fi",
        "use_dummy_weight": True,
        "use_pynccl": False,
        "max_running_req": budget.max_batch_size,
        "cuda_graph_max_bs": budget.max_batch_size,
        "max_extend_tokens": budget.max_num_tokens,
        "max_seq_len_override": budget.max_seq_len,
        "num_page_override": budget.kv_tokens,
        "cache_type": "naive",
    }


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        self._engine = import_module("minisgl.llm").LLM(budget.model_folder, **arguments(budget))

    def facts(self) -> dict[str, Any]:
        """Tokens of the cache."""
        return {"kv_tokens": self._engine.engine.num_pages}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`."""
        make = import_module("minisgl.core").SamplingParams
        parameters = [make(ignore_eos=True, max_tokens=length) for length in output_lens]
        start = time.perf_counter()
        outputs = self._engine.generate(prompts, parameters)
        seconds = time.perf_counter() - start
        return Done(seconds, sum(len(output["token_ids"]) for output in outputs))
