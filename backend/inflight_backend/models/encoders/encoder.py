"""An encoder: a decoder whose tokens see all others of their text, and which draws nothing; and its
part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from inflight_backend.models.attention import AttentionInputs, AttentionStep, HeadParameters
from inflight_backend.models.config import AttentionConfig, ModelConfig
from inflight_backend.models.decoder import Decoder
from inflight_backend.models.encoders.cache import write_answer
from inflight_backend.models.kv_cache import KvPool, RecurrentStates
from inflight_backend.models.layers import Parameter
from inflight_backend.models.ops import Ops
from inflight_backend.models.parameters import ENCODER
from inflight_kernels import reference
from inflight_scheduler import ScheduledBatch

# Numbers of one product of queries and keys: 64 MiB in float32 bound the memory of a long text.
_MAX_SCORES = 2**24


class Encoder:
    """Weights of an encoder and the way through them."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: dict[str, Parameter],
        ops: Ops,
        dtype: torch.dtype,
    ) -> None:
        """Takes those of ``parameters`` that are an encoder's out of the dict, and shares the
        decoder's embedding. ``dtype``: of hidden states."""
        names = [name for name in parameters if name.startswith(ENCODER)]
        own = {name.removeprefix(ENCODER): parameters.pop(name) for name in names}
        own["embedding"] = parameters["embedding"]
        self._decoder = Decoder(config, own, ops, dtype=dtype)
        self._layers = [layer.attention for layer in config.layers]

    def __call__(self, texts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
        """What it says of each text [num_tokens, hidden]; all are computed together."""
        lengths = [len(text) for text in texts]
        tokens = torch.tensor([each for text in texts for each in text], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        step = _EncoderStep(self._layers, lengths)
        return list(torch.split(self._decoder.forward(tokens, positions, step, None), lengths))


class EncoderSteps:
    """Keeps what the encoder says from its step until that in which the context starts."""

    def __init__(self, encoder: Encoder, decoder: Decoder, device: str) -> None:
        self._encoder, self._decoder, self._device = encoder, decoder, torch.device(device)
        self._answers: dict[int, Tensor] = {}  # [num_tokens, hidden], by request

    def run(self, batch: ScheduledBatch, pool: KvPool) -> None:
        """Carry out what ``batch`` says of the encoder; ``pool`` is that of its answers."""
        for request_id in batch.dropped_answers:
            self._answers.pop(request_id, None)  # its step may have failed
        for each in batch.answers:
            answer = self._answers.pop(each.request_id)
            write_answer(self._decoder, answer, pool, each.block_ids)
        if batch.encoder_runs:
            texts = [run.tokens for run in batch.encoder_runs]
            answers = self._encoder(texts, self._device)
            for run, answer in zip(batch.encoder_runs, answers, strict=True):
                self._answers[run.request_id] = answer.clone()  # without those beside it

    def run_largest(self, num_tokens: int) -> None:
        """A text of ``num_tokens``, to measure what that takes."""
        self._encoder([(0,) * num_tokens], self._device)


@dataclass(frozen=True, slots=True)
class _EncoderStep:
    """Attention within each of the texts that lie one after the other; nothing is kept."""

    layers: Sequence[AttentionConfig]
    lengths: Sequence[int]
    states: RecurrentStates | None = None
    cross: AttentionStep | None = None

    @property
    def inputs(self) -> AttentionInputs:
        raise AssertionError("an encoder has no cache")

    def attend(self, layer: int, heads: Tensor, parameters: HeadParameters) -> Tensor:
        config = self.layers[layer]
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        found = [
            _attend(torch.split(text, sizes, dim=1), config, parameters)
            for text in torch.split(heads, list(self.lengths))
        ]
        return torch.cat(found)


def _attend(heads: Sequence[Tensor], config: AttentionConfig, parameters: HeadParameters) -> Tensor:
    """Query, key and value [L, heads, D] of one text -> [L, H, D]."""
    query, key, value = (each.transpose(0, 1)[None] for each in heads)
    tiles = [
        functional.scaled_dot_product_attention(
            query[:, :, tile],
            key,
            value,
            attn_mask=_bias(parameters.relative_bias, tile, len(heads[0]), query),
            scale=config.scale,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        for tile in _tiles(len(heads[0]), config.num_heads)
    ]
    return torch.cat(tiles, dim=2)[0].transpose(0, 1)


def _bias(table: Tensor | None, tile: slice, length: int, like: Tensor) -> Tensor | None:
    if table is None:
        return None
    positions = torch.arange(length, device=like.device)[None]
    return reference.relative_bias(table, positions[:, tile], positions).to(like.dtype)


def _tiles(length: int, num_heads: int) -> Iterator[slice]:
    """Queries, cut so that their scores stay small."""
    size = max(1, _MAX_SCORES // (length * num_heads))
    for start in range(0, length, size):
        yield slice(start, start + size)
