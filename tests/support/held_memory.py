"""What an object keeps in memory, as tensors."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor


def held_bytes(root: Any) -> int:
    """Bytes of all tensors that can be reached from ``root``, through attributes and closures; what
    two tensors share counts once if they begin alike."""
    found, seen, left = dict[int, int](), set[int](), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            # oneDNN's layouts have no address.
            place = id(each) if each.is_mkldnn else each.data_ptr()
            found[place] = max(found.get(place, 0), each.numel() * each.itemsize)
        elif isinstance(each, FunctionType):  # not its globals
            left += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        else:
            left += gc.get_referents(each)
    return sum(found.values())
