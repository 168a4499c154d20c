"""Draws the pictures of docs/recordings.md: the demo model with a KV pool a quarter of the demand.

    python tools/draw_scheduling.py [--keep FOLDER]

Runs `GptManager` with the real engine once per policy, records it, replays the recording (it must
be identical), checks that every count is gapless, and writes docs/images/*.svg. ``--keep`` also
keeps the recordings.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from inflight_backend import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    NamedTensor,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from inflight_backend.text.tokenizer import TextCodec
from inflight_recorder.exporters import write_svg
from inflight_recorder.replay import replay
from inflight_recorder.storage import open_recording
from inflight_recorder.timeline import build_timeline
from inflight_server.serve.settings import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
NUM_REQUESTS = 32
TOKENS_PER_BLOCK = 8
OVERSUBSCRIPTION = 4


class Clients:
    """Requests that come a few at a time, and what they have been answered."""

    def __init__(self, requests: Sequence[InferenceRequest], seed: int) -> None:
        self._waiting = list(requests)
        self._rng = random.Random(seed)
        self._num_polls = 0
        self._num_unfinished = len(requests)
        self.tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
        self.is_done = threading.Event()

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        """Some, now and then."""
        self._num_polls += 1
        wanted = 12 if self._num_polls == 1 else self._rng.choice([0] * 11 + [1, 2])
        number = min(wanted, max(max_num_requests, 0))
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        for request in taken:
            request.created_ns = time.monotonic_ns()
        return taken

    def send(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Collect."""
        assert not error, error
        ids = [i for t in tensors if t.name == "output_ids" for i in t.tensor.reshape(-1).tolist()]
        self.tokens[request_id] += ids
        self._num_unfinished -= is_final
        if self._num_unfinished == 0:
            self.is_done.set()


def record(policy: CapacitySchedulerPolicy, path: Path, seed: int = 1) -> None:
    """One run; every answer counts on from its prompt."""
    rng = random.Random(seed)
    codec = TextCodec.load(DEMO_MODEL, None)
    assert codec is not None
    prompts, requests, num_blocks = {}, [], 0
    for number in range(1, NUM_REQUESTS + 1):
        first = rng.randrange(1, 900)
        text = " ".join(str(first + k) for k in range(rng.randrange(2, 12)))
        prompts[number] = codec.encode(text, 1000)
        length = rng.randrange(20, 160)
        num_blocks += -(-(len(prompts[number]) + length) // TOKENS_PER_BLOCK)
        requests.append(
            InferenceRequest.from_tokens(number, prompts[number], length, is_streaming=True)
        )
    params = TrtGptModelOptionalParams(
        max_batch_size=NUM_REQUESTS,
        max_num_tokens=256,
        max_seq_len=256,
        device="cpu",
        record_file=str(path),
        kv_cache_config=KvCacheConfig(
            max_tokens=num_blocks // OVERSUBSCRIPTION * TOKENS_PER_BLOCK,
            tokens_per_block=TOKENS_PER_BLOCK,
        ),
    )
    clients = Clients(requests, seed)
    model_type = TrtGptModelType.InflightFusedBatching
    with GptManager(
        DEMO_MODEL, model_type, 1, policy, clients.get, clients.send, optional_params=params
    ):
        assert clients.is_done.wait(120), "the run takes too long"
    for number, prompt in prompts.items():
        words = codec.decode(prompt + clients.tokens[number]).split()[:-1]  # the last may be cut
        counted = [int(word) for word in words]
        assert counted == list(range(counted[0], counted[0] + len(counted))), words


def draw(recording: Path, picture: Path) -> None:
    """Replay and draw."""
    with open_recording(recording) as reader:
        result = replay(reader)
    assert result.divergence is None, str(result)
    with open_recording(recording) as reader:
        picture.write_text("".join(write_svg(build_timeline(reader))), encoding="utf-8")
    print(f"{picture.name}: {result}")


def main() -> None:
    """Record and draw both policies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    folder = parser.parse_args().keep
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for policy in (
            CapacitySchedulerPolicy.MAX_UTILIZATION,
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        ):
            name = policy.name.lower()
            path = (folder or Path(scratch)) / f"{name}.jsonl"
            record(policy, path)
            draw(path, IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
