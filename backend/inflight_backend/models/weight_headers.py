"""What the headers of a checkpoint's safetensors files say, read without torch and without weights.

The format: 8 bytes with the length of the header (little endian), the header as JSON (tensor name
-> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from inflight_backend.errors import CheckpointError
from inflight_backend.models.checkpoint_files import find_file
from inflight_backend.models.weight_files import check_names, damage, weight_files

MAX_HEADER_BYTES = 100_000_000
"""The bound that the safetensors library itself sets."""

_DTYPE_TO_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_ONE_BYTE = 1  # F8_E4M3, F8_E5M2, U8, BOOL


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Type and shape of a tensor, and the file it is in."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * _DTYPE_TO_BYTES.get(self.dtype, _ONE_BYTE)


def read_weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the weight files in ``folder``, by name.

    `CheckpointError` names the file that is missing, damaged, cut off or not what the index says.
    """
    headers: dict[str, TensorHeader] = {}
    for name, promised in weight_files(folder).items():
        path = find_file(folder, name)
        if path is None:
            raise CheckpointError(f"{name}: no such file")
        try:
            with path.open("rb") as file:
                content, num_data_bytes = _read_header(file, path)
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from None
        content.pop("__metadata__", None)
        check_names(name, content.keys(), promised)
        for tensor, fields in content.items():
            headers[tensor] = _tensor(name, tensor, fields, num_data_bytes)
    return headers


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The JSON of the header and the bytes that follow it."""
    length = int.from_bytes(file.read(8), "little")
    size = file.seek(0, 2)
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(damage(path))
    file.seek(8)
    try:
        content = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name}: the header is damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: the header is damaged")
    return content, size - 8 - length


def _tensor(file: str, name: str, fields: Any, num_data_bytes: int) -> TensorHeader:
    try:
        shape, dtype = tuple(fields["shape"]), fields["dtype"]
        start, end = fields["data_offsets"]
        is_sound = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound or not isinstance(dtype, str):
        raise CheckpointError(f"{file}: the header of {name[:80]!r} is damaged")
    header = TensorHeader(file, dtype, shape)
    if end - start != header.num_bytes or end > num_data_bytes:
        raise CheckpointError(f"{file}: {name[:80]!r} is not whole, the file is cut off or damaged")
    return header
