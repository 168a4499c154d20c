"""Parameters, the tensors of a checkpoint that each is made of, and which part of them is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from inflight_backend.models.quantization.schemes import Scheme, scheme_at_load, table_at_load
from inflight_backend.models.quantization.stored import Stored, stored_tensors

if TYPE_CHECKING:  # ``inflight plan`` reads this page without torch
    from torch import Tensor


WEIGHT = ".weight"
_ORDER_BYTES = 4
_PRODUCT_ROWS = 16
"""Compiled products take whole panels of so many rows (`inflight_kernels.cpu.linear.takes`)."""
Shape = tuple[int, ...]
Convert = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True)
class Expert:
    """One of ``count`` in stacked tensors; ``is_transposed``: weights are [E, inputs, outputs], and
    scales may be too, or are one number for all."""

    index: int
    count: int
    is_transposed: bool = False

    def stacked(self, end: str, stored: Stored) -> Stored:
        """What a file has where an expert alone would have ``stored``."""
        turned = tuple(shape[::-1] for shape in stored.shapes)
        own: tuple[Shape, ...] = turned if self.is_transposed else stored.shapes
        if end != "weight":
            own = (*own, *turned, *stored.shapes)
        shared = tuple(shape for shape in own if shape in ((), (1,)))
        return replace(stored, shapes=(*((self.count, *shape) for shape in own), *shared))


Ranges = tuple[tuple[int, int], ...]
"""Of neighbours, each from the first to the one behind the last."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a parameter one of several ranks holds; None: all ``rows``, or all ``columns``."""

    rows: Ranges | None = None
    columns: Ranges | None = None

    def shape(self, whole: Shape) -> Shape:
        """Of what is left of a parameter of shape ``whole``."""
        sizes = list(whole)
        for index, ranges in enumerate((self.rows, self.columns)):
            if ranges is not None:
                sizes[index] = num_in(ranges)
        return tuple(sizes)


def num_in(ranges: Ranges) -> int:
    """How many there are in all ``ranges``."""
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, the shape it must have there, and what becomes of it.

    ``convert`` makes of it a tensor of shape ``result`` (None: of the same shape). ``part``: only
    these rows of it are read, from the first to the one behind the last. ``scheme``: of a quantised
    linear, which has other tensors in its place. ``expert``: the number of a quantised linear whose
    tensors are stacked with those of all experts. ``cut``: what of the result is taken.
    """

    name: str
    shape: Shape
    convert: Convert | None = None
    result: Shape | None = None
    part: tuple[int, int] | None = None
    scheme: Scheme | None = None
    expert: Expert | None = None
    cut: Cut = Cut()

    @property
    def module(self) -> str:
        """The linear of the checkpoint that it is the weight of."""
        return self.name.removesuffix(WEIGHT)

    @property
    def tensors(self) -> dict[str, Stored]:
        """What the checkpoint has for it, by name."""
        if self.scheme is None:
            shapes = ((1,), ()) if self.shape == (1,) else (self.shape,)
            return {self.name: Stored(shapes)}
        return {self._name(end): each for end, each in self._stored(self.scheme).items()}

    @property
    def places(self) -> dict[str, str]:
        """The names of a quantised linear's tensors, by their ends as `stored` has them."""
        assert self.scheme is not None
        return {end: self._name(end) for end in self._stored(self.scheme)}

    def _stored(self, scheme: Scheme) -> dict[str, Stored]:
        rows, columns = self.shape
        stored = stored_tensors(scheme, rows, columns)
        if self.expert is None:
            return stored
        return {end: self.expert.stacked(end, each) for end, each in stored.items()}

    def _name(self, end: str) -> str:
        """Experts in one tensor are a parameter, not a linear with a weight."""
        if self.expert is None or self.name.endswith(WEIGHT):
            return f"{self.module}.{end}"
        return self.module if end == "weight" else f"{self.module}_{end}"

    @property
    def filled(self) -> Shape:
        """Shape of the rows of the parameter that it fills."""
        return self.cut.shape(self.result or self.shape)

    @property
    def rows(self) -> int:
        """Of the parameter that it fills."""
        return self.filled[0]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter of the decoder: its sources, concatenated along the first dimension.

    ``is_wide``: kept in float32 whatever the model's dtype is. ``num_experts``: the rows are
    those of linears of so many experts, one after the other. ``is_gate``: of a linear that weighs
    experts; ``is_mixing``: of one that says how streams are mixed, which adapters leave alone.
    ``num_heads``: the rows are those of products of so many heads. ``table``: what its rows, one
    for each token, are there for: they are looked up, are the head's, or both; "positions": there
    is one for each of these, to be looked up. ``file_dtype``: in which the files have it, where
    that may be kept.
    """

    name: str
    sources: tuple[Source, ...]
    is_linear: bool = False
    is_wide: bool = False
    num_experts: int = 0
    is_gate: bool = False
    is_mixing: bool = False
    num_heads: int = 0
    table: Literal["", "rows", "head", "both", "positions"] = ""
    file_dtype: str = ""

    @property
    def shape(self) -> Shape:
        """Shape of the whole parameter."""
        first = self.sources[0].filled
        return (sum(source.rows for source in self.sources), *first[1:])

    @property
    def _may_be_packed(self) -> bool:
        """True if no more is needed of it than a linear's product, and rows."""
        return self.is_linear or self.num_experts > 0 or self.table != ""

    def is_packed(self, backend: str) -> bool:
        """True if it comes quantised and stays so in memory: where ``backend`` has a product. Of
        gates, heads and streams only the kernels of a GPU have one."""
        schemes = (source.scheme for source in self.sources)
        has_kernel = self.is_gate or self.is_mixing or self.num_heads > 0
        return (self._may_be_packed or (has_kernel and backend == "triton")) and any(
            each is not None and each.stays_packed(backend) for each in schemes
        )

    def kept_dtype(self, dtype: str, backend: str) -> str:
        """That of an unquantised one in a model of ``dtype``. Compiled products widen 16 bits in
        registers, so that float32 takes no more memory than what the files have."""
        if self.is_wide:
            return "float32"
        if not self.file_dtype or dtype != "float32" or backend != "compiled":
            return dtype
        rows = self.shape[0] // (self.num_experts or 1)
        has_product = self.shape[-1] % 2 == 0 and (self.table != "" or rows % _PRODUCT_ROWS == 0)
        return self.file_dtype if has_product else dtype

    def scheme_at_load(self, quantization: str) -> Scheme | None:
        """How an unquantised one is rounded while it is loaded; None: it stays as it is."""
        if not self._may_be_packed or self.table == "positions":
            return None
        if self.table:
            is_head = self.table != "rows"
            return table_at_load(quantization, self.shape[-1], is_head=is_head)
        return scheme_at_load(quantization, self.shape[-1])


def packed_bytes(spec: ParameterSpec, backend: str, dtype_bytes: int) -> int:
    """Bytes in memory of a parameter with ``is_packed`` for ``backend``, in a model whose numbers
    take ``dtype_bytes``. Neighbours with one input have one order of columns, and factors."""
    columns = spec.shape[1]
    is_padded = spec.num_heads == 0 and spec.table not in ("rows", "positions")
    num_bytes = columns * _ORDER_BYTES * _num_inputs(spec, lambda scheme: scheme.has_order)
    num_bytes += columns * dtype_bytes * _num_inputs(spec, lambda scheme: scheme.has_factors)
    for source in spec.sources:
        if source.scheme is None or not source.scheme.stays_packed(backend):
            num_bytes += source.rows * columns * dtype_bytes
        else:
            num_bytes += source.scheme.num_bytes(
                source.rows, columns, dtype_bytes, backend, is_padded=is_padded
            )
    return num_bytes


def _num_inputs(spec: ParameterSpec, is_counted: Callable[[Scheme], bool]) -> int:
    """Those of the linears whose scheme counts; neighbours below one module have one."""
    places = groupby(
        source.module.rpartition(".")[0]
        if source.scheme is not None and is_counted(source.scheme)
        else None
        for source in spec.sources
    )
    return sum(place is not None for place, _ in places)


def single_parameter(name: str, source: str, shape: Shape) -> ParameterSpec:
    """The parameter ``name`` of one tensor, ``source``, of this shape."""
    return ParameterSpec(name, (Source(source, shape),))
