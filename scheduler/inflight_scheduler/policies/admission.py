"""What must be refused on arrival, because no iteration could ever run it."""

from __future__ import annotations

from collections.abc import Sequence

from inflight_scheduler.kv.block_manager import BlockManager
from inflight_scheduler.policies.resources import Resource
from inflight_scheduler.request import LlmRequest


def refusal_reason(
    request: LlmRequest,
    *,
    block_manager: BlockManager | None,
    max_num_tokens: int | None,
    may_pause: bool,
    may_chunk: bool = False,
    resources: Sequence[Resource] = (),
) -> str | None:
    """Why ``request`` can never finish here, with both numbers and the fix; None if it can.

    ``may_pause`` is True under MAX_UTILIZATION and for a user's scheduler: a pause turns what was
    generated into prompt, so without chunking prompt + max_new - 1 tokens must fit one iteration.
    With chunking (``may_chunk``) a context of any length runs, if it fits the blocks. Draft tokens
    count as far as they are known; the caller keeps later ones within the bounds.
    """
    if block_manager is not None and not block_manager.can_ever_fit(request, may_pause=may_pause):
        has_chunks = block_manager.window_groups and block_manager.max_chunk_tokens is not None
        return (
            f"prompt of {request.prompt_len} plus {request.max_new_tokens} output tokens needs "
            f"{block_manager.num_needed_alone(request, may_pause=may_pause)} KV blocks of "
            f"{block_manager.tokens_per_block} tokens, but there are {block_manager.num_blocks}; "
            f"ask for less{', lower max_num_tokens' if has_chunks else ''} or raise "
            "max_tokens_in_paged_kv_cache"
        )
    for resource in resources:
        num_needed = resource.needed_alone(request)
        if num_needed > resource.num_total:
            return (
                f"it needs {num_needed} {resource.name}, but there are {resource.num_total}; "
                "ask for less or make room for more"
            )
    return (
        None
        if max_num_tokens is None
        else _over_budget(request, max_num_tokens, may_pause=may_pause, may_chunk=may_chunk)
    )


def _over_budget(
    request: LlmRequest, max_num_tokens: int, *, may_pause: bool, may_chunk: bool
) -> str | None:
    num_drafts = request.num_draft_tokens
    num_step = request.beam_width + num_drafts
    if num_step > max_num_tokens:
        return (
            f"a generation step of {request.beam_width} beams and {num_drafts} draft tokens "
            f"exceeds max_num_tokens={max_num_tokens}; ask for less or raise max_num_tokens"
        )
    if request.encoder_length > max_num_tokens:
        return (
            f"encoder input of {request.encoder_length} tokens exceeds max_num_tokens="
            f"{max_num_tokens}; shorten it or raise max_num_tokens"
        )
    if may_chunk:
        return None
    if request.prompt_len > max_num_tokens:
        return (
            f"prompt of {request.prompt_len} tokens exceeds max_num_tokens={max_num_tokens}; "
            "shorten the prompt, raise max_num_tokens or set enable_chunked_context"
        )
    if request.prompt_len + num_drafts > max_num_tokens:
        return (
            f"prompt of {request.prompt_len} plus {num_drafts} draft tokens exceeds "
            f"max_num_tokens={max_num_tokens}; send fewer drafts, raise max_num_tokens or set "
            "enable_chunked_context"
        )
    longest = request.prompt_len + request.max_new_tokens - 1
    if may_pause and longest > max_num_tokens:
        return (
            f"prompt of {request.prompt_len} plus {request.max_new_tokens} output tokens may have "
            f"to be computed again from {longest} tokens after a pause, which exceeds "
            f"max_num_tokens={max_num_tokens}; ask for less, raise max_num_tokens, or use "
            "batch_scheduler_policy=guaranteed_no_evict"
        )
    return None
