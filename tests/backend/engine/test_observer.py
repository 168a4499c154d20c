"""What is observed of a step that fails is not told with the next one."""

from __future__ import annotations

import torch

from inflight_backend.engine.outputs import OutputRecorder


def test_a_step_that_failed_leaves_nothing_to_be_told() -> None:
    observer = OutputRecorder(num_slots=2, device="cpu")
    observer.set_up(())
    observer.record_candidates([1], [2], torch.tensor([[5, 6]]), torch.tensor([[-0.1, -0.2]]))
    observer.set_up(())  # the next step begins, and nobody has taken that
    assert observer.take() is None
