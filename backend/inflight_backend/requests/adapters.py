"""Which adapter a request asks for."""

from __future__ import annotations

from dataclasses import dataclass

from inflight_backend.errors import UnsupportedRequest
from inflight_backend.requests.inference_request import InferenceRequest
from inflight_backend.requests.values import text_bytes

TASK_FIELD, WEIGHTS_FIELD, CONFIG_FIELD = "lora_task_id", "lora_weights", "lora_config"
NAME_FIELD = "lora_name"


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The adapter of a request: its id, the digest of its weights, and the pages it takes."""

    task_id: int
    digest: bytes
    num_pages: int


def is_sent(request: InferenceRequest, name: str) -> bool:
    """An empty tensor, as ensembles hand on, asks for nothing."""
    return request.has_tensor(name) and request.get_tensor(name).size > 0


def read_name(request: InferenceRequest) -> str:
    """The name of its adapter; "" for none."""
    return text_bytes(request, NAME_FIELD).decode("utf-8", "replace")


def has_no_adapters(request: InferenceRequest) -> None:
    """The answer of a server that runs without: none, or `UnsupportedRequest`."""
    for name in (TASK_FIELD, WEIGHTS_FIELD, CONFIG_FIELD, NAME_FIELD):
        if is_sent(request, name) and (name != NAME_FIELD or read_name(request)):
            if name == NAME_FIELD:
                raise UnsupportedRequest("LoRA feature is not enabled.")  # vLLM's words
            raise UnsupportedRequest(
                f"'{name}' is not supported by this server, which runs without LoRA "
                "(enable_lora); leave it out"
            )
