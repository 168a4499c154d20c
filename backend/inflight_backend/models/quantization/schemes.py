"""What a quantised linear is like, and which linears of a checkpoint are quantised how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import gcd, prod

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import TensorHeader

_OF_CODEBOOK = (
    *("mxfp4", "mxfp4-blocks", "modelopt-mxfp4", "nvfp4", "modelopt-nvfp4", "bnb4"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
_KERNEL_COLUMNS = (
    128  # the kernels pad to a multiple of it (inflight_kernels.ops.linear.quantized_linear)
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight [rows, columns] of a linear is kept: numbers of ``bits``, times scales.

    ``layout``: how files have it (`stored`), of GGUF the type of its blocks. ``group_size``:
    columns that share a scale (None: all), and ``block_rows`` rows do. ``is_symmetric``: the number
    for zero is the middle one. ``has_order``: groups are not of neighbouring columns.
    ``zero_offset`` is added to the numbers for zero in the file. ``quantizes_input``: what the
    linear reads becomes numbers of the weight's type, with a scale per token (with groups: and
    group); FP8 only where a device multiplies it. ``scales``: the end of the name of the tensor
    that holds them. ``scale_dtype``: of these in the files, of integers of 4 bits, if that is
    float16 or bfloat16: compiled products (`kept_scales`) widen them in registers.
    ``has_factors``: what the linear reads is multiplied by a number for each column first.
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
    scale_dtype: str = ""
    has_factors: bool = False

    @property
    def is_float(self) -> bool:
        """True for FP8 (e4m3)."""
        return self.layout == "float8"

    def stays_packed(self, backend: str) -> bool:
        """Whether memory holds what the file does, for that ``attention_backend``. That in plain
        torch has no product of FP8: widening it for each one takes ten times as long."""
        return backend != "torch" or not self.is_float

    @property
    def has_codebook(self) -> bool:
        """True if the numbers are indices of a table of 16."""
        return self.layout in _OF_CODEBOOK

    @property
    def has_zeros(self) -> bool:
        """Whether memory holds a number for zero for each scale."""
        return not self.has_codebook and not self.is_symmetric

    def group_columns(self, columns: int) -> int:
        """Neighbours of a row with one scale. The groups of bitsandbytes are of the rows one after
        the other, so they may begin in one row and end in the next."""
        if self.group_size is None:
            return columns
        return gcd(self.group_size, columns) if self.layout == "bnb4" else self.group_size

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.group_columns(columns))

    def num_bytes(
        self, rows: int, columns: int, dtype_bytes: int, backend: str, *, is_padded: bool = True
    ) -> int:
        """Bytes that a weight takes in memory, without the order of its columns: as
        `forms.PackedWeight`, but kernels (``backend`` triton) pad its columns unless ``is_padded``
        is false, and there and in torch zeros are as wide as scales. ``dtype_bytes``: of a number
        of the model."""
        padding = -columns % _KERNEL_COLUMNS if backend == "triton" and is_padded else 0
        groups, of_zeros = self.num_groups(columns), 0
        if self.has_zeros or self._is_in_pairs(backend, dtype_bytes):
            is_small = backend == "compiled" and self.bits == 4 and self.layout not in GGUF_SCHEMES
            of_zeros = -(-groups // 2) if is_small else groups * dtype_bytes
        of_scales = groups * (4 if self.is_float else dtype_bytes)
        if self.kept_scales(backend):
            of_scales = groups * 2
        return rows * ((columns + padding) * self.bits // 8 + of_scales + of_zeros)

    def kept_scales(self, backend: str) -> str:
        """The type in which they stay in a model of float32; "": in that."""
        return self.scale_dtype if backend == "compiled" else ""

    def _is_in_pairs(self, backend: str, dtype_bytes: int) -> bool:
        """Whether each scale has a number for zero beside it in any case: torch's product of 4 bits
        in bfloat16 takes them so."""
        return backend == "torch" and self.bits == 4 and not self.has_codebook and dtype_bytes == 2


AT_LOAD = ("int8", "int4")
"""What unquantised checkpoints can be rounded to while they are loaded (`rounding`)."""

_GROUP_SIZES = (128, 64, 32)


def scheme_at_load(quantization: str, columns: int) -> Scheme | None:
    """That of a weight with so many columns; None for other values of ``quantization``.

    int8: a scale for each row. int4: groups of 128 columns, or of 64 or 32 if these divide them and
    128 does not, else of all; each has the number that stands for 0 beside its scale, which takes
    no more memory than the middle one would. Columns of an odd number cannot be packed: int8.
    """
    if quantization not in AT_LOAD:
        return None
    if quantization == "int8" or columns % 2:
        return Scheme("int8", 8)
    return Scheme("int4", 4, group_size=_group_size(columns), is_symmetric=False)


def table_at_load(quantization: str, columns: int, *, is_head: bool) -> Scheme | None:
    """The same of a table with a row for each token, which is int8 beside int4 too: few bits of it
    show in every logit. A head has a scale for each row; rows that are looked up alone, which may
    be those of all layers side by side, have groups like int4's."""
    if quantization not in AT_LOAD:
        return None
    return Scheme("int8", 8, group_size=None if is_head else _group_size(columns))


def _group_size(columns: int) -> int | None:
    return next((each for each in _GROUP_SIZES if columns % each == 0), None)


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of the linears that ``targets`` name: "Linear" (all others), "Embedding", exact
    names, and patterns behind "re:"."""

    scheme: Scheme
    targets: tuple[str, ...] = ("Linear",)

    def names(self, module: str) -> bool:
        """True if one of the targets is that linear, by its name or pattern."""
        if "Embedding" in self.targets and _EMBEDDING.search(module):
            return True
        return any(
            re.match(each[3:], module) is not None if each.startswith("re:") else each == module
            for each in self.targets
        )


_EMBEDDING = re.compile(r"(^|[._])(embed|wte|wpe)[^.]*$")
"""Names of embeddings, whose class targets may give."""


_GROUPS_OF_32 = Scheme("", 4, group_size=32)
GGUF_SCHEMES = {
    name: replace(scheme, layout=name)
    for name, scheme in {
        "Q4_0": _GROUPS_OF_32,
        "Q4_1": replace(_GROUPS_OF_32, is_symmetric=False),
        "Q4_K": replace(_GROUPS_OF_32, is_symmetric=False),
        "Q2_K": replace(_GROUPS_OF_32, group_size=16, is_symmetric=False),
        "Q3_K": replace(_GROUPS_OF_32, group_size=16),
        "Q5_0": replace(_GROUPS_OF_32, bits=8),
        "Q5_1": replace(_GROUPS_OF_32, bits=8, is_symmetric=False),
        "Q5_K": replace(_GROUPS_OF_32, bits=8, is_symmetric=False),
        "Q6_K": replace(_GROUPS_OF_32, bits=8, group_size=16),
        "Q8_0": replace(_GROUPS_OF_32, bits=8),
        "IQ4_NL": _GROUPS_OF_32,
        "IQ4_XS": _GROUPS_OF_32,
        "MXFP4": _GROUPS_OF_32,
    }.items()
}
"""By type: how memory holds the numbers of GGUF's blocks (`blocks`). Numbers of 2 and 3 bits take
4, those of 5 and 6 take 8."""

_OF_MODELOPT = ("modelopt-nvfp4", "modelopt-mxfp4", "modelopt-int4")
SEEN_IN_TENSORS = ("modelopt-nvfp4", "modelopt-int4")
"""Layouts whose groups have any size, which config.json need not say."""
_MARKS: dict[tuple[str, str], tuple[str, ...]] = {
    (".weight", "F8_E4M3"): ("float8",),
    (".weight", "I8"): ("int8", "bnb8"),
    (".weight.absmax", "F32"): ("bnb4",),
    (".weight.absmax", "U8"): ("bnb4",),
    (".weight_packed", "I32"): ("packed",),
    (".weight", "U8"): (*_OF_MODELOPT, "bnb4"),
    (".weight_packed", "U8"): ("mxfp4", "nvfp4"),
    (".qweight", "I32"): ("awq", "gptq"),
    ("_blocks", "U8"): ("mxfp4-blocks",),
}
"""Tensors that only a quantised linear has, by the ends of their names and their types, and the
layouts that have them."""
FACTORS = "pre_quant_scale"
"""The end of the name of `Scheme.has_factors`: ModelOpt's, of AWQ and SmoothQuant."""
HALVES = {"F16": "float16", "BF16": "bfloat16"}
_SCALES = {"packed": "weight_scale", "awq": "scales", "gptq": "scales"}
_STACKS = {"F8_E4M3": ("float8",), "U8": ("modelopt-nvfp4",)}
"""The same of stacked experts, which are a parameter beside its scales."""
_STACK_SCALES = ("scale_inv", "weight_scale", "scale")


def _marks(name: str, headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Ends of that name, and the layouts that it may be of."""
    header = headers[name]
    for (end, dtype), layouts in _MARKS.items():
        if header.dtype == dtype and name.endswith(end):
            yield end, layouts
    is_stack = len(header.shape) == 3 and header.dtype in _STACKS
    if is_stack and any(f"{name}_{end}" in headers for end in _STACK_SCALES):
        yield "", _STACKS[header.dtype]


def _name_of_scales(headers: Mapping[str, TensorHeader], module: str, default: str) -> str:
    """Tools call them differently: the end of the name in this file."""
    names = {"weight_scale_inv": f"{module}.weight_scale_inv"}
    names |= {end: f"{module}_{end}" for end in _STACK_SCALES}
    return next((end for end, name in names.items() if name in headers), default)


def _block_size(headers: Mapping[str, TensorHeader], module: str) -> int:
    """Of bitsandbytes, as the number of scales tells it: the smallest power of two that fits."""
    weight, scales = (headers.get(f"{module}.weight{end}") for end in ("", ".absmax"))
    if weight is None or scales is None:
        return _USUAL_BLOCK  # what is missing is told later
    numbers, count = 2 * weight.num_bytes, prod(scales.shape)
    sizes = (2**power for power in range(4, 13))
    return next((size for size in sizes if -(-numbers // size) <= count), _USUAL_BLOCK)


_USUAL_BLOCK = 64


def _size_seen(headers: Mapping[str, TensorHeader], module: str, scheme: Scheme) -> int | None:
    """The columns that share a scale, as many as there are scales of a row; the usual number where
    these do not fit, which is told later."""
    weight, scales = (headers.get(f"{module}.{end}") for end in ("weight", "weight_scale"))
    if weight is None or scales is None or len(weight.shape) != 2 or len(scales.shape) != 2:
        return scheme.group_size
    columns = weight.shape[1] * (1 if scheme.layout == "modelopt-int4" else 2)
    groups = scales.shape[1]
    return columns // groups if groups and columns % groups == 0 else scheme.group_size


def _covers(name: str, module: str) -> bool:
    """Whether a name of what is left out, a part of one, or a pattern is for that linear."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    forms = (name, f"{name}.*", f"*.{name}", f"*.{name}.*")
    return any(fnmatchcase(module, each) for each in forms)


@dataclass(frozen=True, slots=True)
class Quantization:
    """``rules`` of ``quantization_config``; ``modules``: the quantised linears of the checkpoint by
    name, known once its headers are (`found_in`). ``kv_cache``: "fp8" or "int8", the type of the KV
    cache that the checkpoint was made for. ``left_out``: what tools write about linears that are
    not quantised."""

    name: str
    rules: tuple[Rule, ...]
    modules: Mapping[str, Scheme] = field(default_factory=dict)
    kv_cache: str | None = None
    left_out: tuple[str, ...] = ()

    def found_in(self, headers: Mapping[str, TensorHeader]) -> Quantization:
        """The same with ``modules``. Which linears are quantised is seen by their tensors: what
        tools write about those that are not (``ignore``, ``modules_to_not_convert``) goes by names
        that a checkpoint need not have. `CheckpointError` for a linear without a rule."""
        modules = {}
        for name, header in headers.items():
            if name.endswith(".weight") and header.dtype in GGUF_SCHEMES:
                modules[name.removesuffix(".weight")] = GGUF_SCHEMES[header.dtype]
            for end, layouts in _marks(name, headers):
                module = name.removesuffix(end)
                scheme = self._scheme_of(module, layouts)
                if scheme is None:
                    raise CheckpointError(
                        f"{header.file}: {name} is {header.dtype}, and quantization_config does "
                        "not say how it is quantised: none of its schemes is for it"
                    )
                if scheme.is_float:
                    scheme = replace(scheme, scales=_name_of_scales(headers, module, scheme.scales))
                if scheme.layout == "bnb4":
                    scheme = replace(scheme, group_size=_block_size(headers, module))
                if scheme.layout in SEEN_IN_TENSORS:
                    scheme = replace(scheme, group_size=_size_seen(headers, module, scheme))
                if f"{module}.{FACTORS}" in headers:
                    scheme = replace(scheme, has_factors=True)
                if (of_scales := _SCALES.get(scheme.layout)) and scheme.bits == 4:
                    stored = headers.get(f"{module}.{of_scales}")
                    dtype = "" if stored is None else HALVES.get(stored.dtype, "")
                    scheme = replace(scheme, scale_dtype=dtype)
                modules[module] = scheme
        return replace(self, modules=modules)

    def assumed(self, linears: Iterable[str], dtype: str) -> Quantization:
        """The same with the ``modules`` that a checkpoint of ``dtype`` without headers will have:
        of its ``linears`` those that a rule is for and that are not left out by name."""
        modules = {}
        for module in linears:
            named = (rule.scheme for rule in self.rules if rule.names(module))
            others = (rule.scheme for rule in self.rules if "Linear" in rule.targets)
            scheme = next(named, None) or next(others, None)
            if scheme is not None and not any(_covers(each, module) for each in self.left_out):
                if scheme.layout in _SCALES and scheme.bits == 4:
                    is_own = scheme.layout == "packed"  # others write float16
                    kept = dtype if dtype in HALVES.values() else ""
                    scheme = replace(scheme, scale_dtype=kept if is_own else "float16")
                modules[module] = scheme
        return replace(self, modules=modules)

    def _scheme_of(self, module: str, layouts: tuple[str, ...]) -> Scheme | None:
        """Of the rules for such tensors: that which names the module, or is for all, or is the
        only one."""
        rules = [rule for rule in self.rules if rule.scheme.layout in layouts]
        named = (rule.scheme for rule in rules if rule.names(module))
        others = (rule.scheme for rule in rules if "Linear" in rule.targets or len(rules) == 1)
        return next(named, None) or next(others, None)
