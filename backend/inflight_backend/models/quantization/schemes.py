"""What a quantised linear is like, and which linears of a checkpoint are quantised how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import TensorHeader


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight [rows, columns] of a linear is kept: numbers of ``bits``, times scales.

    ``layout``: how files have it (`stored`): "float8", "int8", "packed" (compressed-tensors),
    "awq" or "gptq". ``group_size``: columns that share a scale (None: all), and ``block_rows`` rows
    do. ``is_symmetric``: the number for zero is the middle one. ``has_order``: groups are not of
    neighbouring columns. ``zero_offset`` is added to the numbers for zero in the file.
    ``quantizes_input``: what the linear reads becomes 8-bit integers, with a scale per token.
    ``scales``: the end of the name of the tensor that holds them.
    """

    layout: str
    bits: int
    group_size: int | None = None
    block_rows: int = 1
    is_symmetric: bool = True
    has_order: bool = False
    zero_offset: int = 0
    quantizes_input: bool = False
    scales: str = "weight_scale"

    @property
    def is_float(self) -> bool:
        """True for FP8 (e4m3)."""
        return self.layout == "float8"

    @property
    def has_zeros(self) -> bool:
        """Whether memory holds a number for zero for each scale. Of 4 bits always: the product on a
        CPU (`linears`) takes scales and zeros in pairs."""
        return self.bits == 4 or not self.is_symmetric

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int) -> int:
        """Bytes that a weight takes in memory (`forms.PackedWeight`), without the order of its
        columns; ``dtype_bytes``: of a number of the model."""
        scale_bytes = 4 if self.is_float else dtype_bytes
        per_group = scale_bytes * (2 if self.has_zeros else 1)
        return rows * (columns * self.bits // 8 + self.num_groups(columns) * per_group)


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the linears that ``targets`` name: "Linear" (all others), exact names, and
    patterns behind "re:"."""

    scheme: Scheme
    targets: tuple[str, ...] = ("Linear",)

    def names(self, module: str) -> bool:
        """True if one of the targets is that linear, by its name or pattern."""
        return any(
            re.match(each[3:], module) is not None if each.startswith("re:") else each == module
            for each in self.targets
        )


_MARKS = {"weight": ("F8_E4M3", "I8"), "weight_packed": ("I32",), "qweight": ("I32",)}
"""Tensors that only a quantised linear has, and their types."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """``rules`` of ``quantization_config``; ``modules``: the quantised linears of the checkpoint by
    name, known once its headers are (`found_in`)."""

    name: str
    rules: tuple[Rule, ...]
    modules: Mapping[str, Scheme] = field(default_factory=dict)

    def found_in(self, headers: Mapping[str, TensorHeader]) -> Quantization:
        """The same with ``modules``. Which linears are quantised is seen by their tensors: what
        tools write about those that are not (``ignore``, ``modules_to_not_convert``) goes by names
        that a checkpoint need not have. `CheckpointError` for a linear without a rule."""
        modules = {}
        for name, header in headers.items():
            module, _, kind = name.rpartition(".")
            if header.dtype in _MARKS.get(kind, ()):
                scheme = self._scheme_of(module)
                if scheme is None:
                    raise CheckpointError(
                        f"{header.file}: {name} is quantised, and quantization_config does not say "
                        "how: no target of its config_groups fits"
                    )
                if scheme.is_float and f"{module}.weight_scale_inv" in headers:
                    scheme = replace(scheme, scales="weight_scale_inv")
                modules[module] = scheme
        return replace(self, modules=modules)

    def _scheme_of(self, module: str) -> Scheme | None:
        if len(self.rules) == 1:
            return self.rules[0].scheme
        named = (rule.scheme for rule in self.rules if rule.names(module))
        others = (rule.scheme for rule in self.rules if "Linear" in rule.targets)
        return next(named, None) or next(others, None)
