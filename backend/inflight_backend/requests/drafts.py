"""Draft tokens that a client sends: checked, and cut to those that can be used."""

from __future__ import annotations

from inflight_backend.errors import InvalidRequest
from inflight_backend.log import get_logger
from inflight_backend.requests.inference_request import InferenceRequest

_logger = get_logger(__name__)

FIELD = "draft_input_ids"


def read_drafts(
    request: InferenceRequest,
    *,
    prompt_len: int,
    max_new_tokens: int,
    max_input_len: int,
    max_draft_len: int,
    vocab_size: int,
) -> tuple[int, ...]:
    """The drafts of ``request`` that its last context step verifies; none if it sent none.

    Cut to what fits behind the prompt (``max_input_len``; rule of TensorRT-LLM's `llmRequest.h`),
    and to what can become tokens: the last token is drawn, not guessed. Raises `InvalidRequest` for
    more than ``max_draft_len`` and for ids outside the vocabulary.
    """
    if not request.has_tensor(FIELD):
        return ()
    ids = request.get_tensor(FIELD)
    if ids.ndim > 2:
        raise InvalidRequest(f"'{FIELD}' has shape {list(ids.shape)}, expected [1, k]")
    drafts: list[int] = ids.reshape(-1).tolist()
    if drafts and max_draft_len == 0:
        raise InvalidRequest(
            f"'{FIELD}' holds {len(drafts)} tokens, but max_draft_len is 0 on this server, as "
            "always with deterministic_mode: nothing would verify them"
        )
    if len(drafts) > max_draft_len:
        raise InvalidRequest(
            f"'{FIELD}' holds {len(drafts)} tokens, more than max_draft_len = {max_draft_len}; "
            "send fewer, or raise max_draft_len on the server"
        )
    wrong = next((token for token in drafts if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"'{FIELD}' holds {wrong}, outside the vocabulary 0..{vocab_size - 1}")
    num_fitting = max(min(max_input_len - prompt_len, max_new_tokens - 1), 0)
    if len(drafts) > num_fitting:
        _logger.debug(  # what a client may do with every request writes nothing by default
            "request %d: %d of %d draft tokens are cut off: the prompt has %d tokens, at most %d "
            "are generated, and max_input_len is %d",
            request.request_id,
            len(drafts) - num_fitting,
            len(drafts),
            prompt_len,
            max_new_tokens,
            max_input_len,
        )
    return tuple(drafts[:num_fitting])
