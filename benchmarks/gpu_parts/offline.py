"""E2, E3 and E4: whole requests through scheduler, planner and engine, all arriving at once.

A row for which too little time is left is left out and says so. One that does not end in time
says which share of its tokens it made: its figure is then that of the beginning, not to be
compared with others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from gpu_parts.common import (
    LLAMA_8B,
    LLAMA_13B,
    QWEN_14B,
    TINY,
    Row,
    Setting,
    make_engine,
    start_row,
)
from gpu_parts.whole_requests import run_requests, warm_up
from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.models.config import ModelConfig

_BLOCK = 64
Lengths = tuple[int, int]
"""The least and the most tokens, drawn evenly; the same number twice: all alike."""


@dataclass(frozen=True)
class Work:
    """Requests of like sizes and the published figures to beat (out tokens/s, by card)."""

    num_requests: int
    input: Lengths
    output: Lengths
    published: Mapping[str, int] = field(default_factory=dict)
    expected: int = 0
    """Tokens per second to plan with where nothing is published."""

    @property
    def label(self) -> str:
        """Requests x input tokens / output tokens."""
        return f"{self.num_requests} x {_span(self.input)}/{_span(self.output)}"

    def expected_seconds(self, card: str) -> float:
        """What it takes at two thirds of the published or expected speed; a card without a figure
        is taken for half as fast as the best of the others."""
        tokens = self.num_requests * sum(self.output) / 2
        others = max(self.published.values(), default=0) / 2
        return 1.5 * tokens / (self.published.get(card) or self.expected or others)

    def draw(self, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Seeded prompts of random tokens, and how many tokens each wants."""
        generator = torch.Generator().manual_seed(sum(self.input))

        def lengths(span: Lengths) -> list[int]:
            size = (self.num_requests,)
            drawn: list[int] = torch.randint(
                span[0], span[1] + 1, size, generator=generator
            ).tolist()
            return drawn

        prompts = [
            torch.randint(vocab_size, (length,), generator=generator).tolist()
            for length in lengths(self.input)
        ]
        return prompts, lengths(self.output)


def _span(lengths: Lengths) -> str:
    least, most = lengths
    return str(least) if least == most else f"{least}-{most}"


def _alike(num_requests: int, input_: int, output: int, **published: int) -> Work:
    return Work(num_requests, (input_, input_), (output, output), published)


# NVIDIA/TensorRT-LLM docs/source/blogs/H200launch.md: Llama-2-13B, FP8, one H200.
_STATIC = (
    _alike(1024, 128, 128, H200=11_819),
    _alike(64, 2048, 128, H200=1_349),
    _alike(128, 128, 2048, H200=4_750),
)
# What runs at once on 78 GiB, beside two of those that do not.
_STATIC_SMALL = (
    Work(512, (128, 128), (128, 128), expected=5000),
    Work(64, (128, 128), (2048, 2048), expected=1700),
)
# docs/source/performance/perf-overview.md v1.0: Llama-3.1-8B, FP8, one card.
_INFLIGHT = (
    _alike(2048, 128, 128, H200=27_911, H100=28_312),
    _alike(256, 2048, 128, H200=3_538, H100=3_450),
    _alike(640, 1000, 1000, H200=17_744, H100=15_220),
    _alike(1024, 128, 2048, H200=26_221, H100=22_714),
    _alike(512, 2048, 2048, H200=12_194, H100=9_305),
    _alike(768, 500, 2000, H200=20_770, H100=17_660),
)
# The workload of mini-sglang and nano-vllm, of which only charts are published.
RAGGED = Work(256, (100, 1024), (100, 1024), expected=9_000)
DRY = (Work(3, (9, 9), (4, 4), {"": 1}), Work(3, (3, 9), (2, 5), expected=1))


DEFAULTS = "8B defaults"


def static(setting: Setting) -> Iterator[Row]:
    """E2: the headline rows of Llama-2-13B in FP8, the batch as large as the number of requests;
    where fewer fit at once (row ``fits_at_once``) it is no static batch any more, and on such a
    card smaller ones follow."""
    is_small = setting.card is not None and setting.card.name == "H100"
    yield from _rows(setting, "13B fp8", (*_STATIC, *_STATIC_SMALL) if is_small else _STATIC)


def inflight(setting: Setting) -> Iterator[Row]:
    """E3: Llama-3.1-8B in FP8."""
    yield from _rows(setting, "8B fp8", _INFLIGHT)


def ragged(setting: Setting) -> Iterator[Row]:
    """E4: ragged requests on an 8B in bf16; `peers.py` runs the same beside others."""
    yield from _rows(setting, "8B", (RAGGED,))


def ragged_14b(setting: Setting) -> Iterator[Row]:
    """E4 of the 14B."""
    yield from _rows(setting, "14B", (RAGGED,))


def engines(setting: Setting) -> dict[str, tuple[ModelConfig, EngineConfig]]:
    """Name -> model and configuration, of all that run here; a dry run's are all tiny."""
    found = {
        "8B": (LLAMA_8B, _config(setting, 256, is_fp8=False)),
        "8B fp8": (LLAMA_8B, _config(setting, 2048, is_fp8=True)),
        "13B fp8": (LLAMA_13B, _config(setting, 1024, is_fp8=True)),
        "14B": (QWEN_14B, _config(setting, 256, is_fp8=False)),
        DEFAULTS: (LLAMA_8B, EngineConfig()),
    }
    return (
        {name: (TINY, _config(setting, 2, is_fp8=False)) for name in found}
        if setting.is_dry
        else found
    )


def _config(setting: Setting, max_batch_size: int, *, is_fp8: bool) -> EngineConfig:
    return EngineConfig(
        max_batch_size=2 if setting.is_dry else max_batch_size,
        max_num_tokens=32 if setting.is_dry else 16_384,
        max_seq_len=64 if setting.is_dry else 4096,
        tokens_per_block=_BLOCK,
        max_tokens_in_paged_kv_cache=256 if setting.is_dry else None,
        quantization="fp8" if is_fp8 else "none",
        kv_cache_dtype="fp8" if is_fp8 and not setting.is_dry else "auto",
    )


def _rows(setting: Setting, name: str, works: tuple[Work, ...]) -> Iterator[Row]:
    start = time.monotonic()
    engine = make_engine(setting, *engines(setting)[name])
    yield start_row(setting, name, engine, time.monotonic() - start)
    for work in DRY if setting.is_dry else works:
        needed = work.expected_seconds(_card_name(setting))
        if setting.is_dry or needed < setting.seconds_left:
            yield {"model": name, **_row(setting, engine, work)}
        else:
            left = f"{setting.seconds_left:.0f} s were left, it needs about {needed:.0f}"
            yield {"model": name, "what": work.label, "left_out": left}


def _card_name(setting: Setting) -> str:
    return setting.card.name if setting.card else ""


def _row(setting: Setting, engine: Engine, work: Work) -> Row:
    prompts, output_lens = work.draw(engine.vocab_size)
    warm_up(engine, prompts, output_lens)
    stop_at = float("inf") if setting.is_dry else setting.stop_at
    done = run_requests(engine, prompts, output_lens, stop_at)
    made, wanted = done.num_tokens, sum(output_lens)
    speed = made / done.seconds
    figure, published = work.published.get(_card_name(setting)), {}
    if figure:
        published = {"published": figure, "of_published": speed / figure}
    longest = work.input[1] + work.output[1]
    fits = engine.num_blocks // -(-longest // engine.tokens_per_block)
    return {
        "what": work.label if made == wanted else f"{work.label} (only {made / wanted:.0%} of it)",
        "fits_at_once": min(fits, engine.config.max_batch_size),
        "steps": done.num_steps,
        **setting.figures(
            seconds=done.seconds,
            tokens_per_s=speed,
            host_ms_per_step=1e3 * done.host_seconds / max(done.num_steps, 1),
            **published,
        ),
    }
