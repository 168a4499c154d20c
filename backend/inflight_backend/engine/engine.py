"""The engine: one checkpoint, one pool of KV blocks, and one call per iteration.

A step is: one packed copy of the plan to the device, `SlotTable.set_up` and `SlotTable.begin`,
the decoder, the draw.
The host reads the drawn tokens at its very end and nothing else, so `Engine.submit` may be
followed by another one before the tokens of the first are looked at.

Steps of generations alone, and mixed ones that fit a size, are replayed from recordings where that
can be done (`graph_runner`, `mixed_runner`); all others, and everything on a CPU, run eagerly. Both
draw the same tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from inflight_backend.engine.config import EngineConfig, resolve
from inflight_backend.engine.cuda_graphs import (
    Capture,
    CudaCapture,
    GraphCache,
    GraphCapturer,
    GraphRunner,
)
from inflight_backend.engine.interface import EditSource, MaskSource, MemoryUsage, StepOutputs
from inflight_backend.engine.memory_plan import max_words
from inflight_backend.engine.outputs import OutputRecorder, PendingTokens, TokenReader
from inflight_backend.engine.sampler import (
    MIN_P,
    LogitsAdjustments,
    LogitsRules,
    edit_logits,
    restrict,
    send_masks,
)
from inflight_backend.engine.slot_table import (
    BeamRows,
    SamplingInputs,
    SlotTable,
    partly_filled_blocks,
    sampling_slots_of,
)
from inflight_backend.engine.step_buffer import StepBuffer, StepWords
from inflight_backend.engine.warmup import max_memory_batch, thread_warmup_batch, warm_up
from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.attention import AttentionBackend
from inflight_backend.models.backends import make_cache, make_ops
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.decoder import Decoder, make_cos_sin
from inflight_backend.models.kv_cache import (
    CudaMemory,
    DeviceMemory,
    KvPool,
    allocator_bytes,
    choose_num_blocks,
    resident_memory,
)
from inflight_backend.models.layers import Parameter
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint
from inflight_scheduler import ScheduledBatch

OnProgress = Callable[[int, int], None]

_logger = get_logger(__name__)


class Engine:
    """Executes plans. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parameters: dict[str, Parameter],
        capture: Capture | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """``config`` is resolved; ``parameters`` are taken over (see `decoder_parameters`).

        ``capture`` records steps; without it they are CUDA graphs on CUDA and run eagerly
        elsewhere. ``memory`` is what the KV pool shares with the largest step and the recordings:
        on CUDA that of the GPU, elsewhere nothing is measured.
        """
        self.config = config
        self.model_config = model_config
        self._ops = make_ops(
            config.attention_backend,
            config.quantization,
            is_deterministic=config.deterministic_mode,
        )
        self._decoder = Decoder(model_config, parameters, self._ops)
        self._adjustments = LogitsAdjustments(
            config.num_slots,
            model_config.vocab_size,
            config.seq_len_limit,
            config.device,
            self._ops,
        )
        self._output_recorder = OutputRecorder(config.num_slots, config.device)
        self._beams = BeamRows(config.num_slots, config.device)
        self._outputs: StepOutputs | None = None
        self._rules = LogitsRules()
        cos_sin = make_cos_sin(model_config.rope, model_config.head_dim, config.seq_len_limit)
        self._cos_sin = cos_sin.to(config.device)
        size = config.tokens_per_block
        max_blocks = -(-config.seq_len_limit // size)
        self._slots = SlotTable(config.num_slots, max_blocks, size, config.device)
        words = max_words(config.num_slots, config.num_tokens_limit, max_blocks)
        self._buffer = StepBuffer(words, config.num_slots, config.device)
        self._reader = TokenReader(max(config.num_tokens_limit, config.num_slots), config.device)
        is_cuda = config.device == "cuda"
        self._graph_capturer = GraphCapturer(
            config,
            self._decoder,
            self._slots,
            self._buffer.padded_slots,
            self._draw,
            (lambda: capture) if capture is not None else CudaCapture if is_cuda else None,
        )
        self._graphs = GraphCache()
        if memory is None and is_cuda:
            memory = CudaMemory()
        self.free_bytes: int | None = None  # measured: what there is for the pool
        num_blocks = self._count_blocks(memory)
        self._pool, self._attention = self._make_cache(num_blocks)
        self._graphs = self._graph_capturer.record(self._attention)

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
            checkpoint.check(model_config)
            parameters = checkpoint.load(
                specs,
                config.torch_dtype,
                config.device,
                on_progress,
                is_fp8=config.quantization == "fp8",
            )
        with torch.inference_mode():
            return cls(config, model_config, parameters, capture)

    @property
    def device_name(self) -> str:
        """Where it runs, for people."""
        if self.config.device == "cuda":
            graphs = "" if self.num_graphs else ", without CUDA graphs"
            return f"{torch.cuda.get_device_name()}{graphs}"
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"

    @property
    def num_graphs(self) -> int:
        """Sizes of generation steps that are recorded and replayed, as CUDA graphs on a GPU; with 0
        every step runs eagerly."""
        return self._graphs.num_steps

    @property
    def num_mixed_graphs(self) -> int:
        """The same of mixed steps."""
        return self._graphs.num_mixed

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
        """True where steps run on a device asynchronously."""
        return self.config.device != "cpu"

    @property
    def max_beam_width(self) -> int:
        """Rows that a request may have."""
        return self.config.max_beam_width

    @property
    def supports_block_copies(self) -> bool:
        """True: plans may ask for `BlockCopy`."""
        return True

    @property
    def supports_drafts(self) -> bool:
        """True if plans may have drafts: tokens of a run come from another kernel than single ones,
        so not in the deterministic mode."""
        return not self.config.deterministic_mode

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """The tokens that `ScheduledBatch` asks for, in its order.

        -1 stands for a row whose logits are not finite; the other rows are not affected.
        """
        pending = self.submit(batch)
        tokens = pending.read()
        self._outputs = pending.read_outputs()
        return tokens

    def take_outputs(self) -> StepOutputs | None:
        """What the plan executed last brought beside tokens; None if no request asked."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def mask_next(self, source: MaskSource) -> None:
        """The next plan draws under the masks of ``source``, whose rows count the tokens of the
        plan in order. It is asked while the decoder runs, so it may wait for the step before.
        """
        self._rules.masks = source

    def edit_next(self, source: EditSource) -> None:
        """Have the edits of ``source`` done to the logits of the next plan, before anything else.
        It is asked while the decoder runs, so it may wait for the step before.
        """
        self._rules.edits = source

    @torch.inference_mode()  # the reader's pinned buffers were made in it, too
    def submit(self, batch: ScheduledBatch) -> PendingTokens:
        """Start a step; its tokens, to be read before the step after the next is submitted."""
        return self._reader.send(self.enqueue(batch), self._output_recorder.take())

    @torch.inference_mode()
    def enqueue(self, batch: ScheduledBatch) -> Tensor:
        """Start a step and return its tokens [num_samples] int64 on the device, unread.

        The next call may overwrite them.
        """
        rules, self._rules = self._rules, LogitsRules()
        words = self._buffer.send(batch)
        if batch.block_copies:
            self._pool.copy(words.copy_sources, words.copy_destinations)
        if self._attention.reads_past_the_end:
            self._pool.clean(partly_filled_blocks(batch, self.tokens_per_block))
        if batch.beam_moves:
            self._move_beams(batch, words)
        self._slots.set_up(batch, words)
        self._adjustments.set_up(batch.setups)
        self._beams.set_up(batch.setups)
        self._output_recorder.set_up(batch.setups)
        if batch.is_empty:
            return torch.empty(0, dtype=torch.int64)
        steps, mixed = self._graphs.steps, self._graphs.mixed
        if steps is not None and not batch.runs:
            return self._replay(steps, batch, words, rules)
        observed = self._output_recorder.observed_chunks(batch.context_chunks)
        if mixed is not None and not observed:
            replayed = mixed.forward(batch)
            if replayed is not None:
                self._slots.book(batch)
                sampling = self._slots.begin_sampling(batch, words)
                return self._finish(replayed, sampling, sampling_slots_of(batch), rules)
        step = self._slots.begin(batch, words)
        attention = self._attention.begin(step.attention)
        if observed:
            hidden = self._decoder.forward(step.tokens, attention, None)
            self._output_recorder.record_context_logits(observed, hidden, self._decoder.logits)
            hidden = hidden[step.sample_rows]
        else:
            hidden = self._decoder.forward(step.tokens, attention, step.sample_rows)
        sampling = self._slots.begin_sampling(batch, words)
        return self._finish(hidden, sampling, sampling_slots_of(batch), rules)

    def prepare_thread(self) -> None:
        """First of all in the thread that runs the steps, if another one has loaded: on CUDA a step
        that is not recorded. torch's libraries keep a handle and a workspace for each thread
        (cuBLAS on Hopper: 32 MiB), which no request should wait for."""
        if self.config.device == "cuda":
            recordings, self._graphs = self._graphs, GraphCache()
            self.execute(thread_warmup_batch(self.config))
            self._graphs = recordings

    def memory_usage(self) -> MemoryUsage:
        """Bytes in use now; cheap enough for every iteration."""
        gpu = allocator_bytes() if self.config.device == "cuda" else 0
        pinned = self._buffer.pinned_bytes + self._reader.pinned_bytes
        pinned += self._graphs.pinned_bytes
        return MemoryUsage(cpu=resident_memory(), gpu=gpu, pinned=pinned)

    def _count_blocks(self, memory: DeviceMemory | None) -> int:
        """Blocks of the pool, by the rule of `kv_pool`."""
        config, model = self.config, self.model_config
        if memory is not None:
            kept_bytes = self._measure_step(memory)
            self.free_bytes = memory.free_bytes() - kept_bytes
        return choose_num_blocks(
            2 * model.num_layers * model.kv_size * config.kv_dtype.itemsize,
            config.tokens_per_block,
            self.free_bytes,
            config.max_tokens_in_paged_kv_cache,
            config.kv_cache_free_gpu_mem_fraction,
        )

    def _make_cache(self, num_blocks: int) -> tuple[KvPool, AttentionBackend]:
        return make_cache(
            self.model_config,
            self._cos_sin,
            num_blocks,
            backend=self.config.attention_backend,
            tokens_per_block=self.config.tokens_per_block,
            kv_dtype=self.config.kv_dtype,
            device=self.config.device,
            is_deterministic=self.config.deterministic_mode,
        )

    def _measure_step(self, memory: DeviceMemory) -> int:
        """Bytes that the largest step and the recordings take beside weights and KV: the one is
        run, the others are made, on a tiny pool."""
        batch = max_memory_batch(self.config)
        num_blocks = 1 + max(new.block_id for new in batch.new_blocks)
        try:
            self._pool, self._attention = self._make_cache(num_blocks)
            memory.start_peak()
            warm_up(self, batch)
            step_bytes = memory.peak_bytes()
        except torch.OutOfMemoryError:
            raise ConfigurationError(
                f"a step of max_num_tokens = {self.config.num_tokens_limit} tokens does not fit "
                "the GPU; lower max_num_tokens (prompts may be longer where contexts are chunked)"
            ) from None
        recorded_bytes = self._graph_capturer.measure(self._attention, memory)
        del self._pool, self._attention
        gibibytes = step_bytes / 2**30, recorded_bytes / 2**30
        _logger.info("the largest step takes %.2f GiB, recorded steps keep %.2f GiB", *gibibytes)
        return step_bytes + recorded_bytes

    def _replay(
        self,
        runner: GraphRunner,
        batch: ScheduledBatch,
        words: StepWords,
        rules: LogitsRules,
    ) -> Tensor:
        """A step of generations alone."""
        self._slots.book(batch)
        num_rows = len(batch.generation_slots)
        slots = batch.generation_slots
        is_plain = not (
            self._adjustments.features(slots) or self._output_recorder.wants_samples(slots)
        )
        is_plain = is_plain and not self._beams.are_in(slots)
        may_forbid_end = self._slots.may_forbid_end(slots)
        if is_plain and not rules and not may_forbid_end:
            return runner.run(num_rows)
        hidden = runner.forward(num_rows)
        sampling = self._slots.sampling(
            words.generation_slots.long(), may_forbid_end=may_forbid_end
        )
        return self._finish(hidden, sampling, slots, rules)

    def _finish(
        self,
        hidden: Tensor,
        sampling: SamplingInputs,
        slots: Sequence[int],
        rules: LogitsRules,
    ) -> Tensor:
        """Draw for ``slots``; the tokens are where the next step of their slots finds them.

        Logits take room for as many rows as there may be requests: with drafts there can be more
        rows, which then draw part by part.
        """
        size = self.config.num_slots
        if len(slots) <= size:
            return self._finish_part(hidden, sampling, slots, rules)
        parts = []
        for rows, own_rules in rules.parts(len(slots), size):
            part = sampling.part(rows.start, rows.stop)
            parts.append(self._finish_part(hidden[rows], part, slots[rows], own_rules))
        return torch.cat(parts)

    def _finish_part(
        self,
        hidden: Tensor,
        sampling: SamplingInputs,
        slots: Sequence[int],
        rules: LogitsRules,
    ) -> Tensor:
        features = self._adjustments.features(slots)
        is_observed = self._output_recorder.wants_samples(slots)
        has_beams = self._beams.are_in(slots)
        if not (features or is_observed or rules or has_beams):
            return self._draw(hidden, sampling)
        logits = self._decoder.logits(hidden)
        original = logits.clone() if is_observed else logits
        edit_logits(logits, rules.edits)
        self._adjustments.apply(logits, sampling, features, self._slots.longest(slots))
        masks, has_min_p = send_masks(rules.masks, self.config.device), bool(features & MIN_P)
        restrict(logits, sampling, masks, self._ops)
        if has_beams:
            self._beams.keep(slots, logits, sampling.temperature, self._output_recorder)
            own = self._beams.without(sampling.slots, slots, self._slots.padding_slot)
            sampling = replace(sampling, slots=own)
        log_probs = None
        if is_observed and self.config.normalize_log_probs:
            filters = sampling.filters(has_min_p=has_min_p)
            tokens, log_probs = self._ops.sample_with_log_probs(logits, *filters)
        else:
            tokens = self._choose(logits, sampling, has_min_p=has_min_p)
        self._adjustments.record(sampling, tokens, features, self._slots.parameters)
        if is_observed:
            self._output_recorder.record_samples(slots, original, tokens, log_probs)
        self._slots.store(sampling.slots, tokens)
        return tokens

    def _draw(self, hidden: Tensor, sampling: SamplingInputs) -> Tensor:
        """The next token of every row of hidden [num_samples, hidden_size], without features."""
        if len(hidden) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        logits = self._decoder.plain_logits(hidden)
        restrict(logits, sampling, None, self._ops)
        tokens = self._choose(logits, sampling, has_min_p=False)
        self._slots.store(sampling.slots, tokens)
        return tokens

    def _move_beams(self, batch: ScheduledBatch, words: StepWords) -> None:
        """Rows of a beam search continue the text of others."""
        self._slots.move(batch, words)
        slots, parents = words.move_slots.long(), words.move_parents.long()
        positions = self._slots.lengths(slots)
        self._adjustments.move(slots, parents, words.move_tokens.long(), positions)

    def _choose(self, logits: Tensor, sampling: SamplingInputs, *, has_min_p: bool) -> Tensor:
        """A token for every row of logits [num_samples, vocab]."""
        if sampling.is_all_greedy:
            return self._ops.greedy(logits)
        return self._ops.sample(logits, *sampling.filters(has_min_p=has_min_p))
