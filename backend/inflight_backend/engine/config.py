"""Settings of the engine; "auto" and None are resolved against a checkpoint and a machine.

Needs no torch until a property gives one of its types or `resolve` looks for a GPU, so that a plan
of the memory can be made without.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from inflight_backend.errors import ConfigurationError
from inflight_backend.log import get_logger
from inflight_backend.models.config import LayerConfig, ModelConfig, MoeConfig
from inflight_backend.models.parallel.place import MAX_RANKS, Place
from inflight_backend.models.parallel.shards import local_model, local_parameters
from inflight_backend.models.parameters import ParameterSpec
from inflight_backend.models.quantization.schemes import AT_LOAD

if TYPE_CHECKING:
    import torch

_logger = get_logger(__name__)

DTYPE_TO_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEVICES = ("auto", "cpu", "cuda")
COMPILED = "compiled"
_ATTENTION_BACKENDS = ("auto", "torch", COMPILED, "triton")
_MAX_BEAM_WIDTH = 64
_FP8, _INT8 = "fp8", "int8"
_QUANTIZATIONS = ("none", _FP8, *AT_LOAD)
_MODEL = "model"
_FP8_CAPABILITY = (8, 9)
_DEFAULT_NUM_TOKENS = 8192

# Bounds of the Triton kernels, checked before they run so that the error can name the way out.
_HEAD_DIM_STEP, _MAX_HEAD_DIM, _MAX_BYTE_HEAD_DIM = 16, 576, 256
_MAX_ROWS = 2**16 - 1  # along the second and third dimension of a launch
_LINEAR_STEP = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a checkpoint is run; see `resolve` for what the defaults become.

    ``max_batch_size`` requests of up to ``max_beam_width`` beams run at once, ``max_num_tokens``
    bounds the tokens of one step, ``max_seq_len`` prompt plus new tokens of a request. Without
    ``enable_chunked_context`` a step has room for the longest one, unless ``max_num_tokens`` says
    otherwise.
    The KV pool is described in `memory_plan`. Beside an encoder ``cross_kv_cache_fraction`` of it
    is for what its decoder reads of the encoder's answers.
    ``quantization`` fp8 quantises the linears' weights at load, one scale per row, and what they
    read, one scale per token; int8 and int4 quantise the weights of linears alone, also those of
    experts, for a CPU (`scheme_at_load`). ``kv_cache_dtype``: "model" stores KV in ``dtype``; "fp8"
    and "int8" with the scales of the checkpoint, without any fp8 as it is; "auto" what the
    checkpoint has scales for.
    ``cuda_graph_mode`` records generation steps as CUDA graphs where there is a GPU, and steps with
    context chunks of up to ``cuda_graph_mixed_tokens`` tokens in all (0: none).
    ``normalize_log_probs``: log probabilities are those among what the filters left.
    ``deterministic_mode`` makes what a request draws independent of the others, bit by bit, as far
    as `triton_ops` says.
    ``max_attention_window``: tokens that layers see at most, again and again where there are more
    layers than numbers; none: what the checkpoint says.
    ``max_state_snapshots``: of the states of recurrences, kept for prompts that begin alike (0:
    none are reused); None: as many as requests run at once, and 32 at most.
    ``enable_lora``: requests may have adapters, of rank ``lora_cache_max_adapter_size`` at most;
    None: on a CPU, where that costs nothing until one has.
    Their memory comes in pages; an adapter of rank ``lora_cache_optimal_adapter_size`` fills one.
    There are ``lora_cache_pages``, or as many as ``lora_cache_gpu_memory_fraction`` of the memory
    holds that the weights leave. ``lora_experts``: pages have room for the linears of experts, too;
    a CPU needs no pages.

    ``tensor_parallel_size`` ranks hold a part of each layer, in ``pipeline_parallel_size`` stages
    of neighbouring layers; with ``expert_parallel`` they hold whole experts, not columns of all.
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
    cross_kv_cache_fraction: float = 0.5
    attention_backend: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    cuda_graph_mode: bool = True
    cuda_graph_mixed_tokens: int = 1024
    normalize_log_probs: bool = False
    deterministic_mode: bool = False
    max_attention_window: tuple[int, ...] = ()
    max_state_snapshots: int | None = None
    enable_lora: bool | None = False
    lora_cache_optimal_adapter_size: int = 8
    lora_cache_max_adapter_size: int = 64
    lora_cache_gpu_memory_fraction: float = 0.05
    lora_cache_pages: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    lora_experts: bool = False

    def __post_init__(self) -> None:
        _check_choice("device", self.device, _DEVICES)
        _check_choice("dtype", self.dtype, ("auto", *DTYPE_TO_BYTES))
        _check_choice("attention_backend", self.attention_backend, _ATTENTION_BACKENDS)
        _check_choice("quantization", self.quantization, _QUANTIZATIONS)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", _MODEL, _FP8, _INT8))
        _check_range("max_batch_size", self.max_batch_size, 1, 2**16)
        _check_range("max_beam_width", self.max_beam_width, 1, _MAX_BEAM_WIDTH)
        _check_range("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        _check_range("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS)
        _check_range("tokens_per_block", self.tokens_per_block, 1, 1024)
        _check_range("cuda_graph_mixed_tokens", self.cuda_graph_mixed_tokens, 0, 8192)
        _check_range("lora_cache_max_adapter_size", self.lora_cache_max_adapter_size, 1, 1024)
        most = self.lora_cache_max_adapter_size
        optimal = self.lora_cache_optimal_adapter_size
        _check_range("lora_cache_optimal_adapter_size", optimal, 1, most)
        for name in (
            "max_num_tokens",
            "max_seq_len",
            "max_tokens_in_paged_kv_cache",
            "lora_cache_pages",
        ):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1, 2**40)
        for name in ("kv_cache_free_gpu_mem_fraction", "cross_kv_cache_fraction"):
            fraction = getattr(self, name)
            if not 0.0 < fraction < 1.0:
                raise ConfigurationError(f"{name} must be between 0 and 1, not {fraction}")
        for size in self.max_attention_window:
            _check_range("max_attention_window_size", size, 1, 2**31)
        if self.max_state_snapshots is not None:
            _check_range("max_state_snapshots", self.max_state_snapshots, 0, 2**16)

    def place(self, rank: int) -> Place:
        """Of a rank, from 0, among those that run the model together."""
        return Place(
            rank, self.tensor_parallel_size, self.pipeline_parallel_size, self.expert_parallel
        )

    @property
    def num_slots(self) -> int:
        """Rows that may draw in one step: one per beam of every request."""
        return self.max_batch_size * self.max_beam_width

    @property
    def packed_backend(self) -> str:
        """What multiplies by quantised weights, of a resolved configuration: on a GPU always the
        kernels, whatever attends."""
        return "triton" if self.device == "cuda" else self.attention_backend

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

        kinds = {_FP8: torch.float8_e4m3fn, _INT8: torch.int8}
        return kinds.get(self.kv_cache_dtype, self.torch_dtype)

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

    ``model``: as it fits the checkpoint (`parameters.fitted`). device: CUDA if there is one; all
    else as in `resolve_on_device`.
    """
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is cuda, but torch finds no CUDA device; use cpu or auto")
    if device == "cuda":
        found = torch.cuda.get_device_capability()
        _check_fp8_capability(config, found)
        if _kv_cache_dtype(config, model) == _FP8 and found < _FP8_CAPABILITY:
            _logger.warning("the checkpoint asks for an FP8 KV cache, which this GPU has not")
            config = replace(config, kv_cache_dtype=_MODEL)
    has_triton = find_spec("triton") is not None
    wants_best = config.attention_backend == "auto"
    config = resolve_on_device(replace(config, device=device), model, has_triton=has_triton)
    may_compile = wants_best and config.attention_backend == "torch" and model.encoder is None
    if may_compile and _is_compilable(config):
        config = replace(config, attention_backend=COMPILED)
    elif config.attention_backend == COMPILED:
        _check_compiled(config)
    if config.kv_cache_dtype == _FP8 and model.has_qkv_bias and model.quantization is None:
        _logger.warning(
            "kv_cache_dtype is fp8, which holds numbers up to 448, without a scale: the keys of a "
            "model with biases (%s) may be larger and are cut; compare its answers with auto",
            model.architecture,
        )
    return config


def _is_compilable(config: EngineConfig) -> bool:
    """Whether the ops that are compiled for a CPU can run a resolved configuration here."""
    from inflight_kernels.cpu.threads import is_available

    return _may_be_compiled(config) and is_available()


def _may_be_compiled(config: EngineConfig) -> bool:
    is_plain = config.quantization != _FP8
    return is_plain and config.device == "cpu" and config.dtype in ("float32", "bfloat16")


def resolve_for_plan(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """As `resolve` for ``config.device`` with all that may be installed, without torch."""
    resolved = resolve_on_device(config, model, has_triton=True)
    wants_best = config.attention_backend == "auto" and model.encoder is None
    may_be_compiled = wants_best and _may_be_compiled(resolved)
    is_here = platform.machine() == "x86_64" and find_spec("numba") is not None
    if may_be_compiled and is_here:
        return replace(resolved, attention_backend=COMPILED)
    return resolved


def _check_compiled(config: EngineConfig) -> None:
    """Raise ConfigurationError if they were asked for and cannot."""
    if not _is_compilable(config):
        raise ConfigurationError(
            "attention_backend compiled needs device cpu (x86-64), dtype float32 or bfloat16, "
            "quantization other than fp8, and numba (the extra cpu); use torch or auto"
        )


def resolve_on_device(
    config: EngineConfig, model: ModelConfig, *, has_triton: bool
) -> EngineConfig:
    """The same for ``config.device`` (cpu or cuda), without a look at this machine.

    dtype: the checkpoint's on a GPU, float32 on a CPU. max_seq_len: the checkpoint's positions, and
    not more. max_num_tokens: 8192, or where contexts are computed whole the longest one's.
    attention_backend: triton on CUDA where it can be imported and has kernels for the model's
    heads, else torch (`resolve` makes "compiled" of it where that runs). kv_cache_dtype: as the
    checkpoint says, if it has the scales, else model. `ConfigurationError` for what cannot be run.
    """
    is_cuda = config.device == "cuda"
    _check_kv_scales(config, model)
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
    _check_quantised(config, model, has_triton)
    if is_cuda and backend == "triton" and config.num_slots > _MAX_ROWS:
        raise ConfigurationError(
            f"max_batch_size * max_beam_width is {config.num_slots}, more than the {_MAX_ROWS} "
            "rows that a launch on a GPU may have; lower one of them"
        )
    _check_ranks(config, model)
    if is_cuda and config.quantization == _FP8:
        place = config.place(0)
        specs = local_parameters(model, place)
        _check_fp8_linears(local_model(model, place), specs, dtype)
    return replace(
        config,
        # What a stage receives from another one is not recorded.
        cuda_graph_mode=config.cuda_graph_mode and config.pipeline_parallel_size == 1,
        dtype=dtype,
        max_seq_len=max_seq_len,
        max_num_tokens=config.max_num_tokens or default_num_tokens,
        attention_backend=backend,
        enable_lora=_enables_lora(config, model),
        kv_cache_dtype=_kv_cache_dtype(config, model),
    )


def max_encoder_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest text that the encoder reads, which is never cut; 0 without one. For a
    resolved configuration."""
    if model.encoder is None:
        return 0
    return min(model.encoder.max_position_embeddings, config.num_tokens_limit)


def _enables_lora(config: EngineConfig, model: ModelConfig) -> bool:
    if model.encoder is None:
        return config.device != "cuda" if config.enable_lora is None else config.enable_lora
    if config.enable_lora:
        raise ConfigurationError(
            f"enable_lora is not supported for {model.architecture}, which has an encoder; set it "
            "to false"
        )
    return False


def _kv_cache_dtype(config: EngineConfig, model: ModelConfig) -> str:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    found = None if model.quantization is None else model.quantization.kv_cache
    if model.kv_scales is None:  # numbers without would be far less than FP8 can hold, or far more
        return _MODEL
    is_unfit = config.device == "cuda" and bool(_unfit(model, _MAX_BYTE_HEAD_DIM))
    return _MODEL if found is None or is_unfit or _has_latents(model) else found


def supports_drafts(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether tokens may be guessed and taken back: what one has done to the state of a recurrence
    cannot be undone, and in deterministic mode those of a run come from another kernel than single
    ones."""
    return not (config.deterministic_mode or model.deltas)


def _has_latents(model: ModelConfig) -> bool:
    """Whether keys and values are one cached tensor, for which checkpoints have no scales."""
    return any(each.latent is not None for each in model.attending)


def _check_kv_scales(config: EngineConfig, model: ModelConfig) -> None:
    """Integers have no meaning without; those for FP8, whose largest number is 448, cut them."""
    made_for = None if model.quantization is None else model.quantization.kv_cache
    has_scales = model.kv_scales is not None and not _has_latents(model)
    if config.kv_cache_dtype == _INT8 and not (has_scales and made_for == _INT8):
        if has_scales and made_for == _FP8:
            raise ConfigurationError(
                "kv_cache_dtype is int8, and the scales of the checkpoint are for fp8; use auto, "
                "fp8 or model"
            )
        raise ConfigurationError(
            "kv_cache_dtype int8 needs a scale for the keys and one for the values of each layer, "
            "and the checkpoint has none (k_scale, v_scale); use fp8 or model"
        )


def _check_quantised(config: EngineConfig, model: ModelConfig, has_triton: bool) -> None:
    """What quantised weights do not go with."""
    if model.quantization is not None:
        what = f"the checkpoint is quantised ({model.quantization.name})"
        otherwise = "device=cpu, or give an unquantised checkpoint"
    elif config.quantization in AT_LOAD:
        what, otherwise = f"quantization is {config.quantization}", "device=cpu, or fp8 or none"
    else:
        return
    if model.quantization is not None and config.quantization != "none":
        raise ConfigurationError(f"{what} already; use quantization=none")
    if config.device == "cuda" and not has_triton:
        raise ConfigurationError(
            f"{what}, which on a GPU needs triton, which is not installed; install it, or use "
            f"{otherwise}"
        )


def _check_fp8_capability(config: EngineConfig, found: tuple[int, int]) -> None:
    """Raise ConfigurationError on a GPU that neither multiplies nor converts FP8."""
    for name, other in (("quantization", "none"), ("kv_cache_dtype", "model")):
        if getattr(config, name) == _FP8 and found < _FP8_CAPABILITY:
            needed = _FP8_CAPABILITY
            raise ConfigurationError(
                f"{name} fp8 needs a GPU of compute capability {needed[0]}.{needed[1]} or later, "
                f"and this one has {found[0]}.{found[1]}; use {other}"
            )


def _check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """`ConfigurationError` for a model that cannot be parted so."""
    num_ranks = config.place(0).size
    if config.expert_parallel and not any(map(_has_experts, model.layers)):
        raise ConfigurationError(
            f"expert_parallel is set, and {model.architecture} has no experts; leave it out"
        )
    if num_ranks > 1 and config.deterministic_mode:
        raise ConfigurationError(
            "deterministic_mode is not supported with several ranks, whose sums depend on the "
            "batch; set it to false, or tensor_parallel_size and pipeline_parallel_size to 1"
        )
    for rank in range(0, num_ranks, config.tensor_parallel_size):  # one of each stage
        local_model(model, config.place(rank))


def _has_experts(layer: LayerConfig) -> bool:
    return isinstance(layer.mlp, MoeConfig) or layer.experts_beside is not None


def _check_fp8_linears(model: ModelConfig, specs: Sequence[ParameterSpec], dtype: str) -> None:
    """On CUDA the product takes bfloat16 out and dimensions that are multiples of 16 only; those of
    the part of ``model`` that a rank holds."""
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
    for spec in specs:
        if spec.is_linear and any(size % _LINEAR_STEP for size in spec.shape):
            raise ConfigurationError(
                f"quantization fp8 needs linears whose sizes are multiples of {_LINEAR_STEP}; "
                f"{spec.name} of the checkpoint has {list(spec.shape)}; use none"
            )


def _unfit(model: ModelConfig, most: int) -> list[int]:
    """Sizes of heads for which there are no kernels; ``most``: the largest."""
    head_dims = [head_dim for _, head_dim in model.rope_kinds]
    return [each for each in head_dims if each % _HEAD_DIM_STEP or each > most]


def _choose_backend(config: EngineConfig, model: ModelConfig, has_triton: bool) -> str:
    backend, kv_cache = config.attention_backend, _kv_cache_dtype(config, model)
    head_dims = [head_dim for _, head_dim in model.rope_kinds]
    most = _MAX_HEAD_DIM if kv_cache == _MODEL else _MAX_BYTE_HEAD_DIM
    unfit = _unfit(model, most)
    fits = not unfit
    needed = (
        f"needs a head_dim that is a multiple of {_HEAD_DIM_STEP} up to {most}; the checkpoint's "
        f"is {(unfit or head_dims)[0]}"
    )
    if model.encoder is not None and backend not in ("auto", "torch"):
        raise ConfigurationError(
            f"attention_backend {backend} has no kernels for {model.architecture}, whose decoder "
            "attends to an encoder; use torch or auto"
        )
    if backend == "auto" and model.encoder is not None:
        backend = "torch"
    if backend == "auto":
        is_triton = config.device == "cuda" and fits and has_triton
        backend = "triton" if is_triton else "torch"
    if kv_cache != _MODEL and not fits and config.device == "cuda":
        raise ConfigurationError(f"kv_cache_dtype {kv_cache} {needed}; use model")
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
    return backend


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ConfigurationError(f"{name} must be between {minimum} and {maximum}, not {value}")
