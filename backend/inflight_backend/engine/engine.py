"""The engine: one checkpoint, one pool of KV blocks, and one call per iteration.

A step is: one packed copy of the plan to the device, `SlotTable.set_up` and `SlotTable.begin`,
the decoder, the draw.
The host reads the drawn tokens at its very end and nothing else, so `Engine.enqueue` may be
followed by another one before the tokens of the first are looked at.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inflight_backend.engine.attention import ATTENTION_BACKENDS
from inflight_backend.engine.checkpoint import Checkpoint
from inflight_backend.engine.config import EngineConfig, resolve
from inflight_backend.engine.decoder import Decoder
from inflight_backend.engine.kv_pool import KvPool, choose_num_blocks, resident_memory
from inflight_backend.engine.model_config import ModelConfig
from inflight_backend.engine.ops import TORCH_OPS
from inflight_backend.engine.parameters import (
    decoder_parameters,
    duplicate_names,
    ignorable_names,
)
from inflight_backend.engine.slots import SamplingInputs, SlotTable
from inflight_backend.engine.step_buffer import StepBuffer, max_words
from inflight_backend.iteration_stats import MemoryUsage
from inflight_scheduler import ScheduledBatch

OnProgress = Callable[[int, int], None]


class Engine:
    """Executes plans. Not thread-safe: one thread owns it."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parameters: dict[str, Tensor]
    ) -> None:
        """``config`` is resolved; ``parameters`` are taken over (see `decoder_parameters`)."""
        self.config = config
        self.model_config = model_config
        self._ops = TORCH_OPS
        self._decoder = Decoder(model_config, parameters, self._ops, config.seq_len_limit)
        self._pool = _make_pool(config, model_config)
        self._attention = ATTENTION_BACKENDS[config.attention_backend](self._pool, model_config)
        size = config.tokens_per_block
        max_blocks = -(-config.seq_len_limit // size)
        self._slots = SlotTable(config.max_batch_size, max_blocks, size, config.device)
        words = max_words(config.max_batch_size, config.num_tokens_limit, self.num_blocks)
        self._buffer = StepBuffer(words, config.device)

    @classmethod
    def load(
        cls, checkpoint_dir: Path, config: EngineConfig, on_progress: OnProgress | None = None
    ) -> Engine:
        """Load a Hugging Face checkpoint folder; ``on_progress`` gets bytes done and in all.

        `CheckpointError` or `ConfigurationError` when it cannot be served as asked.
        """
        model_config = ModelConfig.from_folder(checkpoint_dir)
        config = resolve(config, model_config)
        specs = decoder_parameters(model_config)
        with Checkpoint(checkpoint_dir) as checkpoint:
            checkpoint.check(specs, ignorable_names(model_config), duplicate_names(model_config))
            parameters = checkpoint.load(specs, config.torch_dtype, config.device, on_progress)
        with torch.inference_mode():
            return cls(config, model_config, parameters)

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""
        if self.config.device == "cuda":
            return torch.cuda.get_device_name()
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV."""
        return self.config.dtype

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self._pool.num_blocks

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one block."""
        return self.config.tokens_per_block

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.model_config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Prompt plus new tokens of a request, at most."""
        return self.config.seq_len_limit

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one plan, at most."""
        return self.config.num_tokens_limit

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token per last context chunk, then one per generation slot, in plan order.

        -1 stands for a row whose logits are not finite; the other rows are not affected.
        """
        tokens: list[int] = self.enqueue(batch).tolist()
        return tokens

    @torch.inference_mode()
    def enqueue(self, batch: ScheduledBatch) -> Tensor:
        """Start a step and return its tokens [num_samples] int64 on the device, unread."""
        words = self._buffer.send(batch)
        if batch.new_blocks and self._attention.reads_past_the_end:
            self._pool.clean(words.block_ids.long())
        self._slots.set_up(batch, words)
        if batch.is_empty:
            return torch.empty(0, dtype=torch.int64)
        step = self._slots.begin(batch, words)
        hidden = self._decoder.forward(
            step.tokens, step.positions, self._attention.begin(step.attention), step.sample_rows
        )
        tokens = self._draw(hidden, step.sampling)
        self._slots.store(step.sampling.slots, tokens)
        return tokens

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use now; cheap enough for every iteration."""
        gpu = torch.cuda.memory_reserved() if self.config.device == "cuda" else 0
        return MemoryUsage(cpu=resident_memory(), gpu=gpu, pinned=self._buffer.pinned_bytes)

    def _draw(self, hidden: Tensor, sampling: SamplingInputs) -> Tensor:
        """The next token of every row of hidden [num_samples, hidden_size]."""
        if len(hidden) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        logits = self._decoder.logits(hidden)
        if sampling.may_forbid_end:
            _forbid_end(logits, sampling)
        if sampling.is_all_greedy:
            return self._ops.greedy(logits)
        return self._ops.sample(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seeds,
            sampling.positions,
        )


def _forbid_end(logits: Tensor, sampling: SamplingInputs) -> None:
    """Put -inf at the end id of rows whose next token comes before their minimum, in place."""
    end_ids = sampling.end_ids
    is_forbidden = (end_ids >= 0) & (end_ids < logits.shape[1])
    is_forbidden &= sampling.positions < sampling.min_end_positions
    columns = end_ids.clamp(0, logits.shape[1] - 1)[:, None]
    kept = logits.gather(1, columns)
    logits.scatter_(1, columns, kept.masked_fill(is_forbidden[:, None], -torch.inf))


def _make_pool(config: EngineConfig, model: ModelConfig) -> KvPool:
    bytes_per_token = 2 * model.num_layers * model.kv_size * config.torch_dtype.itemsize
    num_blocks = choose_num_blocks(
        bytes_per_token,
        config.tokens_per_block,
        config.device,
        config.max_tokens_in_paged_kv_cache,
        config.kv_cache_free_gpu_mem_fraction,
    )
    return KvPool(
        model.num_layers,
        num_blocks,
        config.tokens_per_block,
        model.num_kv_heads,
        model.head_dim,
        config.torch_dtype,
        config.device,
    )
