"""Optional parameters of `GptManager`, with TensorRT-LLM's names and our additions."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight_backend.errors import ConfigurationError
from inflight_backend.parameters import ServerParameters


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """Size of the KV pool. With both a number of tokens and a fraction, the smaller pool wins."""

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = False
    tokens_per_block: int = 32

    def __post_init__(self) -> None:
        if self.enable_block_reuse:
            raise ConfigurationError("enable_block_reuse is not supported; leave it False")


@dataclass(frozen=True, slots=True)
class TrtGptModelOptionalParams:
    """All lengths in tokens; None leaves the choice to the checkpoint (`EngineConfig`).

    ``record_file``: every decision of the scheduler is written there (`inflight replay`).
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    max_batch_size: int = 256
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    scheduler_class: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    record_file: str | None = None

    @classmethod
    def from_parameters(cls, parameters: ServerParameters) -> TrtGptModelOptionalParams:
        """What the parameters of the Triton model say about the batch manager."""
        return cls(
            kv_cache_config=KvCacheConfig(
                max_tokens=parameters.max_tokens_in_paged_kv_cache,
                free_gpu_memory_fraction=parameters.kv_cache_free_gpu_mem_fraction,
                tokens_per_block=parameters.tokens_per_block,
            ),
            max_batch_size=parameters.max_batch_size,
            max_num_tokens=parameters.max_num_tokens,
            max_seq_len=parameters.max_seq_len,
            max_input_len=parameters.max_input_len,
            scheduler_class=parameters.scheduler_class,
            device=parameters.device,
            dtype=parameters.dtype,
            record_file=parameters.record_file,
        )
