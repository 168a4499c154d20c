"""Settings of the engine; "auto" and None are resolved against a checkpoint and a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from inflight_backend.engine.model_limits import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    check_fp8_linears,
    check_rows,
    choose_num_tokens,
    choose_seq_len,
    has_attention_kernels,
)
from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.backends import ATTENTION_BACKENDS
from inflight_backend.models.config import ModelConfig

_logger = get_logger(__name__)

_DEVICES = ("auto", "cpu", "cuda")
_NAME_TO_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MAX_BEAM_WIDTH = 64
_FP8 = "fp8"
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a checkpoint is run; see `resolve` for what the defaults become.

    ``max_batch_size`` requests of up to ``max_beam_width`` beams run at once, ``max_num_tokens``
    bounds the tokens of one step, ``max_seq_len`` prompt plus new tokens of a request. Without
    ``enable_chunked_context`` a step has room for the longest one, unless ``max_num_tokens`` says
    otherwise.
    The KV pool is described in `kv_pool`.
    ``quantization`` fp8 quantises the linears' weights at load, one scale per row, and what they
    read, one scale per token; ``kv_cache_dtype`` fp8 stores KV in e4m3 without a scale.
    ``cuda_graph_mode`` records generation steps as CUDA graphs where there is a GPU, and steps with
    context chunks of up to ``cuda_graph_mixed_tokens`` tokens in all (0: none).
    ``normalize_log_probs``: log probabilities are those among what the filters left.
    ``deterministic_mode`` makes what a request draws independent of the others, bit by bit, as far
    as `deterministic` says.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 256
    max_beam_width: int = 1
    max_num_tokens: int | None = None
    enable_chunked_context: bool = True
    max_seq_len: int | None = None
    tokens_per_block: int = 32
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float = 0.9
    attention_backend: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    cuda_graph_mode: bool = True
    cuda_graph_mixed_tokens: int = 512
    normalize_log_probs: bool = False
    deterministic_mode: bool = False

    def __post_init__(self) -> None:
        _check_choice("device", self.device, _DEVICES)
        _check_choice("dtype", self.dtype, ("auto", *_NAME_TO_DTYPE))
        _check_choice("attention_backend", self.attention_backend, ("auto", *ATTENTION_BACKENDS))
        _check_choice("quantization", self.quantization, ("none", _FP8))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", _FP8))
        _check_range("max_batch_size", self.max_batch_size, 1, 2**16)
        _check_range("max_beam_width", self.max_beam_width, 1, MAX_BEAM_WIDTH)
        _check_range("tokens_per_block", self.tokens_per_block, 1, 1024)
        _check_range("cuda_graph_mixed_tokens", self.cuda_graph_mixed_tokens, 0, 8192)
        for name in ("max_num_tokens", "max_seq_len", "max_tokens_in_paged_kv_cache"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1, 2**40)
        fraction = self.kv_cache_free_gpu_mem_fraction
        if not 0.0 < fraction < 1.0:
            raise ConfigurationError(
                f"kv_cache_free_gpu_mem_fraction must be between 0 and 1, not {fraction}"
            )

    @property
    def num_slots(self) -> int:
        """Rows that may draw in one step: one per beam of every request."""
        return self.max_batch_size * self.max_beam_width

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of weights and activations of a resolved configuration."""
        return _NAME_TO_DTYPE[self.dtype]

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the KV pool of a resolved configuration."""
        return torch.float8_e4m3fn if self.kv_cache_dtype == _FP8 else self.torch_dtype

    @property
    def num_tokens_limit(self) -> int:
        """``max_num_tokens`` of a resolved configuration."""
        assert self.max_num_tokens is not None
        return self.max_num_tokens

    @property
    def seq_len_limit(self) -> int:
        """``max_seq_len`` of a resolved configuration."""
        assert self.max_seq_len is not None
        return self.max_seq_len


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """A copy without "auto" and None, except ``max_tokens_in_paged_kv_cache``.

    device: CUDA if there is one. dtype: the checkpoint's on a GPU, float32 on a CPU. max_seq_len:
    the checkpoint's positions, and not more. max_num_tokens: `choose_num_tokens`.
    attention_backend: triton on CUDA where it can be imported and has kernels for the model's
    heads, else torch.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is cuda, but torch finds no CUDA device; use cpu or auto")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model.dtype
    max_seq_len = choose_seq_len(config.max_seq_len, model)
    backend = _choose_backend(config, model, device)
    if device == "cuda":
        _check_fp8_device(config)
        if backend == "triton":
            check_rows(config.num_slots)
        if config.quantization == _FP8:
            check_fp8_linears(model, dtype)
    if config.kv_cache_dtype == _FP8 and model.has_qkv_bias:
        _logger.warning(
            "kv_cache_dtype is fp8, which holds numbers up to 448, without a scale: the keys of a "
            "model with biases (%s) may be larger and are cut; compare its answers with auto",
            model.architecture,
        )
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_num_tokens=choose_num_tokens(
            config.max_num_tokens, max_seq_len, may_chunk=config.enable_chunked_context
        ),
        attention_backend=backend,
    )


def _check_fp8_device(config: EngineConfig) -> None:
    """Raise ConfigurationError on a GPU that neither multiplies nor converts FP8."""
    for name, other in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        if getattr(config, name) == _FP8 and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
            needed, found = _FP8_CAPABILITY, torch.cuda.get_device_capability()
            raise ConfigurationError(
                f"{name} fp8 needs a GPU of compute capability {needed[0]}.{needed[1]} or later, "
                f"and this one has {found[0]}.{found[1]}; use {other}"
            )


def _choose_backend(config: EngineConfig, model: ModelConfig, device: str) -> str:
    backend, fits = config.attention_backend, has_attention_kernels(model)
    if backend == "auto":
        is_triton = device == "cuda" and fits and find_spec("triton") is not None
        backend = "triton" if is_triton else "torch"
    if backend == "triton" and not fits:
        raise ConfigurationError(
            f"attention_backend triton needs a head_dim that is a multiple of {HEAD_DIM_STEP} up "
            f"to {MAX_HEAD_DIM}; the checkpoint's is {model.head_dim}; use torch or auto"
        )
    if backend == "triton" and find_spec("triton") is None:
        raise ConfigurationError(
            "attention_backend is triton, which is not installed; install it, or use torch or auto"
        )
    if backend != "triton" and config.deterministic_mode:
        raise ConfigurationError(
            f"deterministic_mode needs attention_backend triton, and {backend} was chosen; use a "
            "GPU, or set deterministic_mode to false"
        )
    if backend != "triton" and config.kv_cache_dtype == _FP8:
        raise ConfigurationError(
            f"kv_cache_dtype fp8 needs attention_backend triton, and {backend} was chosen; use auto"
        )
    return backend


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ConfigurationError(f"{name} must be between {minimum} and {maximum}, not {value}")
