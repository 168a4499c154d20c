"""Settings of the server and of `GptManager`.

`ServerParameters` are parsed from the strings of Triton's ``parameters`` block. The table with
names, kinds, defaults and bounds is `inflight_protocol.PARAMETERS`; launcher and model both call
`parse_parameters`, so they agree on what is allowed. `TrtGptModelOptionalParams` has TensorRT-LLM's
names and our additions.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inflight_backend.engine.interface import StepEngine
from inflight_backend.errors import ConfigurationError
from inflight_backend.guided.compiler import GuidedDecodingConfig
from inflight_backend.manager.logits_processors import (
    LogitsPostProcessor,
    check_logits_processors,
    find_logits_processors,
)
from inflight_backend.ranks.machines import Machines
from inflight_backend.speculative.drafter import SpeculativeDecodingConfig
from inflight_protocol import PARAMETER_BY_NAME, PARAMETERS, TRITON_PARAMETERS, ParameterSpec
from inflight_protocol.aliases import TEMPLATE_HINTS
from inflight_scheduler import DEFAULT_PRIORITY_SPAN, ContextChunkingPolicy


class OverlapScheduler(Enum):
    """Whether steps overlap; AUTO: where the engine runs on a device of its own."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def is_on(self, engine: StepEngine) -> bool:
        """The choice for ``engine``."""
        if self is OverlapScheduler.AUTO:
            return engine.is_asynchronous
        return self is OverlapScheduler.ON


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """Size of the KV pool. With both a number of tokens and a fraction, the smaller pool wins.

    ``enable_block_reuse`` keeps computed blocks for later requests with the same prefix and
    ``cache_salt``. ``dtype`` is auto (that of the model) or fp8. ``max_state_snapshots``
    and ``max_attention_window``: see `EngineConfig`.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    tokens_per_block: int = 32
    dtype: str = "auto"
    cross_kv_cache_fraction: float = 0.5
    max_state_snapshots: int | None = None
    max_attention_window: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeftCacheManagerConfig:
    """Memory for adapters (LoRA), on the host and on the device.

    An adapter of rank ``optimal_adapter_size`` fills a page of the device's memory; none may have a
    rank above ``max_adapter_size``. ``num_device_pages`` None: as many as ``device_cache_percent``
    (a share, 0 to 1) of the memory holds that the weights leave. ``host_cache_size`` in bytes.
    ``lora_prefetch_dir``: folders named by task ids, read at start.
    """

    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    device_cache_percent: float = 0.05
    num_device_pages: int | None = None
    host_cache_size: int = 2**30
    lora_prefetch_dir: str | None = None


@dataclass(frozen=True, slots=True)
class TrtGptModelOptionalParams:
    """All lengths in tokens; None leaves the choice to the checkpoint (`EngineConfig`).

    ``overlap_scheduler``: see `step_loop`. ``record_file``: every decision of the scheduler is
    written there (`inflight replay`). ``kv_events``: where changes of what is cached are published,
    as tcp://127.0.0.1:5557 (see `kv_events`). ``enable_chunked_context`` None: chunked if
    ``max_seq_len`` is above ``max_num_tokens`` (and see `batcher.effective_settings`).
    ``context_chunk_unit`` None means ``tokens_per_block``. ``priority_span``: see
    `ActiveRequests`. ``max_queue_seconds`` and
    ``max_run_seconds`` end requests that have not started, or not finished, that long after they
    arrived; None means never. A request may ask for less (``max_queue_time_ms``,
    ``allotted_time_ms``), not for more. ``normalize_log_probs``: log probabilities are normalised
    over the tokens that the filters left, as TensorRT-LLM's default was until March 2026; by
    default they are the model's own. ``out_of_vocabulary``: "refuse" ids of prompts above the
    vocabulary, or "fold" them into it. ``logits_processors``: those that requests may choose, by
    name (see `logits_processors`). ``enable_lora``: whether requests may have adapters; None: on a
    CPU, and where adapters are named. ``lora_modules``: folders of adapters by name. ``lora_root``:
    adapters of folders below it may be loaded and unloaded by name while it runs. ``lora_experts``:
    adapters may change experts, for which a GPU's memory is set aside; None: if one of
    ``lora_modules`` does.
    ``tensor_parallel_size``, ``pipeline_parallel_size`` and ``expert_parallel``: see
    `EngineConfig`; ``gpu_device_ids``: the GPUs of the ranks, () for the first ones; a rank that is
    silent for ``stall_seconds`` is lost. ``machines``: where ranks of other machines join; None:
    all are on this one.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    max_batch_size: int = 256
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    scheduler_class: str | None = None
    overlap_scheduler: OverlapScheduler = OverlapScheduler.AUTO
    enable_chunked_context: bool | None = None
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    context_chunk_unit: int | None = None
    priority_span: float = DEFAULT_PRIORITY_SPAN
    max_queue_seconds: float | None = None
    max_run_seconds: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    attention_backend: str = "auto"
    cuda_graph_mode: bool = True
    cuda_graph_mixed_tokens: int = 1024
    normalize_log_probs: bool = False
    out_of_vocabulary: str = "refuse"
    deterministic_mode: bool = False
    record_file: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    kv_events_format: str = "array"
    guided_decoding_config: GuidedDecodingConfig = field(default_factory=GuidedDecodingConfig)
    speculative_decoding_config: SpeculativeDecodingConfig = field(
        default_factory=SpeculativeDecodingConfig
    )
    logits_processors: Mapping[str, LogitsPostProcessor] = field(default_factory=dict)
    enable_lora: bool | None = None
    peft_cache_manager_config: PeftCacheManagerConfig = field(
        default_factory=PeftCacheManagerConfig
    )
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    lora_root: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    gpu_device_ids: tuple[int, ...] = ()
    machines: Machines | None = None
    stall_seconds: float = 120.0
    lora_experts: bool | None = None

    @property
    def names_adapters(self) -> bool:
        """True where a setting makes sense with adapters only."""
        prefetch_dir = self.peft_cache_manager_config.lora_prefetch_dir
        return bool(self.lora_modules or self.lora_root or prefetch_dir)

    def __post_init__(self) -> None:
        check_logits_processors(self.logits_processors)
        for name in ("context_chunk_unit", "max_queue_seconds", "max_run_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be above 0, not {value}")
        if not self.priority_span >= 0:
            raise ConfigurationError(f"priority_span must be at least 0, not {self.priority_span}")
        is_default = self.context_chunking_policy == ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
        is_cut = not is_default or self.context_chunk_unit is not None
        if self.enable_chunked_context is False and is_cut:
            raise ConfigurationError(
                "context_chunking_policy and context_chunk_unit say how contexts are cut; "
                "set enable_chunked_context to true, or remove them"
            )

    @classmethod
    def from_parameters(cls, parameters: ServerParameters) -> TrtGptModelOptionalParams:
        """Those of a Triton model; fields with the same name are copied."""
        converted: dict[str, Any] = {
            "kv_cache_config": KvCacheConfig(
                max_tokens=parameters.max_tokens_in_paged_kv_cache,
                free_gpu_memory_fraction=parameters.kv_cache_free_gpu_mem_fraction,
                enable_block_reuse=parameters.enable_kv_cache_reuse,
                tokens_per_block=parameters.tokens_per_block,
                dtype=parameters.kv_cache_dtype,
                cross_kv_cache_fraction=parameters.cross_kv_cache_fraction,
                max_state_snapshots=parameters.max_state_snapshots,
                max_attention_window=_read_windows(parameters.max_attention_window_size),
            ),
            "context_chunking_policy": ContextChunkingPolicy[
                parameters.context_chunking_policy.upper()
            ],
            "overlap_scheduler": OverlapScheduler(parameters.overlap_scheduler),
            "guided_decoding_config": GuidedDecodingConfig(
                parameters.guided_decoding_backend, parameters.tokenizer_dir
            ),
            "logits_processors": find_logits_processors(parameters.logits_processors),
            "speculative_decoding_config": SpeculativeDecodingConfig(
                parameters.speculative_decoding_mode,
                parameters.max_draft_len,
                parameters.max_matching_ngram_size,
                parameters.speculative_disable_by_batch_size,
            ),
            "enable_lora": _AUTO_OR_BOOL[parameters.enable_lora],
            "lora_experts": _AUTO_OR_BOOL[parameters.lora_experts],
            "peft_cache_manager_config": PeftCacheManagerConfig(
                optimal_adapter_size=parameters.lora_cache_optimal_adapter_size,
                max_adapter_size=parameters.lora_cache_max_adapter_size,
                device_cache_percent=parameters.lora_cache_gpu_memory_fraction,
                host_cache_size=parameters.lora_cache_host_memory_bytes,
                lora_prefetch_dir=parameters.lora_prefetch_dir,
            ),
            "lora_modules": _read_modules(parameters.lora_modules),
            **_read_devices(parameters),
            "machines": _read_machines(parameters),
        }
        return cls(**(same_fields(cls, parameters) | converted))


_AUTO_OR_BOOL = {"auto": None, "true": True, "false": False}


def _read_windows(text: str | None) -> tuple[int, ...]:
    """``max_attention_window_size``: whole numbers between commas."""
    try:
        return tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise ConfigurationError(
            f"max_attention_window_size = '{text}' must be whole numbers separated by commas, one "
            "for all layers or one for each, which begin again where there are more layers"
        ) from None


def _read_modules(text: str | None) -> dict[str, str]:
    """``lora_modules``: folders by name, or a file with them (vLLM's ``multi_lora.json``)."""
    if text is None:
        return {}
    try:
        is_object = text.lstrip().startswith("{")
        modules = json.loads(text if is_object else Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"lora_modules = '{text}': {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"lora_modules is not JSON: {error}") from None
    if not isinstance(modules, dict) or not all(
        name and isinstance(folder, str) and folder for name, folder in modules.items()
    ):
        raise ConfigurationError("lora_modules must be a JSON object of names and folders")
    return modules


def _read_devices(parameters: ServerParameters) -> dict[str, Any]:
    """``gpu_device_ids``, and the ``tensor_parallel_size`` that they may stand for."""
    if parameters.gpu_device_ids is None:
        return {"gpu_device_ids": ()}
    words = [word.strip() for word in parameters.gpu_device_ids.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ConfigurationError(
            f"gpu_device_ids must be different numbers, as 0,1 (of one instance: this model has no "
            f"more), got {parameters.gpu_device_ids!r}"
        )
    tensor, pipeline = parameters.tensor_parallel_size, parameters.pipeline_parallel_size
    num_nodes = parameters.num_nodes
    if tensor == 1:
        tensor = max(len(words) * num_nodes // pipeline, 1)
    if tensor * pipeline != len(words) * num_nodes:
        raise ConfigurationError(
            f"gpu_device_ids names {len(words)} GPUs on each of num_nodes = {num_nodes}, and "
            f"tensor_parallel_size * pipeline_parallel_size is {tensor * pipeline}"
        )
    return {"gpu_device_ids": tuple(map(int, words)), "tensor_parallel_size": tensor}


def read_tensor_size(parameters: ServerParameters) -> int:
    """Ranks that part each layer."""
    size: int = _read_devices(parameters).get(
        "tensor_parallel_size", parameters.tensor_parallel_size
    )
    return size


def _read_machines(parameters: ServerParameters) -> Machines | None:
    """``num_nodes`` and ``rank_address``."""
    if parameters.num_nodes == 1:
        return None
    host, colon, port = (parameters.rank_address or "").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16 - 1):
        raise ConfigurationError(
            f"num_nodes is {parameters.num_nodes}: rank_address must say where the other machines "
            f"join, as 10.0.0.1:29500, got {parameters.rank_address!r}"
        )
    return Machines(parameters.num_nodes, host.strip("[]"), int(port))


def same_fields(target: type[Any], source: object) -> dict[str, Any]:
    """The fields of the dataclass ``target`` that ``source`` has under the same name."""
    names = (each.name for each in fields(target) if hasattr(source, each.name))
    return {name: getattr(source, name) for name in names}


PRIVATE_VARIABLE = "INFLIGHT_PRIVATE_PARAMETERS"
"""Environment variable with parameters as a JSON object. Every client of Triton can read a model's
configuration, so `inflight serve` passes paths to its models in this way. Under `PRIVATE_BY_MODEL`
are those of models that have others, by their names."""

PRIVATE_BY_MODEL = "models"

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
_TRUTH_VALUES = {"true": True, "1": True, "false": False, "0": False}
_FROM_TEXT: Mapping[str, Callable[[str], int | float | bool]] = {
    "int": int,
    "float": float,
    "bool": lambda text: _TRUTH_VALUES[text.lower()],
}
_KIND_IN_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


class ServerParameters(SimpleNamespace):
    """The value of each honoured row of `PARAMETERS` under its name; None = not set, the model
    decides. Build it with `parse_parameters`, which knows the defaults."""


def parse_parameters(raw: Mapping[str, str]) -> ServerParameters:
    """Check and convert ``raw``; an empty value or an unfilled ``${...}`` counts as not set.

    ``ConfigurationError`` for an unknown key, a value outside its kind, choices or bounds, a key
    that is not supported with another value than its default, or a missing ``gpt_model_path``.
    """
    check_keys(raw, PARAMETER_BY_NAME)
    values: dict[str, Any] = {}
    for spec in PARAMETERS:
        value = _parse_value(spec, set_or_empty(raw.get(spec.name, "")))
        if spec.is_honoured:
            values[spec.name] = value
    if values["gpt_model_path"] is None:
        raise ConfigurationError(
            "gpt_model_path is not set: give the folder of a Hugging Face checkpoint"
        )
    return ServerParameters(**values)


def read_raw(model_config: str) -> dict[str, str]:
    """The ``parameters`` block of a model's configuration (JSON), with the values of
    `PRIVATE_VARIABLE` in place of those that the block has."""
    private: dict[str, Any] = json.loads(os.environ.get(PRIVATE_VARIABLE, "{}"))
    config = json.loads(model_config)
    private = private.get(PRIVATE_BY_MODEL, {}).get(config.get("name"), private)
    block = config["parameters"]
    return {key: private.get(key, value["string_value"]) for key, value in block.items()}


def check_keys(raw: Mapping[str, str], known: Collection[str]) -> None:
    """`ConfigurationError` for a key with a value that is neither ``known`` nor Triton's own.

    Keys without a value are allowed: TensorRT-LLM's templates have many that stay unfilled.
    """
    for key, text in raw.items():
        if set_or_empty(text) and key not in known and key not in TRITON_PARAMETERS:
            raise ConfigurationError(unknown_key_message(key, known))


def unknown_key_message(key: str, known: Collection[str] = PARAMETER_BY_NAME) -> str:
    """The error for an unknown ``key``, with our name for a setting of TensorRT-LLM or the most
    similar of the ``known`` ones."""
    if key in TEMPLATE_HINTS:
        return f"unknown setting {key!r}: {TEMPLATE_HINTS[key]}"
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown setting {key!r}{hint}"


def set_or_empty(text: str) -> str:
    """The text without surrounding blanks; "" for a placeholder that was not filled."""
    text = text.strip()
    return "" if _PLACEHOLDER.fullmatch(text) else text


def _parse_value(spec: ParameterSpec, text: str) -> str | int | float | bool | None:
    """The typed value of one key, its default if ``text`` is empty."""
    value = _convert(spec, text or spec.default)
    if spec.is_honoured:
        return value
    if value != _convert(spec, spec.default):
        allowed = f"remove it or set it to {spec.default!r}" if spec.default else "remove it"
        raise ConfigurationError(
            f"{spec.name} ({spec.meaning}) is not supported, got {text!r}: {allowed}"
        )
    return value


def check_parameter(name: str, value: object) -> None:
    """`ConfigurationError` unless the row ``name`` of the table allows ``value``."""
    _convert(PARAMETER_BY_NAME[name], str(value))


def _convert(spec: ParameterSpec, text: str) -> str | int | float | bool | None:
    """``text`` as the kind of ``spec``, within its choices or bounds; None for ""."""
    if not text or spec.kind == "str":
        return text or None
    if spec.kind == "choice":
        if text not in spec.choices:
            choices = ", ".join(spec.choices)
            raise ConfigurationError(f"Invalid {spec.name} {text!r}: choose one of {choices}")
        return text
    try:
        value = _FROM_TEXT[spec.kind](text)
    except (KeyError, ValueError):
        kind = _KIND_IN_WORDS[spec.kind]
        raise ConfigurationError(f"{spec.name} must be {kind}, got {text!r}") from None
    low = -math.inf if spec.minimum is None else spec.minimum
    high = math.inf if spec.maximum is None else spec.maximum
    if not low <= value <= high:  # also catches NaN
        raise ConfigurationError(
            f"{spec.name} is {text}: it must be between {spec.minimum} and {spec.maximum}"
        )
    return value
