"""Where adapters attach: from linears of the checkpoint, or TensorRT-LLM's module ids, to rows of
linears of the decoder.

The table follows from `decoder_parameters`, which says what each linear of the decoder is made of:
rows of ``B`` are rearranged exactly as the rows of the weight were while loading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from inflight_backend.adapters.experts import (
    ExpertTarget,
    HeadTarget,
    latent_targets,
    layers_of_experts,
)
from inflight_backend.models.blocks.lora import AdapterPart
from inflight_backend.models.config import MlpConfig, ModelConfig
from inflight_backend.models.parameters import (
    PREFIXES,
    ParameterSpec,
    Source,
    decoder_parameters,
    fused_rows,
    head_rows,
)

_WEIGHT = ".weight"
_OF_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of a linear of the decoder, from ``start``, and which outputs of the module they are.

    The module has ``outputs`` and reads ``inputs`` columns. ``take`` gives of a matrix [outputs, n]
    the rows of the linear. ``source``: the module's weight in the checkpoint, which
    ``is_transposed`` where that has [inputs, outputs]. ``may_scale``: its own product may be
    multiplied (DoRA); that of a router is wider than the memory for adapters.
    """

    linear: str
    start: int
    inputs: int
    outputs: int
    take: Callable[[Tensor], Tensor]
    source: Source | None = None
    is_transposed: bool = False
    may_scale: bool = True

    def part(self, a: Tensor, b: Tensor, scales: Tensor | None) -> AdapterPart:
        """a [rank, inputs], b [outputs, rank] and scales [outputs] of the module."""
        taken = None if scales is None else self.take(scales[:, None])[:, 0].contiguous()
        return AdapterPart(self.linear, self.start, a, self.take(b).contiguous(), taken)


def module_targets(config: ModelConfig) -> dict[str, list[Target | HeadTarget]]:
    """By the checkpoint's name of the module, from its layer's number on (`place_of`).

    A module may fill several places: queries with gates in them, keys that are values, too.
    """
    found: dict[str, list[Target | HeadTarget]] = {}
    # Their rows and columns are not in the order of the modules.
    tiled = tuple(f"{_OF_LAYERS}{i}.delta." for i, each in config.deltas.items() if each.is_tiled)
    for spec in decoder_parameters(config):
        if spec.name.startswith(tiled):
            continue
        if not ((spec.is_linear or spec.is_gate) and spec.name.startswith(_OF_LAYERS)):
            continue
        start = 0
        for source in spec.sources:
            target = _target(config, spec, source, start)
            found.setdefault(place_of(config, source.module) or source.module, []).append(target)
            start += source.rows
    for module, targets in latent_targets(config):
        found[place_of(config, module) or module] = list(targets)
    for layer in layers_of_experts(config):
        for other in layer.other_routers:  # as transformers calls them since its version 5
            found.setdefault(other, found[layer.router])
    return found


def place_of(config: ModelConfig, module: str) -> str | None:
    """``module`` from the list of layers on ("layers.3.mlp.up_proj"), if it lies in the decoder.

    What comes before differs: checkpoints of multimodal models and those without their head have
    other prefixes than the model in memory, by whose names adapters go.
    """
    inner = config.names.prefix
    for prefix in sorted(PREFIXES, key=len, reverse=True):
        if prefix and inner.startswith(prefix):
            inner = inner.removeprefix(prefix)
            break
    for prefix in PREFIXES:
        whole = f"{prefix}{inner}{config.names.layers}"
        if module.startswith(whole):
            return config.names.layers + module.removeprefix(whole)
    return None


def changed_twice(parts: Sequence[AdapterPart]) -> str | None:
    """A linear of which two of ``parts``, which are in order, change the same rows."""
    for one, other in pairwise(parts):
        if one.linear == other.linear and other.start < one.end:
            return one.linear
    return None


def _target(config: ModelConfig, spec: ParameterSpec, source: Source, start: int) -> Target:
    # Writers of quantised ones have turned them.
    is_transposed = config.names.is_transposed and source.scheme is None
    outputs, inputs = reversed(source.shape) if is_transposed else source.shape
    convert = source.convert

    def take(rows: Tensor) -> Tensor:
        if convert is None:
            return rows
        return convert(rows.t() if is_transposed else rows)

    linear = spec.name.removesuffix(_WEIGHT)
    may_scale = not linear.endswith(".router")
    return Target(linear, start, inputs, outputs, take, source, is_transposed, may_scale)


ATTN_QKV, ATTN_Q, ATTN_K, ATTN_V, ATTN_DENSE = range(5)
MLP_H_TO_4H, MLP_4H_TO_H, MLP_GATE, MLP_GATE_UP = 5, 6, 7, 18
MOE_H_TO_4H, MOE_4H_TO_H, MOE_GATE, MOE_ROUTER = range(13, 17)
MODULE_NAMES = (
    *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense"),
    *("mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"),
    *("cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense"),
    *("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up"),
    *("shared_expert_h_to_4h", "shared_expert_4h_to_h", "shared_expert_gate"),
)
"""TensorRT-LLM's modules, by id."""


def wire_targets(config: ModelConfig, layer: int) -> dict[int, list[Target | ExpertTarget]]:
    """The modules of a layer that may be changed, by TensorRT-LLM's ids.

    Its converter sends the gate of a gated layer as ``mlp_h_to_4h`` (5) and what is multiplied by
    it as ``mlp_gate`` (7), whatever its table of names says, and those of experts (13 and 15)
    likewise; of a model with both in one linear it sends 5 with the halves of ``B`` exchanged.
    """
    sizes = {spec.name: spec.shape for spec in decoder_parameters(config)}
    prefix = f"{_OF_LAYERS}{layer}."

    def target(name: str, start: int, rows: Sequence[int] | int) -> list[Target | ExpertTarget]:
        """``rows`` of ``B`` in the order of the linear, or how many there are."""
        weight = f"{prefix}{name}{_WEIGHT}"
        if weight not in sizes:
            return []
        outputs = rows if isinstance(rows, int) else len(rows)
        order = None if isinstance(rows, int) else list(rows)
        take = (lambda b: b) if order is None else (lambda b: b[order])
        return [Target(prefix + name, start, sizes[weight][1], outputs, take)]

    found: dict[int, list[Target | ExpertTarget]] = {}
    attention, mlp = config.layers[layer].attention, config.layers[layer].mlp
    if attention.latent is None and attention.delta is None and not attention.has_gate:
        order, query, kv = attention.rotary_order, attention.query_size, attention.kv_size
        found[ATTN_Q] = target("qkv", 0, head_rows(attention.num_heads, order) or query)
        if attention.kv_source is None and not attention.is_value_key:
            keys = head_rows(attention.num_kv_heads, order) or kv
            found[ATTN_K], found[ATTN_V] = target("qkv", query, keys), target("qkv", query + kv, kv)
            rows = fused_rows(attention, "rows", order) or query + 2 * kv
            found[ATTN_QKV] = target("qkv", 0, rows)
        found[ATTN_DENSE] = target("output", 0, config.hidden_size)
    if isinstance(mlp, MlpConfig):
        _add_mlp(found, target, "", mlp, config, (MLP_H_TO_4H, MLP_4H_TO_H, MLP_GATE))
        if mlp.is_gated:
            found[MLP_GATE_UP] = target("gate_up", 0, 2 * mlp.size)
    elif mlp.shared is not None:
        _add_mlp(found, target, "shared.", mlp.shared, config, (19, 20, 21))
    for each in layers_of_experts(config):
        if each.prefix.startswith(prefix):
            found[MOE_H_TO_4H], found[MOE_GATE] = [each.gate], [each.up]
            found[MOE_4H_TO_H] = [each.down]
            found[MOE_ROUTER] = [
                Target(
                    f"{each.prefix}router",
                    0,
                    config.hidden_size,
                    each.moe.num_experts,
                    lambda b: b,
                    may_scale=False,
                )
            ]
    return {module: targets for module, targets in found.items() if targets}


def _add_mlp(
    found: dict[int, list[Target | ExpertTarget]],
    target: Callable[[str, int, Sequence[int] | int], list[Target | ExpertTarget]],
    place: str,
    mlp: MlpConfig,
    config: ModelConfig,
    ids: tuple[int, int, int],
) -> None:
    first, down, second = ids
    if not mlp.is_gated:
        found[first] = target(f"{place}up", 0, mlp.size)
    elif config.names.gate_up is not None:
        halves = [*range(mlp.size, 2 * mlp.size), *range(mlp.size)]
        found[first] = target(f"{place}gate_up", 0, halves)
    else:
        found[first] = target(f"{place}gate_up", 0, mlp.size)
        found[second] = target(f"{place}gate_up", mlp.size, mlp.size)
    found[down] = target(f"{place}down", 0, config.hidden_size)
