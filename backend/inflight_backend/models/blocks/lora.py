"""Adapters (LoRA, DoRA) over the linears of a decoder, each row of a step with its own.

To what a linear makes of a row an adapter adds ``B A x`` (arXiv 2106.09685). With magnitudes (DoRA,
arXiv 2402.09353) the linear's product is multiplied, too: ``c * (W x) + bias + c * (B A x)``. Here
``B`` holds all constant factors already, so that a step multiplies by nothing else.

A linear of the decoder is made of one or more linears of the checkpoint (queries, keys and values);
an adapter has a part for each that it changes. The linears of a layer's experts have one part
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight_backend.models.layers import Quantized

NO_ADAPTER = -1

Multiply: TypeAlias = Callable[[Any], Tensor]

MultiplyRows: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Linears of experts: rows sorted by expert [n, columns], where those of each begin [experts + 1],
and which row of the step each of them is [n] -> [n, rows]."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What an adapter does to rows ``start .. start + len(b)`` of what ``linear`` answers.

    a [rank, columns], b [rows, rank]. ``scales`` [rows] multiply the linear's own product, without
    its bias; None: it stays as it is. Of experts, where rows are those of each: a [experts, rank,
    columns], b [experts, rows, rank], and no scales.
    """

    linear: str
    start: int
    a: Tensor
    b: Tensor
    scales: Tensor | None = None

    @property
    def end(self) -> int:
        """The row behind the last."""
        return self.start + self.b.shape[-2]

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return self.a.shape[-2]

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a product for each expert."""
        return self.a.dim() == 3

    def to(self, device: str) -> AdapterPart:
        """The same there; on a CPU it is itself."""
        scales = None if self.scales is None else self.scales.to(device)
        return AdapterPart(self.linear, self.start, self.a.to(device), self.b.to(device), scales)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [self.a, self.b] if self.scales is None else [self.a, self.b, self.scales]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter on the host. ``digest`` of its weights: equal ones compute equal keys and
    values."""

    parts: tuple[AdapterPart, ...]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest of its parts; 1 of the part for a rank whose layers it leaves alone."""
        return max((part.rank for part in self.parts), default=1)

    @property
    def has_experts(self) -> bool:
        """Whether it changes experts."""
        return any(part.is_of_experts for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's rows: their places in the table, NO_ADAPTER for none.

    ``of_tokens`` [num_tokens]; ``of_draws``: of the rows that draw, which alone pass the end of the
    last layer.
    """

    of_tokens: npt.NDArray[np.int32]
    of_draws: npt.NDArray[np.int32]


class AdapterTable(Protocol):
    """The adapters that a decoder has at hand, by their places ``0 .. num_places``."""

    def wrap(self, name: str, linear: Multiply, bias: Tensor | None, *, of_draws: bool) -> Multiply:
        """``linear`` with the adapters' parts for it. ``of_draws``: it reads the rows that draw."""

    def wrap_experts(self, name: str, linear: MultiplyRows, *, of_draws: bool) -> MultiplyRows:
        """The same of the linears of experts."""

    def wrap_heads(self, name: str, multiply: Multiply) -> Multiply:
        """The same of a product of heads [T, heads, columns] -> [T, heads, rows], whose parts are
        as those of experts."""

    def prepare(self, adapter: Adapter) -> Any:
        """What `load` takes; any thread may call it."""

    def load(self, place: int, adapter: Any) -> None:
        """Put ``adapter`` in the place of whatever was there."""

    def unload(self, place: int) -> None:
        """The adapter there is not needed any more."""


_Rows: TypeAlias = tuple[int, slice]


class TorchAdapters:
    """In plain torch: a product for each run of rows with the same adapter."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._linears: dict[str, AdaptedLinear | AdaptedExperts | AdaptedHeads] = {}
        self._of_tokens: list[_Rows] = []
        self._of_draws: list[_Rows] = []

    def wrap(self, name: str, linear: Multiply, bias: Tensor | None, *, of_draws: bool) -> Multiply:
        """See `AdapterTable`."""
        rows = self._of_draws if of_draws else self._of_tokens
        adapted = self._linears[name] = AdaptedLinear(linear, bias, rows)
        return adapted

    def wrap_experts(self, name: str, linear: MultiplyRows, *, of_draws: bool) -> MultiplyRows:
        """See `AdapterTable`."""
        rows = self._of_draws if of_draws else self._of_tokens
        adapted = self._linears[name] = AdaptedExperts(linear, rows)
        return adapted

    def wrap_heads(self, name: str, multiply: Multiply) -> Multiply:
        """See `AdapterTable`."""
        adapted = self._linears[name] = AdaptedHeads(multiply, self._of_tokens)
        return adapted

    def prepare(self, adapter: Adapter) -> Any:
        """See `AdapterTable`."""
        return adapter

    def load(self, place: int, adapter: Any) -> None:
        """On a CPU the tensors themselves are kept, not copies: both have the same memory."""
        self.unload(place)
        for name, parts in groupby(adapter.parts, key=lambda part: part.linear):
            self._linears[name].parts[place] = [part.to(self._device) for part in parts]

    def unload(self, place: int) -> None:
        """See `AdapterTable`."""
        for linear in self._linears.values():
            linear.parts.pop(place, None)

    def begin(self, step: StepAdapters | None) -> None:
        """Before a step runs: the adapters of its rows; None if none has one."""
        self._of_tokens[:] = [] if step is None else _runs(step.of_tokens)
        self._of_draws[:] = [] if step is None else _runs(step.of_draws)


def _runs(places: npt.NDArray[np.int32]) -> list[_Rows]:
    """Neighbours with the same adapter: few, for the scheduler sorts requests by adapter."""
    ends = [*(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
    starts = [0, *ends[:-1]]
    return [
        (int(places[start]), slice(start, end))
        for start, end in zip(starts, ends, strict=True)
        if start < end and places[start] != NO_ADAPTER
    ]


class AdaptedLinear:
    """A linear, and what adapters do to some rows of its answer."""

    __slots__ = ("_bias", "_rows", "linear", "parts")

    def __init__(self, linear: Multiply, bias: Tensor | None, rows: Sequence[_Rows]) -> None:
        """``rows``: the runs of the current step, kept up to date by the table."""
        self.linear, self._bias, self._rows = linear, bias, rows
        self.parts: dict[int, list[AdapterPart]] = {}

    def __call__(self, x: Tensor | Quantized) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows]."""
        answer = self.linear(x)
        for place, rows in self._rows:
            for part in self.parts.get(place, ()):
                _add_part(part, plain_input(x, answer.dtype, rows), answer[rows], self._bias)
        return answer


class AdaptedExperts:
    """The linears of a layer's experts, and what adapters do to some rows of their answers."""

    __slots__ = ("_linear", "_rows", "parts")

    def __init__(self, linear: MultiplyRows, rows: Sequence[_Rows]) -> None:
        """See `AdaptedLinear`."""
        self._linear, self._rows = linear, rows
        self.parts: dict[int, list[AdapterPart]] = {}

    def __call__(self, x: Tensor, starts: Tensor, tokens: Tensor) -> Tensor:
        """See `MultiplyRows`."""
        answer = self._linear(x, starts, tokens)
        for place, rows in self._rows:
            parts = self.parts.get(place, ())
            if parts:
                of_adapter = (tokens >= rows.start) & (tokens < rows.stop)
                chosen = of_adapter.nonzero()[:, 0].to(starts.dtype)
                experts = torch.searchsorted(starts[1:], chosen, right=True)
                _add_experts(parts, x, answer, chosen.long(), experts)
        return answer


class AdaptedHeads:
    """A product of heads, and what adapters do to some rows of its answers."""

    __slots__ = ("_multiply", "_rows", "parts")

    def __init__(self, multiply: Multiply, rows: Sequence[_Rows]) -> None:
        """See `AdaptedLinear`."""
        self._multiply, self._rows = multiply, rows
        self.parts: dict[int, list[AdapterPart]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, columns] -> [T, heads, rows]."""
        answer = self._multiply(x)
        for place, rows in self._rows:
            for part in self.parts.get(place, ()):
                inner = torch.einsum("thc,hrc->thr", x[rows], part.a)
                answer[rows] += torch.einsum("thr,hnr->thn", inner, part.b)
        return answer


def _add_experts(
    parts: Sequence[AdapterPart], x: Tensor, answer: Tensor, rows: Tensor, experts: Tensor
) -> None:
    """``rows`` [n] of x and ``answer`` [.., rows of the linear] are those of ``experts`` [n]."""
    start = 0
    for expert, count in enumerate(torch.bincount(experts).tolist()):
        mine = rows[start : start + count]
        start += count
        if count == 0:
            continue
        inputs = x[mine]
        for part in parts:
            added = inputs @ part.a[expert].t() @ part.b[expert].t()
            answer[:, part.start : part.end].index_add_(0, mine, added)


_ALL = slice(None)


def plain_input(x: Tensor | Quantized, dtype: torch.dtype, rows: slice = _ALL) -> Tensor:
    """Rows of what a linear reads, as numbers."""
    if isinstance(x, Quantized):
        return (x.values[rows].to(torch.float32) * x.scales[rows]).to(dtype)
    return x[rows]


def _add_part(part: AdapterPart, x: Tensor, answer: Tensor, bias: Tensor | None) -> None:
    """x [n, columns]; ``answer`` [n, rows of the linear] is changed in place."""
    changed = answer[:, part.start : part.end]
    if part.scales is not None:
        if bias is not None:
            changed -= bias[part.start : part.end]
        changed *= part.scales
        if bias is not None:
            changed += bias[part.start : part.end]
    a, b = part.a.to(x.dtype), part.b.to(x.dtype)  # a router's linear is wider than the others
    changed.addmm_(x @ a.t(), b.t())
