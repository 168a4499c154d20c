"""Settings of the engine; "auto" and None are resolved against a checkpoint and a machine.

Needs no torch until a property gives one of its types or `resolve` looks for a GPU, so that a plan
of the memory can be made without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parameters import decoder_parameters

if TYPE_CHECKING:
    import torch

_logger = get_logger(__name__)

DTYPE_TO_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEVICES = ("auto", "cpu", "cuda")
_ATTENTION_BACKENDS = ("auto", "torch", "triton")
_MAX_BEAM_WIDTH = 64
_FP8 = "fp8"
_FP8_CAPABILITY = (8, 9)
_DEFAULT_NUM_TOKENS = 8192

# Bounds of the Triton kernels, checked before they run so that the error can name the way out.
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256
_MAX_ROWS = 2**16 - 1  # along the second and third dimension of a launch
_LINEAR_STEP = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a checkpoint is run; see `resolve` for what the defaults become.

    ``max_batch_size`` requests of up to ``max_beam_width`` beams run at once, ``max_num_tokens``
    bounds the tokens of one step, ``max_seq_len`` prompt plus new tokens of a request. Without
    ``enable_chunked_context`` a step has room for the longest one, unless ``max_num_tokens`` says
    otherwise.
    The KV pool is described in `memory_plan`.
    ``quantization`` fp8 quantises the linears' weights at load, one scale per row, and what they
    read, one scale per token; ``kv_cache_dtype`` fp8 stores KV in e4m3 without a scale.
    ``cuda_graph_mode`` records generation steps as CUDA graphs where there is a GPU, and steps with
    context chunks of up to ``cuda_graph_mixed_tokens`` tokens in all (0: none).
    ``normalize_log_probs``: log probabilities are those among what the filters left.
    ``deterministic_mode`` makes what a request draws independent of the others, bit by bit, as far
    as `triton_ops` says.
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
    cuda_graph_mixed_tokens: int = 1024
    normalize_log_probs: bool = False
    deterministic_mode: bool = False

    def __post_init__(self) -> None:
        _check_choice("device", self.device, _DEVICES)
        _check_choice("dtype", self.dtype, ("auto", *DTYPE_TO_BYTES))
        _check_choice("attention_backend", self.attention_backend, _ATTENTION_BACKENDS)
        _check_choice("quantization", self.quantization, ("none", _FP8))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", _FP8))
        _check_range("max_batch_size", self.max_batch_size, 1, 2**16)
        _check_range("max_beam_width", self.max_beam_width, 1, _MAX_BEAM_WIDTH)
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
        import torch  # seconds to import

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the KV pool of a resolved configuration."""
        import torch

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
    """A copy for this machine, without "auto" and None (except ``max_tokens_in_paged_kv_cache``).

    device: CUDA if there is one; all else as in `resolve_on_device`.
    """
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is cuda, but torch finds no CUDA device; use cpu or auto")
    if device == "cuda":
        _check_fp8_capability(config, torch.cuda.get_device_capability())
    has_triton = find_spec("triton") is not None
    config = resolve_on_device(replace(config, device=device), model, has_triton=has_triton)
    if config.kv_cache_dtype == _FP8 and model.has_qkv_bias:
        _logger.warning(
            "kv_cache_dtype is fp8, which holds numbers up to 448, without a scale: the keys of a "
            "model with biases (%s) may be larger and are cut; compare its answers with auto",
            model.architecture,
        )
    return config


def resolve_on_device(
    config: EngineConfig, model: ModelConfig, *, has_triton: bool
) -> EngineConfig:
    """The same for ``config.device`` (cpu or cuda), without a look at this machine.

    dtype: the checkpoint's on a GPU, float32 on a CPU. max_seq_len: the checkpoint's positions, and
    not more. max_num_tokens: 8192, or where contexts are computed whole the longest one's.
    attention_backend: triton on CUDA where it can be imported and has kernels for the model's
    heads, else torch. `ConfigurationError` for what cannot be run.
    """
    is_cuda = config.device == "cuda"
    _check_quantised(config, model)
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if is_cuda else "float32"
    max_positions = model.max_position_embeddings
    max_seq_len = config.max_seq_len or max_positions
    if max_seq_len > max_positions:
        raise ConfigurationError(
            f"max_seq_len ({max_seq_len}) is above the checkpoint's "
            f"max_position_embeddings ({max_positions})"
        )
    may_chunk = config.enable_chunked_context
    default_num_tokens = max(_DEFAULT_NUM_TOKENS, 0 if may_chunk else max_seq_len)
    backend = _choose_backend(config, model, has_triton)
    if is_cuda and backend == "triton" and config.num_slots > _MAX_ROWS:
        raise ConfigurationError(
            f"max_batch_size * max_beam_width is {config.num_slots}, more than the {_MAX_ROWS} "
            "rows that a launch on a GPU may have; lower one of them"
        )
    if is_cuda and config.quantization == _FP8:
        _check_fp8_linears(model, dtype)
    return replace(
        config,
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_num_tokens=config.max_num_tokens or default_num_tokens,
        attention_backend=backend,
    )


def _check_quantised(config: EngineConfig, model: ModelConfig) -> None:
    """What a quantised checkpoint does not go with."""
    if model.quantization is None:
        return
    what = f"the checkpoint is quantised ({model.quantization.name})"
    if config.device == "cuda":
        raise ConfigurationError(
            f"{what}, and there are no kernels for it on a GPU yet; use device=cpu, or give an "
            "unquantised checkpoint"
        )
    if config.quantization != "none":
        raise ConfigurationError(f"{what} already; use quantization=none")
    if config.deterministic_mode:
        raise ConfigurationError(
            f"{what}, whose products depend on the batch; deterministic_mode "
            "needs an unquantised one"
        )


def _check_fp8_capability(config: EngineConfig, found: tuple[int, int]) -> None:
    """Raise ConfigurationError on a GPU that neither multiplies nor converts FP8."""
    for name, other in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        if getattr(config, name) == _FP8 and found < _FP8_CAPABILITY:
            needed = _FP8_CAPABILITY
            raise ConfigurationError(
                f"{name} fp8 needs a GPU of compute capability {needed[0]}.{needed[1]} or later, "
                f"and this one has {found[0]}.{found[1]}; use {other}"
            )


def _check_fp8_linears(model: ModelConfig, dtype: str) -> None:
    """On CUDA the product takes bfloat16 out and dimensions that are multiples of 16 only."""
    if dtype != "bfloat16":
        raise ConfigurationError(f"quantization fp8 needs dtype bfloat16, not {dtype}")
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp_size,
        "num_attention_heads * head_dim": model.query_size,
        "num_key_value_heads * head_dim": model.kv_size,
    }
    for name, size in sizes.items():
        if size % _LINEAR_STEP:
            raise ConfigurationError(
                f"quantization fp8 needs a {name} that is a multiple of {_LINEAR_STEP}; the "
                f"checkpoint's is {size}; use none"
            )
    for spec in decoder_parameters(model):
        if spec.is_linear and any(size % _LINEAR_STEP for size in spec.shape):
            raise ConfigurationError(
                f"quantization fp8 needs linears whose sizes are multiples of {_LINEAR_STEP}; "
                f"{spec.name} of the checkpoint has {list(spec.shape)}; use none"
            )


def _choose_backend(config: EngineConfig, model: ModelConfig, has_triton: bool) -> str:
    backend, head_dims = config.attention_backend, [head_dim for _, head_dim in model.rope_kinds]
    unfit = [each for each in head_dims if each % _HEAD_DIM_STEP or each > _MAX_HEAD_DIM]
    fits = not unfit
    needed = (
        f"needs a head_dim that is a multiple of {_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}; the "
        f"checkpoint's is {(unfit or head_dims)[0]}"
    )
    if backend == "auto":
        is_triton = config.device == "cuda" and fits and has_triton
        backend = "triton" if is_triton else "torch"
    if backend == "triton" and not fits:
        raise ConfigurationError(f"attention_backend triton {needed}; use torch or auto")
    if backend == "triton" and not has_triton:
        raise ConfigurationError(
            "attention_backend is triton, which is not installed; install it, or use torch or auto"
        )
    if config.deterministic_mode and (model.deltas or any(each.latent for each in model.attending)):
        raise ConfigurationError(
            "deterministic_mode is not supported for latent attention and recurrences, whose "
            "products depend on the batch; set it to false"
        )
    if backend != "triton" and config.deterministic_mode:
        raise ConfigurationError(
            f"deterministic_mode needs attention_backend triton, and {backend} was chosen; use a "
            "GPU, or set deterministic_mode to false"
        )
    if backend != "triton" and config.kv_cache_dtype == _FP8:
        if config.device == "cuda" and not fits:
            raise ConfigurationError(f"kv_cache_dtype fp8 {needed}; use auto")
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
