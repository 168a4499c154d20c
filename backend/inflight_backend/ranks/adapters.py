"""The part of an adapter that a rank holds, and its way there.

Where a linear is cut by rows, ``A`` is whole and ``B`` has the rows; where it is cut by columns
``A`` has them and ``B`` is whole, and the product is added before the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight_backend.models.blocks.lora import Adapter, AdapterPart
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.parallel.place import Place
from inflight_backend.models.parallel.shards import cut_of, local_name
from inflight_backend.models.parameters import Cut, decoder_parameters
from inflight_backend.ranks.messages import PartBytes, TensorBytes

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class AdapterCuts:
    """Which part of the linears of layers a rank has, by their names in the whole model."""

    cuts: Mapping[str, tuple[str, Cut]]

    @classmethod
    def of(cls, model: ModelConfig, place: Place) -> AdapterCuts:
        """Of the rank at ``place`` of ``model``."""
        cuts = {}
        for spec in decoder_parameters(model):
            name, cut = local_name(model, spec.name, place), cut_of(model, spec, place)
            if spec.is_linear and name is not None and cut is not None:
                cuts[spec.name.removesuffix(_WEIGHT)] = name.removesuffix(_WEIGHT), cut
        return cls(cuts)

    def part_of(self, adapter: Adapter) -> Adapter:
        """What of ``adapter`` changes this rank's linears."""
        parts = (self._part_of(part) for part in adapter.parts)
        return replace(adapter, parts=tuple(part for part in parts if part is not None))

    def _part_of(self, part: AdapterPart) -> AdapterPart | None:
        if part.linear not in self.cuts:
            return None
        name, cut = self.cuts[part.linear]
        start, a, b, scales = part.start, part.a, part.b, part.scales
        if cut.columns is not None:
            a = torch.cat([a[:, first:end] for first, end in cut.columns], 1)
        if cut.rows is not None:
            kept = [(max(first, start), min(end, part.end)) for first, end in cut.rows]
            places = [slice(first - start, end - start) for first, end in kept if first < end]
            if not places:
                return None
            b = torch.cat([b[rows] for rows in places])
            scales = None if scales is None else torch.cat([scales[rows] for rows in places])
            start = sum(max(min(end, part.start) - first, 0) for first, end in cut.rows)
        return AdapterPart(name, start, a.contiguous(), b.contiguous(), scales)


def to_bytes(part: AdapterPart) -> PartBytes:
    """For a message."""
    scales = None if part.scales is None else _to_bytes(part.scales)
    return PartBytes(part.linear, part.start, _to_bytes(part.a), _to_bytes(part.b), scales)


def from_bytes(part: PartBytes) -> AdapterPart:
    """Of a message."""
    scales = None if part.scales is None else _from_bytes(part.scales)
    return AdapterPart(part.linear, part.start, _from_bytes(part.a), _from_bytes(part.b), scales)


def _to_bytes(tensor: Tensor) -> TensorBytes:
    content = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return TensorBytes(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content)


def _from_bytes(found: TensorBytes) -> Tensor:
    dtype: torch.dtype = getattr(torch, found.dtype)
    content = torch.frombuffer(bytearray(found.content), dtype=torch.uint8)
    return content.view(dtype).view(found.shape)
