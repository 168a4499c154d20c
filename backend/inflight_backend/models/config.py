"""What a decoder is made of: one description that all families fill in from ``config.json``.

A family (`families`) reads its keys into a `ModelConfig`; `parameters` says which tensors that
needs, `decoder` computes it. Nothing behind this page knows a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inflight_backend.models.quantization.schemes import Quantization


@dataclass(frozen=True, slots=True)
class NormConfig:
    """``kind``: "rms", or "layer" (mean and variance). Weights multiply as ``weight + offset``."""

    kind: str = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of turning: dimension ``i`` of a head with dimension ``i + dim / 2``, or neighbours.

    ``dim``: dimensions of a head that turn, even. ``is_interleaved``: dimension ``2 i`` turns with
    ``2 i + 1``; ``is_backwards``: by the negative angle. ``kind``: as ``rope_type`` in config.json;
    the fields behind it belong to some kinds only. ``attention_factor`` multiplies cosines and
    sines. ``num_turning``: pairs that turn at all, the first ones (proportional). ``divisors``: of
    each frequency (longrope), ``short_divisors`` where no more than ``original_max_positions`` are
    served.
    """

    dim: int
    theta: float = 10_000.0
    is_interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    num_turning: int = 0
    divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    is_backwards: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention; ``query_rank`` None: queries come from one linear."""

    kv_rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of a gated delta rule (`blocks.gated_delta`). Value heads of one key head are
    neighbours; ``is_tiled``: each has all key heads' one after the other."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    norm_eps: float
    is_tiled: bool = False

    @property
    def key_size(self) -> int:
        """Columns of all keys (or queries)."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Columns of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Columns that pass the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


def state_shapes(delta: DeltaConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one text: the last inputs of the convolution, in the dtype of the model, and a matrix for
    each head, float32."""
    inputs = (delta.num_channels, delta.conv_size - 1)
    return inputs, (delta.num_value_heads, delta.key_dim, delta.value_dim)


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A number for each head and distance, added to scores (T5): distances share ``num_buckets``,
    those from ``max_distance`` on the last one. ``layer``: whose tensor it is.
    ``is_bidirectional``: half of the buckets are for keys behind the query."""

    num_buckets: int
    max_distance: int
    is_bidirectional: bool
    layer: int = 0


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attention of one layer.

    ``window``: the last tokens seen; ``chunk``: only positions of the same chunk are. ``qk_norm``:
    "head" (a weight [head_dim]), "biased" (LayerNorm with a weight and a bias [head_dim]), "full"
    (over all heads, [num_heads * head_dim]), "per_head" (a weight for each, [num_heads, head_dim];
    "per_head_list": as a tensor each) or "plain" (no weight); None for none.
    ``is_value_key``: values are the keys before norm and turning. ``kv_source``: an earlier layer
    whose keys and values are read, instead of own ones. ``delta``: instead of attention there is a
    recurrence, which caches no tokens. ``is_cross``: queries see all of an encoder's answer,
    whose keys and values are cached once. ``slopes``: of ALiBi, one for
    each head. ``temperature``: (scale, span, shift) multiply a query at position p by
    ``1 + scale * log(1 + floor((p + shift) / span))``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    slopes: tuple[float, ...] = ()
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: str | None = None
    qk_norm_kind: NormConfig = NormConfig()
    is_norm_after_rope: bool = False
    has_value_norm: bool = False
    is_value_key: bool = False
    clip: float | None = None
    has_gate: bool = False
    kv_source: int | None = None
    temperature: tuple[float, float, float] | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    relative_bias: RelativeBias | None = None
    is_cross: bool = False

    @property
    def rotary_order(self) -> list[int] | None:
        """For each dimension of a head as the kernels want it, the checkpoint's; None: unchanged.

        The kernels turn dimension ``i`` with dimension ``i + head_dim / 2``. Models that turn
        neighbours, or a part of a head only, have the rows of their query and key projections put
        in that order while loading: products of query and key do not depend on the order of
        dimensions. A dimension that does not turn has frequency 0.
        """
        rope = self.rope
        if rope is None:
            return None
        if rope.dim == self.head_dim and not (rope.is_interleaved or rope.is_backwards):
            return None
        turning = range(rope.dim)
        if rope.is_interleaved:
            first, second = turning[::2], turning[1::2]
        else:
            first, second = turning[: rope.dim // 2], turning[rope.dim // 2 :]
        if rope.is_backwards:
            first, second = second, first
        rest = range(rope.dim, self.head_dim)
        return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]

    @property
    def num_cached(self) -> int:
        """Tensors of the cache: keys and values, or latents that are both, or another layer's."""
        if self.kv_source is not None or self.delta is not None:
            return 0
        return 1 if self.latent is not None else 2

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Each token is ``num_streams`` rows, of which layers compute ``active`` (`blocks.altup`).
    ``laurel_rank``: of a learned residual beside attention."""

    num_streams: int
    active: int
    has_scale: bool
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """A feed-forward layer: ``down(act(gate) * up)``, or ``down(act(up))`` without a gate.

    ``sparsity``: the share of gates that are taken for the smallest, and are 0.
    """

    size: int
    activation: str = "silu"
    is_gated: bool = True
    has_bias: bool = False
    sparsity: float = 0.0


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How the experts of a token are chosen and weighed.

    ``score``: "softmax" or "sigmoid" of the router's logits; "softmax_of_chosen"; "sparsemixer";
    "sigmoid_of_chosen". ``is_normalized``: weights sum to 1 (plus ``norm_eps``). ``num_groups`` of
    experts, of which ``num_chosen_groups`` are kept, by the best ("max") or the sum of the best two
    ("top2") scores. ``scales_input``: the weight multiplies what the expert reads.
    ``has_input_norm``: the router reads what it is given normed and scaled.
    ``has_expert_scales``: a number for each expert multiplies its weight.
    """

    score: str = "softmax"
    is_normalized: bool = False
    norm_eps: float = 0.0
    has_correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0
    scales_input: bool = False
    jitter: float = 0.0
    has_input_norm: bool = False
    has_expert_scales: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the weights are those of a softmax, and nothing else."""
        is_softmax = self.score in ("softmax", "softmax_of_chosen") and not self.has_correction
        has_groups = self.num_groups > 1
        has_more = self.scales_input or self.has_input_norm or self.has_expert_scales
        return is_softmax and not (has_groups or has_more)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of ``num_experts`` experts of ``size``, ``top_k`` of them for each token.

    ``shared``: one that all tokens pass; ``has_shared_gate``: its answer is multiplied by the
    sigmoid of a linear. ``has_bias`` and ``has_router_bias`` as named. ``held_experts``: those from
    the first to the one behind the last are held here, the others by other ranks; None: all are.
    """

    num_experts: int
    top_k: int
    size: int
    routing: RoutingConfig = RoutingConfig()
    activation: str = "silu"
    has_bias: bool = False
    has_router_bias: bool = False
    shared: MlpConfig | None = None
    has_shared_gate: bool = False
    held_experts: tuple[int, int] | None = None

    @property
    def num_held(self) -> int:
        """Experts that are held here."""
        first, end = self.held_experts or (0, self.num_experts)
        return end - first


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer."""

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    experts_beside: MoeConfig | None = None
    """Experts whose answer is added to that of ``mlp``, with norms of their own."""
    has_scalar: bool = False
    """The layer's answer is multiplied by a number."""
    cross: AttentionConfig | None = None
    """Attention over the answer of an encoder, between ``attention`` and ``mlp``."""


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """Where a checkpoint has the tensors of a gated delta rule.

    ``inputs`` and ``gates``: one linear that has all of a key head's projections side by side, or
    two (queries, keys and values, and what gates the answer; strengths and steps). ``is_rate``: for
    A_log there is what it stands for, -exp(A_log).
    """

    folder: str = "linear_attn."
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    conv: str = "conv1d"
    rate: str = "A_log"
    step_bias: str = "dt_bias"
    norm: str = "norm"
    output: str = "out_proj"
    is_rate: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputNames:
    """Where a checkpoint has the inputs of each layer (`blocks.layer_inputs`): the first three are
    the model's, the others each layer's."""

    embedding: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    projection_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class BesideNames:
    """Where a checkpoint has the experts beside a dense layer (Gemma 4). With the ``layout`` "each"
    they have the usual names."""

    router: str = "router.proj"
    layout: str = "stacked"
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    input_norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"
    dense_norm: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Where a checkpoint has its tensors; parts of names, joined as ``prefix + layers + number``.

    ``qkv`` and ``gate_up``: fused ones. ``qkv_layout``: "rows" ([q; k; v]), "per_head" (q, k, v of
    each head), "per_group" (the queries of a KV head, its key, its value) or "codegen".
    ``attention_gate``: of gates that have a linear of their own; None: they lie behind each query
    head. ``latent_halves``: what takes keys and values from latents, where these are apart.
    ``head_bias``: of one that is a row of its own.
    ``shared_parts``: gate and up of the expert that all tokens pass, where these are not called as
    in other layers. ``is_transposed``: weights are [inputs, outputs]. ``expert_layout``: see
    `parameters`.
    """

    prefix: str = "model."
    layers: str = "layers."
    embedding: str = "embed_tokens"
    embedding_norm: str = "embed_layernorm"
    positions: str = "embed_positions"
    final_norm: str = "norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention_output_norm: str = "post_self_attn_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_mlp_layernorm"
    attention: str = "self_attn."
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    qkv: str | None = None
    qkv_layout: str = "rows"
    output: str = "o_proj"
    latent_query: tuple[str, str, str] = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    latent_key_value: tuple[str, str, str] = (
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
    )
    latent_halves: tuple[str, str] | None = None
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    attention_gate: str | None = None
    sinks: str = "sinks"
    relative_bias: str = "relative_attention_bias"
    cross: str = "encoder_attn."
    cross_norm: str = "encoder_attn_layer_norm"
    head_bias: str | None = None
    mlp: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str | None = None
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    is_correction_row: bool = False
    experts: str = "experts."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared: str = "shared_experts."
    shared_gate_up: str | None = None
    shared_parts: tuple[str, str] | None = None
    shared_down: str = "down_proj"
    shared_gate: str = "shared_expert_gate"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    scalar: str = "layer_scalar"
    delta: DeltaNames = DeltaNames()
    layer_input: LayerInputNames = LayerInputNames()
    beside: BesideNames = BesideNames()
    is_transposed: bool = False
    expert_layout: str = "each"

    def of_experts_beside(self) -> WeightNames:
        """The same with the names of `beside` for the experts."""
        beside = self.beside
        if beside.layout == "each":
            return replace(self, router=beside.router)
        return replace(
            self,
            router=beside.router,
            expert_layout=beside.layout,
            expert_gate=beside.gate_up,
            expert_up=beside.gate_up,
            expert_down=beside.down,
        )


NORMS_OF_BLOCK = {
    "pre": ("input_norm", "mlp_norm"),
    "post": ("attention_output_norm", "mlp_output_norm"),
    "sandwich": ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"),
    "parallel": ("input_norm",),
    "parallel2": ("input_norm", "mlp_norm"),
    "post_add": ("attention_output_norm", "mlp_output_norm"),
}
"""The norms of a layer, by ``ModelConfig.block``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. ``block``: where norms stand and what is added when (`decoder`): "pre", "post",
    "sandwich", "parallel" (one norm), "parallel2" (two norms) or "post_add".

    ``is_tied``: the head is the embedding; None: if none was saved.
    ``position_offset``: of the first row of a learned table of positions, or of sines and cosines
    that are computed (``has_sinusoids``); None: without.
    ``embedding_size``: of the table where that differs from ``hidden_size``. ``layer_input_size``:
    of a second embedding of tokens, one for each layer (`blocks.layer_inputs`), which has
    ``layer_input_rows`` (None: all tokens). ``ignored``:
    patterns of tensors that have no use here. ``quantization``: of the checkpoint's linears, if
    they are quantised. ``encoder``: what reads the prompt, where the decoder only attends to its
    answer; it shares the embedding, each of its tokens sees all others (``is_encoder``), and the
    text of the decoder begins with ``start_ids``. ``kv_scales``: the ends of the names of two
    tensors of a layer's attention, the scales of its keys and values in a KV cache of 8 bits.
    ``table_dtype``: of embedding and head in the files, if that is float16 or bfloat16, else "";
    ``linear_dtype``: the same of all linears that are not quantised.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    norm: NormConfig
    is_tied: bool | None
    dtype: str
    block: str = "pre"
    position_offset: int | None = None
    has_sinusoids: bool = False
    embedding_size: int | None = None
    layer_input_size: int = 0
    layer_input_rows: int | None = None
    altup: AltUpConfig | None = None
    embedding_scale: float = 1.0
    has_embedding_norm: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float | None = None
    has_final_norm: bool = True
    has_head_bias: bool = False
    names: WeightNames = field(default_factory=WeightNames)
    ignored: tuple[str, ...] = ()
    quantization: Quantization | None = None
    kv_scales: tuple[str, str] | None = None
    table_dtype: str = ""
    linear_dtype: str = ""
    encoder: ModelConfig | None = None
    is_encoder: bool = False
    start_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many there are."""
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        """The largest of all layers."""
        return max(each.head_dim for each in self.attending)

    @property
    def has_qkv_bias(self) -> bool:
        """True if keys of any layer have a bias."""
        return any(layer.attention.has_qkv_bias for layer in self.layers)

    @property
    def mlp_size(self) -> int:
        """Inner numbers of a token in the widest feed-forward layer."""
        parts = [each.mlp for each in self.layers]
        parts += [each.experts_beside for each in self.layers if each.experts_beside is not None]
        return max(each.size * (each.top_k if isinstance(each, MoeConfig) else 1) for each in parts)

    @property
    def query_size(self) -> int:
        """Columns of all query heads of the widest layer."""
        return max(layer.attention.query_size for layer in self.layers)

    @property
    def kv_size(self) -> int:
        """Columns of all key (or value) heads of the widest layer."""
        return max(layer.attention.kv_size for layer in self.layers)

    @property
    def deltas(self) -> dict[int, DeltaConfig]:
        """The recurrences, by layer."""
        found = ((index, layer.attention.delta) for index, layer in enumerate(self.layers))
        return {index: delta for index, delta in found if delta is not None}

    @property
    def attending(self) -> list[AttentionConfig]:
        """The other layers."""
        return [layer.attention for layer in self.layers if layer.attention.delta is None]

    @property
    def cross_model(self) -> ModelConfig:
        """The same with the attention over the encoder's answer in place of that over the text."""
        return self.with_layers(
            lambda _, layer: layer if layer.cross is None else replace(layer, attention=layer.cross)
        )

    @property
    def rope_kinds(self) -> list[tuple[RopeConfig | None, int]]:
        """(rotary embedding, head_dim) of the layers, each pair once: a table each."""
        return list(dict.fromkeys((each.rope, each.head_dim) for each in self.attending))

    def with_layers(self, change: Callable[[int, LayerConfig], LayerConfig]) -> ModelConfig:
        """The same with each layer, by number, changed."""
        return replace(self, layers=tuple(change(*each) for each in enumerate(self.layers)))

    def with_window_limits(self, sizes: Sequence[int]) -> ModelConfig:
        """Layer ``i`` sees the last ``sizes[i % len(sizes)]`` tokens at most, one that reads
        another layer's keys and values as many as that one; without ``sizes`` nothing changes."""
        if not sizes:
            return self

        def limited(index: int, attention: AttentionConfig) -> dict[str, Any]:
            owner = index if attention.kv_source is None else attention.kv_source
            size = sizes[owner % len(sizes)]
            if attention.delta is not None or size >= self.max_position_embeddings:
                return {}
            return {"window": min(size, attention.window or size)}

        return self.with_attention(limited)

    def with_attention(
        self, change: Callable[[int, AttentionConfig], Mapping[str, Any]]
    ) -> ModelConfig:
        """The same with what ``change`` says of each layer's attention."""
        return self.with_layers(
            lambda index, layer: replace(
                layer, attention=replace(layer.attention, **change(index, layer.attention))
            )
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where the keys and values of layers lie in the KV pool.

    A block holds ``tokens_per_block`` tokens of one group of layers: those that see the whole text
    are one, and those with a window as many groups as it takes to make the groups nearly equal, for
    all take their blocks from one pool. ``windows`` are those of the groups (None: no window). A
    block is made of regions, of ``region_sizes`` numbers for each token. ``groups`` has the group
    of each layer, and ``places`` region and first column of its keys and of its values (the same
    twice where these are one tensor; none of layers that keep no tokens).
    """

    windows: tuple[int | None, ...]
    region_sizes: tuple[int, ...]
    groups: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def numbers_per_token(self) -> int:
        """Of a block, for each of its tokens."""
        return sum(self.region_sizes)

    def num_blocks(self, num_tokens: int, tokens_per_block: int) -> int:
        """Blocks that a text of ``num_tokens`` holds while the next token is computed."""
        total = -(-num_tokens // tokens_per_block)
        spans = [
            total if window is None else min(total, (window - 2) // tokens_per_block + 2)
            for window in self.windows
        ]
        return sum(spans)


_MAX_GROUPS = 16
_WORTH_IT = 0.95  # each group is another table to fill


def make_cache_layout(model: ModelConfig, max_seq_len: int, *, is_shared: bool) -> CacheLayout:
    """The layout that takes least for a text of ``max_seq_len`` tokens; one group where others
    would not save a twentieth.

    A chunk counts as a window of its size. ``is_shared``: texts share blocks of their answers (beam
    search), so nothing can be given back, and all layers are one group.
    """
    layers = [layer.attention for layer in model.layers]
    kinds: dict[int | None, list[int]] = {}
    for index, each in enumerate(layers):
        if each.num_cached:
            seen = min(filter(None, (each.window, each.chunk)), default=max_seq_len)
            window = None if is_shared or seen >= max_seq_len else seen
            kinds.setdefault(window, []).append(index)
    everything = [index for index, each in enumerate(layers) if each.num_cached]
    if len(kinds) <= 1:
        return _one_group(layers, everything, next(iter(kinds), None))
    size = max(each.kv_size for each in layers)
    # The first group is that of layers without a window, if there are some.
    ordered = sorted(kinds, key=lambda window: (window is not None, window or 0))
    num_least = min(len(_pack(layers, kinds[window], size)) for window in ordered)
    if None in kinds:
        num_least = len(_pack(layers, kinds[None], size))
    layouts = []
    for num_regions in range(max(num_least, 2), len(_pack(layers, everything, size)) + 1):
        layout = _grouped(layers, [(each, kinds[each]) for each in ordered], size, num_regions)
        if len(layout.windows) <= _MAX_GROUPS:
            layouts.append(layout)

    def numbers(layout: CacheLayout) -> int:
        return layout.numbers_per_token * layout.num_blocks(max_seq_len, 1)

    together = _one_group(layers, everything, None)
    best = min(layouts, key=numbers, default=together)
    return best if numbers(best) < _WORTH_IT * numbers(together) else together


def _one_group(
    layers: Sequence[AttentionConfig], keeping: Sequence[int], window: int | None
) -> CacheLayout:
    """All layers side by side, each tensor a region."""
    sizes, places = list[int](), dict[int, tuple[tuple[int, int], ...]]()
    for index in keeping:
        each = layers[index]
        first = len(sizes)
        sizes += [each.kv_size] * each.num_cached
        places[index] = ((first, 0), (len(sizes) - 1, 0))
    return _layout(layers, (window,), sizes, dict.fromkeys(keeping, 0), places)


def _grouped(
    layers: Sequence[AttentionConfig],
    kinds: Sequence[tuple[int | None, Sequence[int]]],
    size: int,
    num_regions: int,
) -> CacheLayout:
    """Groups of up to ``num_regions`` regions of ``size`` numbers for a token."""
    windows: list[int | None] = []
    groups, places = dict[int, int](), dict[int, tuple[tuple[int, int], ...]]()
    for window, indices in kinds:
        left = list(indices)
        while left:
            taken = list(left)
            while len(packed := _pack(layers, taken, size)) > num_regions:
                del taken[-1]
            for region, tensors in enumerate(packed):
                for index, column in tensors:
                    places[index] = (*places.get(index, ()), (region, column))
            groups.update(dict.fromkeys(taken, len(windows)))
            windows.append(window)
            left = left[len(taken) :]
    places = {index: (found[0], found[-1]) for index, found in places.items()}
    return _layout(layers, tuple(windows), [size] * num_regions, groups, places)


def _pack(
    layers: Sequence[AttentionConfig], indices: Sequence[int], size: int
) -> list[list[tuple[int, int]]]:
    """Regions of ``size`` numbers for a token, filled in turn with the tensors of these layers:
    layer and first column of each."""
    regions: list[list[tuple[int, int]]] = []
    column = size
    for index in indices:
        for _ in range(layers[index].num_cached):
            if column + layers[index].kv_size > size:
                regions.append([])
                column = 0
            regions[-1].append((index, column))
            column += layers[index].kv_size
    return regions


def _layout(
    layers: Sequence[AttentionConfig],
    windows: tuple[int | None, ...],
    sizes: Sequence[int],
    groups: Mapping[int, int],
    places: Mapping[int, tuple[tuple[int, int], ...]],
) -> CacheLayout:
    """With the layers that read another one's memory."""
    sources = [
        index if each.kv_source is None else each.kv_source for index, each in enumerate(layers)
    ]
    return CacheLayout(
        windows,
        tuple(sizes),
        tuple(groups.get(source, 0) for source in sources),
        tuple(places.get(source, ()) for source in sources),
    )
