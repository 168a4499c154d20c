"""GGUF files, read without torch: metadata, and tensors as rows of bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the package
`gguf` is not used: it makes an array of each of the hundred thousands of tokens and merges that a
file has, which takes seconds, and it lists the tensors of one part only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import CheckpointError

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME = 255
"""Characters of a tensor's name; the format asks for no more than 64."""

_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS"},
    **{17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176)},
    **{"Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17)},
}
"""Numbers and bytes of a block, of the types that are supported."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_BROKEN = (
    *(ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error),
    *(MemoryError, OSError),
)
_FLOAT32, _TEXT, _LIST = 6, 8, 9
"""Types of values, as the format numbers them."""


class GgufTensor(NamedTuple):
    """``shape``: slowest dimension first. ``offset`` in the file number ``part``."""

    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file or the parts of one; ``metadata`` is that of the first."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    _maps: tuple[npt.NDArray[np.uint8], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Of the first file."""
        return self.paths[0].name

    def value(self, key: str, default: Any = None) -> Any:
        """Of the metadata; below its own name the architecture's are meant: ``.block_count``."""
        if key.startswith("."):
            key = f"{self.metadata.get('general.architecture')}{key}"
        return self.metadata.get(key, default)

    def rows(self, name: str, part: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
        """Rows (None: all) of a tensor as bytes [rows, bytes of a row], mapped from the file; of
        one with three dimensions those of all its matrices."""
        tensor = self.tensors[name]
        count, size = prod(tensor.shape[:-1]), row_bytes(tensor.dtype, tensor.shape[-1])
        first, last = part or (0, count)
        start = tensor.offset + first * size
        found = self._maps[tensor.part][start : start + (last - first) * size]
        return found.reshape(last - first, size)


def plain_name(path: Path) -> str:
    """What people call the file: without its suffix and the number of its part."""
    match = _PART.fullmatch(path.name)
    return path.name.removesuffix(SUFFIX) if match is None else match[1]


def row_bytes(dtype: str, columns: int) -> int:
    """Bytes of a row of a tensor."""
    count, size = BLOCKS[dtype]
    return columns // count * size


def find_gguf(path: Path) -> Path | None:
    """The GGUF file (of several parts the first) that ``path`` is, or that alone is in the folder
    ``path``; None for another checkpoint. `CheckpointError` where there are several in a folder
    without safetensors."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    found = sorted(each for each in path.glob(f"*{SUFFIX}") if _is_model(each))
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise CheckpointError(f"{path} has several GGUF files: give one of {names}")
    return found[0] if found else None


def open_gguf(path: Path) -> GgufFile:
    """The file ``path``, with its other parts if its name says that it is one of several.

    `CheckpointError` names the file that is missing, damaged, cut off or of an unknown type.
    """
    paths = tuple(_parts(path))
    stamps = []
    for each in paths:
        try:
            status = each.stat()
        except OSError:
            raise CheckpointError(f"{each.name}: no such file, a part of {path.name}") from None
        stamps.append((status.st_mtime_ns, status.st_size))
    return _open(paths, tuple(stamps))


@lru_cache(maxsize=2)  # weights, tokenizer and texts ask one after the other
def _open(paths: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> GgufFile:
    maps: list[npt.NDArray[np.uint8]] = []
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, path in enumerate(paths):
        try:
            if not path.stat().st_size:
                raise ValueError("it is empty")
            content = np.memmap(path, np.uint8, "r")
            parser = _Parser(content)
            found = parser.read(number)
        except CheckpointError as error:
            raise CheckpointError(f"{path.name}: {error}") from None
        except _BROKEN as error:
            raise CheckpointError(
                f"{path.name}: not a whole GGUF file, truncated or damaged ({error})"
            ) from None
        maps.append(content)
        metadata = metadata or found[0]
        tensors |= found[1]
    numbers, named = _layer_numbers(metadata, len(maps))
    return GgufFile(paths, metadata, tensors | named, (*maps, numbers))


def _layer_numbers(
    metadata: dict[str, Any], part: int
) -> tuple[npt.NDArray[np.uint8], dict[str, GgufTensor]]:
    """Numbers of an activation function, one for each layer, as tensors [1] in a part of their own:
    there they are parameters, in files they are metadata."""
    numbers, tensors = list[float](), dict[str, GgufTensor]()
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        for layer, number in enumerate(metadata.get(f"xielu.{name}", ())):
            tensors[f"blk.{layer}.act_fn.{name}"] = GgufTensor("F32", (1,), part, 4 * len(numbers))
            numbers.append(number)
    return np.array(numbers, "<f4").view(np.uint8), tensors


def _is_model(path: Path) -> bool:
    """False for a later part, and for what a multimodal model has beside its decoder."""
    match = _PART.fullmatch(path.name)
    is_later = match is not None and int(match[2]) > 1
    return not is_later and not path.name.startswith("mmproj")


def _parts(path: Path) -> Iterator[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        yield path
        return
    for number in range(1, int(match[3]) + 1):
        yield path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{SUFFIX}")


class _Parser:
    """Reads the head of a file, from its beginning on."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content, self._place = memoryview(content), 0  # type: ignore[arg-type]

    def read(self, part: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Metadata and tensors."""
        if self._take(4) != _MAGIC:
            raise CheckpointError("is no GGUF file: it does not begin with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"is GGUF of version {version}; supported: 2 and 3, little-endian"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        heads = [self._head() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._place // alignment) * alignment
        tensors = {}
        for name, dtype, shape, offset in heads:
            size = prod(shape[:-1]) * row_bytes(dtype, shape[-1])
            if start + offset + size > len(self._content):
                raise CheckpointError(f"{name} ends behind the file's end: it is cut off")
            tensors[name] = GgufTensor(dtype, shape, part, start + offset)
        return metadata, tensors

    def _head(self) -> tuple[str, str, tuple[int, ...], int]:
        name, num_dimensions = self._text(), self._number("I")
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"a tensor's name is {name[:_MAX_NAME]!a}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        if shape[:-1] == (1,):  # a gate of one row, which other files have as a vector
            shape = shape[1:]
        number, offset = self._number("I"), self._number("Q")
        dtype = _TYPES.get(number, f"number {number}")
        if dtype not in BLOCKS:
            raise CheckpointError(
                f"{name} has the type {dtype}, which is not supported; supported: "
                f"{', '.join(BLOCKS)}"
            )
        if shape[-1] % BLOCKS[dtype][0]:
            raise CheckpointError(f"{name} has {shape[-1]} columns, not blocks of {dtype}")
        return name, dtype, shape, offset

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._numbers(kind, 1)[0]
        kind, count = self._number("I"), self._number("Q")
        if kind in (_TEXT, _LIST):
            return [self._value(kind) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        letter = _NUMBERS[kind]
        data = self._take(count * struct.calcsize(f"<{letter}"))
        if kind == _FLOAT32:  # the shortest decimal that is it: 1e-05, not 9.99999974e-06
            return [float(str(each)) for each in np.frombuffer(data, "<f4")]
        return list(struct.unpack(f"<{count}{letter}", data))

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, letter: str) -> int:
        [number] = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))
        return int(number)

    def _take(self, count: int) -> bytes:
        end = self._place + count
        if end > len(self._content):
            raise ValueError("it ends too early")
        data = bytes(self._content[self._place : end])
        self._place = end
        return data
