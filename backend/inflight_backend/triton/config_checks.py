"""What config.pbtxt may ask of Triton for ``tensorrt_llm`` and would not get: refused at load.

Triton takes each of these and passes it over, or does it beside the model and not with it. The
limit of its queue is the model's, as with `tensorrtllm_backend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import set_or_empty

_PROMPTS = ("input_ids", "text_input")
_GPU = ("KIND_GPU", "GPU")
_LIMIT = "max_queue_size"


def check_config(config: Mapping[str, Any], args: Mapping[str, str]) -> None:
    """`ConfigurationError` for what cannot be done; ``args`` are those of ``initialize``."""
    names = {each["name"] for each in config.get("input", ())}
    if not names.intersection(_PROMPTS):
        raise ConfigurationError(
            "the configuration of this model has neither input 'input_ids' nor 'text_input': write "
            "config.pbtxt with `inflight model-repository`; a configuration that is given with a "
            "load request takes its place as a whole"
        )
    _check_instances(config, args)
    if config.get("response_cache", {}).get("enable"):
        raise ConfigurationError(
            "response_cache is not for this model: stop and ready requests would be answered from "
            "it, and sampled answers repeated; leave it out (enable_kv_cache_reuse shares what "
            "prompts have in common)"
        )
    _check_queue(config)


def with_queue_limit(parameters: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """``parameters`` with the limit of Triton's queue as ``max_queue_size``, if there is one: there
    `tensorrtllm_backend` has it. `ConfigurationError` if they say something else."""
    limit = int(_queue_policy(config).get(_LIMIT, 0))
    own = set_or_empty(parameters.get(_LIMIT, ""))
    if limit and own and own != str(limit):
        raise ConfigurationError(
            f"dynamic_batching.default_queue_policy.{_LIMIT} is {limit} and the parameter {_LIMIT} "
            f"is {own}: they mean the same, leave one of them out"
        )
    return {**parameters, _LIMIT: str(limit)} if limit else dict(parameters)


def _queue_policy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    policy: Mapping[str, Any] = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return policy


def _check_instances(config: Mapping[str, Any], args: Mapping[str, str]) -> None:
    groups = config.get("instance_group", ())
    num_instances = sum(_num_instances(group) for group in groups)
    # Triton may add one to that which runs, and tells it the configuration of before.
    name = args.get("model_instance_name", "")
    if num_instances > 1 or any(_is_another(name, group) for group in groups):
        raise ConfigurationError(
            f"instance_group asks for {max(num_instances, 2)} instances of this model, and one "
            "batches all requests, since a stop request must reach what it stops: set count to 1, "
            "with one GPU at most; for more GPUs start a server for each (CUDA_VISIBLE_DEVICES)"
        )
    device = args.get("model_instance_device_id", "0")
    if args.get("model_instance_kind") in _GPU and device != "0":
        raise ConfigurationError(
            f"instance_group names GPU {device}, and this model runs on the first one that its "
            f"server sees: start it with CUDA_VISIBLE_DEVICES={device} and leave gpus out"
        )


def _is_another(name: str, group: Mapping[str, Any]) -> bool:
    """True if ``name`` is that of an instance of ``group`` behind its first."""
    number = name.removeprefix(f"{group.get('name', '')}_")
    return number != name and number.isdecimal() and int(number) > 0


def _num_instances(group: Mapping[str, Any]) -> int:
    num_devices = len(group.get("gpus", ())) if group.get("kind") in _GPU else 1
    return int(group.get("count", 1)) * max(num_devices, 1)


def _check_queue(config: Mapping[str, Any]) -> None:
    """Requests pass through Triton's queue at once and wait in the model."""
    key = "default_timeout_microseconds"
    if timeout := int(_queue_policy(config).get(key, 0)):
        raise ConfigurationError(
            f"dynamic_batching.default_queue_policy.{key} is {timeout}, but requests wait in the "
            "model, not in Triton's queue: leave it out; the parameter max_queue_seconds bounds "
            "how long they wait"
        )
    if levels := int(config.get("dynamic_batching", {}).get("priority_levels", 0)):
        raise ConfigurationError(
            f"dynamic_batching.priority_levels is {levels}, but requests wait in the model, not in "
            "Triton's queue: leave it out; the input 'priority' orders them"
        )
