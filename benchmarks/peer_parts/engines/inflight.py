"""Our own engine with the server's overlapped loop."""

from __future__ import annotations

from typing import Any

import torch

from gpu_parts.common import LLAMA_8B, TINY, Setting, make_engine
from gpu_parts.whole_requests import run_requests
from inflight_backend.engine import EngineConfig
from peer_parts.work import Budget, Done


class Engine:
    """See `PeerEngine`; variant "fp8" quantises weights and cache."""

    def __init__(self, budget: Budget) -> None:
        device = torch.device("cpu" if budget.is_dry else "cuda")
        setting = Setting(device, budget.is_dry, is_quick=False, stop_at=float("inf"))
        is_fp8 = budget.variant == "fp8"
        config = EngineConfig(
            max_batch_size=budget.max_batch_size,
            max_num_tokens=budget.max_num_tokens,
            max_seq_len=budget.max_seq_len,
            tokens_per_block=budget.block_size,
            max_tokens_in_paged_kv_cache=budget.kv_tokens,
            quantization="fp8" if is_fp8 else "none",
            kv_cache_dtype="fp8" if is_fp8 and not budget.is_dry else "auto",
        )
        self._engine = make_engine(setting, TINY if budget.is_dry else LLAMA_8B, config)

    def facts(self) -> dict[str, Any]:
        """Types, the size of the pool, and how many steps are recorded (0: all run eagerly)."""
        engine = self._engine
        return {
            "types": engine.dtype_name,
            "kv_tokens": engine.num_blocks * engine.tokens_per_block,
            "recordings": engine.num_graphs,
            "loop": "overlapped",
        }

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`."""
        done = run_requests(self._engine, prompts, output_lens)
        notes = {"steps": done.num_steps, "host_ms_per_step": 1e3 * done.host_seconds}
        notes["host_ms_per_step"] = round(notes["host_ms_per_step"] / max(done.num_steps, 1), 3)
        return Done(done.seconds, done.num_tokens, notes)
