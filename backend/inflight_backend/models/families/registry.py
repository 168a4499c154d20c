"""The table of model families, and the options in which a family differs from the plain decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight_backend.models.checkpoint_files import JsonReader


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """The switches of the decoder. ``sliding_windows`` is empty or has one entry per layer."""

    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    is_num_kv_heads_required: bool = True
    is_head_dim_required: bool = False


ReadOptions = Callable[[JsonReader], DecoderOptions]


@dataclass(frozen=True, slots=True)
class Family:
    """``model_type`` must be what config.json says: transformers goes by it, whatever
    ``architectures`` says."""

    model_type: str
    read_options: ReadOptions


FAMILIES: dict[str, Family] = {}
"""By architecture, as ``architectures`` of config.json has it."""


def register_family(architecture: str, model_type: str) -> Callable[[ReadOptions], ReadOptions]:
    """Make the decorated function the reader of an architecture's config.json."""

    def register(read_options: ReadOptions) -> ReadOptions:
        FAMILIES[architecture] = Family(model_type, read_options)
        return read_options

    return register


def read_layer_windows(reader: JsonReader) -> tuple[int | None, ...]:
    """Sliding windows of Qwen: off unless ``use_sliding_window``; the first layers see all.

    ``layer_types`` says it per layer; without it ``max_window_layers`` layers come before the
    first that slides.
    """
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    if not reader.boolean("use_sliding_window", default=False):
        return windows_by_type(reader, None) or (None,) * num_layers
    window = reader.integer("sliding_window")
    if windows := windows_by_type(reader, window):
        return windows
    first = reader.integer("max_window_layers", minimum=0)
    return tuple(None if layer < first else window for layer in range(num_layers))


def windows_by_type(reader: JsonReader, window: int | None) -> tuple[int | None, ...]:
    """``window`` for each layer that ``layer_types`` lets slide, None for the others.

    Empty without that key. ``window`` None: none may slide.
    """
    num_layers = reader.integer("num_hidden_layers", maximum=1024)
    types = reader.texts("layer_types")
    if types and len(types) != num_layers:
        reader.fail("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            reader.fail("layer_types", f"holds {kind!r}, which is not supported")
        if kind == "sliding_attention" and window is None:
            reader.fail("layer_types", f"holds {kind!r}, and there is no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
