"""The adapters of a server: what requests ask for, read, checked and kept; and those with names.

Requests are read in the thread that validates them, which for Triton's is not the loop's: a large
adapter delays its own request only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from inflight_backend.adapters.store import AdapterStore, Storable, other_weights
from inflight_backend.engine.interface import AdapterPages
from inflight_backend.errors import (
    CapacityExceeded,
    CheckpointError,
    ConfigurationError,
    InvalidRequest,
    ServingError,
)
from inflight_backend.log import get_logger
from inflight_backend.requests.adapters import (
    CONFIG_FIELD,
    NAME_FIELD,
    TASK_FIELD,
    WEIGHTS_FIELD,
    AdapterUse,
    is_sent,
    read_name,
)
from inflight_backend.requests.inference_request import Array, InferenceRequest
from inflight_backend.requests.values import integer

if TYPE_CHECKING:
    import torch

    from inflight_backend.models.blocks.lora import Adapter
    from inflight_backend.models.config import ModelConfig
    from inflight_backend.models.parameters import Source

_logger = get_logger(__name__)

_NO_ROOM = (
    "changes experts, or what takes keys and values from latents, for which no memory was set "
    "aside; set lora_experts to true"
)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """``modules``: folders of adapters by name, read at start. ``prefetch_dir``: folders with
    wire tensors, read at start. ``root``: adapters may be loaded while it runs, of folders below
    it; None: not at all."""

    host_memory_bytes: int = 2**30
    prefetch_dir: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None


class AdapterService:
    """Reads adapters of one model; any thread may call it."""

    def __init__(
        self,
        config: AdapterConfig,
        pages: AdapterPages,
        model: ModelConfig,
        dtype: torch.dtype,
        checkpoint_dir: Path | None,
        prepare: Callable[[Adapter], Storable],
    ) -> None:
        """Everything that the configuration names is read here; `ConfigurationError` says what
        cannot be. ``checkpoint_dir``: of the weights by the names of ``model``; None: there are
        none such. ``prepare``: see `StepEngine.prepare_adapter`."""
        self.pages, self._config, self._prepare = pages, config, prepare
        self._model, self._dtype, self._checkpoint_dir = model, dtype, checkpoint_dir
        self.store = AdapterStore(config.host_memory_bytes)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._task_of_name: dict[str, int] = {}
        self._name_of_task: dict[int, str] = {}  # also of those unloaded: requests may go on
        self._next_id = -1
        for name, folder in config.modules.items():
            self._keep(name, Path(folder))
        if config.prefetch_dir is not None:
            self._prefetch(Path(config.prefetch_dir))

    @property
    def names(self) -> list[str]:
        """Of the adapters that have one, in the order in which they were loaded."""
        with self._lock:
            return list(self._task_of_name)

    @property
    def is_used(self) -> bool:
        """Whether there are adapters, or were some."""
        return len(self.store) > 0 or self.store.num_evictions > 0 or self._next_id < -1

    def name_of(self, task_id: int) -> str | None:
        """The name of an adapter that has, or had, one."""
        return self._name_of_task.get(task_id)

    def read(self, request: InferenceRequest) -> AdapterUse | None:
        """The adapter of a request, None if it asks for none; kept on ``request``. A new one is
        put into the store. `InvalidRequest` names the tensor and its bound."""
        name = read_name(request)
        if not name and not is_sent(request, TASK_FIELD):
            if is_sent(request, WEIGHTS_FIELD) or is_sent(request, CONFIG_FIELD):
                raise InvalidRequest(f"{TASK_FIELD} must be set for LoRA inference")
            return None
        task_id = (
            self._named(request, name) if name else integer(request, TASK_FIELD, 0, 0, 2**64 - 1)
        )
        adapter = self._find_or_read(request, task_id)
        request.adapter = adapter
        return AdapterUse(task_id, adapter.digest, self.pages.pages_of(adapter.rank))

    def load(self, name: str, folder: str) -> None:
        """Keep the adapter of a folder below ``root`` under ``name``."""
        if not name:
            raise InvalidRequest(f"'{NAME_FIELD}' is missing: it says what to call the adapter")
        if self._config.root is None:
            raise InvalidRequest("adapters may not be loaded on this server; see lora_root")
        root = Path(self._config.root).resolve()
        try:
            path = (root / folder).resolve()
        except (ValueError, RuntimeError):  # no text of a path, or links in a circle
            raise InvalidRequest(f"{folder!r} is no folder") from None
        if not path.is_relative_to(root):
            raise InvalidRequest(f"the folder {folder!r} does not lie below lora_root")
        with self._loading:  # one by one, or two could take the same name
            if name in self.names:
                raise InvalidRequest(f"there is an adapter {name!r} already; unload it first")
            try:
                self._keep(name, path)
            except ConfigurationError as error:
                raise InvalidRequest(str(error).replace(f"{root}/", "")) from None

    def unload(self, name: str) -> None:
        """Take no more requests for ``name``; those in flight go on."""
        if self._config.root is None:
            raise InvalidRequest("adapters may not be unloaded on this server; see lora_root")
        with self._lock:
            task_id = self._task_of_name.pop(name, None)
        if task_id is None:
            raise InvalidRequest(f"there is no adapter {name!r}")
        self.store.remove(task_id)

    def _named(self, request: InferenceRequest, name: str) -> int:
        for field_name in (TASK_FIELD, WEIGHTS_FIELD, CONFIG_FIELD):
            if is_sent(request, field_name):
                raise InvalidRequest(f"'{NAME_FIELD}' and '{field_name}' exclude one another")
        with self._lock:
            task_id = self._task_of_name.get(name)
            names = list(self._task_of_name)
        if task_id is None:
            raise InvalidRequest(f"LoRA {name} is not supported, we currently support {names}")
        return task_id

    def _find_or_read(self, request: InferenceRequest, task_id: int) -> Storable:
        has_weights = is_sent(request, WEIGHTS_FIELD)
        if has_weights != is_sent(request, CONFIG_FIELD):
            raise InvalidRequest(f"'{WEIGHTS_FIELD}' and '{CONFIG_FIELD}' must come together")
        known = self.store.find(task_id)
        if not has_weights:
            if known is None:
                raise InvalidRequest(
                    f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
                )
            return known
        from inflight_backend.adapters.digest import digest_of_arrays

        weights, config = request.get_tensor(WEIGHTS_FIELD), request.get_tensor(CONFIG_FIELD)
        digest = request.reading(WEIGHTS_FIELD, lambda array: digest_of_arrays(array, config))
        if known is None:
            return self.store.put(task_id, self._read_arrays(weights, config, digest))
        if known.digest != digest:
            raise other_weights(task_id)
        return known

    def _read_arrays(self, weights: Array, config: Array, digest: bytes) -> Storable:
        from inflight_backend.adapters.wire_tensors import read_wire_tensors

        adapter = read_wire_tensors(
            weights, config, self._model, self._dtype, self.pages.max_rank, digest
        )
        if adapter.has_experts and not self.pages.has_experts:
            raise InvalidRequest(f"'{CONFIG_FIELD}' {_NO_ROOM}")
        return self._prepare(adapter)

    def _keep(self, name: str, folder: Path) -> None:
        adapter = self._read_folder(folder)
        if adapter.rank > self.pages.max_rank:
            raise CheckpointError(
                f"the adapter {name} has rank {adapter.rank}, more than "
                f"lora_cache_max_adapter_size = {self.pages.max_rank}"
            )
        if adapter.has_experts and not self.pages.has_experts:
            raise CheckpointError(f"the adapter {name} {_NO_ROOM}")
        with self._lock:
            task_id = self._next_id
            self._next_id -= 1
        self._put(f"the adapter {name}", task_id, self._prepare(adapter))
        with self._lock:
            self._task_of_name[name] = task_id
            self._name_of_task[task_id] = name
        _logger.info("adapter %s: rank %d, %d bytes", name, adapter.rank, adapter.num_bytes)

    def _put(self, what: str, task_id: int, adapter: Storable) -> None:
        try:
            self.store.put(task_id, adapter, is_kept=True)
        except CapacityExceeded as error:
            raise ConfigurationError(f"{what} cannot be kept: {error}") from None

    def _read_folder(self, folder: Path) -> Adapter:
        from inflight_backend.adapters.peft_folder import read_peft_folder
        from inflight_backend.models.weights import Checkpoint

        if self._checkpoint_dir is None:
            return read_peft_folder(folder, self._model, self._dtype, _no_weight)
        with Checkpoint(self._checkpoint_dir) as checkpoint:
            return read_peft_folder(folder, self._model, self._dtype, checkpoint.weight)

    def _prefetch(self, folder: Path) -> None:
        from inflight_backend.adapters.digest import digest_of_arrays
        from inflight_backend.adapters.wire_tensors import read_prefetch_folder

        for task_id, (weights, config) in read_prefetch_folder(folder).items():
            what = f"lora_prefetch_dir: the adapter {task_id}"
            try:
                adapter = self._read_arrays(weights, config, digest_of_arrays(weights, config))
            except ServingError as error:
                raise ConfigurationError(f"{what} cannot be used: {error}") from None
            self._put(what, task_id, adapter)


def _no_weight(source: Source) -> NoReturn:
    raise CheckpointError(
        f"use_dora needs the weight {source.name}, which a GGUF file has in another form; serve "
        "the checkpoint that it was made of"
    )
