"""How the memory of a device is divided, from `config.json` and the weight headers alone: no torch.

Tokens in the KV pool, as if all layers kept all of them: ``max_tokens_in_paged_kv_cache`` if given.
On a GPU also what ``kv_cache_free_gpu_mem_fraction`` of the memory holds that loading, the largest
step and captured graphs leave; the smaller wins. An engine measures what they leave, a plan adds it
up. On a CPU, without a setting, the smaller of 65,536 tokens and (for an engine) a quarter of the
available memory.

Beside an encoder the blocks are divided: `split_blocks`.

The shapes of the slot tensors are here so that a plan can count them; their owners take the shapes
from here. With 256 slots, a vocabulary of 128,256 and texts of 8,192 tokens the logits adjustments
take 260 MiB (a row of counts, one of biases and one text per slot): 0.2 % of an H200, allocated at
load on a GPU, because the pool takes the rest and a request that asks for a penalty hours later
must not find the memory gone. On a CPU they are allocated when the first request needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from inflight_backend.engine.config import (
    DTYPE_TO_BYTES,
    EngineConfig,
    max_encoder_len,
    resolve_for_plan,
)
from inflight_backend.engine.interface import AdapterPages
from inflight_backend.errors import ConfigurationError
from inflight_backend.models.checkpoint_files import has_weights, read_weight_headers
from inflight_backend.models.config import (
    CacheLayout,
    ModelConfig,
    MoeConfig,
    make_cache_layout,
    state_shapes,
)
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.parallel.shards import local_model, local_parameters
from inflight_backend.models.parameters import (
    ENCODER,
    ParameterSpec,
    assumed,
    check_weights,
    decoder_parameters,
    fitted,
    packed_bytes,
)
from inflight_scheduler import KEPT_STEPS, MAX_STOP_TOKEN_IDS
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


def slot_table_shapes(
    num_slots: int, max_blocks: int, num_groups: int = 1, max_cross_blocks: int = 0
) -> Shapes:
    """Tables of `SlotTable`."""
    rows = num_slots + 1
    return {
        "cross_tables": ((rows, 1, max_cross_blocks), 4),
        "answer_lengths": ((rows,), 8),
        "parameters": ((rows, NUM_COLUMNS), 4),
        "block_tables": ((rows, num_groups, max_blocks), 4),
        "first_columns": ((num_groups, 1), 8),
        "cached_lengths": ((rows,), 8),
        "last_tokens": ((rows,), 8),
    }


def max_words(
    num_slots: int, max_num_tokens: int, max_blocks_per_slot: int, max_copies_per_slot: int = 1
) -> int:
    """Words of the largest plan (`StepBuffer`): every slot set up and moved, a chunk and copied
    blocks, its whole block tables assigned (slots may share blocks, so there can be more
    assignments than blocks), every token prompt, and the slots of generations, which always take
    their room."""
    words_per_slot = NUM_COLUMNS + 15 + 2 * max_copies_per_slot + 4 * max_blocks_per_slot
    return num_slots * words_per_slot + 6 * max_num_tokens + 1  # a draft draws, too


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all of them."""
    return sum(prod(shape) * size for shape, size in shapes.values())


def max_words_of(config: EngineConfig, layout: CacheLayout) -> int:
    """`max_words` of a resolved configuration: in a group with a window a plan assigns what the
    longest chunk needs, and copies what a prefix that is found leaves to see."""
    num_tokens, size = config.num_tokens_limit, config.tokens_per_block
    max_blocks, num_copies = -(-config.seq_len_limit // size), 1
    num_blocks = 0
    for window in layout.windows:
        num_new = max_blocks
        if window is not None:
            num_new = min(max_blocks, (window + num_tokens) // size + 2)
            num_copies += min(max_blocks, window // size + 2)
        num_blocks += num_new
    return max_words(config.num_slots, num_tokens, num_blocks, num_copies)


def layout_of(config: EngineConfig, model: ModelConfig) -> CacheLayout:
    """Where a resolved configuration keeps KV."""
    # Stages have different layers, and block tables for all of them.
    is_shared = config.max_beam_width > 1 or config.pipeline_parallel_size > 1
    return make_cache_layout(model, config.seq_len_limit, is_shared=is_shared)


def max_cross_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks of the longest answer of an encoder, for a resolved configuration; 0 without one."""
    return -(-max_encoder_len(config, model) // config.tokens_per_block)


def cross_layout(model: ModelConfig) -> CacheLayout:
    """Where the keys and values of an encoder's answers are kept: all layers side by side."""
    return make_cache_layout(model.cross_model, 1, is_shared=True)


def answer_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """What is kept for answers of an encoder that no context has read (`AnswerRoom`); 0 without."""
    if model.encoder is None:
        return 0
    num_tokens = KEPT_STEPS * config.num_tokens_limit
    return num_tokens * model.hidden_size * DTYPE_TO_BYTES[config.dtype]


def split_blocks(config: EngineConfig, model: ModelConfig, num_blocks: int) -> tuple[int, int]:
    """Blocks for texts, and for an encoder's answers (0 without one), in the memory of
    ``num_blocks`` for texts alone; `ConfigurationError` if one of them has none."""
    if model.encoder is None:
        return num_blocks, 0
    num_given = int(num_blocks * config.cross_kv_cache_fraction)
    per_block, per_cross = (
        block_bytes(config, layout) for layout in (layout_of(config, model), cross_layout(model))
    )
    num_own, num_cross = num_blocks - num_given, num_given * per_block // per_cross
    if num_own < 1 or num_cross < 1:
        raise ConfigurationError(
            f"cross_kv_cache_fraction = {config.cross_kv_cache_fraction} leaves {num_own} blocks "
            f"for texts and {num_cross} for the encoder's answers; raise "
            "max_tokens_in_paged_kv_cache or lower tokens_per_block"
        )
    return num_own, num_cross


def reserved_bytes(config: EngineConfig, model: ModelConfig, layout: CacheLayout) -> int:
    """Everything above, for a resolved configuration."""
    num_slots, max_seq_len = config.num_slots, config.seq_len_limit
    max_blocks = -(-max_seq_len // config.tokens_per_block)
    num_groups, num_cross = len(layout.windows), max_cross_blocks(config, model)
    taken = num_bytes(slot_table_shapes(num_slots, max_blocks, num_groups, num_cross))
    taken += answer_bytes(config, model)
    taken += 4 * max_words_of(config, layout)
    if config.device != "cpu":
        taken += num_bytes(adjustment_shapes(num_slots, model.vocab_size, max_seq_len))
    return taken


def kv_bytes_per_token(config: EngineConfig, model: ModelConfig) -> int:
    """Keys and values of one token in all layers, for a resolved configuration."""
    layers = [layer.attention for layer in model.layers]
    return sum(each.num_cached * each.kv_size for each in layers) * _kv_size(config)


def block_bytes(config: EngineConfig, layout: CacheLayout) -> int:
    """One block, for a resolved configuration: with several groups of layers that of one of them,
    and what the others have more."""
    return layout.numbers_per_token * config.tokens_per_block * _kv_size(config)


def _kv_size(config: EngineConfig) -> int:
    return DTYPE_TO_BYTES[config.dtype] if config.kv_cache_dtype == "model" else 1


def state_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """States of all slots, and their snapshots, in layers with a recurrence, for a resolved
    configuration."""
    sizes = DTYPE_TO_BYTES[config.dtype], DTYPE_TO_BYTES["float32"]
    per_slot = sum(
        prod(shape) * size
        for delta in model.deltas.values()
        for shape, size in zip(state_shapes(delta), sizes, strict=True)
    )
    return (config.num_slots + 1 + (num_snapshots_of(config, model) or 0)) * per_slot


def num_snapshots_of(config: EngineConfig, model: ModelConfig) -> int | None:
    """Snapshots of states, for a resolved configuration; None for a model without any state. There
    is none where layers have a window: their part of a prefix is given back."""
    if not model.deltas:
        return None
    if any(layer.attention.window is not None for layer in model.layers):
        return 0
    if config.max_state_snapshots is not None:
        return config.max_state_snapshots
    return min(config.max_batch_size, _MAX_DEFAULT_SNAPSHOTS)


def supports_block_reuse(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether a prompt may go on from blocks that others have left: what a text behind an encoder
    means depends on what that has read, and a recurrence goes on where there is a snapshot only."""
    return model.encoder is None and num_snapshots_of(config, model) != 0


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear that adapters may change, or those of ``experts`` alike: the rows of each of its
    parts and its columns."""

    name: str
    slices: tuple[int, ...]
    columns: int
    experts: int = 1


def adapted_linears(model: ModelConfig, *, with_experts: bool) -> list[AdaptedLinear]:
    """Those of layers. Each part of one has an ``A`` of its own. What takes keys and values from
    latents takes as much as experts, and counts as such."""
    found = []
    for spec in decoder_parameters(model):
        name, (columns, *_) = spec.name.removesuffix(".weight"), spec.shape[1:] or (0,)
        if not spec.name.startswith("layers."):
            continue
        if spec.is_linear or spec.is_gate:
            slices = tuple(source.rows for source in spec.sources)
            found.append(AdaptedLinear(name, slices, columns))
        elif spec.num_experts and with_experts:
            rows = spec.shape[0] // spec.num_experts
            halves = (rows // 2, rows // 2) if name.endswith("gate_up") else (rows,)
            found.append(AdaptedLinear(name, halves, columns, spec.num_experts))
    for index, layer in enumerate(model.layers if with_experts else ()):
        if (latent := layer.attention.latent) is not None:
            name, heads = f"layers.{index}.expand", layer.attention.num_heads
            found.append(AdaptedLinear(f"{name}_key", (latent.kv_rank,), latent.nope, heads))
            found.append(AdaptedLinear(f"{name}_value", (latent.value,), latent.kv_rank, heads))
    return found


def page_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Of one page: that rank of every linear; and the scales of the adapter that has it."""
    rank, numbers = config.lora_cache_optimal_adapter_size, 0
    for each in adapted_linears(model, with_experts=config.lora_experts):
        rows = sum(each.slices)
        numbers += rank * each.experts * (len(each.slices) * each.columns + rows) + rows
    return numbers * DTYPE_TO_BYTES[config.dtype]


def choose_pages(config: EngineConfig, model: ModelConfig, free_bytes: int) -> AdapterPages:
    """As many as the configuration says of ``free_bytes``, and never less than the largest adapter
    needs."""
    rank, most = config.lora_cache_optimal_adapter_size, config.lora_cache_max_adapter_size
    has_experts = config.lora_experts or config.attention_backend != "triton"
    pages = AdapterPages(0, rank, most, has_experts)
    num_pages = config.lora_cache_pages
    if num_pages is None:
        share = free_bytes * config.lora_cache_gpu_memory_fraction
        num_pages = int(share) // page_bytes(config, model)
    num_pages = min(max(num_pages, pages.pages_of(most)), _MAX_PAGES)
    return replace(pages, num_pages=num_pages)


def choose_num_blocks(
    config: EngineConfig,
    bytes_per_token: int,
    max_bytes: int | None,
    bytes_per_block: int | None = None,
) -> int:
    """Blocks of a pool that may take ``max_bytes`` (None: any number), by the rule above;
    `ConfigurationError` if not even one fits.

    ``bytes_per_block``: with several groups of layers; None: all layers share the blocks. Tokens
    are counted as if all layers kept all of them."""
    limits = []
    if config.max_tokens_in_paged_kv_cache is not None:
        limits.append(config.max_tokens_in_paged_kv_cache)
    elif config.device == "cpu":
        limits.append(CPU_DEFAULT_TOKENS)
    if max_bytes is not None:
        limits.append(max(max_bytes, 0) // bytes_per_token)
    num_blocks = min(limits) // config.tokens_per_block
    if bytes_per_block is not None:
        num_blocks = min(limits) * bytes_per_token // bytes_per_block
    if num_blocks < 1:
        raise ConfigurationError(
            f"the KV pool has room for {min(limits)} tokens and a block takes "
            f"{config.tokens_per_block}: not even one block fits; raise "
            "max_tokens_in_paged_kv_cache or lower tokens_per_block"
        )
    return num_blocks


_MAX_PAGES = 2**16  # of adapters

GIB = 2**30
DEFAULT_RESERVE = GIB // 2
"""Assumed for what no checkpoint tells: the CUDA context, workspaces, what is recorded."""

CPU_DEFAULT_TOKENS = 65_536
_MAX_DEFAULT_SNAPSHOTS = 32
_ROPE_BYTES = 4
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes. ``quantization``: what is done at load, or the method of the checkpoint.
    ``file_bytes`` are those of the tensors, None if only config.json was read.
    ``free_bytes`` is left of the GPU after loading, None on a CPU.

    ``kv_bytes_per_token`` is what a token takes in all layers. A block holds tokens of one group of
    layers, and ``windows`` are those of the groups (`CacheLayout`).
    ``num_snapshots`` of states, and those of the slots, are in ``slot_bytes`` (None: no states).
    ``token_bytes`` of the weights are read for a token of a request alone: no step is faster.
    ``adapter_pages`` (None: there are none on this device), each of ``page_bytes``;
    ``table_bytes`` are the table of the rotary embedding, ``slot_bytes`` are kept for the slots
    beside the pool, ``step_bytes`` are what a step of ``max_num_tokens``
    takes on a GPU while it runs. ``num_cross_blocks`` are those of an encoder's answers.
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
    num_snapshots: int | None
    num_parameters: int
    file_bytes: int | None
    weight_bytes: int
    token_bytes: int
    table_bytes: int
    slot_bytes: int
    step_bytes: int
    free_bytes: int | None
    kv_bytes_per_token: int
    block_bytes: int
    windows: tuple[int | None, ...]
    num_blocks: int
    adapter_pages: AdapterPages | None
    page_bytes: int
    cross_block_bytes: int = 0
    num_cross_blocks: int = 0

    @property
    def adapter_bytes(self) -> int:
        """All pages of adapters."""
        return 0 if self.adapter_pages is None else self.adapter_pages.num_pages * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        """The whole pool."""
        return self.block_bytes * self.num_blocks + self.cross_block_bytes * self.num_cross_blocks

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit the pool in all groups of layers."""
        return self.num_blocks // len(self.windows) * self.tokens_per_block


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
    may_lack_weights: bool = False,
) -> MemoryPlan:
    """Plan the memory of a checkpoint on a GPU with ``gpu_memory`` free before the server starts,
    of which ``reserve`` goes to what no checkpoint tells; None: on a CPU. If it
    ``may_lack_weights`` and does, config.json alone is read.

    `CheckpointError` if it cannot be read or its tensors are not the model's, `ConfigurationError`
    for what a server would refuse, or if the weights or not even one block fit.
    """
    config = replace(config or EngineConfig(), device="cpu" if gpu_memory is None else "cuda")
    model = read_model(folder)
    headers = None
    if not may_lack_weights or has_weights(folder):
        headers = read_weight_headers(folder)
        model = fitted(model, headers)
    else:
        model = assumed(model)
    model = model.with_window_limits(config.max_attention_window)
    config = resolve_for_plan(config, model)
    if headers is not None:
        check_weights(model, headers)
    place = config.place(0)
    specs = local_parameters(model, place)
    weight_bytes = _weight_bytes(specs, config) + _bytes_beside(specs, config)
    token_bytes = _token_bytes(specs, config, model)
    num_parameters = sum(prod(spec.shape) for spec in decoder_parameters(model))
    model = local_model(model, place)
    head_dims = sum(head_dim for _, head_dim in model.rope_kinds)
    table_bytes = config.seq_len_limit * head_dims * _ROPE_BYTES
    layout = layout_of(config, model)
    slot_bytes = reserved_bytes(config, model, layout) + state_bytes(config, model)
    num_rows = min(config.num_slots, config.num_tokens_limit)
    step_bytes = _step_bytes(model, config.num_tokens_limit, num_rows, DTYPE_TO_BYTES[config.dtype])
    free_bytes = max_bytes = adapter_pages = None
    per_page = page_bytes(config, model)
    if gpu_memory is not None:
        adapter_bytes = 0
        if config.enable_lora:
            adapter_pages = choose_pages(config, model, max(gpu_memory - weight_bytes, 0))
            adapter_bytes = adapter_pages.num_pages * per_page
        taken = weight_bytes + adapter_bytes + table_bytes + slot_bytes + step_bytes
        free_bytes = gpu_memory - taken - reserve
        max_bytes = int(free_bytes * config.kv_cache_free_gpu_mem_fraction)
        if free_bytes <= 0:
            raise ConfigurationError(
                "the weights and the largest step do not fit: "
                f"{-free_bytes / GIB:.1f} GiB of GPU memory are missing"
            )
    per_token, per_block = kv_bytes_per_token(config, model), block_bytes(config, layout)
    num_blocks = choose_num_blocks(config, per_token, max_bytes, per_block)
    num_own, num_cross = split_blocks(config, model, num_blocks)
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
        num_snapshots=num_snapshots_of(config, model),
        num_parameters=num_parameters,
        file_bytes=None if headers is None else sum(each.num_bytes for each in headers.values()),
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        table_bytes=table_bytes,
        slot_bytes=slot_bytes,
        step_bytes=step_bytes,
        free_bytes=free_bytes,
        kv_bytes_per_token=per_token,
        block_bytes=per_block,
        windows=layout.windows,
        num_blocks=num_own,
        cross_block_bytes=block_bytes(config, cross_layout(model)) if num_cross else 0,
        num_cross_blocks=num_cross,
        adapter_pages=adapter_pages,
        page_bytes=per_page,
    )


def concurrency(plan: MemoryPlan, prompt_len: int, max_new_tokens: int) -> Concurrency:
    """How many requests of this shape run at once, up to the batch size: one of them in its
    context, which may take more blocks where layers have windows.

    Beside an encoder, which reads the prompt, the first token of the decoder's text is given.
    """
    if plan.num_cross_blocks:
        own = concurrency(replace(plan, num_cross_blocks=0), 1, max_new_tokens)
        num_cross = -(-prompt_len // plan.tokens_per_block)
        guaranteed = min(own.guaranteed, plan.num_cross_blocks // num_cross)
        total_blocks = own.blocks_at_completion + num_cross
        return Concurrency(prompt_len, max_new_tokens, total_blocks, guaranteed, guaranteed)
    size, total = plan.tokens_per_block, prompt_len + max_new_tokens
    num_chunk = min(plan.max_num_tokens, prompt_len)
    total_blocks = num_context = 0
    mean = 0.0
    for window in plan.windows:
        num_blocks = -(-total // size)
        most = num_blocks if window is None else min(num_blocks, (window - 2) // size + 2)
        in_context = -(-prompt_len // size)
        if window is not None:
            in_context = min(in_context, (window + num_chunk - 3) // size + 2)
        total_blocks += most
        num_context += max(most, in_context)
        # Blocks after each step, summed: those of the prompt and of 0 to max_new_tokens - 1 more.
        held = _sum_of_blocks(total - 1, size, most)
        mean += (held - _sum_of_blocks(prompt_len - 1, size, most)) / max_new_tokens
    num_blocks = 0
    if num_context <= plan.num_blocks:
        num_blocks = plan.num_blocks - (num_context - total_blocks)
    return Concurrency(
        prompt_len,
        max_new_tokens,
        total_blocks,
        min(num_blocks // total_blocks, plan.max_batch_size),
        min(int(num_blocks / mean), plan.max_batch_size),
    )


def _sum_of_blocks(num_tokens: int, size: int, most: int) -> int:
    """Blocks of 1 token, of 2 and so on up to ``num_tokens``, each at most ``most``, summed."""
    num_full, rest = divmod(min(num_tokens, size * most), size)
    growing = size * num_full * (num_full + 1) // 2 + rest * (num_full + 1)
    return growing + max(num_tokens - size * most, 0) * most


def usual_shapes(max_seq_len: int) -> list[tuple[int, int]]:
    """(prompt, new tokens) in four to one, from 256 tokens to the longest request."""
    lengths = [256]
    while lengths[-1] * 4 < max_seq_len:
        lengths.append(lengths[-1] * 4)
    lengths = [length for length in lengths if length < max_seq_len] + [max_seq_len]
    return [(length - max(length // 5, 1), max(length // 5, 1)) for length in lengths]


def _weight_bytes(specs: Sequence[ParameterSpec], config: EngineConfig) -> int:
    """Bytes of the parameters; in FP8 the linears' take one each, and a scale for each row."""
    num_bytes, dtype_bytes = 0, DTYPE_TO_BYTES[config.dtype]
    for spec in specs:
        backend = config.packed_backend
        if spec.is_packed(backend):
            num_bytes += packed_bytes(spec, backend, dtype_bytes)
        elif (scheme := spec.scheme_at_load(config.quantization)) is not None:
            num_bytes += scheme.num_bytes(spec.shape[0], spec.shape[1], dtype_bytes, backend)
        elif config.quantization == "fp8" and spec.is_linear:
            num_bytes += prod(spec.shape) + spec.shape[0] * _SCALE_BYTES
        else:
            num_bytes += prod(spec.shape) * DTYPE_TO_BYTES[spec.kept_dtype(config.dtype, backend)]
    return num_bytes


def _bytes_beside(specs: Sequence[ParameterSpec], config: EngineConfig) -> int:
    """Bytes of embeddings that are looked up beside what heads are multiplied by: torch's products
    of integers have layouts of their own."""
    if config.packed_backend != "torch":
        return 0
    found = 0
    for spec in specs:
        schemes = [source.scheme for source in spec.sources]
        schemes.append(spec.scheme_at_load(config.quantization))
        is_integer = any(each and not (each.is_float or each.has_codebook) for each in schemes)
        if spec.table == "both" and is_integer:
            found += _weight_bytes([spec], config)
    return found


def _token_bytes(specs: Sequence[ParameterSpec], config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the parameters that a token of a request alone reads: of experts those that it
    passes, of tables that are only looked up next to nothing. An encoder has run before."""
    mixtures = [each for layer in model.layers for each in (layer.mlp, layer.experts_beside)]
    shares = [each.top_k / each.num_experts for each in mixtures if isinstance(each, MoeConfig)]
    num_bytes = 0
    for spec in specs:
        if spec.table not in ("rows", "positions") and not spec.name.startswith(ENCODER):
            share = min(shares) if spec.num_experts else 1
            num_bytes += int(share * _weight_bytes([spec], config))
    return num_bytes


def _step_bytes(model: ModelConfig, num_tokens: int, num_rows: int, size: int) -> int:
    """Activations where most of them live at once, in a gated MLP: three rows of hidden_size (the
    residual, what was added to it, the sum) and three of intermediate_size (gate, up, their
    product); and logits as they come and in float32. A test measures the first."""
    activations = num_tokens * 3 * (model.hidden_size + model.mlp_size) * size
    if model.altup is not None:  # streams before, as predicted, and corrected
        activations += num_tokens * 3 * model.altup.num_streams * model.hidden_size * size
    return activations + num_rows * model.vocab_size * (size + 4)
