"""How the memory of a device is divided, from `config.json` and the weight headers alone: no torch.

Tokens in the KV pool: ``max_tokens_in_paged_kv_cache`` if given. On a GPU also what
``kv_cache_free_gpu_mem_fraction`` of the memory holds that loading, the largest step and captured
graphs leave; the smaller wins. An engine measures what they leave, a plan adds it up. On a CPU,
without a setting, the smaller of 65,536 tokens and (for an engine) a quarter of the available
memory.

The shapes of the slot tensors are here so that a plan can count them; their owners take the shapes
from here. With 256 slots, a vocabulary of 128,256 and texts of 8,192 tokens the logits adjustments
take 260 MiB (a row of counts, one of biases and one text per slot): 0.2 % of an H200, allocated at
load on a GPU, because the pool takes the rest and a request that asks for a penalty hours later
must not find the memory gone. On a CPU they are allocated when the first request needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from inflight_backend.engine.config import DTYPE_TO_BYTES, EngineConfig, resolve_on_device
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.checkpoint_files import read_weight_headers
from inflight_backend.models.config import ModelConfig, state_shapes
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.parameters import (
    check_weights,
    decoder_parameters,
    fitted,
    packed_bytes,
)
from inflight_scheduler import MAX_STOP_TOKEN_IDS
from inflight_scheduler.sampling import SETTINGS

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
    return num_slots * words_per_slot + 6 * max_num_tokens + 1  # a draft draws, too


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all of them."""
    return sum(prod(shape) * size for shape, size in shapes.values())


def reserved_bytes(config: EngineConfig, vocab_size: int) -> int:
    """Everything above, for a resolved configuration."""
    num_slots, max_seq_len = config.num_slots, config.seq_len_limit
    max_blocks = -(-max_seq_len // config.tokens_per_block)
    taken = num_bytes(slot_table_shapes(num_slots, max_blocks))
    taken += 4 * max_words(num_slots, config.num_tokens_limit, max_blocks)
    if config.device != "cpu":
        taken += num_bytes(adjustment_shapes(num_slots, vocab_size, max_seq_len))
    return taken


def kv_bytes_per_token(config: EngineConfig, model: ModelConfig) -> int:
    """Keys and values of one token in all layers, for a resolved configuration."""
    size = 1 if config.kv_cache_dtype == "fp8" else DTYPE_TO_BYTES[config.dtype]
    layers = [layer.attention for layer in model.layers]
    return sum(each.num_cached * each.kv_size for each in layers) * size


def state_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """States of all slots in layers with a recurrence, for a resolved configuration."""
    sizes = DTYPE_TO_BYTES[config.dtype], DTYPE_TO_BYTES["float32"]
    per_slot = sum(
        prod(shape) * size
        for delta in model.deltas.values()
        for shape, size in zip(state_shapes(delta), sizes, strict=True)
    )
    return (config.num_slots + 1) * per_slot


def choose_num_blocks(config: EngineConfig, bytes_per_token: int, max_bytes: int | None) -> int:
    """Blocks of a pool that may take ``max_bytes`` (None: any number), by the rule above;
    `ConfigurationError` if not even one fits."""
    limits = []
    if config.max_tokens_in_paged_kv_cache is not None:
        limits.append(config.max_tokens_in_paged_kv_cache)
    elif config.device == "cpu":
        limits.append(CPU_DEFAULT_TOKENS)
    if max_bytes is not None:
        limits.append(max(max_bytes, 0) // bytes_per_token)
    num_blocks = min(limits) // config.tokens_per_block
    if num_blocks < 1:
        raise ConfigurationError(
            f"the KV pool has room for {min(limits)} tokens and a block takes "
            f"{config.tokens_per_block}: not even one block fits; raise "
            "max_tokens_in_paged_kv_cache or lower tokens_per_block"
        )
    return num_blocks


GIB = 2**30
DEFAULT_RESERVE = GIB // 2
"""Assumed for what no checkpoint tells: the CUDA context, workspaces, what is recorded."""

CPU_DEFAULT_TOKENS = 65_536
_ROPE_BYTES = 4
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes. ``quantization``: what is done at load, or the method of the checkpoint.
    ``free_bytes`` is left of the GPU after loading, None on a CPU.

    ``table_bytes`` are the table of the rotary embedding, ``slot_bytes`` are kept for the slots
    beside the pool, ``step_bytes`` are what a step of ``max_num_tokens``
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


def make_plan(
    folder: Path,
    config: EngineConfig | None = None,
    *,
    gpu_memory: int | None = None,
    reserve: int = DEFAULT_RESERVE,
) -> MemoryPlan:
    """Plan the memory of a checkpoint on a GPU with ``gpu_memory`` free before the server starts,
    of which ``reserve`` goes to what no checkpoint tells; None: on a CPU.

    `CheckpointError` if it cannot be read or its tensors are not the model's, `ConfigurationError`
    for what a server would refuse, or if the weights or not even one block fit.
    """
    config = replace(config or EngineConfig(), device="cpu" if gpu_memory is None else "cuda")
    if config.kv_cache_dtype == "fp8" and gpu_memory is None:
        raise ConfigurationError("kv_cache_dtype fp8 needs a GPU: give --gpu-memory, or use auto")
    model = read_model(folder)
    config = resolve_on_device(config, model, has_triton=True)
    headers = read_weight_headers(folder)
    model = fitted(model, headers)
    check_weights(model, headers)
    weight_bytes = _weight_bytes(model, config)
    head_dims = sum(head_dim for _, head_dim in model.rope_kinds)
    table_bytes = config.seq_len_limit * head_dims * _ROPE_BYTES
    slot_bytes = reserved_bytes(config, model.vocab_size) + state_bytes(config, model)
    num_rows = min(config.num_slots, config.num_tokens_limit)
    step_bytes = _step_bytes(model, config.num_tokens_limit, num_rows, DTYPE_TO_BYTES[config.dtype])
    free_bytes = max_bytes = None
    if gpu_memory is not None:
        free_bytes = gpu_memory - weight_bytes - table_bytes - slot_bytes - step_bytes - reserve
        max_bytes = int(free_bytes * config.kv_cache_free_gpu_mem_fraction)
        if free_bytes <= 0:
            raise ConfigurationError(
                "the weights and the largest step do not fit: "
                f"{-free_bytes / GIB:.1f} GiB of GPU memory are missing"
            )
    per_token = kv_bytes_per_token(config, model)
    return MemoryPlan(
        architecture=model.architecture,
        dtype=config.dtype,
        quantization=model.quantization.name if model.quantization else config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_seq_len=config.seq_len_limit,
        max_num_tokens=config.num_tokens_limit,
        tokens_per_block=config.tokens_per_block,
        max_batch_size=config.max_batch_size,
        max_beam_width=config.max_beam_width,
        num_parameters=sum(prod(spec.shape) for spec in decoder_parameters(model)),
        file_bytes=sum(header.num_bytes for header in headers.values()),
        weight_bytes=weight_bytes,
        table_bytes=table_bytes,
        slot_bytes=slot_bytes,
        step_bytes=step_bytes,
        free_bytes=free_bytes,
        kv_bytes_per_token=per_token,
        num_blocks=choose_num_blocks(config, per_token, max_bytes),
    )


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


def _weight_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the parameters; in FP8 the linears' take one each, and a scale for each row."""
    num_bytes = 0
    for spec in decoder_parameters(model):
        if spec.is_packed:
            num_bytes += packed_bytes(spec, DTYPE_TO_BYTES[config.dtype])
        elif config.quantization == "fp8" and spec.is_linear:
            num_bytes += prod(spec.shape) + spec.shape[0] * _SCALE_BYTES
        else:
            dtype = "float32" if spec.is_wide else config.dtype
            num_bytes += prod(spec.shape) * DTYPE_TO_BYTES[dtype]
    return num_bytes


def _step_bytes(model: ModelConfig, num_tokens: int, num_rows: int, size: int) -> int:
    """Activations where most of them live at once, in a gated MLP: three rows of hidden_size (the
    residual, what was added to it, the sum) and three of intermediate_size (gate, up, their
    product); and logits as they come and in float32. A test measures the first."""
    activations = num_tokens * 3 * (model.hidden_size + model.mlp_size) * size
    return activations + num_rows * model.vocab_size * (size + 4)
