"""The command ``inflight plan``."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from string import ascii_letters, whitespace
from typing import TYPE_CHECKING, Annotated

import typer

from inflight_backend.errors import ConfigurationError
from inflight_server.commands.recordings import reported_errors
from inflight_server.commands.worker import (
    ExpertParallelOption,
    PipelineParallelOption,
    TensorParallelOption,
)

if TYPE_CHECKING:
    from inflight_backend.engine.memory_plan import Concurrency, MemoryPlan

app = typer.Typer()

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MAX_BYTES = 2**60
_MAX_TOKENS = 2**40  # the bound of the server's parameters
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face checkpoint folder, GGUF file, or a name on the Hub "
            "(ORG/NAME[@REVISION]), of which no weights are fetched."
        ),
    ],
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Free memory of the GPU, such as 80GiB; without it a CPU is planned."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, fp8, int8 or int4.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, model, fp8 or int8.")] = "auto",
    tokens_per_block: Annotated[int, typer.Option(min=1, max=1024)] = 32,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_TOKENS, help="The parameter max_tokens_in_paged_kv_cache."),
    ] = None,
    fraction: Annotated[
        float,
        typer.Option(min=0.01, max=0.99, help="The parameter kv_cache_free_gpu_mem_fraction."),
    ] = 0.9,
    max_batch_size: Annotated[int, typer.Option(min=1, max=65536)] = 256,
    max_beam_width: Annotated[int, typer.Option(min=1, max=64)] = 1,
    max_num_tokens: Annotated[int | None, typer.Option(min=1, max=_MAX_TOKENS)] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=2, max=_MAX_TOKENS)] = None,
    max_state_snapshots: Annotated[
        int | None, typer.Option(min=0, max=65536, help="The parameter of that name.")
    ] = None,
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    expert_parallel: ExpertParallelOption = False,
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Adapters (LoRA) of up to this rank; else none."),
    ] = None,
    lora_fraction: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="The parameter lora_cache_gpu_memory_fraction."),
    ] = 0.05,
    lora_experts: Annotated[
        bool, typer.Option("--lora-experts", help="Adapters may change experts.")
    ] = False,
    reserve: Annotated[
        str,
        typer.Option(help="Assumed for the CUDA context, workspaces and recorded steps."),
    ] = "0.5GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint needs and how many requests fit. Nothing is loaded."""
    from inflight_backend.engine import EngineConfig
    from inflight_backend.engine.memory_plan import concurrency, make_plan, usual_shapes
    from inflight_server.checkpoints import find_checkpoint

    with reported_errors():
        config = EngineConfig(
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            tokens_per_block=tokens_per_block,
            max_tokens_in_paged_kv_cache=max_tokens,
            kv_cache_free_gpu_mem_fraction=fraction,
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            max_state_snapshots=max_state_snapshots,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            expert_parallel=expert_parallel,
            enable_lora=lora_rank is not None,
            lora_cache_max_adapter_size=lora_rank or 64,
            lora_cache_optimal_adapter_size=min(lora_rank or 8, 8),
            lora_cache_gpu_memory_fraction=lora_fraction,
            lora_experts=lora_experts,
        )
        is_here = Path(model).exists()
        made = make_plan(
            find_checkpoint(model, has_weights=False),
            config,
            gpu_memory=None if gpu_memory is None else _memory("--gpu-memory", gpu_memory),
            reserve=_memory("--reserve", reserve),
            may_lack_weights=not is_here,
        )
    rows = [concurrency(made, *shape) for shape in usual_shapes(made.max_seq_len)]
    bandwidth = read_bandwidth() if made.free_bytes is None else None
    if as_json:
        sizes = {"pool_bytes": made.pool_bytes, "adapter_bytes": made.adapter_bytes}
        content = {**asdict(made), **sizes, "read_bandwidth": bandwidth}
        typer.echo(json.dumps({**content, "concurrency": [asdict(row) for row in rows]}, indent=1))
    else:
        typer.echo(_describe(made, rows, bandwidth))


def parse_size(text: str) -> int:
    """Bytes of ``80GiB``, ``16g``, ``512 MB``, up to 1 EiB; `ConfigurationError` for others."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{text[:40]!r} is no size: write 80GiB, 16GB or 512MiB")
    num_bytes = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if num_bytes > _MAX_BYTES:  # also infinitely many
        raise ConfigurationError(f"the size {text[:40]!r} is above 1 EiB")
    return int(num_bytes)


def _memory(option: str, text: str) -> int:
    """The size given as ``option``; below 1 MiB it is a number without its unit, but for 0."""
    num_bytes = parse_size(text)
    if 0 < num_bytes < _UNITS["mi"]:
        number = text.strip().rstrip(ascii_letters + whitespace)
        raise ConfigurationError(f"{option} {text} is {num_bytes} bytes: write {number}GiB")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def read_bandwidth() -> float:
    """Bytes per second that all threads together read of this machine's memory: the best of some
    passes over 256 MiB, which takes 0.2 s."""
    import torch

    numbers = torch.ones(2**26)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    return numbers.nbytes / min(seconds)


def _describe(made: MemoryPlan, rows: list[Concurrency], bandwidth: float | None) -> str:
    linears = "" if made.quantization == "none" else f" with linears in {made.quantization}"
    files = "by config.json: the files are not here"
    if made.file_bytes is not None:
        files = f"files: {format_size(made.file_bytes)}"
    facts = [
        (
            "model",
            f"{made.architecture}, {made.num_parameters:,} parameters as {made.dtype}{linears}",
        ),
        ("weights", f"{format_size(made.weight_bytes)} ({files})"),
        ("rope table", f"{format_size(made.table_bytes)} ({made.max_seq_len:,} positions)"),
        (
            "kept for slots",
            f"{format_size(made.slot_bytes)} ({made.max_batch_size * made.max_beam_width} slots"
            f"{f', {made.num_snapshots} snapshots' if made.num_snapshots else ''})",
        ),
    ]
    if (pages := made.adapter_pages) is not None:
        num_adapters = pages.num_pages // pages.pages_of(pages.max_rank)
        size = f"{format_size(made.adapter_bytes)} ({pages.num_pages:,} pages"
        facts.append(("adapters", f"{size}, {num_adapters:,} adapters of rank {pages.max_rank})"))
    if made.free_bytes is not None:
        step = f"{format_size(made.step_bytes)} ({made.max_num_tokens:,} tokens)"
        facts.append(("largest step", step))
        facts.append(("left on the GPU", format_size(made.free_bytes)))
    if bandwidth is not None:
        seconds = made.token_bytes / bandwidth
        read = f"reads {format_size(made.token_bytes)} of weights; at {bandwidth / 1e9:.1f} GB/s"
        least = f"{1000 * seconds:.1f} ms, or {1 / seconds:,.0f} tokens/s"
        facts.append(("a token alone", f"{read}, measured here, no faster than {least}"))
    facts += [
        ("KV per token", format_size(made.kv_bytes_per_token)),
        ("KV per block", f"{format_size(made.block_bytes)} ({made.tokens_per_block} tokens)"),
        (
            "pool",
            f"{made.num_blocks:,} blocks = {made.pool_tokens:,} tokens, "
            f"{format_size(made.pool_bytes)}",
        ),
    ]
    if made.num_cross_blocks:
        size = format_size(made.cross_block_bytes)
        num_tokens = made.num_cross_blocks * made.tokens_per_block
        blocks = f"{made.num_cross_blocks:,} blocks of {size} = {num_tokens:,} tokens"
        facts.append(("of the encoder", f"{blocks}, shared by all requests at once"))
    if any(made.windows):
        windows = ", ".join(f"{each:,}" for each in made.windows if each is not None)
        num_full = sum(window is None for window in made.windows)
        groups = f"{len(made.windows)}, of which {num_full} keep all tokens, others the last"
        facts.append(("groups of layers", f"{groups} {windows}"))
    lines = [f"{name:<16} {value}" for name, value in facts]
    lines += ["", "requests at once (prompt + new tokens):", ""]
    header = ("prompt", "new", "blocks each", "guaranteed_no_evict", "max_utilization, staggered")
    lines.append("  ".join(f"{name:>{max(len(name), 7)}}" for name in header))
    for row in rows:
        values = (
            row.prompt_len,
            row.max_new_tokens,
            row.blocks_at_completion,
            row.guaranteed,
            row.staggered,
        )
        lines.append(
            "  ".join(
                f"{value:>{max(len(name), 7)},}" for name, value in zip(header, values, strict=True)
            )
        )
    lines += [
        "",
        "guaranteed_no_evict: never pauses a request (static_batch: the same number per batch).",
        "max_utilization does not pause up to that number either; staggered: when requests are",
        "spread over their lives, so that each holds the mean of its blocks.",
    ]
    if made.num_cross_blocks:
        lines[-3:] = [
            "guaranteed_no_evict and static_batch only: a pause would lose what the",
            "encoder has said.",
        ]
    if any(row.prompt_len + row.max_new_tokens - 1 > made.max_num_tokens for row in rows):
        lines += [
            "",
            f"max_num_tokens is {made.max_num_tokens:,}: a longer prompt takes several iterations.",
            "Where contexts are not cut (enable_chunked_context=false, V1, deterministic_mode)",
            "a step must hold the longest one: plan with --max-num-tokens of the longest request.",
        ]
    return "\n".join(lines)
