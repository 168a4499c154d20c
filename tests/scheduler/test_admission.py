"""What is refused on arrival: exactly what could never finish."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_world import make_request

from inflight_scheduler import (
    BlockManager,
    CrossBlocks,
    LlmRequest,
    PeftPages,
    Resource,
    refusal_reason,
)

RESOURCES: list[Resource] = [
    PeftPages(2, lambda task_id: task_id),
    CrossBlocks(BlockManager(2, 4)),
]
PAUSED = (
    "prompt of 8 plus 6 output tokens may have to be computed again from 13 tokens after a pause, "
    "which exceeds max_num_tokens=12; ask for less, raise max_num_tokens, or use "
    "batch_scheduler_policy=guaranteed_no_evict"
)


@pytest.mark.parametrize(
    ("request_", "limits", "reason"),
    [
        (
            make_request(1, 8, 9),
            {},
            "prompt of 8 plus 9 output tokens needs 5 KV blocks of 4 tokens, but there are 4",
        ),
        (make_request(1, 8, 8), {}, None),
        (make_request(1, 13, 1), {}, "prompt of 13 tokens exceeds max_num_tokens=12"),
        (make_request(1, 13, 1), {"may_chunk": True}, None),
        (make_request(1, 13, 1), {"max_num_tokens": None}, None),
        (make_request(1, 13), {"block_manager": None}, "exceeds max_num_tokens=12"),
        (
            make_request(1, 2, 2, beam_width=4),
            {"max_num_tokens": 3},
            "a generation step of 4 beams and 0 draft tokens exceeds max_num_tokens=3",
        ),
        (make_request(1, 2, 2, beam_width=3), {"max_num_tokens": 3}, None),
        (
            make_request(1, 1, 4, num_drafts=3),
            {"max_num_tokens": 3},
            "a generation step of 1 beams and 3 draft tokens exceeds max_num_tokens=3",
        ),
        (make_request(1, 5, 4, num_drafts=3), {"max_num_tokens": 8}, None),
        (
            make_request(1, 5, 4, num_drafts=4),
            {"max_num_tokens": 8},
            "prompt of 5 plus 4 draft tokens exceeds max_num_tokens=8",
        ),
        (make_request(1, 5, 4, num_drafts=7), {"max_num_tokens": 8, "may_chunk": True}, None),
        (make_request(1, 8, 6), {"may_pause": True}, PAUSED),
        (make_request(1, 8, 6), {}, None),
        (make_request(1, 8, 5), {"may_pause": True}, None),
        (make_request(1, 1, 3, lora_task_id=2, encoder_length=8), {"resources": RESOURCES}, None),
        (
            make_request(1, 1, 3, lora_task_id=3),
            {"resources": RESOURCES},
            "it needs 3 adapter pages, but there are 2",
        ),
        (
            make_request(1, 1, 1, encoder_length=9),
            {"resources": RESOURCES},
            "it needs 3 cross KV blocks, but there are 2",
        ),
        (
            make_request(1, 1, 1, encoder_length=8),
            {"max_num_tokens": 7},
            "encoder input of 8 tokens exceeds max_num_tokens=7",
        ),
    ],
)
def test_reason(request_: LlmRequest, limits: dict[str, Any], reason: str | None) -> None:
    """4 blocks of 4 tokens, 12 tokens per iteration, unless the row says otherwise."""
    defaults: dict[str, Any] = {
        "block_manager": BlockManager(4, 4),
        "max_num_tokens": 12,
        "may_pause": False,
    }
    found = refusal_reason(request_, **(defaults | limits))
    assert found is None if reason is None else found is not None and reason in found
