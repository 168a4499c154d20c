"""What the parts of the GPU benchmark share: their setting, ceilings, models and engines.

A part is a generator of rows (flat dicts). Nothing here imports triton: a dry run switches its
interpreter on first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.config import resolve
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import ModelConfig
from inflight_backend.models.families.registry import read_family
from inflight_backend.models.layers import Parameter
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import allocate, put_rows

Row = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do: bytes and operations per second.

    The defaults are those of an H200 as measured before, FP8 assumed; `ceilings` measures them.
    """

    read_bytes: float = 4.3e12
    bf16_flops: float = 790e12
    fp8_flops: float = 1500e12
    is_measured: bool = False


@dataclass(frozen=True)
class Card:
    """A GPU with figures of its own: the name that torch gives it, and the bandwidth its maker
    states, in bytes per second."""

    name: str
    device_name: str
    nominal_bytes: float


CARDS = (
    Card("H200", "NVIDIA H200", 4.8e12),
    Card("H100", "NVIDIA H100 80GB HBM3", 3.35e12),
)
"""Of SXM modules; others of the name (PCIe, NVL) are other cards."""


def find_card(device_name: str) -> Card | None:
    """The card that torch calls so."""
    return next((card for card in CARDS if card.device_name == device_name), None)


@dataclass(frozen=True)
class Setting:
    """Where and how large; ``stop_at`` is on the clock of `time.monotonic`."""

    device: torch.device
    is_dry: bool
    is_quick: bool
    stop_at: float
    ceilings: Ceilings = field(default_factory=Ceilings)
    share: tuple[int, int] = (0, 1)
    """Which of how many processes this is, where a part has several."""

    @property
    def card(self) -> Card | None:
        """The GPU, if figures of it are known; None in a dry run."""
        on_gpu = self.device.type == "cuda"
        return find_card(torch.cuda.get_device_name()) if on_gpu else None

    @property
    def seconds_left(self) -> float:
        """Time until the part must be done."""
        return self.stop_at - time.monotonic()

    def own(self, items: Iterable[_T]) -> Iterator[_T]:
        """Of all that the part has to do, what this process does."""
        number, count = self.share
        return islice(items, number, None, count)

    def figures(self, **values: float) -> Row:
        """Measured values, rounded; none in a dry run, which measures nothing."""
        return {} if self.is_dry else {name: _rounded(value) for name, value in values.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Part = Callable[[Setting], Iterator[Row]]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def llama(**values: object) -> ModelConfig:
    """A Llama 3 8B with these keys of ``config.json`` changed."""
    return read_family(JsonReader({**_LLAMA_8B, **values}, "config.json"))


_LLAMA_8B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
}
LLAMA_8B = llama()
LLAMA_13B = llama(
    vocab_size=32_000,
    hidden_size=5120,
    intermediate_size=13_824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=40,
    max_position_embeddings=4096,
    rope_theta=10_000.0,
)
# Qwen3-14B without the norms of its heads: their cost is in K3.
QWEN_14B = llama(
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=17_408,
    num_hidden_layers=40,
    num_attention_heads=40,
)
_TINY: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TINY = llama(**_TINY)
# Shapes at which FP8's error is that of larger ones: sums of 256 products.
SMALL = llama(
    **{**_TINY, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 32}
)


def make_engine(setting: Setting, model: ModelConfig, config: EngineConfig) -> Engine:
    """An engine with seeded random weights made on the device; ``config`` may hold "auto"."""
    free_memory(setting.device)
    config = resolve(replace(config, device=setting.device.type), model)
    with torch.inference_mode():
        is_fp8 = config.quantization == "fp8"
        parameters = random_parameters(model, config.torch_dtype, setting.device, is_fp8=is_fp8)
        return Engine(config, model, parameters)


def free_memory(device: torch.device) -> None:
    """Give the device's memory back that engines held which are gone.

    Such an engine is part of a cycle (its recordings call it) and keeps its pool until the
    collector runs. Torch in turn keeps what the collector frees: the first small tensor of the
    next engine would lie in the segment of the old pool and hold all of it, and a pool that is
    sized by what the device has free would do without.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def start_row(setting: Setting, name: str, engine: Engine, seconds: float) -> Row:
    """What an engine became. On a GPU it is an error that no step was recorded: what is measured
    then is the host."""
    row: Row = {
        "model": name,
        "what": "start",
        "types": engine.dtype_name,
        "kv_blocks": engine.num_blocks,
        "recordings": engine.num_graphs,
        "mixed_recordings": engine.num_mixed_graphs,
        **setting.figures(seconds=seconds),
    }
    if not setting.is_dry and not engine.num_graphs:
        row["error"] = "no step could be recorded: the rows of this engine are of eager steps"
    elif not (setting.is_dry or engine.num_mixed_graphs):
        row["note"] = "no mixed step could be recorded: they run eagerly"
    return row


def random_parameters(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_fp8: bool = False
) -> dict[str, Parameter]:
    """Normal weights of deviation 0.02, norms around 1. (Zeros would run faster than real data.)"""
    generator = torch.Generator(device).manual_seed(0)
    parameters: dict[str, Parameter] = {}
    for spec in decoder_parameters(model):
        drawn = torch.empty(spec.shape, dtype=dtype, device=device)
        drawn.normal_(1.0 if "norm" in spec.name else 0.0, 0.02, generator=generator)
        if is_fp8 and spec.is_linear:  # as a checkpoint is loaded
            allocated = allocate(spec, dtype, str(device), is_fp8=True)
            put_rows(allocated, 0, drawn)
            parameters[spec.name] = allocated
        else:
            parameters[spec.name] = drawn
    return parameters


def linear_parameters(model: ModelConfig) -> tuple[int, int]:
    """(numbers in the linears of all layers, numbers in the head)."""
    hidden = model.hidden_size
    per_layer = hidden * (model.query_size + 2 * model.kv_size) + model.query_size * hidden
    per_layer += 3 * hidden * model.mlp_size
    return per_layer * model.num_layers, model.vocab_size * hidden


def step_floor_ms(
    setting: Setting, model: ModelConfig, is_fp8: bool, batch_size: int, context: int
) -> float:
    """Least time of a generation step: weights read (or multiplied) once, then every token's KV."""
    ceilings = setting.ceilings
    linears, head = linear_parameters(model)
    width = 1 if is_fp8 else 2
    flops = ceilings.fp8_flops if is_fp8 else ceilings.bf16_flops
    products = 2 * batch_size * (linears / flops + head / ceilings.bf16_flops)
    weights = max((linears * width + head * 2) / ceilings.read_bytes, products)
    kv_bytes = 2 * model.num_layers * model.kv_size * width * batch_size * context
    return 1e3 * (weights + kv_bytes / ceilings.read_bytes)


def context_floor_ms(setting: Setting, model: ModelConfig, is_fp8: bool, length: int) -> float:
    """Least time of a prompt: products of all its tokens and its causal attention in bf16."""
    ceilings = setting.ceilings
    linears, head = linear_parameters(model)
    flops = ceilings.fp8_flops if is_fp8 else ceilings.bf16_flops
    attention = 2 * length * length * model.query_size * model.num_layers
    seconds = 2 * linears * length / flops + (2 * head + attention) / ceilings.bf16_flops
    weights = (linears * (1 if is_fp8 else 2) + head * 2) / ceilings.read_bytes
    return 1e3 * max(seconds, weights)
