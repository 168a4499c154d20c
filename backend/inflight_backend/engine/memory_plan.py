"""How the memory of a device is divided, from `config.json` and the weight headers alone: no torch.

The rule of the KV pool is that of `inflight_backend.models.kv_cache`; a test holds the two together
and the server compares them when it starts.

The shapes of the slot tensors are here so that a plan can count them; their owners take the shapes
from here. With 256 slots, a vocabulary of 128,256 and texts of 8,192 tokens the logits adjustments
take 260 MiB (a row of counts, one of biases and one text per slot): 0.2 % of an H200, allocated at
load on a GPU, because the pool takes the rest and a request that asks for a penalty hours later
must not find the memory gone. On a CPU they are allocated when the first request needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

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
from inflight_backend.models.checkpoint_files import read_weight_headers
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parameters import check_weights, decoder_parameters
from inflight_scheduler import MAX_STOP_TOKEN_IDS
from inflight_scheduler.sampling import SETTINGS

if TYPE_CHECKING:
    from inflight_backend.engine import Engine


Shapes = dict[str, tuple[tuple[int, ...], int]]
"""Name -> shape and bytes of one number."""

COLUMNS: dict[str, int] = {
    name: index
    for index, name in enumerate(
        (
            "seed",  # takes two words; first, so that it can be read as int64
            "high_seed",
            "end_id",
            "min_end_position",
            "initial_top_p",
            *(name for name, setting in SETTINGS.items() if setting.on_device),
        )
    )
}
"""Columns of the table of slots, in words: each sampling setting, and what the engine adds."""

NUM_COLUMNS = len(COLUMNS) + len(COLUMNS) % 2  # even, since a row is also read as int64


def adjustment_shapes(num_slots: int, vocab_size: int, max_seq_len: int) -> Shapes:
    """Tables of `LogitsAdjustments`; the padding slot has a row, too."""
    rows = num_slots + 1
    return {
        "counts": ((rows, vocab_size), 4),
        "bias": ((rows, vocab_size), 4),
        "history": ((rows, max_seq_len), 4),
        "ends": ((rows, MAX_STOP_TOKEN_IDS), 4),
    }


def slot_table_shapes(num_slots: int, max_blocks: int) -> Shapes:
    """Tables of `SlotTable`."""
    rows = num_slots + 1
    return {
        "parameters": ((rows, NUM_COLUMNS), 4),
        "block_tables": ((rows, max_blocks), 4),
        "cached_lengths": ((rows,), 8),
        "last_tokens": ((rows,), 8),
    }


def max_words(num_slots: int, max_num_tokens: int, max_blocks_per_slot: int) -> int:
    """Words of the largest plan (`StepBuffer`): every slot set up and moved, a chunk and a copied
    block, its whole block table assigned (slots may share blocks, so there can be more assignments
    than blocks), every token prompt, and the slots of generations, which always take their room."""
    words_per_slot = NUM_COLUMNS + 17 + 3 * max_blocks_per_slot
    return num_slots * words_per_slot + 4 * max_num_tokens + 1  # a draft draws, too


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all of them."""
    return sum(prod(shape) * size for shape, size in shapes.values())


def reserved_bytes(
    num_slots: int,
    vocab_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    tokens_per_block: int,
    *,
    has_adjustments: bool,
) -> int:
    """Everything above; without the adjustments where they are made on demand."""
    max_blocks = -(-max_seq_len // tokens_per_block)
    taken = num_bytes(slot_table_shapes(num_slots, max_blocks))
    taken += 4 * max_words(num_slots, max_num_tokens, max_blocks)
    if has_adjustments:
        taken += num_bytes(adjustment_shapes(num_slots, vocab_size, max_seq_len))
    return taken


_logger = get_logger(__name__)

GIB = 2**30
DEFAULT_RESERVE = GIB // 2
"""Assumed for what no checkpoint tells: the CUDA context, workspaces, what is recorded."""

_DTYPE_TO_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CPU_DEFAULT_TOKENS = 65_536
_ROPE_BYTES = 4
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What is planned for. ``gpu_memory`` is what is free before the server starts; None: a CPU.

    ``free_bytes`` in its place is what a server has measured with everything loaded: then nothing
    is assumed. ``max_tokens`` and ``fraction`` are the parameters max_tokens_in_paged_kv_cache and
    kv_cache_free_gpu_mem_fraction, the others those of their names.
    """

    gpu_memory: int | None = None
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    max_tokens: int | None = None
    fraction: float = 0.9
    max_batch_size: int = 256
    max_beam_width: int = 1
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    reserve: int = DEFAULT_RESERVE
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes. ``free_bytes`` is left of the GPU after loading, None on a CPU.

    ``table_bytes`` are the table of the rotary embedding, ``slot_bytes`` are kept for the slots
    beside the pool (`engine.slot_memory`), ``step_bytes`` are what a step of ``max_num_tokens``
    takes on a GPU while it runs.
    """

    architecture: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    max_batch_size: int
    max_beam_width: int
    num_parameters: int
    file_bytes: int
    weight_bytes: int
    table_bytes: int
    slot_bytes: int
    step_bytes: int
    free_bytes: int | None
    kv_bytes_per_token: int
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return self.kv_bytes_per_token * self.tokens_per_block

    @property
    def pool_bytes(self) -> int:
        """The whole pool."""
        return self.block_bytes * self.num_blocks

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit the pool."""
        return self.num_blocks * self.tokens_per_block


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of one shape run at once, by capacity policy.

    ``guaranteed`` reserve their blocks to completion and never wait for blocks again: as many never
    pause under max_utilization either, whatever happens. ``staggered`` is max_utilization's number
    when requests are evenly spread over their lives, so that each holds the mean of its blocks.
    """

    prompt_len: int
    max_new_tokens: int
    blocks_at_completion: int
    guaranteed: int
    staggered: int


def make_plan(folder: Path, settings: PlanSettings | None = None) -> MemoryPlan:
    """Plan the memory of a checkpoint.

    `CheckpointError` if it cannot be read or its tensors are not the model's, `ConfigurationError`
    if requests may be longer than the checkpoint allows, or the weights or not even one block fit.
    """
    settings = settings or PlanSettings()
    model = ModelConfig.from_folder(folder)
    headers = read_weight_headers(folder)
    check_weights(model, headers, str(folder))
    dtype = _resolve_dtype(settings, model)
    max_seq_len = choose_seq_len(settings.max_seq_len, model)
    max_num_tokens = choose_num_tokens(settings.max_num_tokens, max_seq_len, may_chunk=True)
    num_parameters = sum(prod(spec.shape) for spec in decoder_parameters(model))
    weight_bytes = _weight_bytes(model, dtype, _is_fp8("quantization", settings))
    table_bytes = max_seq_len * model.head_dim * _ROPE_BYTES
    slot_bytes = reserved_bytes(
        settings.max_batch_size * settings.max_beam_width,
        model.vocab_size,
        max_seq_len,
        max_num_tokens,
        settings.tokens_per_block,
        has_adjustments=settings.gpu_memory is not None,
    )
    num_rows = min(settings.max_batch_size * settings.max_beam_width, max_num_tokens)
    step_bytes = _step_bytes(model, max_num_tokens, num_rows, _DTYPE_TO_BYTES[dtype])
    free_bytes = settings.free_bytes
    if settings.gpu_memory is not None:
        taken = weight_bytes + table_bytes + slot_bytes + step_bytes
        free_bytes = settings.gpu_memory - taken - settings.reserve
    kv_bytes = 1 if _is_fp8("kv_cache_dtype", settings) else _DTYPE_TO_BYTES[dtype]
    per_token = 2 * model.num_layers * model.kv_size * kv_bytes
    return MemoryPlan(
        architecture=model.architecture,
        dtype=dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        tokens_per_block=settings.tokens_per_block,
        max_batch_size=settings.max_batch_size,
        max_beam_width=settings.max_beam_width,
        num_parameters=num_parameters,
        file_bytes=sum(header.num_bytes for header in headers.values()),
        weight_bytes=weight_bytes,
        table_bytes=table_bytes,
        slot_bytes=slot_bytes,
        step_bytes=step_bytes,
        free_bytes=free_bytes,
        kv_bytes_per_token=per_token,
        num_blocks=_count_blocks(settings, free_bytes, per_token),
    )


def check_limits(model: ModelConfig, settings: PlanSettings) -> None:
    """`ConfigurationError` where a server with these settings refuses FP8, or so many rows, if it
    chooses its attention backend itself."""
    if settings.gpu_memory is not None and has_attention_kernels(model):
        check_rows(settings.max_batch_size * settings.max_beam_width)
    if _is_fp8("kv_cache_dtype", settings):
        if settings.gpu_memory is None:
            raise ConfigurationError(
                "kv_cache_dtype fp8 needs a GPU: give --gpu-memory, or use auto"
            )
        if not has_attention_kernels(model):
            raise ConfigurationError(
                f"kv_cache_dtype fp8 needs a head_dim that is a multiple of {HEAD_DIM_STEP} up to "
                f"{MAX_HEAD_DIM}; the checkpoint's is {model.head_dim}; use auto"
            )
    if _is_fp8("quantization", settings) and settings.gpu_memory is not None:
        check_fp8_linears(model, _resolve_dtype(settings, model))


def check_pool(folder: Path, engine: Engine) -> bool:
    """Compare the pool of a loaded engine with its plan, and log both; False if memory is scarce.

    An `AssertionError` if they differ: what ``inflight plan`` says would be wrong. On a GPU the
    plan starts from the bytes that the engine has measured; how many tokens and blocks that makes
    is worked out twice. On a CPU without ``max_tokens_in_paged_kv_cache`` the pool may be smaller,
    since a quarter of the available memory is its bound.
    """
    config = engine.config
    max_tokens = config.max_tokens_in_paged_kv_cache
    plan = make_plan(
        folder,
        PlanSettings(
            dtype=config.dtype,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            tokens_per_block=config.tokens_per_block,
            max_tokens=max_tokens,
            fraction=config.kv_cache_free_gpu_mem_fraction,
            max_batch_size=config.max_batch_size,
            max_beam_width=config.max_beam_width,
            max_num_tokens=config.max_num_tokens,
            max_seq_len=config.max_seq_len,
            free_bytes=engine.free_bytes,
        ),
    )
    has_bound = max_tokens is not None or engine.free_bytes is not None
    may_be_less = engine.num_blocks < plan.num_blocks and not has_bound
    assert engine.num_blocks == plan.num_blocks or may_be_less, (
        f"the KV pool has {engine.num_blocks} blocks and the plan says {plan.num_blocks}"
    )
    num_wanted = plan.num_blocks
    if max_tokens is not None:
        num_wanted = max_tokens // config.tokens_per_block
    is_whole = engine.num_blocks == num_wanted
    (_logger.info if is_whole else _logger.warning)(
        "KV pool: %d blocks of %d tokens, %.2f GiB; %d blocks were planned for",
        engine.num_blocks,
        engine.tokens_per_block,
        engine.num_blocks * plan.block_bytes / GIB,
        num_wanted,
    )
    return is_whole


def concurrency(plan: MemoryPlan, prompt_len: int, max_new_tokens: int) -> Concurrency:
    """How many requests of this shape run at once, up to the batch size."""
    size = plan.tokens_per_block
    total = -(-(prompt_len + max_new_tokens) // size)
    # Blocks after each step, summed: those of the prompt and of 0 to max_new_tokens - 1 more.
    held = _sum_of_blocks(prompt_len + max_new_tokens - 1, size)
    mean = (held - _sum_of_blocks(prompt_len - 1, size)) / max_new_tokens
    return Concurrency(
        prompt_len,
        max_new_tokens,
        total,
        min(plan.num_blocks // total, plan.max_batch_size),
        min(int(plan.num_blocks / mean) if total <= plan.num_blocks else 0, plan.max_batch_size),
    )


def _sum_of_blocks(num_tokens: int, size: int) -> int:
    """Blocks of 1 token, of 2 and so on up to ``num_tokens``, summed."""
    num_full, rest = divmod(num_tokens, size)
    return size * num_full * (num_full + 1) // 2 + rest * (num_full + 1)


def usual_shapes(max_seq_len: int) -> list[tuple[int, int]]:
    """(prompt, new tokens) in four to one, from 256 tokens to the longest request."""
    lengths = [256]
    while lengths[-1] * 4 < max_seq_len:
        lengths.append(lengths[-1] * 4)
    lengths = [length for length in lengths if length < max_seq_len] + [max_seq_len]
    return [(length - max(length // 5, 1), max(length // 5, 1)) for length in lengths]


def _resolve_dtype(settings: PlanSettings, model: ModelConfig) -> str:
    dtype = settings.dtype
    if dtype == "auto":
        return "float32" if settings.gpu_memory is None else model.dtype
    if dtype not in _DTYPE_TO_BYTES:
        raise ConfigurationError(f"dtype must be one of auto, {', '.join(_DTYPE_TO_BYTES)}")
    return dtype


def _weight_bytes(model: ModelConfig, dtype: str, is_fp8: bool) -> int:
    """Bytes of the parameters; in FP8 the linears' take one each, and a scale for each row."""
    num_bytes = 0
    for spec in decoder_parameters(model):
        if is_fp8 and spec.is_linear:
            num_bytes += prod(spec.shape) + spec.shape[0] * _SCALE_BYTES
        else:
            num_bytes += prod(spec.shape) * _DTYPE_TO_BYTES[dtype]
    return num_bytes


def _step_bytes(model: ModelConfig, num_tokens: int, num_rows: int, size: int) -> int:
    """Activations where most of them live at once, in a gated MLP: three rows of hidden_size (the
    residual, what was added to it, the sum) and three of intermediate_size (gate, up, their
    product); and logits as they come and in float32. A test measures the first."""
    activations = num_tokens * 3 * (model.hidden_size + model.intermediate_size) * size
    return activations + num_rows * model.vocab_size * (size + 4)


def _is_fp8(name: str, settings: PlanSettings) -> bool:
    value, other = getattr(settings, name), getattr(PlanSettings(), name)
    if value not in ("fp8", other):
        raise ConfigurationError(f"{name} must be {other} or fp8, not {value!r}")
    return bool(value == "fp8")


def _count_blocks(settings: PlanSettings, free_bytes: int | None, per_token: int) -> int:
    """Blocks of the pool: the smaller of the setting and what the GPU has room for."""
    limits = [] if settings.max_tokens is None else [settings.max_tokens]
    if free_bytes is not None:
        if free_bytes <= 0:
            raise ConfigurationError(
                "the weights and the largest step do not fit: "
                f"{-free_bytes / GIB:.1f} GiB of GPU memory are missing"
            )
        limits.append(int(free_bytes * settings.fraction) // per_token)
    elif settings.max_tokens is None:
        limits.append(_CPU_DEFAULT_TOKENS)
    num_blocks = min(limits) // settings.tokens_per_block
    if num_blocks < 1:
        raise ConfigurationError(
            f"the KV pool has room for {min(limits)} tokens and a block takes "
            f"{settings.tokens_per_block}: not even one block fits"
        )
    return num_blocks
