"""Leaves one GPU's code in a CUDA library, so that a wheel of a peer fits one transfer.

A library holds its kernels once per architecture, in *fat binaries*: a header of 16 bytes (magic,
version, header size, size of what follows) and entries, each with a header (kind, its size, the
size of its payload, the architecture) and a payload. Payloads of other architectures are replaced
by zeros, which compress to nothing; every offset and size stays, and the driver, which picks an
entry by its header, finds the wanted one as it was. Layout as in LLVM's `Offloading/Utility` and
the open readers of cuobjdump's format; nothing but payloads is changed, so a wrong guess can only
make a kernel unavailable, never another one run.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, bytes that follow the header
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, flags, header size, payload size, ..., minor/major


@dataclass(frozen=True, slots=True)
class Blanked:
    """What was found: entries kept and blanked, bytes blanked, in how many fat binaries."""

    binaries: int
    kept: int
    blanked: int
    blanked_bytes: int


def blank_other_architectures(data: bytearray, architecture: int) -> Blanked:
    """Zero the payloads of ``data``, a library, that are not for ``architecture`` (as 90)."""
    binaries = kept = blanked = blanked_bytes = 0
    needle = struct.pack("<I", _MAGIC)
    start = data.find(needle)
    while start >= 0:
        end = _end_of_binary(data, start)
        if end is None:  # four bytes that happen to look like one
            start = data.find(needle, start + 4)
            continue
        binaries += 1
        for payload, size, found in _entries(data, start, end):
            if found == architecture:
                kept += 1
            else:
                data[payload : payload + size] = bytes(size)
                blanked += 1
                blanked_bytes += size
        start = data.find(needle, end)
    return Blanked(binaries, kept, blanked, blanked_bytes)


def _end_of_binary(data: bytearray, start: int) -> int | None:
    """Where the fat binary at ``start`` ends, None if there is none."""
    if start + _HEADER.size > len(data):
        return None
    _, version, header_size, size = _HEADER.unpack_from(data, start)
    end = start + header_size + int(size)
    is_one = version == 1 and header_size == _HEADER.size and end <= len(data)
    return end if is_one else None


def _entries(data: bytearray, start: int, end: int) -> list[tuple[int, int, int]]:
    """(offset of the payload, its size, architecture) of the entries between two offsets."""
    found = []
    place = start + _HEADER.size
    while place + _ENTRY.size <= end:
        kind, _, header_size, size, _, _, _, _, architecture = _ENTRY.unpack_from(data, place)
        payload = place + header_size
        if kind not in (1, 2) or header_size < _ENTRY.size or payload + size > end:
            raise ValueError(f"no entry of a fat binary at {place:#x}: kind {kind}, {size} bytes")
        found.append((payload, size, architecture))
        place = payload + size
    return found
