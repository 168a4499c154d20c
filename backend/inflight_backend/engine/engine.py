"""The engine: one checkpoint, one pool of KV blocks, and one call per iteration.

A step is: one packed copy of the plan to the device, `SlotTable.set_up` and `SlotTable.begin`,
the decoder, the draw.
The host reads the drawn tokens at its very end and nothing else, so `Engine.submit` may be
followed by another one before the tokens of the first are looked at.

Steps of generations alone are replayed from recordings where that can be done (`graph_runner`);
all others, and everything on a CPU, run eagerly. Both draw the same tokens.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inflight_backend.engine.attention import ATTENTION_BACKENDS
from inflight_backend.engine.checkpoint import Checkpoint
from inflight_backend.engine.config import EngineConfig, resolve
from inflight_backend.engine.decoder import Decoder
from inflight_backend.engine.graph_runner import Capture, CudaCapture, GraphRunner
from inflight_backend.engine.kv_pool import KvPool, choose_num_blocks, resident_memory
from inflight_backend.engine.model_config import ModelConfig
from inflight_backend.engine.ops import make_ops
from inflight_backend.engine.parameters import (
    decoder_parameters,
    duplicate_names,
    ignorable_names,
)
from inflight_backend.engine.rope import make_cos_sin
from inflight_backend.engine.slots import SamplingInputs, SlotTable, StepInputs
from inflight_backend.engine.step_buffer import StepBuffer, max_words
from inflight_backend.engine.token_reader import PendingTokens, TokenReader
from inflight_backend.iteration_stats import MemoryUsage
from inflight_scheduler import ScheduledBatch

OnProgress = Callable[[int, int], None]

_logger = logging.getLogger(__name__)


class Engine:
    """Executes plans. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parameters: dict[str, Tensor],
        capture: Capture | None = None,
    ) -> None:
        """``config`` is resolved; ``parameters`` are taken over (see `decoder_parameters`).

        ``capture`` records generation steps; without it they are CUDA graphs on CUDA and run
        eagerly elsewhere.
        """
        self.config = config
        self.model_config = model_config
        self._ops = make_ops(config.attention_backend, config.quantization)
        self._decoder = Decoder(model_config, parameters, self._ops)
        self._pool = _make_pool(config, model_config)
        cos_sin = make_cos_sin(model_config.rope, model_config.head_dim, config.seq_len_limit)
        self._attention = ATTENTION_BACKENDS[config.attention_backend](
            self._pool, model_config, cos_sin.to(config.device)
        )
        size = config.tokens_per_block
        max_blocks = -(-config.seq_len_limit // size)
        self._slots = SlotTable(config.max_batch_size, max_blocks, size, config.device)
        words = max_words(config.max_batch_size, config.num_tokens_limit, max_blocks)
        self._buffer = StepBuffer(words, config.max_batch_size, config.device)
        self._reader = TokenReader(config.max_batch_size, config.device)
        self._runner = self._make_runner(capture)

    @classmethod
    def load(
        cls,
        checkpoint_dir: Path,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        capture: Capture | None = None,
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
            return cls(config, model_config, parameters, capture)

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""
        if self.config.device == "cuda":
            return torch.cuda.get_device_name()
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV."""
        config = self.config
        weights = "fp8" if config.quantization == "fp8" else config.dtype
        kv_cache = "fp8" if config.kv_cache_dtype == "fp8" else config.dtype
        return weights if weights == kv_cache else f"{weights} with {kv_cache} KV cache"

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

    @property
    def is_asynchronous(self) -> bool:
        """True where steps run on a device while the host goes on."""
        return self.config.device != "cpu"

    @property
    def supports_block_copies(self) -> bool:
        """True: plans may ask for `BlockCopy`."""
        return True

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token per last context chunk, then one per generation slot, in plan order.

        -1 stands for a row whose logits are not finite; the other rows are not affected.
        """
        return self.submit(batch).read()

    def submit(self, batch: ScheduledBatch) -> PendingTokens:
        """Start a step; its tokens, to be read before the step after the next is submitted."""
        return self._reader.send(self.enqueue(batch))

    @torch.inference_mode()
    def enqueue(self, batch: ScheduledBatch) -> Tensor:
        """Start a step and return its tokens [num_samples] int64 on the device, unread.

        The next call may overwrite them.
        """
        words = self._buffer.send(batch)
        if batch.block_copies:
            self._pool.copy(words.copy_sources.long(), words.copy_destinations.long())
        if batch.new_blocks and self._attention.reads_past_the_end:
            self._pool.clean(words.block_ids.long())
        self._slots.set_up(batch, words)
        if batch.is_empty:
            return torch.empty(0, dtype=torch.int64)
        if self._runner is not None and not batch.context_chunks:
            self._slots.book_generation(batch)
            return self._runner.run(len(batch.generation_slots))
        return self._run(self._slots.begin(batch, words))

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use now; cheap enough for every iteration."""
        gpu = torch.cuda.memory_reserved() if self.config.device == "cuda" else 0
        pinned = self._buffer.pinned_bytes + self._reader.pinned_bytes
        return MemoryUsage(cpu=resident_memory(), gpu=gpu, pinned=pinned)

    def _run(self, step: StepInputs) -> Tensor:
        """Decode and draw; the tokens are where the next step of their slots finds them."""
        hidden = self._decoder.forward(
            step.tokens, self._attention.begin(step.attention), step.sample_rows
        )
        tokens = self._draw(hidden, step.sampling)
        self._slots.store(step.sampling.slots, tokens)
        return tokens

    def _run_generation(self, slots: Tensor) -> Tensor:
        """What is recorded: a step of generations in ``slots`` [B] int32."""
        return self._run(self._slots.begin_generation(slots))

    def _make_runner(self, capture: Capture | None) -> GraphRunner | None:
        if not (self.config.cuda_graph_mode and self._attention.is_capturable):
            return None
        if capture is None:
            if self.config.device != "cuda":
                return None
            capture = CudaCapture()
        try:
            return GraphRunner(self._run_generation, self._buffer.padded_slots, capture)
        except RuntimeError:
            _logger.warning("generation steps cannot be recorded and run eagerly", exc_info=True)
            return None

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
    bytes_per_token = 2 * model.num_layers * model.kv_size * config.kv_dtype.itemsize
    if config.device == "cuda":
        torch.cuda.empty_cache()  # what loading and quantising left must count as free
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
        config.kv_dtype,
        config.device,
    )
