"""Runs the demo model under `GptManager` with requests that arrive by the clock, and records it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inflight_backend import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    NamedTensor,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from inflight_server.serve.settings import DEMO_MODEL


class TimedRequest(NamedTuple):
    """A request that arrives ``seconds`` after the start; prompts of one ``family`` (0 to 8) begin
    alike, those of two do not."""

    seconds: float
    prompt_len: int
    num_new_tokens: int
    family: int = 0


class _Clients:
    """Hands requests over when their time has come, and waits for all answers."""

    def __init__(self, requests: Sequence[TimedRequest]) -> None:
        self._waiting = deque(enumerate(requests, start=1))
        self._num_unfinished = len(requests)
        self._start = time.monotonic()
        self.errors: list[str] = []
        self.is_done = threading.Event()

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        """The requests that have arrived by now, as far as there is room."""
        now = time.monotonic() - self._start
        taken: list[InferenceRequest] = []
        while self._waiting and len(taken) < max_num_requests:
            number, request = self._waiting[0]
            if request.seconds > now:
                break
            self._waiting.popleft()
            tokens = [1 + (request.family + k) % 9 for k in range(request.prompt_len)]
            taken.append(
                InferenceRequest.from_tokens(
                    number, tokens, request.num_new_tokens, is_streaming=True
                )
            )
            taken[-1].created_ns = int((self._start + request.seconds) * 1e9)
        return taken

    def send(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Count the ends."""
        if error:
            self.errors.append(error)
        self._num_unfinished -= is_final
        if self._num_unfinished == 0:
            self.is_done.set()


def run_recorded(
    requests: Sequence[TimedRequest],
    path: Path,
    policy: CapacitySchedulerPolicy,
    *,
    max_batch_size: int,
    num_blocks: int,
    tokens_per_block: int = 16,
    max_num_tokens: int = 512,
    max_seq_len: int = 512,
    enable_block_reuse: bool = True,
) -> None:
    """Run ``requests`` to their end and leave the recording at ``path``."""
    params = TrtGptModelOptionalParams(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        device="cpu",
        record_file=str(path),
        kv_cache_config=KvCacheConfig(
            max_tokens=num_blocks * tokens_per_block,
            tokens_per_block=tokens_per_block,
            enable_block_reuse=enable_block_reuse,
        ),
    )
    clients = _Clients(requests)
    model_type = TrtGptModelType.InflightFusedBatching
    with GptManager(
        DEMO_MODEL, model_type, 1, policy, clients.get, clients.send, optional_params=params
    ):
        assert clients.is_done.wait(600), "the run takes too long"
    assert not clients.errors, clients.errors[0]
