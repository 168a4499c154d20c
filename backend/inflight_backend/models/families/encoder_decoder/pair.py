"""What families with an encoder have in common: two stacks over one embedding."""

from __future__ import annotations

from dataclasses import replace

from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.config import AttentionConfig, LayerConfig, ModelConfig
from inflight_backend.models.families.registry import read_start_ids

NO_LIMIT = 2**17
"""Tokens that an encoder without a table of positions may read, if the server has room."""


def paired(encoder: ModelConfig, decoder: ModelConfig, reader: JsonReader) -> ModelConfig:
    """``decoder``, each layer of which attends to what ``encoder`` says as to its own text, but
    without positions. Its text begins with ``decoder_start_token_id``; with the token that pads
    where there is no such key."""

    def attend_across(_: int, layer: LayerConfig) -> LayerConfig:
        cross: AttentionConfig = replace(layer.attention, is_cross=True, relative_bias=None)
        return replace(layer, cross=cross)

    encoder = replace(encoder, is_encoder=True, is_tied=True, has_head_bias=False)
    pad = (reader.integer("pad_token_id", minimum=0),) if "pad_token_id" in reader else (0,)
    return replace(
        decoder.with_layers(attend_across),
        encoder=encoder,
        start_ids=read_start_ids(reader, pad),
    )
