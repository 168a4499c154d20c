"""Decides what runs in each iteration: requests, blocks, capacity, micro-batch. Pure Python."""

from inflight_scheduler.active import DEFAULT_PRIORITY_SPAN, ActiveRequests
from inflight_scheduler.admission import refusal_reason
from inflight_scheduler.batch import (
    BlockAssignment,
    BlockCopy,
    ContextChunk,
    ScheduledBatch,
    SlotSetup,
)
from inflight_scheduler.block_manager import BlockManager, ReuseStats
from inflight_scheduler.blocks import BlockPool
from inflight_scheduler.capacity import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from inflight_scheduler.chunking import ContextChunking, ContextChunkingPolicy
from inflight_scheduler.decision import check_decision
from inflight_scheduler.errors import ContextTooLong, InvalidDecision, SchedulerError
from inflight_scheduler.explain import WaitCode, WaitReason, explain
from inflight_scheduler.forecast import BlockForecast
from inflight_scheduler.micro_batch import MicroBatchScheduler
from inflight_scheduler.planner import BatchPlanner, SlotPool
from inflight_scheduler.request import FinishReason, LlmRequest, LlmRequestState
from inflight_scheduler.reuse import PrefixMatch
from inflight_scheduler.sampling import NO_OUTPUTS, OutputParams, SamplingParams
from inflight_scheduler.scheduler import (
    CapacitySchedulerPolicy,
    RequestScheduler,
    SimpleScheduler,
    TrtGptModelType,
    make_capacity_scheduler,
    make_scheduler,
)

__all__ = [
    "DEFAULT_PRIORITY_SPAN",
    "NO_OUTPUTS",
    "ActiveRequests",
    "BatchPlanner",
    "BlockAssignment",
    "BlockCopy",
    "BlockForecast",
    "BlockManager",
    "BlockPool",
    "CapacityScheduler",
    "CapacitySchedulerPolicy",
    "ContextChunk",
    "ContextChunking",
    "ContextChunkingPolicy",
    "ContextTooLong",
    "FinishReason",
    "GuaranteedNoEvictScheduler",
    "InvalidDecision",
    "LlmRequest",
    "LlmRequestState",
    "MaxRequestsScheduler",
    "MaxUtilizationScheduler",
    "MicroBatchScheduler",
    "OutputParams",
    "PrefixMatch",
    "RequestScheduler",
    "ReuseStats",
    "SamplingParams",
    "ScheduledBatch",
    "SchedulerError",
    "SimpleScheduler",
    "SlotPool",
    "SlotSetup",
    "StaticBatchScheduler",
    "TrtGptModelType",
    "WaitCode",
    "WaitReason",
    "check_decision",
    "explain",
    "make_capacity_scheduler",
    "make_scheduler",
    "refusal_reason",
]
