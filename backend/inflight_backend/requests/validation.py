"""From named tensors to an `LlmRequest`, or to an error that names the field and its bound.

Everything a caller can get wrong is found here, before a request reaches the scheduler: after that
no value of a request may raise inside the loop.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import inflight_protocol as protocol
from inflight_backend.errors import InvalidRequest, UnsupportedRequest
from inflight_backend.guided.guide import TYPE_FIELD, Guide
from inflight_backend.log import get_logger
from inflight_backend.requests.adapters import AdapterUse, has_no_adapters
from inflight_backend.requests.guides import read_guide
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.outputs import read_outputs
from inflight_backend.requests.sampling import (
    check_with_beams,
    read_beams,
    read_sampling,
    read_words,
)
from inflight_backend.requests.values import check_vocabulary, flag, integer, number, text_bytes
from inflight_protocol import TensorSpec
from inflight_scheduler import BeamSearch, LlmRequest, can_verify

if TYPE_CHECKING:
    from inflight_backend.guided.compiler import PendingGuide


_logger = get_logger(__name__)

MAX_SALT_BYTES = 256
"""Longest ``cache_salt``: room for any tenant's name or secret, and a bound for memory."""


def _read_cache_salt(request: InferenceRequest) -> bytes:
    """The salt of ``request``, b"" for none. An empty one is refused: its sender expects not to
    share."""
    salt = text_bytes(request, "cache_salt")
    if request.has_tensor("cache_salt") and not 0 < len(salt) <= MAX_SALT_BYTES:
        raise InvalidRequest(
            f"'cache_salt' has {len(salt)} bytes, outside 1..{MAX_SALT_BYTES}; "
            "leave it out to share cached text with all requests that send none"
        )
    return salt


def _read_deadline(request: InferenceRequest, name: str, max_seconds: float | None) -> float | None:
    """The deadline on the clock of `time.monotonic`, None for none: milliseconds from the arrival,
    bounded by the server's ``max_seconds``."""
    milliseconds = integer(request, name, 0, 1, _INT32_MAX)
    limits = [milliseconds / 1000] if milliseconds else []
    if max_seconds is not None:
        limits.append(max_seconds)
    return request.created_ns / 1e9 + min(limits) if limits else None


DEFAULT_MAX_TOKENS = 16
"""New tokens when a request names no number (the usual default of completion APIs)."""

PROCESSOR_FIELD = "logits_post_processor_name"

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_DRAFTS = "draft_input_ids"
_PROMPT, _START, _SOURCE = "input_ids", "decoder_input_ids", "encoder_input_ids"
_FOLD_HINT = "; a server with out_of_vocabulary=fold takes such ids, for benchmarks"


def read_processor_name(request: InferenceRequest) -> str:
    """The name that a request sends; "" if it sends none, or an empty one."""
    return text_bytes(request, PROCESSOR_FIELD).decode("utf-8", "replace")


def _has_none(request: InferenceRequest) -> None:
    """The check of a server without logits processors."""
    if read_processor_name(request):
        raise UnsupportedRequest(f"'{PROCESSOR_FIELD}' is not supported by this server")


def _guides_nothing(guide: Guide) -> PendingGuide:
    raise UnsupportedRequest(f"'{TYPE_FIELD}' is not supported by this server")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the loaded model and the configuration allow; all lengths in tokens.

    ``may_stream`` False: streaming requests are treated as the others (V1 batching).
    ``refusal_reason`` says why a request, valid in itself, could never finish here (KV pool, token
    budget); None if it can. Seconds bound the waiting and the whole life of a request.
    ``start_guide`` compiles guides; ``guided_end_id`` and ``guided_more_end_ids`` end the answers
    of guided requests that send no ``end_id``. At most ``max_draft_len`` drafts may be sent.
    ``check_processor`` refuses logits processors that are not there. ``folds_ids``: ids of a prompt
    that are above the vocabulary stand for their remainder by its size. ``read_adapter``: which
    adapter a request has; a new one that it brings is kept from then on. ``max_encoder_len``: of
    the longest text that the encoder reads, 0 without one; the decoder's begins with ``start_ids``.
    """

    vocab_size: int
    max_input_len: int
    max_seq_len: int
    exclude_input_in_output: bool
    refusal_reason: Callable[[LlmRequest], str | None]
    may_stream: bool = True
    max_beam_width: int = 1
    max_queue_seconds: float | None = None
    max_run_seconds: float | None = None
    start_guide: Callable[[Guide], PendingGuide] = _guides_nothing
    guided_end_id: int = -1
    guided_more_end_ids: tuple[int, ...] = ()
    max_draft_len: int = 0
    check_processor: Callable[[InferenceRequest], None] = _has_none
    folds_ids: bool = False
    read_adapter: Callable[[InferenceRequest], AdapterUse | None] = has_no_adapters
    max_encoder_len: int = 0
    start_ids: tuple[int, ...] = ()

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt as clients see it: of a model with an encoder, what that reads."""
        return self.max_encoder_len or self.max_input_len


def longest_text(limits: RequestLimits) -> int:
    """Tokens of the longest prompt and answer together that are served, if there is one beam.

    ``max_seq_len``, or less: the KV pool or the token budget may be smaller.
    """

    def is_too_long(num_tokens: int) -> bool:
        return limits.refusal_reason(LlmRequest(0, [0], num_tokens - 1)) is not None

    return 1 + bisect_left(range(2, limits.max_seq_len + 1), True, key=is_too_long)


def validate(request: InferenceRequest, limits: RequestLimits) -> LlmRequest:
    """The request as the scheduler needs it; kept on ``request`` so that it is made once.

    Raises `InvalidRequest`.
    """
    if request.llm_request is None:
        request.llm_request = _make_llm_request(request, limits)
    return request.llm_request


def _make_llm_request(request: InferenceRequest, limits: RequestLimits) -> LlmRequest:
    for name, tensor in request.tensors.items():
        _check_tensor(protocol.INPUT_BY_NAME[name], tensor)
    limits.check_processor(request)
    guide = read_guide(request)
    tokens, encoder_tokens = _texts(request, limits)
    max_new_tokens = integer(request, "request_output_len", DEFAULT_MAX_TOKENS, 1, _INT32_MAX)
    _check_lengths(len(tokens), max_new_tokens, request.sent_name("request_output_len"), limits)
    outputs = read_outputs(request, len(tokens), max_new_tokens, limits.vocab_size)
    more_end_ids = (
        () if guide is None or request.has_tensor("end_id") else limits.guided_more_end_ids
    )
    sampling = read_sampling(request, max_new_tokens, limits.vocab_size, more_end_ids)
    end_id = _read_end_id(request, limits, is_guided=guide is not None)
    stop_words = read_words(request, "stop_words_list", limits.vocab_size)
    beams = None
    params = read_beams(request, limits.max_beam_width, limits.vocab_size)
    if params.width > 1:
        check_with_beams(request, sampling, outputs)
        beams = BeamSearch(params, max_new_tokens, end_id, stop_words, sampling.stop_token_ids)
    adapter = limits.read_adapter(request)
    llm_request = LlmRequest(
        request.request_id,
        tokens,
        max_new_tokens,
        sampling=sampling,
        end_id=end_id,
        beam_width=params.width,
        beams=beams,
        # Tokenizers with an added [PAD] have one that the model has not; it is only written.
        pad_id=integer(request, "pad_id", -1, -1, _INT32_MAX),
        is_streaming=request.is_streaming and limits.may_stream,
        exclude_input_in_output=flag(
            request, "exclude_input_in_output", limits.exclude_input_in_output
        ),
        priority=number(request, "priority", 0.5, 0.0, 1.0),
        # Logits of a cached prefix would never be computed, so such a prompt shares nothing.
        cache_salt=_read_cache_salt(request)
        + (secrets.token_bytes(16) if outputs.needs_whole_context else b""),
        queue_deadline=_read_deadline(request, "max_queue_time_ms", limits.max_queue_seconds),
        run_deadline=_read_deadline(request, "allotted_time_ms", limits.max_run_seconds),
        outputs=outputs,
        stop_words=stop_words,
        encoder_length=len(encoder_tokens),
        encoder_tokens=tuple(encoder_tokens),
    )
    if adapter is not None:
        llm_request.lora_task_id, llm_request.lora_digest = adapter.task_id, adapter.digest
        llm_request.lora_pages = adapter.num_pages
    drafts = _read_drafts(request, len(tokens), max_new_tokens, limits)
    is_free = guide is None and not read_processor_name(request)
    if can_verify(llm_request) and is_free:  # else it is answered token by token
        llm_request.set_draft_tokens(drafts)
    if (reason := limits.refusal_reason(llm_request)) is not None:
        raise InvalidRequest(reason)
    if guide is not None:
        request.guide = limits.start_guide(guide)
    return llm_request


def _read_end_id(request: InferenceRequest, limits: RequestLimits, *, is_guided: bool) -> int:
    """-1 for none, which any id outside the vocabulary stands for, as in TensorRT-LLM."""
    default = limits.guided_end_id if is_guided else -1
    end_id = integer(request, "end_id", default, _INT32_MIN, _INT32_MAX)
    if not 0 <= end_id < limits.vocab_size:
        end_id = -1
    if is_guided and end_id < 0:
        raise InvalidRequest(
            f"'{TYPE_FIELD}' needs an 'end_id' within the vocabulary: it ends the answer where the "
            "grammar allows that"
        )
    return end_id


def _check_tensor(spec: TensorSpec, tensor: npt.NDArray[Any]) -> None:
    """Type, batch dimension and size; a tensor not honoured passes only if it asks for nothing."""
    expected = protocol.DTYPE_TO_NUMPY[spec.dtype]
    is_number = spec.name == "early_stopping" and tensor.dtype == np.int32  # see `read_beams`
    is_wide = spec.name == "lora_weights" and tensor.dtype == np.float32  # as their model's dtype
    if tensor.dtype != np.dtype(expected) and not is_number and not is_wide:
        raise InvalidRequest(f"'{spec.name}' has type {tensor.dtype}, expected {spec.dtype}")
    if tensor.ndim > 1 and tensor.shape[0] != 1:
        raise InvalidRequest(
            f"'{spec.name}' has shape {list(tensor.shape)}: "
            f"one request carries one prompt, so the first dimension must be 1"
        )
    if spec.is_scalar and tensor.size != 1:
        raise InvalidRequest(f"'{spec.name}' must hold one value, got {tensor.size}")
    if not spec.is_honoured and not _is_neutral(spec, tensor):
        hint = "leave it out"
        if spec.neutral not in (None, protocol.EMPTY):
            hint += f" or send {spec.neutral}"
        raise UnsupportedRequest(f"'{spec.name}' is not supported by this server; {hint}")


def _is_neutral(spec: TensorSpec, tensor: npt.NDArray[Any]) -> bool:
    if spec.neutral == protocol.EMPTY:
        return tensor.size == 0
    if spec.neutral == protocol.ONLY_ZEROS:
        return not tensor.any()
    if spec.neutral is None or tensor.size != 1:
        return False
    value = tensor.reshape(-1)[0]
    return bool(np.isclose(float(value), float(spec.neutral), rtol=1e-6, atol=0.0))


def _texts(request: InferenceRequest, limits: RequestLimits) -> tuple[list[int], list[int]]:
    """Where the text of the decoder begins, and what its encoder reads, if there is one.

    As in tensorrtllm_backend the prompt is what the encoder reads, and ``decoder_input_ids`` is
    where the answer starts; or, as in the Executor API, ``encoder_input_ids`` comes beside the
    prompt, which is where the answer starts then.
    """
    if not limits.max_encoder_len:
        _refuse_encoder_inputs(request)
        return _ids(request, _PROMPT, "input_lengths", limits), []
    has_source, start = _has_ids(request, _SOURCE), list(limits.start_ids)
    if has_source and _has_ids(request, _START):
        raise InvalidRequest(
            f"'{_START}' and '{_SOURCE}' are both given; with '{_SOURCE}' the answer starts with "
            f"'{_PROMPT}'"
        )
    if has_source:
        source = _ids(request, _SOURCE, None, limits)
        if _has_ids(request, _PROMPT):
            start = _ids(request, _PROMPT, "input_lengths", limits)
    else:
        source = _ids(request, _PROMPT, "input_lengths", limits)
        if _has_ids(request, _START):
            start = _ids(request, _START, "decoder_input_lengths", limits)
    if len(source) > limits.max_encoder_len:
        raise InvalidRequest(
            f"the encoder's input has {len(source)} tokens, more than the longest it reads here, "
            f"{limits.max_encoder_len}"
        )
    return start, source


def _refuse_encoder_inputs(request: InferenceRequest) -> None:
    """`UnsupportedRequest` for what a decoder alone has no use for. Clients of the peer's
    preprocessing hand on the one id that it puts where no text of a decoder is given."""
    neutral = {_SOURCE: 0, _START: 1, "decoder_input_lengths": 1}
    for name, most in neutral.items():
        if not request.has_tensor(name):
            continue
        tensor = request.get_tensor(name)
        is_neutral = tensor.size <= most and (name != "decoder_input_lengths" or tensor.max() == 1)
        if not is_neutral:
            raise UnsupportedRequest(
                f"'{name}' is for models with an encoder, and this one has none; leave it out"
            )


def _has_ids(request: InferenceRequest, name: str) -> bool:
    return request.has_tensor(name) and request.get_tensor(name).size > 0


def _ids(
    request: InferenceRequest, name: str, lengths: str | None, limits: RequestLimits
) -> list[int]:
    """The ids that count (the first ``lengths`` say how many), each inside the vocabulary."""
    if not request.has_tensor(name):
        raise InvalidRequest("the prompt is missing: send 'input_ids' or 'text_input'")
    ids = request.get_tensor(name)
    if ids.ndim > 2:
        raise InvalidRequest(f"'{name}' has shape {list(ids.shape)}, expected [1, n]")
    ids = ids.reshape(-1)
    if ids.size == 0:
        raise InvalidRequest(f"'{name}' is empty: a prompt needs at least one token")
    if lengths is not None:
        ids = ids[: integer(request, lengths, ids.size, 1, ids.size)]
    if limits.folds_ids:
        ids = np.where(ids < 0, ids, ids % limits.vocab_size)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"'{name}' holds {wrong}, outside the vocabulary 0..{limits.vocab_size - 1}"
            f"{'' if wrong < 0 else _FOLD_HINT}"
        )
    tokens: list[int] = ids.tolist()
    return tokens


def _check_lengths(
    prompt_len: int, max_new_tokens: int, output_field: str, limits: RequestLimits
) -> None:
    if prompt_len > limits.max_input_len:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, more than max_input_len = {limits.max_input_len}"
        )
    total = prompt_len + max_new_tokens
    if total > limits.max_seq_len:
        raise InvalidRequest(
            f"prompt ({prompt_len} tokens) + {output_field} ({max_new_tokens}) = {total}, "
            f"more than max_seq_len = {limits.max_seq_len}"
        )


def _read_drafts(
    request: InferenceRequest, prompt_len: int, max_new_tokens: int, limits: RequestLimits
) -> tuple[int, ...]:
    """The drafts that the last context step verifies, within the vocabulary.

    Cut to those that fit behind the prompt (``max_input_len``; rule of TensorRT-LLM's
    `llmRequest.h`) and can become tokens: the last token is sampled, not drafted.
    """
    if not request.has_tensor(_DRAFTS):
        return ()
    ids = request.get_tensor(_DRAFTS)
    if ids.ndim > 2:
        raise InvalidRequest(f"'{_DRAFTS}' has shape {list(ids.shape)}, expected [1, k]")
    drafts: list[int] = ids.reshape(-1).tolist()
    if drafts and limits.max_draft_len == 0:
        raise InvalidRequest(
            f"'{_DRAFTS}' holds {len(drafts)} tokens, but max_draft_len is 0 on this server, as "
            "always with deterministic_mode and for recurrences: nothing would verify them"
        )
    if len(drafts) > limits.max_draft_len:
        raise InvalidRequest(
            f"'{_DRAFTS}' holds {len(drafts)} tokens, more than max_draft_len = "
            f"{limits.max_draft_len}; send fewer, or raise max_draft_len on the server"
        )
    check_vocabulary(_DRAFTS, drafts, limits.vocab_size)
    num_fitting = max(min(limits.max_input_len - prompt_len, max_new_tokens - 1), 0)
    if len(drafts) > num_fitting:
        _logger.debug(  # clients may send too many with every request
            "request %d: %d of %d draft tokens are cut off: the prompt has %d tokens, at most %d "
            "are generated, and max_input_len is %d",
            request.request_id,
            len(drafts) - num_fitting,
            len(drafts),
            prompt_len,
            max_new_tokens,
            limits.max_input_len,
        )
    return tuple(drafts[:num_fitting])
