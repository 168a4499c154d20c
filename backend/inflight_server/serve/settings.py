"""The settings of `inflight serve`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import inflight_backend
from inflight_backend.errors import ConfigurationError
from inflight_backend.manager.parameters import (
    ServerParameters,
    parse_parameters,
    read_tensor_size,
    unknown_key_message,
)
from inflight_backend.text.tokenizer_files import find_tokenizer
from inflight_client.front_options import FrontOptions
from inflight_protocol import DRAFT_MODEL_NAME, LLM_MODEL_NAME, PARAMETER_BY_NAME
from inflight_server.serve.repository import DEFAULT_MODELS, UINT32_KEY

DEMO_MODEL = Path(inflight_backend.__file__).parent / "demo_model"

_OPTION_FOR_KEY = {
    "gpt_model_path": "give the checkpoint with --model",
    "status_file": "inflight serve keeps this file itself",
    "drain_file": "inflight serve keeps this file itself",
}
PATH_KEYS = frozenset({"tokenizer_dir", "record_file", "lora_prefetch_dir", "lora_root"})
PRIVATE_KEYS = PATH_KEYS | {"lora_modules"}
"""Parameters that clients must not see."""
_MODEL_NAME_KEY = "tensorrt_llm_model_name"
_DRAFT_NAME_KEY = "tensorrt_llm_draft_model_name"
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_TEXT_MODEL_KEYS = {
    "add_special_tokens": ("preprocessing",),
    "skip_special_tokens": ("postprocessing",),
    "accumulate_tokens": ("tensorrt_llm_bls",),
    _MODEL_NAME_KEY: ("tensorrt_llm_bls", "vllm_model"),
    _DRAFT_NAME_KEY: ("tensorrt_llm_bls",),
    UINT32_KEY: (LLM_MODEL_NAME,),
}
"""Key that is no parameter of `tensorrt_llm` -> the models that it is for."""

_LIKE_THE_TARGET = (
    "device",
    "attention_backend",
    "max_batch_size",
    "max_tokens_in_paged_kv_cache",
    "max_run_seconds",
    "stall_seconds",
)
"""Parameters that a draft model takes over from its target."""
_KV_SHARE = "kv_cache_free_gpu_mem_fraction"
# Both load at the same time: whichever measures the free memory first leaves room for the other.
_TARGET_KV_SHARE, _DRAFT_KV_SHARE = "0.6", "0.2"

_OPENAI_PACKAGES = ("starlette", "uvicorn", "httptools", "jinja2", "pydantic", "tokenizers")

_LOCAL_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address of all interfaces -> that of this machine."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One run of the launcher. ``host`` is an address. ``parameters`` are the values of ``--set``,
    checked.

    ``max_connection_seconds``: of a gRPC connection, and again as long for the streams that are
    still open on it; twice that for any request, unless `max_run_seconds` is among the parameters;
    0: for ever. ``load_seconds``: how long loading may stand still.
    ``is_decoupled`` False: one response per request, no streaming.
    ``draft_model``: a checkpoint that guesses for ``model``, with its own ``draft_parameters``.
    ``openai_port``: of OpenAI's API, 0 for none; ``front``: its other settings; ``api_key``: a
    secret that its clients must send, or one of ``api_key_file``.
    """

    model: Path = DEMO_MODEL
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai_port: int = 9000
    front: FrontOptions = field(default_factory=FrontOptions)
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    drain_seconds: float = 30.0
    max_restarts: int = 5
    max_connection_seconds: float = 3600.0
    load_seconds: float = 600.0
    is_verbose: bool = False
    is_decoupled: bool = True
    models: tuple[str, ...] = DEFAULT_MODELS
    draft_model: Path | None = None
    draft_parameters: dict[str, str] = field(default_factory=dict)

    @property
    def is_demo(self) -> bool:
        """True when the model is the one that ships with the package."""
        return self.model == DEMO_MODEL

    @property
    def is_public(self) -> bool:
        """True when the server listens on every interface."""
        return self.host in _LOCAL_OF

    @property
    def local_address(self) -> str:
        """The address under which a client on this machine reaches the server."""
        return _LOCAL_OF.get(self.host, self.host)

    @property
    def local_host(self) -> str:
        """`local_address` as in a URL."""
        return _as_in_url(self.local_address)

    @property
    def addresses(self) -> dict[str, str]:
        """Option name of tritonserver -> the address to listen on.

        The two kinds of servers in it write one of IPv6 in different ways. Its HTTP listens on all
        interfaces for one that it cannot read.
        """
        http = f"ipv6:{self.host}" if ":" in self.host else self.host
        return {
            "--http-address": http,
            "--metrics-address": http,
            "--grpc-address": _as_in_url(self.host),
        }

    @property
    def llm_parameters(self) -> ServerParameters:
        """``parameters`` as `tensorrt_llm` parses them."""
        return _parse_for_llm(self.parameters, self.model)

    @property
    def tokenizer_dir(self) -> Path:
        """The folder in which the model will look for its tokenizer."""
        return Path(self.parameters.get("tokenizer_dir") or self.model)

    @property
    def why_no_openai(self) -> str:
        """Why OpenAI's API is not served; "" if it is."""
        if self.openai_port == 0:
            return "--openai-port 0"
        if not self.is_decoupled:
            return "it needs a model that streams, without --no-decoupled"
        if find_tokenizer(self.tokenizer_dir) is None:
            return "the model has no tokenizer"
        missing = [name for name in _OPENAI_PACKAGES if find_spec(name) is None]
        return f"it needs {missing[0]}: pip install '.[openai]' in a clone" if missing else ""

    @property
    def all_ports(self) -> dict[str, int]:
        """Option name -> port, that of OpenAI's API as well."""
        return self.ports | ({} if self.why_no_openai else {"--openai-port": self.openai_port})

    @property
    def ports(self) -> dict[str, int]:
        """Option name -> port, of tritonserver."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
        }


def with_draft(
    parameters: Mapping[str, str], draft_parameters: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The parameters of a target and of its draft model, in one server and on one device."""
    taken_over = {key: parameters[key] for key in _LIKE_THE_TARGET if key in parameters}
    names = {_DRAFT_NAME_KEY: DRAFT_MODEL_NAME, _KV_SHARE: _TARGET_KV_SHARE}
    return names | dict(parameters), (
        {_KV_SHARE: _DRAFT_KV_SHARE} | taken_over | dict(draft_parameters)
    )


def _as_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_overrides(
    items: Iterable[str], model: Path, models: Sequence[str] = DEFAULT_MODELS
) -> dict[str, str]:
    """Turn ``key=value`` strings into parameters of ``models``; relative paths become absolute.

    ``ConfigurationError`` for an item that is not ``key=value``, a key given twice, one that
    belongs to the launcher or to a model that is not there, and everything `parse_parameters`
    refuses.
    """
    values: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigurationError(f"--set needs key=value, got {item!r}")
        if key in _TEXT_MODEL_KEYS:
            _check_text_model_key(key, value, models)
        elif key not in PARAMETER_BY_NAME:
            raise ConfigurationError(f"--set: {unknown_key_message(key)}")
        if key in _OPTION_FOR_KEY:
            raise ConfigurationError(f"--set cannot change {key}: {_OPTION_FOR_KEY[key]}")
        if key in values:
            raise ConfigurationError(f"--set gives {key} twice: {values[key]!r} and {value!r}")
        values[key] = str(Path(value).absolute()) if key in PATH_KEYS and value else value
    _parse_for_llm(values, model)
    return values


def rank_sizes(values: Mapping[str, str], model: Path, num_nodes: int) -> tuple[int, int]:
    """The tensor and pipeline parallel size of ``values`` (see `parse_overrides`), also by the GPUs
    that they name, on so many machines."""
    parameters = _parse_for_llm({"num_nodes": str(num_nodes), **values}, model)
    return read_tensor_size(parameters), parameters.pipeline_parallel_size


def _parse_for_llm(values: Mapping[str, str], model: Path) -> ServerParameters:
    ours = {key: value for key, value in values.items() if key not in _TEXT_MODEL_KEYS}
    return parse_parameters({**ours, "gpt_model_path": str(model)})


def _check_text_model_key(key: str, value: str, models: Sequence[str]) -> None:
    owners = _TEXT_MODEL_KEYS[key]
    if not set(owners) & set(models):
        raise ConfigurationError(
            f"--set {key} is for the model {' or '.join(owners)}: ask for it, --add {owners[0]}"
        )
    if key in (_MODEL_NAME_KEY, _DRAFT_NAME_KEY):
        if not _MODEL_NAME.fullmatch(value):
            raise ConfigurationError(f"--set {key} must be the name of a model, got {value!r}")
    elif value.lower() not in ("true", "false"):
        raise ConfigurationError(f"--set {key} must be true or false, got {value!r}")
