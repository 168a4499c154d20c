"""The rotary embedding of ``config.json``: every kind, in the spellings of old and new files."""

from __future__ import annotations

import math
from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import RopeConfig


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN sharpens attention over contexts that are ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_KEYS = {
    "default": {"mrope_section", "mrope_interleaved"},  # of images; a text turns as one
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        "llama_4_scaling_beta",
        "max_position_embeddings",
        "finetuned",
    },
    "longrope": {
        "factor",
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_max_position_embeddings",
        "short_mscale",
        "long_mscale",
    },
    "proportional": {"factor"},
}
_KEYS_BESIDE_ALPHA = {"factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
"""Of Hunyuan's "dynamic", whose files have YaRN's keys too, and whose code reads none of them."""
_ALIASES = {"su": "longrope", "mrope": "default"}


def read_rope(
    reader: JsonReader,
    head_dim: int,
    *,
    kind_of_layer: str | None = None,
    is_interleaved: bool = False,
    dim: int | None = None,
    theta_key: str = "rope_theta",
) -> RopeConfig:
    """The rotary embedding of config.json, in either spelling (``rope_parameters`` of
    transformers 5; ``rope_scaling`` and ``rope_theta``).

    ``kind_of_layer``: an entry of ``layer_types`` that may have a section of its own. ``dim``:
    where the family fixes it; else ``partial_rotary_factor`` of ``head_dim``. ``theta_key``: where
    this kind of layer has its theta in old files. `CheckpointError` for a key that is unknown.
    """
    section = rope_section(reader, kind_of_layer)
    theta = section.number("rope_theta", default=reader.number(theta_key, default=10_000.0))
    kind = section.text("rope_type", default=section.text("type", default="default"))
    kind = _ALIASES.get(kind, kind)
    if kind not in _KEYS:
        section.fail("rope_type", f"{kind!r} is not supported; supported: {', '.join(_KEYS)}")
    has_alpha = kind == "dynamic" and "alpha" in section
    known = _KEYS_BESIDE_ALPHA if has_alpha else _KEYS[kind]
    known = known | {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    for key in section:
        if key not in known:
            section.fail(key, f"is not supported with rope_type {kind}")
    partial = section.number(
        "partial_rotary_factor",
        default=reader.number("partial_rotary_factor", default=1.0),
    )
    dim = head_dim if kind == "proportional" else dim or int(head_dim * partial)
    if dim % 2:
        reader.fail("head_dim", f"must be even, not {dim}, where it turns")
    if kind == "proportional":
        return RopeConfig(head_dim, theta, kind=kind, num_turning=int(partial * head_dim // 2))
    rope = RopeConfig(dim, theta, is_interleaved, kind)
    if kind in ("default", "linear"):
        factor = section.number("factor", default=1.0) if kind == "linear" else 1.0
        return RopeConfig(dim, theta, is_interleaved, kind, factor)
    return _READERS[kind](rope, section, reader)


def rope_section(reader: JsonReader, kind_of_layer: str | None = None) -> JsonReader:
    """``rope_parameters`` or ``rope_scaling``, whichever says anything, of a kind of layer.

    A file of transformers 5 to which a user has added the model card's setting for longer
    contexts has both: it takes the second then, and forgets the theta of the first.
    """
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if kind_of_layer is not None and kind_of_layer in new:
        return new.section(kind_of_layer)
    if not any(old):
        return new
    if any(new) and not new.equals(old):
        reader.fail("rope_scaling", "is given beside rope_parameters and differs; keep one of them")
    if kind_of_layer == "sliding_attention":
        return reader.section("no_such_section")  # scaled are the layers that see everything
    return old


def without_scale(rope: RopeConfig | None) -> RopeConfig | None:
    """``rope`` of heads that are normed after they have turned, where no scale is left."""
    return rope and replace(rope, attention_factor=1.0)


def _original(section: JsonReader, reader: JsonReader) -> int:
    """Positions of the original length: of the section, of the file, or all there are."""
    key = "original_max_position_embeddings"
    outside = reader.integer(key, default=reader.integer("max_position_embeddings"))
    original = section.integer(key, default=outside)
    if key in reader and outside != original:  # releases of transformers differ in which they take
        reader.fail(key, f"({outside}) is not that of the rope ({original})")
    return original


def _read_dynamic(rope: RopeConfig, section: JsonReader, reader: JsonReader) -> RopeConfig:
    if "alpha" in section:  # Hunyuan: a theta that does not depend on the length
        stretch = section.number("alpha") ** (rope.dim / (rope.dim - 2))
        return RopeConfig(rope.dim, rope.theta * stretch, rope.is_interleaved)
    factor, original = section.number("factor"), _original(section, reader)
    return RopeConfig(
        rope.dim, rope.theta, rope.is_interleaved, "dynamic", factor,
        original_max_positions=original,
    )  # fmt: skip


def _read_llama3(rope: RopeConfig, section: JsonReader, reader: JsonReader) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        section.fail("high_freq_factor", f"({high}) must be above low_freq_factor ({low})")
    factor, original = section.number("factor"), _original(section, reader)
    return RopeConfig(
        rope.dim, rope.theta, rope.is_interleaved, "llama3", factor, low, high, original
    )


def _read_yarn(rope: RopeConfig, section: JsonReader, reader: JsonReader) -> RopeConfig:
    factor = section.number("factor")
    scale = yarn_scale(factor)
    if "mscale" in section and "mscale_all_dim" in section:
        scale = yarn_scale(factor, section.number("mscale")) / yarn_scale(
            factor, section.number("mscale_all_dim")
        )
    return RopeConfig(
        rope.dim,
        rope.theta,
        rope.is_interleaved,
        "yarn",
        factor,
        original_max_positions=_original(section, reader),
        beta_fast=section.number("beta_fast", default=32.0),
        beta_slow=section.number("beta_slow", default=1.0),
        is_truncated=section.boolean("truncate", default=True),
        attention_factor=section.number("attention_factor", default=scale),
    )


def _read_longrope(rope: RopeConfig, section: JsonReader, reader: JsonReader) -> RopeConfig:
    """With the factors for long contexts if longer ones than the original are served: a server has
    one table."""
    positions, original = reader.integer("max_position_embeddings"), _original(section, reader)
    factor = section.number("factor", default=positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = section.number("long_mscale" if positions > original else "short_mscale", default=scale)
    divisors = section.numbers("long_factor"), section.numbers("short_factor")
    for key, found in zip(("long_factor", "short_factor"), divisors, strict=True):
        if len(found) != rope.dim // 2:
            section.fail(key, f"must have {rope.dim // 2} numbers, not {len(found)}")
    return RopeConfig(
        rope.dim,
        rope.theta,
        rope.is_interleaved,
        "longrope",
        original_max_positions=original,
        attention_factor=section.number("attention_factor", default=scale),
        divisors=tuple(divisors[0]),
        short_divisors=tuple(divisors[1]),
    )


_READERS = {
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
