"""Further resources (contract 4.2): cross blocks, pages of adapters, window pools, bypasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.scheduler_world import generating, ids, make_request

from inflight_scheduler import (
    POLICIES,
    ActiveRequests,
    AnswerRoom,
    BlockManager,
    CapacityScheduler,
    CapacitySchedulerPolicy,
    ContextChunking,
    ContextChunkingPolicy,
    ContextTooLong,
    CrossBlocks,
    GuaranteedNoEvictScheduler,
    LlmRequest,
    LlmRequestState,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    PeftPages,
    Resource,
    SchedulerError,
    SimpleScheduler,
    StaticBatchScheduler,
    WaitCode,
    WaitReason,
    explain,
    make_scheduler,
)
from inflight_scheduler.policies.fast_path import is_applicable

GUARANTEED = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC = CapacitySchedulerPolicy.STATIC_BATCH


def pages(num_pages: int) -> PeftPages:
    """Adapter n has n pages."""
    return PeftPages(num_pages, lambda task_id: task_id)


def with_adapter(request_id: int, task_id: int | None, num_prompt: int = 1) -> LlmRequest:
    return make_request(request_id, num_prompt, 4, lora_task_id=task_id)


def with_encoder(request_id: int, encoder_length: int) -> LlmRequest:
    request = make_request(request_id, 2, 2, encoder_length=encoder_length)
    assert request.is_encoder_init_state
    return request


def context_after_encoder(request_id: int, encoder_length: int) -> LlmRequest:
    request = with_encoder(request_id, encoder_length)
    request.finish_encoder()
    return request


def scheduler_class(policy: CapacitySchedulerPolicy) -> Callable[..., CapacityScheduler]:
    return POLICIES[policy.name.lower()]


Adapters = list[tuple[int, int | None, int]]  # id, adapter, prompt


@pytest.mark.parametrize("policy", [GUARANTEED, STATIC], ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    ("num_blocks", "adapters", "fitting"),
    [
        (16, [(1, 2, 1), (2, 2, 1), (3, 1, 1)], [1, 2, 3]),  # an adapter counts once
        # A request that lacks only pages is passed over; one that lacks blocks ends the list.
        (16, [(1, 2, 1), (2, 3, 1), (3, None, 1), (4, 1, 1)], [1, 3, 4]),
        (4, [(1, 2, 1), (2, 3, 12), (3, None, 1)], [1]),
    ],
)
def test_three_pages_are_reserved(
    policy: CapacitySchedulerPolicy, num_blocks: int, adapters: Adapters, fitting: list[int]
) -> None:
    scheduler = scheduler_class(policy)(8, BlockManager(num_blocks, 4), resources=[pages(3)])
    requests = [with_adapter(*adapter) for adapter in adapters]
    assert ids(*scheduler.schedule_request(requests)) == (fitting, [])


@pytest.mark.parametrize("policy", [GUARANTEED, STATIC], ids=lambda policy: policy.name)
def test_cross_blocks_are_reserved_and_end_the_list(policy: CapacitySchedulerPolicy) -> None:
    """All of them for the first chunk, and none later."""
    manager, cross = BlockManager(16, 4), BlockManager(4, 4)
    resources = [pages(1), CrossBlocks(cross)]
    scheduler = scheduler_class(policy)(8, manager, resources=resources)
    requests = [context_after_encoder(i, length) for i, length in ((1, 9), (2, 8), (3, 4))]
    assert ids(*scheduler.schedule_request(requests)) == ([1], [])  # 3 of 4, then 2
    later = context_after_encoder(4, 13)
    later.context_chunk_size = 1
    later.move_to_next_context_chunk()
    assert manager.allocate(4, 2) is not None
    assert cross.allocate(4, 13) is not None
    assert cross.num_free_blocks == 0
    assert ids(*scheduler.schedule_request([later])) == ([4], [])


def test_running_adapters_are_reserved_first() -> None:
    manager = BlockManager(16, 4)
    running = generating(with_adapter(9, 2), manager)
    scheduler = GuaranteedNoEvictScheduler(8, manager, resources=[pages(3)])
    requests = [with_adapter(1, 3), with_adapter(2, 2), running]
    assert ids(*scheduler.schedule_request(requests)) == ([9, 2], [])


def test_a_static_batch_waits_for_its_end() -> None:
    manager = BlockManager(16, 4)
    running = generating(with_adapter(9, None), manager)
    scheduler = StaticBatchScheduler(8, manager, resources=[pages(3)])
    assert ids(*scheduler.schedule_request([with_adapter(1, 1), running])) == ([9], [])


class TestMaxUtilization:
    def test_lacking_pages_look_for_a_victim(self) -> None:
        manager = BlockManager(16, 4)
        first, last = (generating(with_adapter(i, i), manager) for i in (1, 3))
        scheduler = MaxUtilizationScheduler(8, manager, resources=[pages(3)])
        # 2 needs two pages next to 1; 3 is paused though it holds none that are counted.
        assert ids(*scheduler.schedule_request([first, with_adapter(2, 2), last])) == ([1, 2], [3])

    def test_without_a_victim_the_walk_ends(self) -> None:
        scheduler = MaxUtilizationScheduler(8, BlockManager(16, 4), resources=[pages(3)])
        requests = [with_adapter(1, 2), with_adapter(2, 3), with_adapter(3, None)]
        assert ids(*scheduler.schedule_request(requests)) == ([1], [])

    def test_an_encoder_is_rejected(self) -> None:
        manager, cross = BlockManager(4, 4), CrossBlocks(BlockManager(4, 4))
        with pytest.raises(ValueError, match="cannot run a model with an encoder"):
            MaxUtilizationScheduler(8, manager, resources=[cross])
        with pytest.raises(ValueError, match="use guaranteed_no_evict or static_batch"):
            make_scheduler(UTILIZATION, manager, max_batch_size=8, resources=[cross])


class TestEncoder:
    def test_it_is_admitted_without_blocks_and_its_context_is_not(self) -> None:
        cross = CrossBlocks(BlockManager(2, 4))
        scheduler = make_scheduler(
            GUARANTEED, BlockManager(1, 4), max_batch_size=8, max_num_tokens=99, resources=[cross]
        )
        requests = [with_encoder(1, 8), with_encoder(2, 8)]
        assert ids(*scheduler.schedule_request(requests, ())) == ([1, 2], [], [])
        for request in requests:
            request.finish_encoder()
        assert ids(*scheduler.schedule_request(requests, ())) == ([1], [], [])

    def test_room_for_its_answer_is_not_waited_for_by_contexts(self) -> None:
        """6 of 10 tokens are taken: the first, which has come late and is urgent, does not fit."""
        resources: list[Resource] = [
            CrossBlocks(BlockManager(4, 4)),
            AnswerRoom(10, lambda: 6),
        ]
        scheduler = make_scheduler(
            GUARANTEED, BlockManager(8, 4), max_batch_size=8, max_num_tokens=99, resources=resources
        )
        requests = [with_encoder(1, 5), context_after_encoder(2, 6), with_encoder(3, 4)]
        requests.append(with_encoder(4, 1))
        assert ids(*scheduler.schedule_request(requests, ())) == ([3, 2], [], [])
        assert explain(scheduler, requests)[4].code is WaitCode.RESOURCE

    def test_its_adapter_must_be_there(self) -> None:
        cross = CrossBlocks(BlockManager(2, 4))
        scheduler = GuaranteedNoEvictScheduler(
            8,
            BlockManager(1, 4),
            resources=[cross, pages(1)],
            no_schedule_until_state=LlmRequestState.ENCODER_INIT,
        )
        request = with_encoder(1, 8)
        request.lora_task_id = 2
        assert ids(*scheduler.schedule_request([request])) == ([], [])

    @pytest.mark.parametrize(
        "scheduler_class", [GuaranteedNoEvictScheduler, MaxUtilizationScheduler]
    )
    def test_without_a_cross_pool_it_is_an_error(
        self, scheduler_class: type[GuaranteedNoEvictScheduler | MaxUtilizationScheduler]
    ) -> None:
        scheduler = scheduler_class(
            8, BlockManager(4, 4), no_schedule_until_state=LlmRequestState.ENCODER_INIT
        )
        with pytest.raises(SchedulerError, match="request 7 has 5 tokens for an encoder, but"):
            scheduler.schedule_request([with_encoder(7, 5)])

    def test_it_costs_its_input(self) -> None:
        micro_batch = MicroBatchScheduler(
            8, 10, no_schedule_until_state=LlmRequestState.ENCODER_INIT
        )
        requests = [with_encoder(1, 6), make_request(2, 4), with_encoder(3, 1)]
        assert ids(*micro_batch.schedule(requests)) == ([1, 2], [])
        with pytest.raises(ContextTooLong, match=r"request 4: an encoder input of 11 .*=10"):
            micro_batch.schedule([with_encoder(4, 11)])

    def test_a_pause_goes_back_to_it(self) -> None:
        request = context_after_encoder(1, 3)
        request.move_to_next_context_chunk()
        request.pause()
        assert request.state is LlmRequestState.ENCODER_INIT


class TestDisaggregated:
    def coming(self, request_id: int, num_prompt: int = 4) -> LlmRequest:
        request = make_request(request_id, num_prompt, 4)
        request.state = LlmRequestState.DISAGG_GENERATION_INIT
        return request

    def test_they_have_a_list_of_their_own_and_come_first(self) -> None:
        scheduler = GuaranteedNoEvictScheduler(8, BlockManager(4, 4))
        requests = [make_request(1, 4, 4), make_request(2, 4, 4), self.coming(3)]
        result = scheduler.schedule_request(requests)
        assert ids(*result, result.fitting_disagg_gen_init) == ([1], [], [3])
        assert len(result) == 2, "users unpack a pair"

    def test_their_list_ends_alone(self) -> None:
        scheduler = GuaranteedNoEvictScheduler(8, BlockManager(4, 4))
        result = scheduler.schedule_request([self.coming(1, 40), make_request(2, 4, 4)])
        assert ids(*result, result.fitting_disagg_gen_init) == ([2], [], [])

    def test_a_static_batch_lets_them_wait(self) -> None:
        manager = BlockManager(8, 4)
        scheduler = StaticBatchScheduler(8, manager)
        running = generating(make_request(1, 4, 4), manager)
        assert scheduler.schedule_request([self.coming(2), running]).fitting_disagg_gen_init == []
        assert ids(scheduler.schedule_request([self.coming(2)]).fitting_disagg_gen_init) == ([2],)

    def test_max_utilization_takes_their_prompt_in_order(self) -> None:
        scheduler = MaxUtilizationScheduler(8, BlockManager(2, 4))
        requests = [make_request(1, 4, 4), self.coming(2), make_request(3, 4, 4)]
        result = scheduler.schedule_request(requests)
        assert ids(*result, result.fitting_disagg_gen_init) == ([1], [], [2])

    def test_no_step_runs_for_them(self) -> None:
        scheduler = make_scheduler(GUARANTEED, BlockManager(4, 4), max_batch_size=8)
        result = scheduler.schedule_request([self.coming(1), make_request(2, 4, 4)], ())
        assert ids(*result) == ([2], [], [])

    def test_a_context_whose_kv_leaves_layer_by_layer_is_a_context(self) -> None:
        scheduler = make_scheduler(
            GUARANTEED, BlockManager(8, 4), max_batch_size=8, max_num_tokens=8
        )
        leaving, other = make_request(1, 5, 4), make_request(2, 4, 4)
        leaving.state = LlmRequestState.DISAGG_CONTEXT_INIT_AND_TRANS
        assert ids(*scheduler.schedule_request([leaving, other], ())) == ([1], [], []), "5 + 4 > 8"
        assert leaving.is_context_init_state
        assert not leaving.is_generation_in_progress_state

    def test_the_reservation_outlasts_the_transfer(self) -> None:
        manager = BlockManager(4, 4)
        on_its_way = self.coming(1)
        assert manager.allocate(1, 4) is not None
        on_its_way.state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        scheduler = GuaranteedNoEvictScheduler(8, manager)
        # 3 blocks are free, one of them reserved.
        assert ids(*scheduler.schedule_request([on_its_way, make_request(2, 8, 4)])) == ([], [])
        assert ids(*scheduler.schedule_request([on_its_way, make_request(3, 4, 4)])) == ([3], [])
        on_its_way.state = LlmRequestState.DISAGG_GENERATION_TRANS_COMPLETE
        assert ids(*scheduler.schedule_request([on_its_way])) == ([1], [])

    def test_a_plain_pair_of_a_user_is_enough(self) -> None:
        class All(CapacityScheduler):
            def schedule_request(
                self, active_requests: Sequence[LlmRequest]
            ) -> tuple[list[LlmRequest], list[LlmRequest]]:
                return list(active_requests), []

        scheduler = SimpleScheduler(All(8), MicroBatchScheduler(8))
        assert ids(*scheduler.schedule_request([make_request(1)], ())) == ([1], [], [])


class Doors:
    """A resource of a user: one door each, which is held while a request runs."""

    name = "doors"
    ends_walk = True

    def __init__(self, num_total: int) -> None:
        self.num_total = num_total
        self.num_available = num_total

    def forecast(self) -> Doors:
        return Doors(self.num_total)

    def needed_alone(self, request: LlmRequest) -> int:
        return 1

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        return 1

    def needed_to_completion(self, request: LlmRequest) -> int:
        return 1

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        self.num_available -= num_needed

    def release(self, request: LlmRequest) -> None:
        """Only the accepted count."""


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy), ids=lambda policy: policy.name)
def test_a_resource_of_a_user_counts_like_ours(policy: CapacitySchedulerPolicy) -> None:
    doors: Resource = Doors(2)
    scheduler = make_scheduler(policy, BlockManager(16, 4), max_batch_size=8, resources=[doors])
    requests = [make_request(i) for i in (1, 2, 3)]
    assert ids(*scheduler.schedule_request(requests, ())) == ([1, 2], [], [])
    reasons = explain(scheduler, requests)
    assert reasons[3] == WaitReason(WaitCode.RESOURCE, 1, 0, resource="doors")
    assert str(reasons[3]) == "waiting for doors: needs 1, free 0"


def test_reasons_of_requests_that_are_passed_over() -> None:
    scheduler = make_scheduler(
        GUARANTEED, BlockManager(16, 4), max_batch_size=8, resources=[pages(3)]
    )
    requests = [with_adapter(1, 2), with_adapter(2, 3), with_adapter(3, 3), with_adapter(4, None)]
    reasons = explain(scheduler, requests)
    lacking = WaitReason(WaitCode.RESOURCE, 3, 1, resource="adapter pages")
    assert reasons == {2: lacking, 3: lacking}


def test_adapters_stand_together_in_the_batch() -> None:
    manager = BlockManager(16, 4)
    contexts = [with_adapter(i, task) for i, task in ((1, 2), (2, None), (3, 1), (4, 2))]
    running = [generating(with_adapter(i, task), manager) for i, task in ((5, 1), (6, None))]
    micro_batch = MicroBatchScheduler(8)
    assert ids(*micro_batch.schedule([*contexts, *running])) == ([2, 3, 1, 4], [6, 5])
    assert ids(*micro_batch.schedule([with_adapter(1, 2), with_adapter(2, 1)])) == ([2, 1], [])


def test_adapters_stand_together_among_the_cut_and_among_the_last_chunks() -> None:
    lengths = ((1, 2, 40), (2, None, 40), (3, 1, 1), (4, None, 1))
    contexts = [make_request(i, length, lora_task_id=task) for i, task, length in lengths]
    chunking = ContextChunking(ContextChunkingPolicy.EQUAL_PROGRESS, unit_size=2)
    assert ids(*MicroBatchScheduler(8, 10, chunking=chunking).schedule(contexts)) == (
        [2, 1, 4, 3],
        [],
    )


def test_the_short_way_is_for_blocks_and_our_own_rules_only() -> None:
    manager = BlockManager(8, 4)
    micro_batch = MicroBatchScheduler(8)
    assert is_applicable(GuaranteedNoEvictScheduler(8, manager), micro_batch)
    with_pages = GuaranteedNoEvictScheduler(8, manager, resources=[pages(1)])
    assert is_applicable(with_pages, micro_batch), "requests with adapters are found out later"
    with_cross = GuaranteedNoEvictScheduler(8, manager, resources=[CrossBlocks(manager)])
    assert not is_applicable(with_cross, micro_batch)
    from_encoders = LlmRequestState.ENCODER_INIT
    gated = GuaranteedNoEvictScheduler(8, manager, no_schedule_until_state=from_encoders)
    assert not is_applicable(gated, micro_batch)
    for other in (
        MicroBatchScheduler(8, no_schedule_until_state=from_encoders),
        MicroBatchScheduler(8, no_schedule_after_state=LlmRequestState.GENERATION_COMPLETE),
        type("Mine", (MicroBatchScheduler,), {})(8),
    ):
        assert not is_applicable(GuaranteedNoEvictScheduler(8, manager), other)
    active = ActiveRequests(manager)
    for request in (with_adapter(1, None), with_adapter(2, 1), make_request(3, beam_width=2)):
        active.add(request)
    assert active.num_with_beams_or_adapter == 2


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="resources need a block_manager"):
        make_scheduler(STATIC, None, max_batch_size=8, resources=[pages(1)])
    with pytest.raises(ValueError, match="num_pages must be at least 1, not 0"):
        pages(0)
