"""Decides what runs in each iteration: requests, blocks, capacity, micro-batch. Pure Python."""

from inflight_scheduler.batch import (
    AdapterAssignment,
    AnswerAssignment,
    BeamMove,
    BlockAssignment,
    BlockCopy,
    ContextChunk,
    EncoderRun,
    ScheduledBatch,
    SlotSetup,
    VerifiedSlot,
)
from inflight_scheduler.beam_search import BeamParams, BeamSearch, BeamStep, Hypothesis
from inflight_scheduler.errors import ContextTooLong, InvalidDecision, SchedulerError
from inflight_scheduler.kv.block_manager import BlockManager, ReuseStats
from inflight_scheduler.planning.active_requests import (
    DEFAULT_PRIORITY_SPAN,
    ActiveRequests,
    rank_at_arrival,
)
from inflight_scheduler.planning.plan_parts import NO_CANDIDATES, Candidates
from inflight_scheduler.planning.planner import BatchPlanner
from inflight_scheduler.planning.verification import can_verify
from inflight_scheduler.policies.admission import refusal_reason
from inflight_scheduler.policies.capacity import (
    POLICIES,
    CacheCapacityScheduler,
    CapacityResult,
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
    register_policy,
)
from inflight_scheduler.policies.check_decision import check_decision
from inflight_scheduler.policies.explain import WaitCode, WaitReason, explain, explain_left_out
from inflight_scheduler.policies.forecast import BlockForecast
from inflight_scheduler.policies.micro_batch import (
    ContextChunking,
    ContextChunkingPolicy,
    MicroBatchScheduler,
)
from inflight_scheduler.policies.resources import (
    KEPT_STEPS,
    AnswerRoom,
    CrossBlocks,
    PeftPages,
    Resource,
)
from inflight_scheduler.policies.scheduler import (
    CapacitySchedulerPolicy,
    RequestScheduler,
    SimpleScheduler,
    TrtGptModelType,
    find_policy,
    make_scheduler,
    policy_name,
)
from inflight_scheduler.request import LlmRequest
from inflight_scheduler.sampling import MAX_STOP_TOKEN_IDS, NO_OUTPUTS, OutputParams, SamplingParams
from inflight_scheduler.states import FinishReason, LlmRequestState

__all__ = [
    "DEFAULT_PRIORITY_SPAN",
    "KEPT_STEPS",
    "MAX_STOP_TOKEN_IDS",
    "NO_CANDIDATES",
    "NO_OUTPUTS",
    "POLICIES",
    "ActiveRequests",
    "AdapterAssignment",
    "AnswerAssignment",
    "AnswerRoom",
    "BatchPlanner",
    "BeamMove",
    "BeamParams",
    "BeamSearch",
    "BeamStep",
    "BlockAssignment",
    "BlockCopy",
    "BlockForecast",
    "BlockManager",
    "CacheCapacityScheduler",
    "Candidates",
    "CapacityResult",
    "CapacityScheduler",
    "CapacitySchedulerPolicy",
    "ContextChunk",
    "ContextChunking",
    "ContextChunkingPolicy",
    "ContextTooLong",
    "CrossBlocks",
    "EncoderRun",
    "FinishReason",
    "GuaranteedNoEvictScheduler",
    "Hypothesis",
    "InvalidDecision",
    "LlmRequest",
    "LlmRequestState",
    "MaxRequestsScheduler",
    "MaxUtilizationScheduler",
    "MicroBatchScheduler",
    "OutputParams",
    "PeftPages",
    "RequestScheduler",
    "Resource",
    "ReuseStats",
    "SamplingParams",
    "ScheduledBatch",
    "SchedulerError",
    "SimpleScheduler",
    "SlotSetup",
    "StaticBatchScheduler",
    "TrtGptModelType",
    "VerifiedSlot",
    "WaitCode",
    "WaitReason",
    "can_verify",
    "check_decision",
    "explain",
    "explain_left_out",
    "find_policy",
    "make_scheduler",
    "policy_name",
    "rank_at_arrival",
    "refusal_reason",
    "register_policy",
]
