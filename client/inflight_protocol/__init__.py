"""The wire in one table: every tensor and parameter, with type, shape and what we do with it.

Everything that names a tensor or a parameter reads it from here: request validation, the
``config.pbtxt`` (a test compares), the clients and the docs. Names, types and order follow
``tensorrtllm_backend`` v0.19 (its `config.pbtxt` files), with the names that
were changed later beside the old ones.

A tensor that is not honoured yet is *refused by name* unless it carries its neutral value (the one
that asks for nothing), because existing clients send those by default.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight_protocol.ensemble import DRAFT_INPUTS, ENSEMBLE_INPUT_MAP, ENSEMBLE_OUTPUT_MAP
from inflight_protocol.inputs import CONTROL_INPUTS, INPUT_BY_NAME, INPUTS, RENAMED_INPUTS
from inflight_protocol.metrics import (
    CACHE_CONFIG,
    ERRORS,
    EVENTS,
    GENERATION_TOKENS,
    HISTOGRAMS,
    INPUT_LENGTHS,
    LORA,
    LORA_REQUESTS,
    METRICS,
    OLDER_NAMES,
    OUTPUT_LENGTHS,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    REUSE,
    SUCCESSES,
    V1_METRICS,
    VLLM_METRICS,
    MetricFamilySpec,
)
from inflight_protocol.outputs import OUTPUT_BY_NAME, OUTPUTS
from inflight_protocol.parameters import (
    MAX_QUEUE_SIZE,
    PARAMETER_BY_NAME,
    PARAMETERS,
    TRITON_PARAMETERS,
)
from inflight_protocol.specs import (
    DTYPE_TO_NUMPY,
    EMPTY,
    ONLY_ZEROS,
    ParameterSpec,
    TensorSpec,
)

__all__ = [
    "ACCUMULATE_PARAMETER",
    "CACHE_CONFIG",
    "CONTROL_INPUTS",
    "DRAFT_INPUTS",
    "DRAFT_MODEL_NAME",
    "DTYPE_TO_NUMPY",
    "EMPTY",
    "ENSEMBLE_INPUT_MAP",
    "ENSEMBLE_MODEL_NAME",
    "ENSEMBLE_OUTPUT_MAP",
    "ERRORS",
    "ERROR_CODES_PARAMETER",
    "EVENTS",
    "GENERATION_TOKENS",
    "HISTOGRAMS",
    "IGNORE_EOS_PARAMETER",
    "INPUTS",
    "INPUT_BY_NAME",
    "INPUT_LENGTHS",
    "LLM_MODEL_NAME",
    "LORA",
    "LORA_REQUESTS",
    "MAX_QUEUE_SIZE",
    "METRICS",
    "NOT_IN_FLIGHT",
    "OLDER_NAMES",
    "ONLY_ZEROS",
    "OUTPUTS",
    "OUTPUT_BY_NAME",
    "OUTPUT_LENGTHS",
    "PARAMETERS",
    "PARAMETER_BY_NAME",
    "PREEMPTIONS",
    "PREFIX_HITS",
    "PREFIX_QUERIES",
    "PROMPT_TOKENS",
    "RENAMED_INPUTS",
    "REUSE",
    "SHARED_PARAMETER",
    "STREAMING_PARAMETER",
    "SUCCESSES",
    "TRITON_PARAMETERS",
    "V1_METRICS",
    "VLLM_METRICS",
    "MetricFamilySpec",
    "ParameterSpec",
    "TensorSpec",
    "names",
]

ERROR_CODES_PARAMETER = "inflight_error_codes"
"""Request parameter that asks for errors of the form ``[CODE] message``.

A stream of Triton carries no code with an error. Its own way, the header ``triton_grpc_error``,
must not be used: it ends about one in 200 refused requests with the abort of the whole server
(24.10).
"""

SHARED_PARAMETER = "inflight_shared"
"""Request parameter that has a request's answer come on a stream that it shares with others:
``NAME TAG``, the id of the request that opened that stream (input ``shared``) and what the answer
is called there. Its own stream ends it, with nothing or an error. Where there is no stream of this
name the answer comes on its own, as without the parameter. See `shared`.
"""

NOT_IN_FLIGHT = "not in flight"
"""The ``state`` in the answer to `why` about an id that no request in flight has."""

STREAMING_PARAMETER = "Streaming"
"""Request parameter of ``inflight_batcher_llm_client.py``; says what input ``streaming`` says."""

ACCUMULATE_PARAMETER = "accumulate_tokens"
"""Request parameter of public benchmark clients (those of vLLM, SGLang, TensorRT-LLM); changes
nothing here or there: they add up the texts themselves."""

IGNORE_EOS_PARAMETER = "ignore_eos"
"""Request parameter of public benchmark clients: true says what -1 as ``end_id`` says."""

LLM_MODEL_NAME = "tensorrt_llm"
ENSEMBLE_MODEL_NAME = "ensemble"
DRAFT_MODEL_NAME = "tensorrt_llm_draft"
"""The model that guesses for `tensorrt_llm`, where there is one."""


def names(specs: Iterable[TensorSpec | ParameterSpec]) -> list[str]:
    """The names of some rows of the table, in order."""
    return [spec.name for spec in specs]
