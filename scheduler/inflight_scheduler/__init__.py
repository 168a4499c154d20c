"""Decides what runs in each iteration: requests, blocks, capacity, micro-batch. Pure Python."""

from inflight_scheduler.admission import refusal_reason
from inflight_scheduler.batch import BlockAssignment, ContextChunk, ScheduledBatch, SlotSetup
from inflight_scheduler.block_manager import BlockManager
from inflight_scheduler.blocks import BlockPool
from inflight_scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
)
from inflight_scheduler.decision import check_decision
from inflight_scheduler.errors import ContextTooLong, InvalidDecision, SchedulerError
from inflight_scheduler.micro_batch import MicroBatchScheduler
from inflight_scheduler.planner import BatchPlanner, SlotPool
from inflight_scheduler.request import FinishReason, LlmRequest, LlmRequestState, SamplingParams
from inflight_scheduler.scheduler import (
    CapacitySchedulerPolicy,
    RequestScheduler,
    SimpleScheduler,
    TrtGptModelType,
    make_capacity_scheduler,
    make_scheduler,
)

__all__ = [
    "BatchPlanner",
    "BlockAssignment",
    "BlockManager",
    "BlockPool",
    "CapacityScheduler",
    "CapacitySchedulerPolicy",
    "ContextChunk",
    "ContextTooLong",
    "FinishReason",
    "GuaranteedNoEvictScheduler",
    "InvalidDecision",
    "LlmRequest",
    "LlmRequestState",
    "MaxRequestsScheduler",
    "MaxUtilizationScheduler",
    "MicroBatchScheduler",
    "RequestScheduler",
    "SamplingParams",
    "ScheduledBatch",
    "SchedulerError",
    "SimpleScheduler",
    "SlotPool",
    "SlotSetup",
    "TrtGptModelType",
    "check_decision",
    "make_capacity_scheduler",
    "make_scheduler",
    "refusal_reason",
]
