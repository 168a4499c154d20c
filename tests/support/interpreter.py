"""Triton's interpreter with less to do per call: interpreted tests wait for it most.

Whenever a kernel calls another jitted function (`tl.sum` and `tl.cdiv` are such, too), the
interpreter replaces the members of `triton.language` by its own once more, which takes longer than
most of these functions. Here a launch replaces them once, wherever its functions look for them.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from triton import language
from triton.runtime import interpreter

# To the interpreter a function is what it sees: kernels the first, Triton's own functions both.
_SEES_ALL = types.SimpleNamespace(__globals__={"tl": language, "core": language.core})


def patch_once_per_launch() -> None:
    """From now on, in this process. Calling it again changes nothing."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    if launch.__module__ == __name__:
        return
    # Triton does at the first launch, when `print` is replaced, whose signature 3.10 cannot tell.
    importlib.import_module("triton.experimental.gluon")
    is_patched = False

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_patched
        is_patched = False
        try:
            launch(self, *args, **kwargs)
        finally:
            is_patched = False

    def patch_at_launch(_: Any) -> Any:
        nonlocal is_patched
        if is_patched:
            return None  # only a launch restores
        is_patched = True
        return patch(_SEES_ALL)

    interpreter.GridExecutor.__call__ = call
    interpreter._patch_lang = patch_at_launch
