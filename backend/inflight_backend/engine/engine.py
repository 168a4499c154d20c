"""The engine: one checkpoint, one pool of KV blocks, and one call per iteration.

A step is: one packed copy of the plan to the device, `SlotTable.set_up` and `SlotTable.begin`,
the decoder, the draw.
The host reads the drawn tokens at its very end and nothing else, so `Engine.submit` may be
followed by another one before the tokens of the first are looked at.

Steps of generations alone, and mixed ones that fit a size, are replayed from recordings where that
can be done (`cuda_graphs`); all others, and everything on a CPU, run eagerly. Both draw the same
tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from inflight_backend.engine.adapters import DeviceSlotAdapters, SlotAdapters
from inflight_backend.engine.config import (
    COMPILED,
    EngineConfig,
    max_encoder_len,
    resolve,
    supports_drafts,
)
from inflight_backend.engine.cuda_graphs import (
    Capture,
    CudaCapture,
    GraphCache,
    GraphCapturer,
    StepGraph,
)
from inflight_backend.engine.following_sampler import FollowingSampler
from inflight_backend.engine.interface import (
    AdapterPages,
    EditSource,
    MaskSource,
    MemoryUsage,
    StepOutputs,
)
from inflight_backend.engine.memory_plan import (
    CPU_DEFAULT_TOKENS,
    GIB,
    answer_bytes,
    block_bytes,
    choose_num_blocks,
    choose_pages,
    cross_layout,
    kv_bytes_per_token,
    layout_of,
    max_cross_blocks,
    max_words_of,
    num_snapshots_of,
    split_blocks,
    supports_block_reuse,
)
from inflight_backend.engine.outputs import OutputRecorder, PendingTokens, TokenReader
from inflight_backend.engine.sampler import LogitsRules, Sampler
from inflight_backend.engine.slot_table import (
    SamplingInputs,
    SlotTable,
    partly_filled_blocks,
    sampling_slots_of,
)
from inflight_backend.engine.step_buffer import StepBuffer, StepSizes, StepWords
from inflight_backend.engine.warmup import (
    compiling_batches,
    max_memory_batch,
    thread_warmup_batch,
    warm_up,
)
from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.attention import AttentionBackend
from inflight_backend.models.backends import make_cache, make_ops
from inflight_backend.models.blocks.lora import Adapter, TorchAdapters
from inflight_backend.models.blocks.rope import make_tables
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.encoders.cache import CrossedAttention
from inflight_backend.models.encoders.encoder import Encoder, EncoderSteps
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.kv_cache import (
    CudaMemory,
    DeviceMemory,
    KvPool,
    RecurrentStates,
    ResidentMemory,
    allocator_bytes,
)
from inflight_backend.models.layers import Parameter
from inflight_backend.models.parallel.collectives import (
    MAX_UNDER_WAY,
    NO_COLLECTIVES,
    Collectives,
)
from inflight_backend.models.parallel.shards import local_model, local_parameters
from inflight_backend.models.quantization.schemes import AT_LOAD
from inflight_backend.models.weights import Checkpoint, OnProgress, give_back_freed_memory
from inflight_scheduler import ContextChunk, ScheduledBatch

_CPU_MEMORY_SHARE = 0.25
_PARTS_PER_STAGE = 2
_LEAST_PART = {"cpu": 64, "cuda": 512}
"""Tokens of a part of a step (`Engine._parts`): of fewer, reading the weights once more for each
part takes longer than the stages save."""
_AnyEngine = TypeVar("_AnyEngine", bound="Engine")

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Started:
    """A step that the decoder runs: its answer, the rows of that which draw (None: all), and what
    the draw needs."""

    hidden: Tensor
    sample_rows: Tensor | None
    sampling: SamplingInputs


class Engine:
    """Executes plans. Not thread-safe: one thread owns it.

    A `StepEngine` that also copies blocks, verifies drafts (``supports_drafts``), runs beams (up to
    ``max_beam_width`` rows of a request) and returns outputs beside tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parameters: dict[str, Parameter],
        capture: Capture | None = None,
        memory: DeviceMemory | None = None,
        ranks: Collectives = NO_COLLECTIVES,
    ) -> None:
        """``config`` is resolved; ``parameters`` are taken over (see `local_parameters`).

        ``capture`` records steps; without it they are CUDA graphs on CUDA and run eagerly on a CPU.
        ``memory`` is what the KV pool shares with the largest step and the recordings: on CUDA that
        of the GPU; on a CPU nothing is measured. ``ranks``: those that run the model together;
        each has an engine and sees the same plans.
        """
        self.config, self.model_config, self._ranks = config, model_config, ranks
        self.vocab_size = model_config.vocab_size
        self.tokens_per_block = config.tokens_per_block
        self.max_seq_len = config.seq_len_limit
        self.max_num_tokens = config.num_tokens_limit
        self.max_beam_width = config.max_beam_width
        self.is_asynchronous = config.device != "cpu"
        self.supports_drafts = supports_drafts(config, model_config)
        self.max_encoder_len = max_encoder_len(config, model_config)
        self.start_ids = model_config.start_ids
        self.num_snapshots = num_snapshots_of(config, model_config)
        self.supports_block_reuse = supports_block_reuse(config, model_config)

        model_config = self._local = local_model(model_config, ranks.place)
        has_packed = model_config.quantization is not None or config.quantization in AT_LOAD
        ops = make_ops(
            config.attention_backend,
            config.quantization,
            is_deterministic=config.deterministic_mode,
            packed_backend=config.packed_backend if has_packed else "",
        )
        is_cuda = config.device == "cuda"
        if memory is None and is_cuda:
            memory = CudaMemory()
        self._adapters = self._make_adapters(memory) if config.enable_lora else None
        table = None if self._adapters is None else self._adapters.table
        encoder, dtype = None, config.torch_dtype
        if model_config.encoder is not None:
            encoder = Encoder(model_config.encoder, parameters, ops, dtype)
        self._decoder = Decoder(model_config, parameters, ops, table, ranks, dtype)
        self._encoder = None
        if encoder is not None:
            self._encoder = EncoderSteps(encoder, self._decoder, config.device)
        self._tables = make_tables(model_config, config.seq_len_limit, config.device)
        self._layout = layout_of(config, model_config)
        self.windows = self._layout.windows
        max_blocks = -(-config.seq_len_limit // config.tokens_per_block)
        self._slots = SlotTable(
            config.num_slots,
            max_blocks,
            config.tokens_per_block,
            config.device,
            len(self.windows),
            max_cross_blocks(config, model_config),
        )
        self._cross_pool: KvPool | None = None
        self._states = RecurrentStates(
            model_config.deltas,
            config.num_slots,
            config.torch_dtype,
            config.device,
            self.num_snapshots or 0,
        )
        words = max_words_of(config, self._layout)
        self._buffer = StepBuffer(words, config.num_slots, config.device)
        self._reader = TokenReader(max(config.num_tokens_limit, config.num_slots), config.device)
        self._output_recorder = OutputRecorder(config.num_slots, config.device)
        self._sampler: Sampler | FollowingSampler
        if ranks.place.rank == 0:
            self._sampler = Sampler(
                config, self._decoder, ops, self._slots, self._output_recorder, ranks
            )
        else:
            self._sampler = FollowingSampler(config, self._decoder, self._slots, ranks)
        self._resident = ResidentMemory()
        self._outputs: StepOutputs | None = None
        self._rules = LogitsRules()
        self._graph_capturer = GraphCapturer(
            config,
            self._decoder,
            self._slots,
            self._buffer,
            self._sampler.draw,
            (lambda: capture) if capture is not None else CudaCapture if is_cuda else None,
            self._adapters,
        )
        self._graphs = self._adapted_graphs = GraphCache()
        self.num_blocks, self.num_cross_blocks = self._count_blocks(memory)
        self._pool, self._attention = self._make_cache(self.num_blocks, self.num_cross_blocks)
        self._graphs = self._graph_capturer.record(self._attention)
        if self._adapters is not None:  # steps without an adapter keep recordings of their own
            self._adapted_graphs = self._graph_capturer.record(self._attention, has_adapters=True)

    @classmethod
    def load(
        cls: type[_AnyEngine],
        checkpoint_dir: Path,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        capture: Capture | None = None,
        ranks: Collectives = NO_COLLECTIVES,
    ) -> _AnyEngine:
        """Load a Hugging Face checkpoint folder, of which a rank reads its part; ``on_progress``
        gets bytes done and in all.

        `CheckpointError` or `ConfigurationError` when it cannot be served as asked.
        """
        model_config = read_model(checkpoint_dir)
        with torch.inference_mode(), Checkpoint(checkpoint_dir) as checkpoint:
            model_config = checkpoint.fit(model_config)
            model_config = model_config.with_window_limits(config.max_attention_window)
            config = resolve(config, model_config)
            specs = local_parameters(model_config, ranks.place)
            checkpoint.check(model_config)
            parameters = checkpoint.load(
                specs,
                config.torch_dtype,
                config.device,
                on_progress,
                quantization=config.quantization,
                backend=config.packed_backend,
            )
        with torch.inference_mode():
            engine = cls(config, model_config, parameters, capture, ranks=ranks)
        give_back_freed_memory()
        return engine

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
        return len(self._graphs.generations)

    @property
    def num_mixed_graphs(self) -> int:
        """The same of mixed steps."""
        return len(self._graphs.mixed)

    @property
    def dtype_name(self) -> str:
        """Type of weights and KV."""
        config = self.config
        weights = "fp8" if config.quantization == "fp8" else config.dtype
        if config.quantization in AT_LOAD:
            weights = f"{config.dtype} ({config.quantization})"
        if (quantized := self.model_config.quantization) is not None:
            weights = f"{config.dtype} ({quantized.name})"
        kv_cache = config.dtype if config.kv_cache_dtype == "model" else config.kv_cache_dtype
        return weights if weights == kv_cache else f"{weights} with {kv_cache} KV cache"

    @property
    def adapter_pages(self) -> AdapterPages | None:
        """Its memory for adapters; None if it runs without any."""
        return None if self._adapters is None else self._adapters.pages

    @torch.inference_mode()
    def prepare_adapter(self, adapter: Adapter) -> Any:
        """What `load_adapter` takes; any thread may call it."""
        assert self._adapters is not None, "enable_lora is off"
        return self._adapters.table.prepare(adapter)

    @torch.inference_mode()
    def load_adapter(self, place: int, adapter: Any) -> None:
        """The steps submitted from now on find ``adapter`` in that place; None: nothing."""
        assert self._adapters is not None, "enable_lora is off"
        if adapter is None:
            self._adapters.table.unload(place)
        else:
            self._adapters.table.load(place, adapter)

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
        self._output_recorder.set_up(batch.setups)
        if self._adapters is not None:
            self._adapters.set_up(batch.adapters)
        observed = self._output_recorder.observed_chunks(batch)
        graph = None if observed else self._find_graph(batch)
        if graph is not None:
            return self._replay(batch, graph, rules)
        if batch.num_tokens == 0:
            self._prepare(batch, StepSizes.of(batch))
            return torch.empty(0, dtype=torch.int64)
        parts = [batch] if observed else self._parts(batch)
        started = [self._start(part, observed) for part in parts]
        # Behind the start of them all: one stage of a pipeline runs a part beside another stage.
        hidden = [self._receive(each, observed) for each in started]
        sampling = SamplingInputs.joined([each.sampling for each in started])
        slots = sampling_slots_of(batch)
        joined = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return self._sampler.sample(joined, sampling, slots, rules)

    def _replay(self, batch: ScheduledBatch, graph: StepGraph, rules: LogitsRules) -> Tensor:
        """`enqueue` of a step that is recorded."""
        words = self._prepare(batch, graph.sizes)
        slots = sampling_slots_of(batch)
        graph.replay()
        is_plain = not rules and self._sampler.is_plain(slots)
        # Of several ranks the first alone knows whether a draw is plain.
        if graph.replay_draw is not None and is_plain and self._ranks.place.size == 1:
            graph.replay_draw()
            assert graph.tokens is not None
            return graph.tokens[: len(slots)]
        sampling = self._slots.begin_sampling(batch, words)
        return self._sampler.sample(graph.hidden[: len(slots)], sampling, slots, rules)

    def _prepare(self, batch: ScheduledBatch, sizes: StepSizes) -> StepWords:
        """All of a step that comes before the decoder."""
        words = self._buffer.send(batch, sizes)
        if batch.block_copies:
            self._pool.copy(words.copy_sources, words.copy_destinations)
        if self._attention.reads_past_the_end:
            self._pool.clean(partly_filled_blocks(batch, self.tokens_per_block))
        if batch.beam_moves:
            self._slots.move(batch, words)
            self._states.move(words.move_slots.long(), words.move_parents.long())
            self._sampler.move(words)
        self._states.begin(batch)
        self._slots.set_up(batch, words)
        if self._encoder is not None:
            assert self._cross_pool is not None
            self._slots.assign_answers(batch.answers)
            self._encoder.run(batch, self._cross_pool)
        self._sampler.set_up(batch.setups)
        if batch.num_tokens:
            self._slots.book(batch)
            if self._adapters is not None:
                self._adapters.note_used(batch)
        return words

    def _parts(self, batch: ScheduledBatch) -> list[ScheduledBatch]:
        """``batch``, in a pipeline as several that follow one another, if it has tokens enough:
        then stages compute beside one another. All ranks find the same."""
        num_stages = self._ranks.place.pipeline_size
        least = _LEAST_PART["cpu" if self.config.device == "cpu" else "cuda"]
        count = min(_PARTS_PER_STAGE * num_stages, MAX_UNDER_WAY, batch.num_tokens // least)
        if num_stages == 1 or count < 2 or self.model_config.deltas:
            return [batch]
        return batch.in_parts(-(-batch.num_tokens // count))

    def _start(
        self, batch: ScheduledBatch, observed: Sequence[tuple[int, ContextChunk]]
    ) -> _Started:
        """Have the decoder run ``batch``, eagerly."""
        words = self._prepare(batch, StepSizes.of(batch))
        step = self._slots.begin(words.runs, self._slots.host_lengths(batch))
        attention = self._attention.begin(step.attention)
        if self._adapters is not None:
            self._adapters.begin(batch, words.runs, draws_all=bool(observed))
        rows = None if observed else step.sample_rows
        hidden = self._decoder.forward(step.tokens, step.attention.positions, attention, rows)
        sampling = self._slots.begin_sampling(batch, words)
        return _Started(hidden, step.sample_rows if observed else None, sampling)

    def _find_graph(self, batch: ScheduledBatch) -> StepGraph | None:
        has_adapters = self._adapters is not None and self._adapters.has_any(batch)
        return (self._adapted_graphs if has_adapters else self._graphs).find(batch)

    def _make_adapters(self, memory: DeviceMemory | None) -> SlotAdapters:
        config, model = self.config, self._local
        free = psutil.virtual_memory().available if memory is None else memory.free_bytes()
        pages = choose_pages(config, model, free)
        pages = replace(pages, num_pages=self._ranks.least(pages.num_pages))
        if config.attention_backend == "triton":
            return DeviceSlotAdapters(config, model, pages)
        table = TorchAdapters(config.device)
        if config.attention_backend == COMPILED:
            from inflight_backend.models.compiled.lora import CompiledAdapters  # needs numba

            table = CompiledAdapters(config.torch_dtype)
        return SlotAdapters(table, pages, config.num_slots)

    def _receive(self, started: _Started, observed: Sequence[tuple[int, ContextChunk]]) -> Tensor:
        """Hidden states of all that draw; logits of ``observed`` chunks are recorded."""
        hidden = self._decoder.receive(started.hidden)
        if started.sample_rows is None:
            return hidden
        if self._ranks.place.is_first_stage:
            self._output_recorder.record_context_logits(observed, hidden, self._decoder.logits)
        return hidden[started.sample_rows]

    def prepare_thread(self) -> None:
        """First of all in the thread that runs the steps, if another one has loaded: what no
        request should wait for. On CUDA a step that is not recorded, as torch's libraries keep a
        handle and a workspace for each thread (cuBLAS on Hopper: 32 MiB); on a CPU steps whose
        kernels are compiled, or read from the cache."""
        if self.config.device == "cuda":
            recordings, self._graphs = self._graphs, GraphCache()  # no request has an adapter
            self.execute(thread_warmup_batch(self.config))
            self._graphs = recordings
        elif self.config.attention_backend == COMPILED:
            for batch in compiling_batches(self.config):
                self.execute(batch)
            give_back_freed_memory()

    def memory_usage(self) -> MemoryUsage:
        """See `StepEngine`."""
        gpu = allocator_bytes() if self.config.device == "cuda" else 0
        pinned = self._buffer.pinned_bytes + self._reader.pinned_bytes
        return MemoryUsage(cpu=self._resident.num_bytes(), gpu=gpu, pinned=pinned)

    def _count_blocks(self, memory: DeviceMemory | None) -> tuple[int, int]:
        """Blocks of the pool and of that for an encoder's answers, by the rule of `memory_plan`; a
        line in the log says if they are scarce.

        On a CPU the memory bounds a pool of the default size only.
        """
        config = self.config
        num_tokens, max_bytes = config.max_tokens_in_paged_kv_cache, None
        if memory is not None:
            kept_bytes = self._measure_step(memory)
            free_bytes = memory.free_bytes() - kept_bytes - answer_bytes(config, self.model_config)
            max_bytes = int(free_bytes * config.kv_cache_free_gpu_mem_fraction)
        elif num_tokens is None:
            num_tokens = CPU_DEFAULT_TOKENS
            max_bytes = int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE)
        per_token, size = kv_bytes_per_token(config, self._local), config.tokens_per_block
        per_block = block_bytes(config, self._layout)
        num_blocks = self._ranks.least(choose_num_blocks(config, per_token, max_bytes, per_block))
        num_wanted = num_blocks if num_tokens is None else num_tokens * per_token // per_block
        (_logger.info if num_blocks == num_wanted else _logger.warning)(
            "KV pool: %d blocks of %d tokens, %.2f GiB; %d blocks were planned for",
            num_blocks,
            size,
            num_blocks * per_block / GIB,
            num_wanted,
        )
        return split_blocks(config, self.model_config, num_blocks)

    def _make_cache(
        self, num_blocks: int, num_cross_blocks: int = 1
    ) -> tuple[KvPool, AttentionBackend]:
        """The pool of texts, and attention over it; beside an encoder also over its answers."""
        make = partial(
            make_cache,
            tables=self._tables,
            backend=self.config.attention_backend,
            tokens_per_block=self.config.tokens_per_block,
            kv_dtype=self.config.kv_dtype,
            dtype=self.config.torch_dtype,
            device=self.config.device,
            is_deterministic=self.config.deterministic_mode,
        )
        model = self._local
        pool, attention = make(model, self._layout, num_blocks=num_blocks, states=self._states)
        if self._encoder is None:
            return pool, attention
        layout, model = cross_layout(model), model.cross_model
        self._cross_pool, cross = make(model, layout, num_blocks=num_cross_blocks)
        return pool, CrossedAttention(attention, cross)

    def _measure_step(self, memory: DeviceMemory) -> int:
        """Bytes that the largest step and the recordings take beside weights and KV: the one is
        run, the others are made, on a tiny pool."""
        batch = max_memory_batch(self.config)
        num_blocks = 1 + max(new.block_id for new in batch.new_blocks)
        try:
            self._pool, self._attention = self._make_cache(num_blocks)
            memory.start_peak()
            warm_up(self, batch)
            if self._encoder is not None:
                self._encoder.run_largest(self.max_encoder_len)
            if self._adapters is not None:
                with self._adapters.everywhere():
                    warm_up(self, batch)
            step_bytes = memory.peak_bytes()
        except torch.OutOfMemoryError:
            raise ConfigurationError(
                f"a step of max_num_tokens = {self.config.num_tokens_limit} tokens does not fit "
                "the GPU; lower max_num_tokens (prompts may be longer where contexts are chunked)"
            ) from None
        recorded_bytes = self._graph_capturer.measure(self._attention, memory)
        if self._adapters is not None:
            recorded_bytes += self._graph_capturer.measure(
                self._attention, memory, has_adapters=True
            )
        del self._pool, self._attention
        self._cross_pool = None
        gibibytes = step_bytes / 2**30, recorded_bytes / 2**30
        _logger.info("the largest step takes %.2f GiB, recorded steps keep %.2f GiB", *gibibytes)
        return step_bytes + recorded_bytes
