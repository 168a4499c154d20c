"""Stands for CUDA graphs where there is no GPU: a step that runs again, under their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What would wait for the device, or have a shape that depends on numbers: a capture refuses it.
_FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::_unique2",
}


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that a CUDA graph could not hold."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.name() not in _FORBIDDEN, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


class Rerun:
    """A `Capture`: the replay runs the same call and writes to the tensor of the first run.

    ``sizes`` are the answers' lengths in the order of capture, ``num_replays`` counts.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_replays = 0

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Run it once and keep it."""
        answer = self._run(call)
        self.sizes.append(len(answer))

        def replay() -> None:
            self.num_replays += 1
            answer.copy_(self._run(call))

        return replay, answer

    def _run(self, call: Callable[[], Tensor]) -> Tensor:
        with NoSync():  # type: ignore[no-untyped-call]
            return call()
