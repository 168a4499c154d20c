"""One engine with its scheduler, blocks and slots, and the batching modes it runs in.

V1 is request-level batching, the mode before in-flight batching: a batch is formed when nothing
runs; its contexts run in one step, then it generates in lock-step, and no request joins until the
last one has finished. That is the STATIC_BATCH capacity policy with whole contexts. Rules: contract
of `GptManager`, `TrtGptModelType.V1`. TensorRT-LLM pads: a request that has finished keeps its row
until the batch ends. Here that row is left out of the step, so padding costs nothing, and it is
counted as `Empty Generation Slots`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from inflight_backend.adapters.placement import AdapterPlacement
from inflight_backend.adapters.service import AdapterConfig, AdapterService
from inflight_backend.calls import settle
from inflight_backend.engine.interface import PendingStep, StepEngine
from inflight_backend.errors import ConfigurationError
from inflight_backend.gguf_files import find_gguf
from inflight_backend.kv_events import KvEventPublisher
from inflight_backend.manager.logits_processors import LogitsHooks
from inflight_backend.manager.output_gatherer import OutputGatherer
from inflight_backend.manager.parameters import TrtGptModelOptionalParams, same_fields
from inflight_backend.manager.statistics import (
    IterationStats,
    StaticBatchTally,
    values_of_drafts,
)
from inflight_backend.manager.user_scheduler import (
    Decision,
    GuardedScheduler,
    find_scheduler_class,
    make_guarded,
)
from inflight_backend.ranks.machines import check_no_mpi
from inflight_backend.requests.adapters import has_no_adapters
from inflight_backend.requests.validation import RequestLimits
from inflight_backend.speculative.drafter import Drafter, DraftTally
from inflight_recorder.recorder import FlightRecorder
from inflight_recorder.settings import Settings, scheduler_of
from inflight_recorder.storage import RecordingFile, rotate
from inflight_scheduler import (
    ActiveRequests,
    BatchPlanner,
    BlockManager,
    CapacitySchedulerPolicy,
    ContextChunking,
    PeftPages,
    RequestScheduler,
    ReuseStats,
    ScheduledBatch,
    TrtGptModelType,
    WaitReason,
    explain,
    explain_left_out,
    find_policy,
    refusal_reason,
)


def effective_settings(
    model_type: TrtGptModelType,
    policy: CapacitySchedulerPolicy | str,
    params: TrtGptModelOptionalParams | None,
) -> tuple[CapacitySchedulerPolicy | str, TrtGptModelOptionalParams]:
    """Policy and settings with the defaults that depend on others.

    V1 means STATIC_BATCH and contexts computed whole; so does the deterministic mode compute them,
    in which other chunks could give other numbers. `ConfigurationError` for a name that is not
    registered, and for V1 with a setting that would take its batches apart.
    """
    params = params or TrtGptModelOptionalParams()
    is_v1 = model_type == TrtGptModelType.V1
    try:
        policy = find_policy(policy)
    except ValueError as error:
        raise ConfigurationError(f"scheduler_policy: {error}") from None
    for name in ("enable_chunked_context", "logits_processors", "scheduler_class"):
        if is_v1 and getattr(params, name):
            raise ConfigurationError(
                f"{name} is not available with gpt_model_type V1, whose contexts are whole and "
                "whose batches are fixed; leave it out or use inflight_fused_batching"
            )
    if (is_v1 or params.deterministic_mode) and params.enable_chunked_context is None:
        params = replace(params, enable_chunked_context=False)
    return CapacitySchedulerPolicy.STATIC_BATCH if is_v1 else policy, params


_NO_REQUESTS: Decision = ([], [], [])


def load_engine(
    model: str | Path | StepEngine,
    params: TrtGptModelOptionalParams,
    on_progress: Callable[[int, int], None] | None = None,
    max_beam_width: int = 1,
) -> StepEngine:
    """Load a checkpoint, if ``model`` is not an engine already; ``on_progress`` gets bytes loaded
    and bytes in all."""
    if not isinstance(model, str | Path):
        return model
    check_no_mpi()
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # Read when torch first allocates GPU memory. Segments that can grow avoid fragmentation by
        # steps of many sizes beside a KV pool that takes nearly all of the memory.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    from inflight_backend.engine import Engine, EngineConfig  # torch: seconds to import

    kv_cache, adapters = params.kv_cache_config, params.peft_cache_manager_config
    changes: dict[str, Any] = {
        "max_beam_width": max_beam_width,
        "enable_chunked_context": params.enable_chunked_context is not False,
        "tokens_per_block": kv_cache.tokens_per_block,
        "max_tokens_in_paged_kv_cache": kv_cache.max_tokens,
        "kv_cache_free_gpu_mem_fraction": kv_cache.free_gpu_memory_fraction,
        "kv_cache_dtype": kv_cache.dtype,
        "cross_kv_cache_fraction": kv_cache.cross_kv_cache_fraction,
        "max_attention_window": kv_cache.max_attention_window,
        "max_state_snapshots": kv_cache.max_state_snapshots if kv_cache.enable_block_reuse else 0,
        "enable_lora": True if params.names_adapters else params.enable_lora,
        "lora_cache_optimal_adapter_size": adapters.optimal_adapter_size,
        "lora_cache_max_adapter_size": adapters.max_adapter_size,
        "lora_cache_gpu_memory_fraction": adapters.device_cache_percent,
        "lora_cache_pages": adapters.num_device_pages,
        "lora_experts": _have_experts(params),
    }
    config = EngineConfig(**(same_fields(EngineConfig, params) | changes))
    # On a thread that ends before any step runs: OpenMP keeps helpers for each thread that has
    # computed, and if they outnumber the cores it ignores ``GOMP_SPINCOUNT``, so that none of them
    # spins for more work before it sleeps.
    loaded: Future[Engine] = Future()
    load: Callable[[], Engine] = partial(Engine.load, Path(model), config, on_progress)
    if config.place(0).size > 1:
        from inflight_backend.ranks.leader import LeadingEngine

        load = partial(
            LeadingEngine.start,
            Path(model),
            config,
            on_progress,
            gpu_device_ids=params.gpu_device_ids,
            machines=params.machines,
            silence_seconds=params.stall_seconds,
        )
    thread = threading.Thread(target=settle, args=(loaded, load), name="load", daemon=True)
    thread.start()
    engine = loaded.result()
    thread.join()
    return engine


def _have_experts(params: TrtGptModelOptionalParams) -> bool:
    if params.lora_experts is not None:
        return params.lora_experts
    from inflight_backend.adapters.peft_folder import names_experts

    return any(names_experts(Path(folder)) for folder in params.lora_modules.values())


def make_adapters(
    engine: StepEngine, params: TrtGptModelOptionalParams, model: str | Path | StepEngine
) -> AdapterPlacement | None:
    """Reads the adapters that are named; None if the engine runs without any."""
    if engine.adapter_pages is None or not isinstance(model, str | Path):
        return None
    from inflight_backend.engine import Engine
    from inflight_backend.models.families.registry import read_published_model

    assert isinstance(engine, Engine)
    cache = params.peft_cache_manager_config
    gguf = find_gguf(Path(model))
    service = AdapterService(
        AdapterConfig(
            cache.host_cache_size, cache.lora_prefetch_dir, params.lora_modules, params.lora_root
        ),
        engine.adapter_pages,
        engine.model_config if gguf is None else read_published_model(gguf),
        engine.config.torch_dtype,
        Path(model) if gguf is None else None,
        engine.prepare_adapter,
    )
    return AdapterPlacement(service, engine.load_adapter)


class Batcher:
    """Schedules and plans the steps of one engine. Its parts are public; each owns a resource."""

    def __init__(
        self,
        engine: StepEngine,
        policy: CapacitySchedulerPolicy | str,
        params: TrtGptModelOptionalParams,
        max_beam_width: int = 1,
        *,
        is_v1: bool = False,
        adapters: AdapterPlacement | None = None,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        self.engine, self._adapters = engine, adapters
        self.kv_events = kv_events
        self.max_beam_width = max_beam_width
        if max_beam_width > engine.max_beam_width:
            raise ConfigurationError(
                f"max_beam_width is {max_beam_width}, more than the engine was made for"
            )
        self.policy = policy
        self._params = params
        self.num_paused = 0
        self.rules = LogitsHooks(engine, params.logits_processors)
        self._chunking = self._make_chunking(params)
        self._max_drafts = params.speculative_decoding_config.max_draft_len * engine.supports_drafts
        self.block_manager = BlockManager(
            engine.num_blocks,
            engine.tokens_per_block,
            enable_reuse=params.kv_cache_config.enable_block_reuse and engine.supports_block_reuse,
            may_copy_blocks=True,
            windows=engine.windows,
            max_chunk_tokens=None if self._chunking is None else engine.max_num_tokens,
            max_drafts=self._max_drafts,
            num_snapshots=engine.num_snapshots or None,
            listener=kv_events,
        )
        self.gatherer = OutputGatherer(engine.vocab_size)
        self.active = ActiveRequests(self.block_manager, params.priority_span)
        self._drafter = self._make_drafter(params)
        self._draft_tally = DraftTally()
        self._static_tally = StaticBatchTally() if is_v1 else None
        self.is_overlapped = params.overlap_scheduler.is_on(engine)
        self._max_batch_size = params.max_batch_size
        self._settings = self._make_settings(params)
        self.planner = BatchPlanner(
            self.block_manager,
            params.max_batch_size,
            self.active,
            max_beam_width,
            self._settings.make_cross_blocks(),
        )
        self._scheduler = self._make_scheduler(params)
        self._lists: Decision = ([], [], [])
        self.recorder = self._make_recorder(params)

    def schedule(self, *, may_pause: bool = True) -> ScheduledBatch:
        """Schedule, pause requests if needed, and return the plan (empty if none can run).

        With ``may_pause`` False no request is paused: if one must be, none runs.
        """
        self.num_paused = 0
        if not self.active:
            return self.planner.plan((), ())
        if self._drafter is not None:
            self._drafter.guess(self.active)
        lists = self._scheduler.schedule_request(self.active, ())
        self._lists = _NO_REQUESTS if lists[2] and not may_pause else lists
        context, generation, paused = self._lists
        self.num_paused = len(paused)
        is_by_default = isinstance(self._scheduler, GuardedScheduler) and (
            self._scheduler.is_overruled
        )
        self.recorder.decided(self.active, context, generation, paused, is_by_default=is_by_default)
        batch = self.planner.plan(context, generation, paused)
        self.recorder.carried_out(self.block_manager.num_free_blocks)
        self.gatherer.planned(batch)
        if batch.num_drafts:
            self._draft_tally.planned(batch, self.planner.token_owners(batch))
        if self._static_tally is not None and not batch.is_empty:
            num_passed = len(self.active.generation) - batch.num_generation_requests
            self._static_tally.count(batch, num_passed)
        return batch

    @property
    def wants_drafts(self) -> bool:
        """True when the next step may verify drafts, and so cannot overlap with another one."""
        return self.active.num_with_drafts > 0 or (
            self._drafter is not None and self._drafter.is_on(self.active)
        )

    def prepare_sampling(
        self, batch: ScheduledBatch, before: tuple[ScheduledBatch, PendingStep] | None = None
    ) -> None:
        """Have the engine apply the `LogitsHooks` to ``batch``, which it runs next; ``before``:
        the previous step, if its tokens have not been read."""
        if self.rules:
            owners = self.planner.token_owners
            unread = None if before is None else (owners(before[0]), before[1])
            self.rules.prepare(owners(batch), unread)

    def place_adapters(self, batch: ScheduledBatch) -> ScheduledBatch:
        """``batch``, which the engine runs next, with the adapters of its slots; see
        `AdapterPlacement.prepare`."""
        return batch if self._adapters is None else self._adapters.prepare(batch, self._task_of)

    def forget_adapters(self) -> None:
        """A step has failed; see `AdapterPlacement.forget`."""
        if self._adapters is not None:
            self._adapters.forget()

    def _task_of(self, request_id: int) -> int | None:
        request = self.active.get(request_id)
        assert request is not None, "a plan sets up active requests only"
        return request.lora_task_id

    @property
    def num_used_slots(self) -> int:
        """Slots of the engine that are in use."""
        return self._max_batch_size - self.planner.slots.num_free_slots

    def is_idle_and_free(self) -> bool:
        """True when no request is active, and free blocks and slots equal their totals."""
        return not (self.active or self.block_manager.num_used_blocks or self.num_used_slots)

    def is_idle_and_intact(self) -> bool:
        """The same, with every block and slot accounted for; O(blocks)."""
        if not self.is_idle_and_free():
            return False
        try:
            self.active.check_integrity()
            self.block_manager.check_integrity()
            self.planner.slots.check_integrity(())
            if self.planner.answers is not None:
                self.planner.answers.check_integrity()
        except Exception:
            return False
        return True

    def rebuild(self) -> Batcher:
        """A new batcher on the same engine; a recording to a file ends here."""
        self.recorder.close()
        if self.kv_events is not None:
            self.kv_events.cleared()
        params = replace(self._params, record_file=None)
        adapters = self._adapters
        if adapters is not None:
            adapters.forget()
            adapters.service.store.release_all()
        return Batcher(
            self.engine,
            self.policy,
            params,
            self.max_beam_width,
            is_v1=self._static_tally is not None,
            adapters=adapters,
            kv_events=self.kv_events,
        )

    def measure(
        self,
        batch: ScheduledBatch,
        *,
        iteration: int,
        num_waiting: int,
        num_repairs: int,
    ) -> IterationStats:
        """The statistics of the iteration that ran ``batch``, as things stand now.

        Active requests are those still in flight; waiting ones were active when it was scheduled
        and did not run. ``num_repairs``: how often the batcher was rebuilt since something was held
        with no request active; 0, unless we have a bug. For V1 its keys replace `Generation
        Requests`, `MicroBatch ID` and `Paused Requests`.
        """
        blocks, memory = self.block_manager, self.engine.memory_usage()
        reuse = blocks.reuse_stats if blocks.enable_reuse else ReuseStats()
        num_context = len(batch.context_chunks) + len(batch.encoder_runs)  # as TensorRT-LLM counts
        num_generation = batch.num_generation_requests
        values: dict[str, float] = {
            "Active Request Count": len(self.active),
            "Context Requests": num_context,
            "Fraction used KV cache blocks": blocks.num_used_blocks / max(blocks.num_blocks, 1),
            "Free KV cache blocks": blocks.num_free_blocks,
            "Iteration Counter": iteration,
            "KV cache hit rate": reuse.hit_rate,
            "KV cache transfer time": 0,  # of disaggregated serving, as "Request count"
            "Max KV cache blocks": blocks.num_blocks,
            "Max Request Count": self._max_batch_size,
            "Request count": 0,
            "Reused KV cache blocks": reuse.num_reused_blocks,
            "Runtime CPU Memory Usage": memory.cpu,
            "Runtime GPU Memory Usage": memory.gpu,
            "Runtime Pinned Memory Usage": memory.pinned,
            "Scheduled Requests": num_context + num_generation,
            "Tokens per KV cache block": blocks.tokens_per_block,
            "Total Context Tokens": batch.num_context_tokens + batch.num_encoder_tokens,
            "Used KV cache blocks": blocks.num_used_blocks,
            "Waiting Requests": num_waiting,
        }
        if self._static_tally is not None:
            values |= self._static_tally.values(batch)
        else:
            values["Generation Requests"] = num_generation
            values["MicroBatch ID"] = 0
            values["Paused Requests"] = self.num_paused
        if batch.num_drafts:
            values |= values_of_drafts(self._draft_tally.count())
        if self._adapters is not None and self._adapters.service.is_used:
            values |= self._adapters.measure(self.active, self._num_waiting_for_pages(num_waiting))
        if num_repairs:
            values["Repairs"] = num_repairs
        return IterationStats(values)

    def adapter_labels(self) -> dict[str, str]:
        """The labels of `LORA_REQUESTS` as of the last iteration; none until there is an
        adapter."""
        if self._adapters is None or not self._adapters.service.is_used:
            return {}
        used, num_pages = self._adapters.in_use, self._adapters.service.pages.num_pages
        return {
            "max_lora": str(min(num_pages, self._max_batch_size)),
            "running_lora_adapters": ",".join(used.running),
            "waiting_lora_adapters": ",".join(used.waiting),
        }

    def _num_waiting_for_pages(self, num_waiting: int) -> int:
        """Requests that wait for pages of adapters; it is seldom that one must be looked for."""
        assert self._adapters is not None
        if num_waiting == 0 or not self._adapters.lacks_any(self.active):
            return 0
        reasons = self.explain().values()
        return sum(reason.resource == PeftPages.name for reason in reasons)

    def explain(self) -> dict[int, WaitReason]:
        """Why active requests would not run now, by id.

        A user's scheduler is not called again, as it may count its calls: its last decision is
        explained.
        """
        scheduler = self._scheduler
        if not isinstance(scheduler, GuardedScheduler):
            return explain(scheduler, self.active)
        if scheduler.is_overruled:
            return explain(scheduler.default, self.active)
        return explain_left_out(
            scheduler.name,
            self.active,
            self._lists,
            block_manager=self.block_manager,
            max_batch_size=self._max_batch_size,
            max_num_tokens=self.engine.max_num_tokens,
        )

    def make_limits(self, **others: Any) -> RequestLimits:
        """The limits of requests; ``others``: those that the engine does not determine."""
        params, longest_prompt = self._params, self.engine.max_seq_len - 1
        longest_source = min(
            self.engine.max_encoder_len,
            self.engine.num_cross_blocks * self.engine.tokens_per_block,
        )
        adapters = self._adapters
        return RequestLimits(
            vocab_size=self.engine.vocab_size,
            max_input_len=longest_prompt
            if longest_source
            else min(params.max_input_len or longest_prompt, longest_prompt),
            max_seq_len=self.engine.max_seq_len,
            max_queue_seconds=params.max_queue_seconds,
            max_run_seconds=params.max_run_seconds,
            check_processor=self.rules.check,
            max_beam_width=self.max_beam_width,
            folds_ids=params.out_of_vocabulary == "fold",
            max_draft_len=self._max_drafts,
            refusal_reason=partial(
                refusal_reason,
                block_manager=self.block_manager,
                max_num_tokens=self.engine.max_num_tokens,
                may_pause=self._settings.may_pause,
                may_chunk=self._chunking is not None,
                resources=self._settings.resources(self.planner),
            ),
            max_encoder_len=min(params.max_input_len or longest_source, longest_source),
            start_ids=self.engine.start_ids,
            read_adapter=has_no_adapters if adapters is None else adapters.service.read,
            **others,
        )

    def _make_scheduler(self, params: TrtGptModelOptionalParams) -> RequestScheduler:
        if params.scheduler_class is None:
            try:
                return scheduler_of(self.policy, self._settings, self.planner)
            except ValueError as error:  # what a policy cannot serve
                raise ConfigurationError(f"batch_scheduler_policy: {error}") from None
        if self.planner.answers is not None:
            raise ConfigurationError(
                "scheduler_class is not supported for a model with an encoder, since the scheduler "
                "that decides in its place may pause requests; leave it out"
            )
        scheduler_class = find_scheduler_class(params.scheduler_class)
        return make_guarded(scheduler_class, self._settings, self.planner)

    def _make_drafter(self, params: TrtGptModelOptionalParams) -> Drafter | None:
        config = params.speculative_decoding_config
        if config.mode == "none":
            return None
        if not self.engine.supports_drafts:
            raise ConfigurationError(
                f"speculative_decoding_mode is {config.mode}, but the engine verifies no drafts (a "
                "recurrence cannot take back a wrong one, and in deterministic_mode it may not); "
                "set it to none"
            )
        return Drafter(
            config,
            self.block_manager,
            self.engine.max_num_tokens,
            lambda request: request.request_id in self.rules,
        )

    def _make_settings(self, params: TrtGptModelOptionalParams) -> Settings:
        adapters = self._adapters
        return Settings(
            policy=self.policy,
            num_blocks=self.engine.num_blocks,
            tokens_per_block=self.engine.tokens_per_block,
            max_batch_size=self._max_batch_size,
            max_num_tokens=self.engine.max_num_tokens,
            chunking=self._chunking,
            enable_reuse=self.block_manager.enable_reuse,
            may_copy_blocks=self.engine.num_snapshots is None,
            num_snapshots=self.engine.num_snapshots or None,
            scheduler_class=params.scheduler_class,
            is_overlapped=self.is_overlapped,
            priority_span=params.priority_span,
            num_adapter_pages=None if adapters is None else adapters.service.pages.num_pages,
            windows=self.engine.windows,
            max_drafts=self._max_drafts if any(self.engine.windows) else 0,
            num_cross_blocks=self.engine.num_cross_blocks,
            max_drafting_batch=None
            if self._drafter is None
            else params.speculative_decoding_config.disable_by_batch_size,
        )

    def _make_recorder(self, params: TrtGptModelOptionalParams) -> FlightRecorder:
        sink = None
        try:
            if params.record_file:
                path = Path(params.record_file)
                if path.exists() and not path.is_file():  # opening a FIFO blocks without a reader
                    raise ConfigurationError(f"record_file = '{path}' is no regular file")
                rotate(path)
                sink = RecordingFile(path)
        except OSError as error:
            raise ConfigurationError(
                f"record_file = '{params.record_file}' cannot be written: {error.strerror}"
            ) from None
        return FlightRecorder(
            self._settings, self.block_manager, software=version("inflight"), sink=sink
        )

    def _make_chunking(self, params: TrtGptModelOptionalParams) -> ContextChunking | None:
        is_chunked, engine = params.enable_chunked_context, self.engine
        if is_chunked is None:
            is_chunked = engine.max_seq_len > engine.max_num_tokens
        if not is_chunked:
            return None
        if (params.context_chunk_unit or 0) > self.engine.max_num_tokens:
            raise ConfigurationError(
                f"context_chunk_unit is {params.context_chunk_unit}, more than max_num_tokens = "
                f"{self.engine.max_num_tokens}: such a chunk would never run"
            )
        unit_size = params.context_chunk_unit or self.engine.tokens_per_block
        return ContextChunking(
            params.context_chunking_policy,
            min(unit_size, self.engine.max_num_tokens),
            num_stages=params.pipeline_parallel_size,
        )
