"""Hugging Face transformers: its continuous batching over a paged cache.

Variant "fa3" attends with FlashAttention 3 (see `peer_parts.flash_attention_3`), which switches its
CUDA graphs, its asynchronous batching and its fast decode path on; without it there is SDPA, which
needs a mask and has none of them.
"""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import torch

from peer_parts.work import Budget, Done


class Engine:
    """See `PeerEngine`."""

    def __init__(self, budget: Budget) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        attention = "sdpa"
        if budget.variant == "fa3":
            from peer_parts import flash_attention_3

            flash_attention_3.pose_as_flash_attn_interface()
            attention = "flash_attention_3"
        config = transformers.LlamaConfig(
            **budget.shape, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False
        )
        config._attn_implementation = f"paged|{attention}"
        device = "cpu" if budget.is_dry else "cuda"
        torch.manual_seed(0)
        dtype = torch.float32 if budget.is_dry else torch.bfloat16
        with torch.device(device):
            torch.set_default_dtype(dtype)
            self._model = transformers.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        self._attention = attention
        self._settings = transformers.ContinuousBatchingConfig(
            block_size=budget.block_size,
            num_blocks=budget.kv_tokens // budget.block_size,
            max_batch_tokens=budget.max_num_tokens,
            max_requests_per_batch=budget.max_batch_size,
            allow_block_sharing=False,
        )

    def facts(self) -> dict[str, Any]:
        """Version and attention."""
        return {"version": metadata.version("transformers"), "attention": self._attention}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Done:
        """See `PeerEngine`; one by one to its manager, which takes a length for each request."""
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        num_tokens = 0
        with self._model.continuous_batching_context_manager(
            generation_config=config,
            continuous_batching_config=self._settings,
            persistent_manager=True,
        ) as manager:
            start = time.perf_counter()
            for prompt, length in zip(prompts, output_lens, strict=True):
                manager.add_request(prompt, max_new_tokens=length)
            num_open = len(prompts)
            while num_open:
                output = manager.get_result(timeout=600)
                if output is None or output.error:
                    raise RuntimeError(f"a request failed: {output.error if output else 'silence'}")
                if output.is_finished():
                    num_tokens += len(output.generated_tokens)
                    num_open -= 1
            seconds = time.perf_counter() - start
        return Done(seconds, num_tokens)
