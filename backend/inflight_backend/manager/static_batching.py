"""V1: request-level batching, the mode before in-flight batching, as settings and statistics.

A batch is formed when nothing runs; all of it goes through its contexts in one step and then
generates in lock-step, and nobody joins until the last one has finished. That is the STATIC_BATCH
capacity policy with whole contexts. Rules: contract of `GptManager`, `TrtGptModelType.V1`.

The peer pads: a request that has finished keeps its row until the batch ends. Here that row is
left out of the step, so padding costs nothing, and it is counted: `Empty Generation Slots`.
"""

from __future__ import annotations

from dataclasses import replace

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.iteration_stats import StaticBatchStats
from inflight_backend.manager.optional_params import TrtGptModelOptionalParams
from inflight_scheduler import CapacitySchedulerPolicy, ScheduledBatch, TrtGptModelType


class StaticBatchTally:
    """Remembers how large the running batch was when it was formed."""

    __slots__ = ("_batch_size",)

    def __init__(self) -> None:
        self._batch_size = 0

    def count(self, batch: ScheduledBatch, num_passed: int) -> StaticBatchStats:
        """The numbers of ``batch``, the plan that comes after the one counted last.

        ``num_passed`` others generate and do not run in it, as those whose number of beams is
        another one: their slots are not empty. An empty plan is none: the tokens of a step that
        ran may have been waited for beside it.
        """
        if batch.is_empty:
            return StaticBatchStats()
        num_generating = batch.num_generation_requests
        if num_generating == 0:
            self._batch_size = len(batch.context_chunks)
            return StaticBatchStats()
        num_finished = self._batch_size - num_generating - num_passed
        return StaticBatchStats(num_generating, num_finished)


def params_in_force(
    model_type: TrtGptModelType, params: TrtGptModelOptionalParams | None
) -> TrtGptModelOptionalParams:
    """What holds where nothing was said: V1 computes contexts whole, and so does the deterministic
    mode, in which other chunks could be other numbers."""
    params = params or TrtGptModelOptionalParams()
    is_whole = model_type == TrtGptModelType.V1 or params.deterministic_mode
    if is_whole and params.enable_chunked_context is None:
        return replace(params, enable_chunked_context=False)
    return params


def policy_in_force(
    model_type: TrtGptModelType,
    policy: CapacitySchedulerPolicy,
    params: TrtGptModelOptionalParams,
) -> CapacitySchedulerPolicy:
    """``policy`` for in-flight batching; for V1 always STATIC_BATCH, which is what V1 means.

    `ConfigurationError` for V1 with what would take its batches apart.
    """
    if model_type != TrtGptModelType.V1:
        return policy
    if params.enable_chunked_context:
        raise ConfigurationError(
            "enable_chunked_context is true, but gpt_model_type V1 computes contexts whole; "
            "set it to false or use inflight_fused_batching"
        )
    if params.logits_processors:
        raise ConfigurationError(
            "logits_processors are not available with gpt_model_type V1; remove them or use "
            "inflight_fused_batching"
        )
    if params.scheduler_class is not None:
        raise ConfigurationError(
            f"scheduler_class = '{params.scheduler_class}' cannot schedule gpt_model_type V1; "
            "remove it or use inflight_fused_batching"
        )
    return CapacitySchedulerPolicy.STATIC_BATCH
