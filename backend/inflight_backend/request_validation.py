"""From named tensors to an `LlmRequest`, or to an error that names the field and its bound.

Everything a caller can get wrong is found here, before a request reaches the scheduler: after that
no value of a request may raise inside the loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight_backend.errors import InvalidRequest
from inflight_backend.inference_request import InferenceRequest
from inflight_backend.request_scheduling import deadline_of, read_cache_salt
from inflight_client import protocol
from inflight_client.protocol import TensorSpec
from inflight_scheduler import LlmRequest, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""New tokens when a request names no number (the usual default of completion APIs)."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the loaded model and the configuration allow; all lengths in tokens.

    ``may_stream`` False: streaming requests are treated as the others (V1 batching).
    ``refusal_reason`` says why a request, valid in itself, could never finish here (KV pool, token
    budget); None if it can. Seconds bound the waiting and the whole life of a request.
    """

    vocab_size: int
    max_input_len: int
    max_seq_len: int
    exclude_input_in_output: bool
    refusal_reason: Callable[[LlmRequest], str | None]
    may_stream: bool = True
    max_queue_seconds: float | None = None
    max_run_seconds: float | None = None


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
    tokens = _prompt(request, limits)
    max_new_tokens = _integer(request, "request_output_len", DEFAULT_MAX_TOKENS, 1, _INT32_MAX)
    _check_lengths(len(tokens), max_new_tokens, request.sent_name("request_output_len"), limits)
    llm_request = LlmRequest(
        request.request_id,
        tokens,
        max_new_tokens,
        sampling=_sampling(request, max_new_tokens, limits),
        end_id=_integer(request, "end_id", -1, -1, limits.vocab_size - 1),
        pad_id=_integer(request, "pad_id", -1, -1, limits.vocab_size - 1),
        is_streaming=request.is_streaming and limits.may_stream,
        exclude_input_in_output=_flag(
            request, "exclude_input_in_output", limits.exclude_input_in_output
        ),
        priority=_number(request, "priority", 0.5, 0.0, 1.0),
        cache_salt=read_cache_salt(request),
        queue_deadline=deadline_of(
            request,
            _integer(request, "max_queue_time_ms", 0, 1, _INT32_MAX),
            limits.max_queue_seconds,
        ),
        run_deadline=deadline_of(
            request,
            _integer(request, "allotted_time_ms", 0, 1, _INT32_MAX),
            limits.max_run_seconds,
        ),
    )
    if (reason := limits.refusal_reason(llm_request)) is not None:
        raise InvalidRequest(reason)
    return llm_request


def _check_tensor(spec: TensorSpec, tensor: npt.NDArray[Any]) -> None:
    """Type, batch dimension and size; a tensor not honoured passes only if it asks for nothing."""
    expected = protocol.DTYPE_TO_NUMPY[spec.dtype]
    if tensor.dtype != np.dtype(expected):
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
        raise InvalidRequest(f"'{spec.name}' is not supported by this server; {hint}")


def _is_neutral(spec: TensorSpec, tensor: npt.NDArray[Any]) -> bool:
    if spec.neutral == protocol.EMPTY:
        return tensor.size == 0
    if spec.neutral is None or tensor.size != 1:
        return False
    value = tensor.reshape(-1)[0]
    return bool(np.isclose(float(value), float(spec.neutral), rtol=1e-6, atol=0.0))


def _prompt(request: InferenceRequest, limits: RequestLimits) -> list[int]:
    """The ids that count, each inside the vocabulary."""
    if not request.has_tensor("input_ids"):
        raise InvalidRequest("the prompt is missing: send 'input_ids' or 'text_input'")
    ids = request.get_tensor("input_ids")
    if ids.ndim > 2:
        raise InvalidRequest(f"'input_ids' has shape {list(ids.shape)}, expected [1, n]")
    ids = ids.reshape(-1)
    if ids.size == 0:
        raise InvalidRequest("'input_ids' is empty: a prompt needs at least one token")
    num_tokens = _integer(request, "input_lengths", ids.size, 1, ids.size)
    ids = ids[:num_tokens]
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"'input_ids' holds {wrong}, outside the vocabulary 0..{limits.vocab_size - 1}"
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


def _sampling(
    request: InferenceRequest, max_new_tokens: int, limits: RequestLimits
) -> SamplingParams:
    top_k = _integer(request, "runtime_top_k", 0, 0, _INT32_MAX)
    if request.has_tensor("random_seed"):
        seed = int(request.get_tensor("random_seed").reshape(-1)[0])
    else:
        seed = secrets.randbits(64)  # without a seed no two requests draw alike
    return SamplingParams(
        temperature=_number(request, "temperature", 1.0, 0.0, float("inf")),
        top_k=min(top_k, limits.vocab_size),  # more than all of them filters nothing
        top_p=_number(request, "runtime_top_p", 0.0, 0.0, 1.0),
        seed=seed - 2**64 if seed >= 2**63 else seed,  # device tensors hold signed numbers
        min_length=_integer(request, "min_length", 0, 0, max_new_tokens),
    )


def _integer(request: InferenceRequest, name: str, default: int, minimum: int, maximum: int) -> int:
    if not request.has_tensor(name):
        return default
    value = int(request.get_tensor(name).reshape(-1)[0])
    if not minimum <= value <= maximum:
        raise InvalidRequest(
            f"'{request.sent_name(name)}' is {value}, outside {minimum}..{maximum}"
        )
    return value


def _number(
    request: InferenceRequest, name: str, default: float, minimum: float, maximum: float
) -> float:
    if not request.has_tensor(name):
        return default
    value = float(request.get_tensor(name).reshape(-1)[0])
    if not np.isfinite(value) or not minimum <= value <= maximum:
        bound = f"at least {minimum:g}" if maximum == float("inf") else f"{minimum:g}..{maximum:g}"
        raise InvalidRequest(f"'{name}' is {value:g}; it must be a finite number, {bound}")
    return value


def _flag(request: InferenceRequest, name: str, default: bool) -> bool:
    return bool(request.get_tensor(name).reshape(-1)[0]) if request.has_tensor(name) else default
