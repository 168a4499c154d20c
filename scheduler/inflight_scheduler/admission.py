"""What must be refused on arrival, because no iteration could ever run it."""

from __future__ import annotations

from inflight_scheduler.block_manager import BlockManager
from inflight_scheduler.request import LlmRequest


def refusal_reason(
    request: LlmRequest,
    *,
    block_manager: BlockManager | None,
    max_num_tokens: int | None,
    may_pause: bool,
    may_chunk: bool = False,
) -> str | None:
    """Why ``request`` can never finish here, with both numbers and the fix; None if it can.

    ``may_pause`` is True under MAX_UTILIZATION and for a user's scheduler: a pause turns what was
    generated into prompt, so without chunking prompt + max_new - 1 tokens must fit one iteration.
    With chunking (``may_chunk``) a context of any length runs, if it fits the blocks.
    """
    if block_manager is not None and not block_manager.can_ever_fit(request):
        return (
            f"prompt of {request.prompt_len} plus {request.max_new_tokens} output tokens needs "
            f"{block_manager.get_blocks_at_completion(request)} KV blocks of "
            f"{block_manager.tokens_per_block} tokens, but there are {block_manager.num_blocks}; "
            "ask for less or raise max_tokens_in_paged_kv_cache"
        )
    if max_num_tokens is None or may_chunk:
        return None
    if request.prompt_len > max_num_tokens:
        return (
            f"prompt of {request.prompt_len} tokens exceeds max_num_tokens={max_num_tokens}; "
            "shorten the prompt, raise max_num_tokens or set enable_chunked_context"
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
