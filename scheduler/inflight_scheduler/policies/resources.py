"""What a request needs besides its KV blocks, behind one small interface.

A `Resource` says how much there is; its `Forecast` keeps the budgets of one decision: how much a
request would take, now or until its end, and how much is left after those accepted so far. The KV
blocks themselves are such a forecast (`BlockForecast`), and so are

- `CrossBlocks`: the blocks of an encoder's output, which cross attention reads,
- `AnswerRoom`: memory for such outputs until then,
- `PeftPages`: the pages of LoRA adapters, taken once for all requests with the same adapter.

Write another class with these members for whatever else must not run out. Deciding only counts:
taking and giving back is left to the owner of the resource, as to `BatchPlanner` for KV blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.forecast import BlockForecast
from inflight_scheduler.request import LlmRequest


class Forecast(Protocol):
    """The budgets of one resource during one decision; constructed for each."""

    @property
    def num_available(self) -> int:
        """What is left after everything claimed and released so far; negative if too much is."""

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """What the next step of ``request`` (or the next two) would take, at most."""

    def needed_to_completion(self, request: LlmRequest) -> int:
        """What ``request`` would take until its last token, at most."""

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        """``request`` is accepted and takes ``num_needed``."""

    def release(self, request: LlmRequest) -> None:
        """``request`` is paused and gives back what it holds."""


class Resource(Protocol):
    """Something that can run out. ``name`` completes "12 of 8 ...", in the plural.

    ``ends_walk``: a request that lacks it is not passed by those behind, as with blocks; else only
    this one waits.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_total(self) -> int: ...
    @property
    def ends_walk(self) -> bool: ...

    def forecast(self) -> Forecast:
        """How much is left now."""

    def needed_alone(self, request: LlmRequest) -> int:
        """What ``request`` needs at most while it holds nothing; more than all is refused."""


class CrossBlocks:
    """KV blocks of encoder outputs: all of them are taken with the first context chunk.

    Requests with an encoder need this resource.
    """

    __slots__ = ("block_manager",)
    name = "cross KV blocks"
    ends_walk = True

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    @property
    def num_total(self) -> int:
        """Blocks, free or not."""
        return self.block_manager.num_blocks

    def forecast(self) -> _CrossForecast:
        """Free blocks of the cross pool."""
        return _CrossForecast(self)

    def needed_alone(self, request: LlmRequest) -> int:
        """Blocks of the whole encoder output, shared by all beams."""
        return -(-request.encoder_length // self.block_manager.tokens_per_block)


class _CrossForecast:
    __slots__ = ("_cross", "num_available")

    def __init__(self, cross: CrossBlocks) -> None:
        self._cross = cross
        self.num_available = cross.block_manager.num_free_blocks

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """All at context position 0, then none; the encoder itself takes none."""
        is_later = request.is_generation_in_progress_state or not request.is_first_context_chunk
        if is_later or request.is_encoder_init_state:
            return 0
        num_held = self._cross.block_manager.num_blocks_of(request.request_id)
        return max(0, self._cross.needed_alone(request) - num_held)

    def needed_to_completion(self, request: LlmRequest) -> int:
        return self.needed_one_step(request)

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        self.num_available -= num_needed

    def release(self, request: LlmRequest) -> None:
        self.num_available += self._cross.block_manager.num_blocks_of(request.request_id)


KEPT_STEPS = 2
"""An engine has room for what an encoder says in so many of its largest steps."""


class AnswerRoom:
    """Room for what encoders have said and no context has read: ``num_total`` tokens, of which
    ``num_kept`` tells how many are taken. Only an encoder takes some, so contexts go on and make
    room."""

    __slots__ = ("num_kept", "num_total")
    name = "tokens of encoder answers"
    ends_walk = False

    def __init__(self, num_total: int, num_kept: Callable[[], int]) -> None:
        self.num_total, self.num_kept = num_total, num_kept

    def forecast(self) -> _AnswerForecast:
        """What is free now."""
        return _AnswerForecast(self.num_total - self.num_kept())

    def needed_alone(self, request: LlmRequest) -> int:
        """The whole answer."""
        return request.encoder_length


class _AnswerForecast:
    __slots__ = ("num_available",)

    def __init__(self, num_available: int) -> None:
        self.num_available = num_available

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """That of an encoder which has not run."""
        return request.encoder_length if request.is_encoder_init_state else 0

    def needed_to_completion(self, request: LlmRequest) -> int:
        return self.needed_one_step(request)

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        self.num_available -= num_needed

    def release(self, request: LlmRequest) -> None:
        """Nothing: no request that is paused keeps an answer."""


class PeftPages:
    """Pages of LoRA adapters: ``num_pages`` in all, ``pages_of_task(task_id)`` for each adapter;
    None: as many as its requests say (``lora_pages``).

    A decision counts each adapter once, however many requests use it, and nothing between
    decisions: an adapter that no accepted request uses can be dropped from its pages.
    """

    __slots__ = ("num_total", "pages_of_task")
    name = "adapter pages"
    ends_walk = False

    def __init__(self, num_pages: int, pages_of_task: Callable[[int], int] | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_total = num_pages
        self.pages_of_task = pages_of_task

    def forecast(self) -> _PeftForecast:
        """All pages, until some are claimed."""
        return _PeftForecast(self)

    def needed_alone(self, request: LlmRequest) -> int:
        """Pages of its adapter."""
        if request.lora_task_id is None:
            return 0
        if self.pages_of_task is None:
            return request.lora_pages
        return self.pages_of_task(request.lora_task_id)


class _PeftForecast:
    __slots__ = ("_claimed_tasks", "_pages", "num_available")

    def __init__(self, pages: PeftPages) -> None:
        self._pages = pages
        self.num_available = pages.num_total
        self._claimed_tasks: set[int] = set()

    def needed_one_step(self, request: LlmRequest, two_step_lookahead: bool = False) -> int:
        """The adapter must be there for every step."""
        is_claimed = request.lora_task_id in self._claimed_tasks
        return 0 if is_claimed else self._pages.needed_alone(request)

    def needed_to_completion(self, request: LlmRequest) -> int:
        return self.needed_one_step(request)

    def claim(self, request: LlmRequest, num_needed: int) -> None:
        self.num_available -= num_needed
        if request.lora_task_id is not None:
            self._claimed_tasks.add(request.lora_task_id)

    def release(self, request: LlmRequest) -> None:
        """Nothing: only the accepted count, and a victim is not one of them."""


class Shortage(NamedTuple):
    """What a request lacks: how much it needs and what is free; ``resource`` None: KV blocks."""

    resource: Resource | None
    num_needed: int
    num_available: int

    @property
    def ends_walk(self) -> bool:
        """True when those behind may not pass."""
        return self.resource is None or self.resource.ends_walk


class Budgets:
    """KV blocks and all further resources during one decision.

    ``to_completion``: requests claim what they take until their last token, else what the next
    step takes (``two_step_lookahead``: the next two). ``refused`` has those that were not accepted,
    by id: what each lacks, or None if it waits for the context of another.
    """

    __slots__ = ("_further", "_to_completion", "_two_step_lookahead", "blocks", "refused")

    def __init__(
        self,
        block_manager: BlockManager,
        resources: Sequence[Resource] = (),
        *,
        to_completion: bool,
        two_step_lookahead: bool = False,
    ) -> None:
        self.blocks = BlockForecast(block_manager)
        self.refused: dict[int, Shortage | None] = {}
        self._further = [(resource, resource.forecast()) for resource in resources]
        self._to_completion = to_completion
        self._two_step_lookahead = two_step_lookahead

    def claim(self, request: LlmRequest) -> None:
        """``request`` runs in any case."""
        self._take(request, self._needed_of(self.blocks, request))

    def try_claim(self, request: LlmRequest) -> Shortage | None:
        """Accept ``request`` if everything is there; else only ``refused`` changes.

        A shortage that ends the walk is told before one that does not.
        """
        num_needed = self._needed_of(self.blocks, request)
        shortage = self._shortage(request, num_needed)
        if shortage is None:
            self._take(request, num_needed)
        else:
            self.refused[request.request_id] = shortage
        return shortage

    def _shortage(self, request: LlmRequest, num_needed_blocks: int) -> Shortage | None:
        if num_needed_blocks > self.blocks.num_available:
            return Shortage(None, num_needed_blocks, self.blocks.num_available)
        found = None
        for resource, forecast in self._further:
            num_needed = self._needed_of(forecast, request)
            if 0 < num_needed > forecast.num_available and (found is None or resource.ends_walk):
                found = Shortage(resource, num_needed, forecast.num_available)
                if resource.ends_walk:
                    break
        return found

    def release(self, request: LlmRequest) -> None:
        """``request`` is paused and gives back what it holds."""
        self.blocks.release(request)
        for _, forecast in self._further:
            forecast.release(request)

    def left(self) -> list[tuple[str, int]]:
        """What is free of each by its name, "blocks" (of KV) first; negative if overdrawn."""
        further = [(resource.name, forecast.num_available) for resource, forecast in self._further]
        return [("blocks", self.blocks.num_available), *further]

    def _take(self, request: LlmRequest, num_needed_blocks: int) -> None:
        self.blocks.claim(request, num_needed_blocks)
        for _, forecast in self._further:
            forecast.claim(request, self._needed_of(forecast, request))

    def _needed_of(self, forecast: Forecast, request: LlmRequest) -> int:
        if self._to_completion:
            return forecast.needed_to_completion(request)
        return forecast.needed_one_step(request, self._two_step_lookahead)
