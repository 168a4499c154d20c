"""The parameters of linears and norms, by their names in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parameters.rearranging import added, pick, transposed
from inflight_backend.models.parameters.sources import (
    WEIGHT,
    ParameterSpec,
    Source,
    single_parameter,
)


def norm_parameters(
    config: ModelConfig, name: str, source: str, size: int | None = None
) -> list[ParameterSpec]:
    """Of a norm: its weight and bias, as far as it has them."""
    norm, shape = config.norm, (size or config.hidden_size,)
    specs = []
    if norm.has_weight:
        convert = partial(added, amount=norm.offset, then=None) if norm.offset else None
        weight = Source(f"{source}.weight", shape, convert)
        specs.append(ParameterSpec(f"{name}.weight", (weight,), is_wide=norm.offset != 0))
    if norm.has_bias:
        specs.append(single_parameter(f"{name}.bias", f"{source}.bias", shape))
    return specs


def linear_parameters(
    config: ModelConfig, name: str, source: str, rows: int, columns: int, has_bias: bool
) -> list[ParameterSpec]:
    """Of a linear: its weight, and its bias if it has one."""
    return joined_parameters(config, name, "", {source: rows}, columns, has_bias)


def joined_parameters(
    config: ModelConfig, name: str, folder: str, parts: Mapping[str, int], columns: int,
    has_bias: bool,
) -> list[ParameterSpec]:  # fmt: skip
    """A linear whose rows are those of ``parts``, one after the other."""
    return [
        ParameterSpec(
            f"{name}.{kind}",
            tuple(
                linear_source(config, f"{folder}{part}.{kind}", rows, columns, None)
                for part, rows in parts.items()
            ),
            kind == "weight",
        )
        for kind in (("weight", "bias") if has_bias else ("weight",))
    ]


def linear_source(
    config: ModelConfig, name: str, size: int, columns: int, rows: Sequence[int] | None
) -> Source:
    """``rows`` (None: all) of a linear's weight or bias with ``size`` outputs."""
    count = size if rows is None else len(rows)
    if name.endswith(".bias"):
        return Source(name, (size,), pick(rows), (count,))
    found = config.quantization
    is_quantised = found is not None and name.removesuffix(WEIGHT) in found.modules
    # Writers of quantised ones have turned them.
    if config.names.is_transposed and not is_quantised:
        return Source(name, (columns, size), partial(transposed, rows=rows), (count, columns))
    return Source(name, (size, columns), pick(rows), (count, columns))
