"""The encoder of a step: runs it, and hands what it says to the blocks of the requests."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_backend.models.decoder import Decoder
from inflight_backend.models.encoders.cache import write_answer
from inflight_backend.models.encoders.encoder import Encoder
from inflight_backend.models.kv_cache import KvPool
from inflight_scheduler import ScheduledBatch


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
