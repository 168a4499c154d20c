"""Adapters as PEFT writes them: ``adapter_config.json`` and ``adapter_model.safetensors``.

The tensors that are there say which modules are changed; the configuration says by how much
(``lora_alpha / r``, or ``/ sqrt(r)`` with ``use_rslora``; `peft.LoraConfig`). Keys that change
what is computed in another way are refused by name. Of a parameter of a module
(``target_parameters``) the tensors go by the module, of a second one of it by its ``base_layer``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from inflight_backend.adapters.digest import digest_of
from inflight_backend.adapters.experts import ExpertTarget, HeadTarget, joined, layers_of_experts
from inflight_backend.adapters.targets import Target, changed_twice, module_targets, place_of
from inflight_backend.errors import CheckpointError
from inflight_backend.log import get_logger
from inflight_backend.models.blocks.lora import Adapter, AdapterPart
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parameters import Source

_logger = get_logger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_KINDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_BASE = ".base_layer"
_USED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    "target_parameters",
}
# They say what is trained, and how it began; what was trained lies in the tensors.
_WITHOUT_EFFECT = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "task_type"),
    *("base_model_name_or_path", "inference_mode", "lora_dropout", "init_lora_weights", "revision"),
    *("fan_in_fan_out", "auto_mapping", "peft_version", "megatron_config", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    *("ensure_weight_tying", "qalora_group_size", "velora_config"),
}
# Value that asks for nothing, besides None and what is empty.
_REFUSED = {
    "modules_to_save": None,
    "trainable_token_indices": None,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "monteclora_config": None,
    "kasa_config": None,
}
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What is honoured of ``adapter_config.json``."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    has_magnitudes: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    parameters: tuple[str, ...] = ()

    def name_of(self, module: str) -> str:
        """What patterns call it: a parameter, if its weight is named as such."""
        weight = f".{module}.weight"
        return (
            weight[1:] if weight.endswith(tuple(f".{each}" for each in self.parameters)) else module
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module, or of a parameter, by its whole name."""
        rank: int = _first_match(self.ranks, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """What ``B A`` is multiplied by."""
        rank = self.rank_of(module)
        alpha: float = _first_match(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _first_match(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if key.match(module)), default)


def read_peft_config(folder: Path) -> PeftConfig:
    """`CheckpointError` names the key that cannot be honoured."""
    path = folder / CONFIG
    try:
        if not path.is_file():  # reading a pipe might never end
            raise CheckpointError(f"{path} cannot be read: there is no such file")
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise CheckpointError(f"{path}: peft_type is {kind!r}, only 'LORA' is supported")
    for key, neutral in _REFUSED.items():
        value = values.get(key)
        if value is not None and value not in (neutral, False, [], {}):
            raise CheckpointError(
                f"{path}: {key} is {value!r}, which is not supported; train the adapter without it"
            )
    if unknown := sorted(values.keys() - _USED - _WITHOUT_EFFECT - _REFUSED.keys()):
        _logger.info("%s: keys without a meaning here: %s", path, ", ".join(unknown))
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        _logger.warning(
            "%s: init_lora_weights is %r, which trains beside a changed base model: its answers "
            "are right only if PEFT converted it when it was saved "
            "(path_initial_model_for_weight_conversion)",
            path,
            start,
        )
    number = _reader(path, values)
    return PeftConfig(
        rank=int(number("r", 8, True)),
        alpha=number("lora_alpha", 8, False),
        is_rank_stabilized=bool(values.get("use_rslora")),
        has_magnitudes=bool(values.get("use_dora")),
        ranks=_patterns(path, values, "rank_pattern", int),
        alphas=_patterns(path, values, "alpha_pattern", float),
        parameters=tuple(map(str, values.get("target_parameters") or ())),
    )


def _reader(path: Path, values: Mapping[str, Any]) -> Callable[[str, float, bool], float]:
    def number(key: str, default: float, is_positive: bool) -> float:
        value = values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (is_positive and value < 1):
            raise CheckpointError(f"{path}: {key} is {value!r}, not a number in its bounds")
        return float(value)

    return number


def _patterns(
    path: Path, values: Mapping[str, Any], key: str, kind: Callable[[Any], Any]
) -> dict[re.Pattern[str], Any]:
    given = values.get(key) or {}
    try:
        return {re.compile(rf"(.*\.)?({name})$"): kind(value) for name, value in given.items()}
    except (re.error, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {key} cannot be used: {error}") from None


BaseWeight = Callable[[Source], Tensor]
"""A linear of the checkpoint as it is stored (`Checkpoint.weight`)."""


def read_peft_folder(
    folder: Path, model: ModelConfig, dtype: torch.dtype, base_weight: BaseWeight
) -> Adapter:
    """The adapter of a folder, for a model whose numbers are ``dtype``.

    ``base_weight`` is asked for those linears that have magnitudes. `CheckpointError` if the folder
    has what cannot be used, or not what it should.
    """
    parts = _FolderReader(folder, model, dtype, base_weight).read()
    if not parts:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensor of an adapter")
    return Adapter(tuple(parts), digest_of(part_tensors(parts)))


def part_tensors(parts: list[AdapterPart]) -> list[tuple[str, Tensor]]:
    """Tensors of ``parts`` with names that say where each belongs."""
    return [
        (f"{part.linear}:{part.start}:{number}", tensor)
        for part in parts
        for number, tensor in enumerate(part.tensors)
    ]


def _read_modules(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Tensors by module and kind."""
    path = folder / WEIGHTS
    if not path.is_file():
        others = " (adapter_model.bin is not read: it may run code)"
        hint = others if (folder / "adapter_model.bin").exists() else ""
        raise CheckpointError(f"{path} is missing{hint}; save the adapter as safetensors")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        end = next((end for end in _KINDS if name.endswith(end)), None)
        if end is None or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{path}: {name} is not supported; an adapter has {_PREFIX}MODULE"
                ".lora_A.weight, .lora_B.weight and .lora_magnitude_vector"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name} holds a number that is not finite")
        module = name.removeprefix(_PREFIX).removesuffix(end)
        modules.setdefault(module, {})[_KINDS[end]] = tensor
    return modules


def names_experts(folder: Path) -> bool:
    """Whether an adapter seems to change experts or latents, by the names of its tensors."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError):
        return False  # reading it says what is wrong
    return any(each in name for name in names for each in (".experts.", ".kv_b_proj."))


_Tensors = dict[str, Tensor]


class _FolderReader:
    """Reads one folder for one model."""

    def __init__(
        self, folder: Path, model: ModelConfig, dtype: torch.dtype, base_weight: BaseWeight
    ) -> None:
        """See `read_peft_folder`."""
        self._folder, self._path, self._model = folder, folder / WEIGHTS, model
        self._dtype, self._base_weight = dtype, base_weight
        self._config, self._targets = read_peft_config(folder), module_targets(model)
        self._stacks: dict[str, list[ExpertTarget]] = {}
        self._singles: dict[str, tuple[ExpertTarget, int]] = {}
        for layer in layers_of_experts(model):
            self._stacks |= {each: [layer.gate_up, layer.down] for each in layer.stacks}
            self._singles |= layer.single_targets()

    def read(self) -> list[AdapterPart]:
        """All parts."""
        parts: list[AdapterPart] = []
        experts: dict[ExpertTarget, dict[int, tuple[Tensor, Tensor]]] = {}
        for name, tensors in _read_modules(self._folder).items():
            module = name
            while module.endswith(_BASE):
                module = module.removesuffix(_BASE)
            place = place_of(self._model, module) or ""
            if place in self._targets:
                parts += self._read_linear(module, tensors, self._targets[place])
            elif place in self._stacks:
                parts.append(self._read_stack(module, tensors, self._stacks[place]))
            elif place in self._singles:
                target, number = self._singles[place]
                factors = self._factors(
                    module, tensors, target.inputs, target.outputs, may_scale=False
                )
                experts.setdefault(target, {})[number] = factors
            else:
                raise CheckpointError(
                    f"{self._path}: {name} is no linear of a layer of this model "
                    f"({self._model.architecture}) that an adapter may change"
                )
        for target, each in experts.items():
            a, b = joined(target, each)
            parts.append(target.part(a.to(self._dtype), b.to(self._dtype)))
        parts.sort(key=lambda part: (part.linear, part.start))
        if twice := changed_twice(parts):
            raise CheckpointError(f"{self._path} changes rows of {twice} twice")
        return parts

    def _read_linear(
        self, name: str, tensors: _Tensors, targets: list[Target | HeadTarget]
    ) -> list[AdapterPart]:
        first = targets[0]
        a, b = self._factors(name, tensors, first.inputs, first.outputs, may_scale=first.may_scale)
        scales = None
        if self._config.has_magnitudes:
            assert first.source is not None
            weight = self._base_weight(first.source).float()
            weight = weight.t() if first.is_transposed else weight
            norms = torch.linalg.vector_norm(weight + b @ a, dim=1)
            scales = tensors["magnitude"].float() / norms
            b = b * scales[:, None]
            scales = scales.to(self._dtype)
        a, b = a.to(self._dtype), b.to(self._dtype)
        return [each.part(a, b, scales) for each in targets]

    def _read_stack(
        self, module: str, tensors: _Tensors, targets: list[ExpertTarget]
    ) -> AdapterPart:
        """Which of a module's parameters it is, the shapes say."""
        self._check_kinds(module, tensors, may_scale=False)
        a, b = tensors["A"].float(), tensors["B"].float()
        count = targets[0].count
        fits = a.dim() == b.dim() == 2 and len(a) == b.shape[1] > 0 == len(a) % count
        found = [(each, pair) for each in targets if fits for pair in each.readings(a, b)]
        if len(found) != 1:
            raise CheckpointError(
                f"{self._path}: A of {module} has shape {list(a.shape)} and B {list(b.shape)}, "
                f"which {'may' if found else 'cannot'} be of "
                f"{' or '.join(each.parameter for each in targets)} of {count} experts"
            )
        ((target, (a, b)),) = found
        name = f"{module}.{target.parameter}"
        if a.shape[1] != self._config.rank_of(name):
            raise CheckpointError(
                f"{self._path}: {name} has rank {a.shape[1]}, and adapter_config.json asks for "
                f"{self._config.rank_of(name)}"
            )
        b = b * self._config.scale_of(name)
        return target.part(a.to(self._dtype), b.to(self._dtype))

    def _factors(
        self, module: str, tensors: _Tensors, inputs: int, outputs: int, *, may_scale: bool
    ) -> tuple[Tensor, Tensor]:
        """A and the scaled B of a linear, in float32."""
        self._check_kinds(module, tensors, may_scale=may_scale)
        name = self._config.name_of(module)
        rank = self._config.rank_of(name)
        shapes = {"A": (rank, inputs), "B": (outputs, rank), "magnitude": (outputs,)}
        for kind, tensor in tensors.items():
            if tensor.shape != shapes[kind]:
                raise CheckpointError(
                    f"{self._path}: {kind} of {module} has shape {list(tensor.shape)}; the rank in "
                    f"adapter_config.json and the model ask for {list(shapes[kind])}"
                )
        return tensors["A"].float(), tensors["B"].float() * self._config.scale_of(name)

    def _check_kinds(self, module: str, tensors: _Tensors, *, may_scale: bool) -> None:
        has_magnitudes = self._config.has_magnitudes
        if has_magnitudes and not may_scale:
            raise CheckpointError(
                f"{self._path}: use_dora is not supported for experts, routers and what takes "
                f"keys and values from latents ({module})"
            )
        wanted = {"A", "B", *(["magnitude"] if has_magnitudes else [])}
        if tensors.keys() != wanted:
            has, needs = ", ".join(sorted(tensors)), ", ".join(sorted(wanted))
            raise CheckpointError(
                f"{self._path}: {module} has {has}, and adapter_config.json asks for {needs}"
            )
