"""Where adapters of experts and of latents attach, and their factors as PEFT lays them.

Since its version 5 transformers keeps the weights of all experts of a layer in one parameter, which
PEFT changes as such (``target_parameters``); before, each expert had linears of its own. Adapters
of both kinds are read over checkpoints of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from inflight_backend.models.blocks.lora import AdapterPart
from inflight_backend.models.config import ModelConfig, MoeConfig, WeightNames
from inflight_backend.models.parameters import Source, decoder_parameters


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """Rows from ``start`` of each of ``count`` experts' linears, which read ``inputs`` columns.

    ``parameter``: what transformers calls their weights together. ``order``: the rows of ``B`` as
    the decoder has them, None: as they are. ``may_be_turned``: transformers may have the weights
    [inputs, outputs], which PEFT takes for [outputs, inputs].
    """

    linear: str
    parameter: str
    count: int
    start: int
    inputs: int
    outputs: int
    order: tuple[int, ...] | None = None
    may_be_turned: bool = False

    def part(self, a: Tensor, b: Tensor) -> AdapterPart:
        """a [count, rank, inputs] and b [count, outputs, rank] of the experts."""
        b = b if self.order is None else b[:, list(self.order)]
        return AdapterPart(self.linear, self.start, a.contiguous(), b.contiguous())

    def readings(self, a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What `part` takes of a [count * rank, columns] and b [rows, rank * count], as PEFT has
        them for a parameter: none if they do not fit, and two if they fit in both ways."""
        sizes = (a.shape[1], b.shape[0])
        inner = a.view(self.count, -1, a.shape[1])
        outer = b.view(len(b), -1, self.count).permute(2, 0, 1)
        found = [(inner, outer)] if sizes == (self.inputs, self.outputs) else []
        if self.may_be_turned and sizes == (self.outputs, self.inputs):
            found.append((outer.transpose(1, 2), inner.transpose(1, 2)))
        return found


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """What takes keys, or values, from latents: ``size`` rows of each of ``heads``, from ``first``
    on, of a module with ``outputs`` that reads ``inputs`` columns.

    The decoder multiplies queries by the rows of keys, not latents, so there `A` and `B` change
    places.
    """

    linear: str
    is_key: bool
    heads: int
    first: int
    size: int
    inputs: int
    outputs: int
    source: Source
    is_transposed: bool = False
    may_scale: bool = False

    def part(self, a: Tensor, b: Tensor, scales: Tensor | None) -> AdapterPart:
        """a [rank, inputs] and b [outputs, rank] of the module."""
        assert scales is None
        rows = b.view(self.heads, -1, b.shape[1])[:, self.first : self.first + self.size]
        of_all = a.expand(self.heads, *a.shape)
        if self.is_key:
            of_all, rows = rows.transpose(1, 2), of_all.transpose(1, 2)
        return AdapterPart(self.linear, 0, of_all.contiguous(), rows.contiguous())


def latent_targets(config: ModelConfig) -> Iterator[tuple[str, list[HeadTarget]]]:
    """With the names of their modules in the checkpoint."""
    for spec in decoder_parameters(config):
        layer, _, name = spec.name.removeprefix("layers.").partition(".")
        if name != "expand" or len(spec.sources) != 1:
            continue
        attention = config.layers[int(layer)].attention
        latent, heads, source = attention.latent, attention.num_heads, spec.sources[0]
        assert latent is not None
        outputs, inputs = source.shape
        target = partial(HeadTarget, heads=heads, inputs=inputs, outputs=outputs, source=source)
        keys = target(f"{spec.name}_key", True, first=0, size=latent.nope)
        values = target(f"{spec.name}_value", False, first=latent.nope, size=latent.value)
        yield source.module, [keys, values]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of a layer: ``prefix`` of their linears in the decoder, and the places of their
    modules, from the list of layers on: of the router, of stacked parameters and of single experts
    (without their numbers)."""

    prefix: str
    moe: MoeConfig
    hidden_size: int
    names: WeightNames
    router: str
    other_routers: tuple[str, ...]
    stacks: tuple[str, ...]
    singles: str

    @property
    def gate(self) -> ExpertTarget:
        """The first half of what experts do first."""
        return self._target("gate_up", "gate_up_proj", 0, self.hidden_size, self.moe.size)

    @property
    def up(self) -> ExpertTarget:
        """The other half."""
        return replace(self.gate, start=self.moe.size)

    @property
    def gate_up(self) -> ExpertTarget:
        """Both."""
        size = self.moe.size
        order = None
        if self.names.expert_layout == "interleaved":
            order = (*range(0, 2 * size, 2), *range(1, 2 * size, 2))
        return replace(self.gate, outputs=2 * size, order=order)

    @property
    def down(self) -> ExpertTarget:
        """What they do last."""
        return self._target("down", "down_proj", 0, self.moe.size, self.hidden_size)

    def _target(
        self, name: str, parameter: str, start: int, inputs: int, outputs: int
    ) -> ExpertTarget:
        linear, count = f"{self.prefix}experts.{name}", self.moe.num_experts
        may_be_turned = self.names.expert_layout == "transposed"
        return ExpertTarget(
            linear, parameter, count, start, inputs, outputs, may_be_turned=may_be_turned
        )

    def single_targets(self) -> dict[str, tuple[ExpertTarget, int]]:
        """By the places of their modules: an expert's linears, and the number of the expert."""
        names = self.names if self.names.expert_layout == "each" else WeightNames()
        linears = {
            names.expert_gate: self.gate,
            names.expert_up: self.up,
            names.expert_down: self.down,
        }
        return {
            f"{self.singles}{expert}.{name}": (target, expert)
            for expert in range(self.moe.num_experts)
            for name, target in linears.items()
        }


def layers_of_experts(config: ModelConfig) -> Iterator[ExpertLayer]:
    """Those layers that have some."""
    for index, layer in enumerate(config.layers):
        names, prefix = config.names, f"layers.{index}."
        folder = f"{names.layers}{index}."
        if isinstance(layer.mlp, MoeConfig):
            yield _layer(config, names, layer.mlp, prefix, folder)
        if layer.experts_beside is not None:
            beside = replace(names.of_experts_beside(), mlp="")
            yield _layer(config, beside, layer.experts_beside, f"{prefix}beside.", folder)


def _layer(
    config: ModelConfig, names: WeightNames, moe: MoeConfig, prefix: str, folder: str
) -> ExpertLayer:
    is_each = names.expert_layout == "each"
    module = names.experts.rstrip(".") if is_each else names.expert_gate.rpartition(".")[0]
    inner = module.rpartition(".")[0]  # some have it in the names of tensors
    place = folder + names.mlp + (f"{inner}." if inner else "")
    folders = (place, f"{folder}mlp.")
    return ExpertLayer(
        prefix,
        moe,
        config.hidden_size,
        names,
        f"{folder}{names.mlp}{names.router}",
        tuple(f"{each}{name}" for each in folders for name in ("router", "gate")),
        tuple(f"{each}experts" for each in folders),
        f"{folder}{names.mlp}{WeightNames().experts if not is_each else names.experts}",
    )


def joined(
    target: ExpertTarget, factors: dict[int, tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Factors [rank, inputs] and [outputs, rank] of some experts as those of all: zeros beside
    them, and where they have a smaller rank than others."""
    rank = max(len(a) for a, _ in factors.values())
    all_a = torch.zeros(target.count, rank, target.inputs)
    all_b = torch.zeros(target.count, target.outputs, rank)
    for expert, (a, b) in factors.items():
        all_a[expert, : len(a)], all_b[expert, :, : len(a)] = a, b
    return all_a, all_b
