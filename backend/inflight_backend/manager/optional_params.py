"""Optional parameters of `GptManager`, with TensorRT-LLM's names and our additions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight_backend.errors import ConfigurationError
from inflight_backend.guided.service import GuidedDecodingConfig
from inflight_backend.manager.logits_processors import (
    LogitsPostProcessor,
    check_logits_processors,
    find_logits_processors,
)
from inflight_backend.manager.parameters import ServerParameters
from inflight_backend.manager.step_loop import OverlapScheduler
from inflight_backend.speculative.config import SpeculativeDecodingConfig
from inflight_scheduler import DEFAULT_PRIORITY_SPAN, ContextChunkingPolicy


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """Size of the KV pool. With both a number of tokens and a fraction, the smaller pool wins.

    ``enable_block_reuse`` keeps computed blocks for later requests that begin with the same text
    and have the same ``cache_salt``. ``dtype``
    is auto (that of the model) or fp8.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    tokens_per_block: int = 32
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class TrtGptModelOptionalParams:
    """All lengths in tokens; None leaves the choice to the checkpoint (`EngineConfig`).

    ``overlap_scheduler``: see `step_loop`. ``record_file``: every decision of the scheduler is
    written there (`inflight replay`). ``enable_chunked_context`` None: where ``max_seq_len`` is
    above ``max_num_tokens`` (and see `static_batching.params_in_force`). ``context_chunk_unit``
    None means ``tokens_per_block``.
    ``priority_span``: see `ActiveRequests`. ``max_queue_seconds`` and ``max_run_seconds`` end
    requests that have not started, or not finished, so long after they arrived; None means never.
    A request may ask for less (``max_queue_time_ms``, ``allotted_time_ms``), not for more.
    ``normalize_log_probs``: log probabilities are those among what the filters left, as
    TensorRT-LLM's default was until March 2026; by default they are the model's own.
    ``out_of_vocabulary``: "refuse", or "fold" ids of prompts that are above the vocabulary into it.
    ``logits_processors``: those that requests may choose, by name (see `logits_processors`).
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    max_batch_size: int = 256
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    scheduler_class: str | None = None
    overlap_scheduler: OverlapScheduler = OverlapScheduler.AUTO
    enable_chunked_context: bool | None = None
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    context_chunk_unit: int | None = None
    priority_span: float = DEFAULT_PRIORITY_SPAN
    max_queue_seconds: float | None = None
    max_run_seconds: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    attention_backend: str = "auto"
    cuda_graph_mode: bool = True
    cuda_graph_mixed_tokens: int = 512
    normalize_log_probs: bool = False
    out_of_vocabulary: str = "refuse"
    deterministic_mode: bool = False
    record_file: str | None = None
    guided_decoding_config: GuidedDecodingConfig = field(default_factory=GuidedDecodingConfig)
    speculative_decoding_config: SpeculativeDecodingConfig = field(
        default_factory=SpeculativeDecodingConfig
    )
    logits_processors: Mapping[str, LogitsPostProcessor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_logits_processors(self.logits_processors)
        for name in ("context_chunk_unit", "max_queue_seconds", "max_run_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be above 0, not {value}")
        if not self.priority_span >= 0:
            raise ConfigurationError(f"priority_span must be at least 0, not {self.priority_span}")
        is_default = self.context_chunking_policy == ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
        is_cut = not is_default or self.context_chunk_unit is not None
        if self.enable_chunked_context is False and is_cut:
            raise ConfigurationError(
                "context_chunking_policy and context_chunk_unit say how contexts are cut; "
                "set enable_chunked_context to true, or remove them"
            )

    @classmethod
    def from_parameters(cls, parameters: ServerParameters) -> TrtGptModelOptionalParams:
        """What the parameters of the Triton model say about the batch manager."""
        return cls(
            kv_cache_config=KvCacheConfig(
                max_tokens=parameters.max_tokens_in_paged_kv_cache,
                free_gpu_memory_fraction=parameters.kv_cache_free_gpu_mem_fraction,
                enable_block_reuse=parameters.enable_kv_cache_reuse,
                tokens_per_block=parameters.tokens_per_block,
                dtype=parameters.kv_cache_dtype,
            ),
            max_batch_size=parameters.max_batch_size,
            max_num_tokens=parameters.max_num_tokens,
            max_seq_len=parameters.max_seq_len,
            max_input_len=parameters.max_input_len,
            scheduler_class=parameters.scheduler_class,
            enable_chunked_context=parameters.enable_chunked_context,
            context_chunking_policy=ContextChunkingPolicy[
                parameters.context_chunking_policy.upper()
            ],
            context_chunk_unit=parameters.context_chunk_unit,
            priority_span=parameters.priority_span,
            max_queue_seconds=parameters.max_queue_seconds,
            max_run_seconds=parameters.max_run_seconds,
            device=parameters.device,
            dtype=parameters.dtype,
            quantization=parameters.quantization,
            attention_backend=parameters.attention_backend,
            cuda_graph_mode=parameters.cuda_graph_mode,
            cuda_graph_mixed_tokens=parameters.cuda_graph_mixed_tokens,
            normalize_log_probs=parameters.normalize_log_probs,
            out_of_vocabulary=parameters.out_of_vocabulary,
            deterministic_mode=parameters.deterministic_mode,
            overlap_scheduler=OverlapScheduler(parameters.overlap_scheduler),
            record_file=parameters.record_file,
            guided_decoding_config=GuidedDecodingConfig(
                parameters.guided_decoding_backend, parameters.tokenizer_dir
            ),
            logits_processors=find_logits_processors(parameters.logits_processors),
            speculative_decoding_config=SpeculativeDecodingConfig(
                parameters.speculative_decoding_mode,
                parameters.max_draft_len,
                parameters.max_matching_ngram_size,
                parameters.speculative_disable_by_batch_size,
            ),
        )
