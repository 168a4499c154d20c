"""The parameters of feed-forward layers and experts, in each of the ways these are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from inflight_backend.models.config import MlpConfig, ModelConfig, MoeConfig
from inflight_backend.models.parameters.linears import joined_parameters, linear_parameters
from inflight_backend.models.parameters.rearranging import (
    as_row,
    columns_in_order,
    flat,
    multiplied,
    one_row,
    pick,
    transposed,
)
from inflight_backend.models.parameters.sources import (
    WEIGHT,
    Expert,
    ParameterSpec,
    Source,
    single_parameter,
)


def mlp_parameters(
    config: ModelConfig, mlp: MlpConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Of a feed-forward layer under ``prefix``, in the checkpoint under ``folder``."""
    names, hidden, size = config.names, config.hidden_size, mlp.size
    if not mlp.is_gated:
        up = linear_parameters(config, f"{prefix}up", folder + names.up, size, hidden, mlp.has_bias)
    else:
        fused = names.gate_up
        parts = {fused: 2 * size} if fused else {names.gate: size, names.up: size}
        up = joined_parameters(config, f"{prefix}gate_up", folder, parts, hidden, mlp.has_bias)
    down = linear_parameters(
        config, f"{prefix}down", folder + names.down, hidden, size, mlp.has_bias
    )
    if mlp.activation == "xielu":
        sources = tuple(
            Source(f"{folder}act_fn.{name}", (1,), one_row)
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        up = [*up, ParameterSpec(f"{prefix}activation", sources, is_wide=True)]
    return up + down


def moe_parameters(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Of router, experts and shared experts."""
    names, hidden, experts = config.names, config.hidden_size, moe.num_experts
    router = Source(f"{folder}{names.router}.weight", (experts, hidden))
    specs = [ParameterSpec(f"{prefix}router.weight", (router,), is_gate=True)]
    if moe.has_router_bias:
        specs.append(
            single_parameter(f"{prefix}router.bias", f"{folder}{names.router}.bias", (experts,))
        )
    if moe.routing.has_correction:
        shape = (1, experts) if names.is_correction_row else (experts,)
        source = Source(folder + names.correction, shape)
        specs.append(ParameterSpec(f"{prefix}router.correction", (source,), is_wide=True))
    if moe.routing.has_input_norm:
        scaled = partial(multiplied, factor=hidden**-0.5)
        source = Source(folder + names.router_scale, (hidden,), scaled)
        specs.append(ParameterSpec(f"{prefix}router.scale", (source,), is_wide=True))
    if moe.routing.has_expert_scales:
        source = Source(folder + names.expert_scales, (experts,))
        specs.append(ParameterSpec(f"{prefix}router.expert_scales", (source,), is_wide=True))
    specs += _EXPERTS[names.expert_layout](config, moe, f"{prefix}experts.", folder)
    if moe.shared is not None:
        gate, up = names.shared_parts or (names.gate, names.up)
        shared = replace(
            names, gate=gate, up=up, gate_up=names.shared_gate_up, down=names.shared_down
        )
        specs += mlp_parameters(
            replace(config, names=shared), moe.shared, f"{prefix}shared.", folder + names.shared
        )
    if moe.has_shared_gate:
        source = Source(f"{folder}{names.shared_gate}.weight", (1, hidden))
        if names.expert_layout == "gguf":
            source = replace(source, shape=(hidden,), convert=as_row, result=(1, hidden))
        specs.append(ParameterSpec(f"{prefix}shared_gate.weight", (source,), is_gate=True))
    return specs


def _experts_each(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """A tensor for each expert and part."""
    names, hidden, size = config.names, config.hidden_size, moe.size
    parts = {"gate_up": ((names.expert_gate, size), (names.expert_up, size)),
             "down": ((names.expert_down, hidden),)}  # fmt: skip
    specs = []
    for part, linears in parts.items():
        columns = size if part == "down" else hidden
        for kind in ("weight", "bias") if moe.has_bias else ("weight",):
            sources = (
                Source(
                    f"{folder}{names.experts}{expert}.{linear}.{kind}",
                    (rows, columns) if kind == "weight" else (rows,),
                )
                for expert in range(moe.num_experts)
                for linear, rows in linears
            )
            is_weight = kind == "weight"
            name = f"{prefix}{part}.{kind}"
            num_experts = moe.num_experts if is_weight else 0
            specs.append(ParameterSpec(name, tuple(sources), num_experts=num_experts))
    return specs


def _experts_stacked(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """[E, 2 * size, hidden] and [E, hidden, size]."""
    names, hidden, size = config.names, config.hidden_size, moe.size
    parts = {"gate_up": (names.expert_gate, 2 * size, hidden),
             "down": (names.expert_down, hidden, size)}  # fmt: skip
    return [
        ParameterSpec(
            f"{prefix}{part}.weight",
            _stack(config, moe, folder + name, (rows, columns), None, is_transposed=False),
            num_experts=moe.num_experts,
        )
        for part, (name, rows, columns) in parts.items()
    ]


def _stack(
    config: ModelConfig,
    moe: MoeConfig,
    name: str,
    shape: tuple[int, int],
    order: Sequence[int] | None,
    *,
    is_transposed: bool,
) -> tuple[Source, ...]:
    """Weights [rows, columns] of all experts in one tensor, their rows in ``order`` (None: as they
    are): expert by expert, so that a copy is one expert's; of a quantised one also because its
    scales may be for several rows or columns."""
    count, (rows, columns) = moe.num_experts, shape
    scheme = None
    if config.quantization is not None:
        scheme = config.quantization.modules.get(name.removesuffix(WEIGHT))
    if scheme is not None:
        is_transposed = is_transposed and scheme.layout != "mxfp4-blocks"
        return tuple(
            Source(name, shape, pick(order), scheme=scheme,
                   expert=Expert(index, count, is_transposed))
            for index in range(count)
        )  # fmt: skip
    stored = (count, columns, rows) if is_transposed else (count, rows, columns)
    convert = partial(flat, is_transposed=is_transposed, order=order)
    return tuple(Source(name, stored, convert, shape, (index, index + 1)) for index in range(count))


def _experts_transposed(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """[E, hidden, 2 * size] and [E, size, hidden]; "interleaved": gate and up take turns."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    gates_first = None
    if names.expert_layout == "interleaved":
        gates_first = [*range(0, 2 * size, 2), *range(1, 2 * size, 2)]
    parts = {"gate_up": (names.expert_gate, 2 * size, hidden, gates_first),
             "down": (names.expert_down, hidden, size, None)}  # fmt: skip
    specs = [
        ParameterSpec(
            f"{prefix}{part}.weight",
            _stack(config, moe, folder + name, (rows, columns), order, is_transposed=True),
            num_experts=moe.num_experts,
        )
        for part, (name, rows, columns, order) in parts.items()
    ]
    if moe.has_bias:
        specs += [
            ParameterSpec(
                f"{prefix}gate_up.bias",
                (
                    Source(
                        f"{folder}{names.expert_gate}_bias",
                        (count, 2 * size),
                        columns_in_order(gates_first),
                    ),
                ),
            ),
            ParameterSpec(
                f"{prefix}down.bias",
                (Source(f"{folder}{names.expert_down}_bias", (count, hidden)),),
            ),
        ]
    return specs


def _experts_joined(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """DBRX: gate and up [E * size, hidden], down [E * size, hidden] used untransposed."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    shape = (count * size, hidden)
    # Gate and up of an expert must lie together: the loader fills rows in order, so each expert's
    # rows of both tensors are sources of their own.
    gate_up = tuple(
        Source(folder + name, shape, None, (size, hidden), (expert * size, (expert + 1) * size))
        for expert in range(count)
        for name in (names.expert_gate, names.expert_up)
    )
    turned = partial(transposed, rows=None)
    down = tuple(
        Source(
            folder + names.expert_down, shape, turned, (hidden, size),
            (expert * size, (expert + 1) * size),
        )
        for expert in range(count)
    )  # fmt: skip
    return [
        ParameterSpec(f"{prefix}gate_up.weight", gate_up, num_experts=count),
        ParameterSpec(f"{prefix}down.weight", down, num_experts=count),
    ]


def _experts_gguf(
    config: ModelConfig, moe: MoeConfig, prefix: str, folder: str
) -> list[ParameterSpec]:
    """Gate, up and down of all experts in a tensor each, [E * size, hidden] and [E * hidden, size]:
    rows of gate and up of an expert must lie together, as they may do in the file."""
    names, hidden, size, count = config.names, config.hidden_size, moe.size, moe.num_experts
    parts = (names.expert_gate, names.expert_up)
    gate_up = tuple(
        Source(
            f"{folder}{part}.weight", (count * size, hidden), None, (size, hidden),
            (expert * size, (expert + 1) * size),
        )
        for expert in range(count)
        for part in parts
    )  # fmt: skip
    if names.expert_gate == names.expert_up:  # one tensor, both of each expert
        gate_up = (Source(f"{folder}{names.expert_up}.weight", (2 * count * size, hidden)),)
    down = Source(f"{folder}{names.expert_down}.weight", (count * hidden, size))
    specs = [
        ParameterSpec(f"{prefix}gate_up.weight", gate_up, num_experts=count),
        ParameterSpec(f"{prefix}down.weight", (down,), num_experts=count),
    ]
    if moe.has_bias:
        biases = tuple(
            Source(f"{folder}{part}.bias", (count, size), flat, (size,), (expert, expert + 1))
            for expert in range(count)
            for part in parts
        )
        down = Source(f"{folder}{names.expert_down}.bias", (count, hidden))
        specs.append(ParameterSpec(f"{prefix}gate_up.bias", biases))
        specs.append(ParameterSpec(f"{prefix}down.bias", (down,)))
    return specs


_EXPERTS: dict[str, Callable[[ModelConfig, MoeConfig, str, str], list[ParameterSpec]]] = {
    "each": _experts_each,
    "stacked": _experts_stacked,
    "transposed": _experts_transposed,
    "interleaved": _experts_transposed,
    "joined": _experts_joined,
    "gguf": _experts_gguf,
}
