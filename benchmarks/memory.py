"""What a CPU server's process takes for a quantised checkpoint, beside the same in bfloat16.

Each model is loaded, and made ready for its first request, in a process of its own; reported is
what that takes (RSS) more than one with a model of a few kilobytes. The checkpoints are of random
bits: a Llama of 1.1 B parameters with 4 bits in groups of 128, or 8 by rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.quantized import compressed  # beside this folder

from inflight_backend.engine import Engine, EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.models.checkpoint_files import JsonReader
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.quantization.configs import read_quantization
from inflight_backend.models.quantization.stored import stored_tensors
from report import describe_run, write_result

_EMPTY, _NONE = "empty", "none"
_SHAPES: dict[str, dict[str, Any]] = {
    _EMPTY: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22},
}
_SHAPES[_EMPTY] |= {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_SHAPES["tiny"] |= {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
_SHAPES["1.1B"] |= {"vocab_size": 32_000, "num_attention_heads": 32, "num_key_value_heads": 4}
_OF_4_BITS = {"bits": 4, "group_size": 128}
_SCHEMES: dict[str, dict[str, Any]] = {
    "w4a16": compressed("pack-quantized", 4, "group", group_size=128),
    "w4a16-asymmetric": compressed("pack-quantized", 4, "group", group_size=128, symmetric=False),
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True, **_OF_4_BITS},
    "w8a16": compressed("int-quantized"),
    "fp8": compressed("float-quantized"),
}
_TYPES = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.bfloat16,  # the first of those that scales may have
}


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _parse()
    if options.load:
        print(json.dumps(_load(options.load)))
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        empty = _measure(Path(scratch), _EMPTY, _NONE)
        rows = [_measure(Path(scratch), options.model, each) for each in (_NONE, *options.schemes)]
    for row in rows:
        row["process_bytes"] -= empty["process_bytes"]
        row["of_bfloat16"] = {
            key: row[key] / rows[0][key] for key in ("weight_bytes", "process_bytes")
        }
    _print(rows)
    result = {
        **describe_run("inflight", "torch", "numba"),
        "model": options.model,
        "empty_process_bytes": empty["process_bytes"],
        "rows": rows,
    }
    print(f"written: {write_result('memory', result, options.output)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=[*_SHAPES][1:], default="1.1B")
    parser.add_argument("--schemes", nargs="*", choices=_SCHEMES, default=list(_SCHEMES))
    parser.add_argument("--scratch", help="folder for one checkpoint at a time")
    parser.add_argument("--output", type=Path, help="JSON file; default: the committed result")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args()


def _measure(scratch: Path, shape: str, scheme: str) -> dict[str, Any]:
    """A row: with all that a process takes."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        _write(folder, _SHAPES[shape], _SCHEMES.get(scheme))
        command = [sys.executable, __file__, "--load", str(folder)]
        for _ in range(2):  # the first one compiles kernels
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = {"scheme": scheme, **json.loads(done.stdout)}
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def _write(folder: Path, shape: dict[str, Any], quantization: dict[str, Any] | None) -> None:
    """A checkpoint of random bits in bfloat16, whose linears are quantised so."""
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    content |= {"hidden_act": "silu", "max_position_embeddings": 2048, **shape}
    (folder / "config.json").write_text(json.dumps(content))
    specs = decoder_parameters(read_model(folder))
    if quantization is not None:
        content["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(content))
    found = read_quantization(JsonReader(content, "config.json"))
    tensors = {}
    for spec in specs:
        for source in spec.sources:
            if found is None or not spec.is_linear:
                tensors[source.name] = _random(source.shape, torch.bfloat16)
                continue
            module = source.name.removesuffix(".weight")
            stored = stored_tensors(found.rules[0].scheme, *source.shape)
            for end, each in stored.items():
                if not each.is_optional:
                    name = f"{module}.{end}"
                    tensors[name] = _random(each.shapes[0], _TYPES[each.dtypes[0]])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A few thousand numbers that repeat: integers of all bits, or from 0 to 0.01."""
    generator = torch.Generator().manual_seed(len(shape))
    bits = torch.randint(256, (1 << 16,), dtype=torch.uint8, generator=generator)
    some = (bits.float() / 25_600).to(dtype) if dtype.is_floating_point else bits.view(dtype)
    count = prod(shape)
    return some.view(torch.uint8).repeat(-(-count // len(some))).view(dtype)[:count].view(shape)


def _load(folder: Path) -> dict[str, int]:
    """What this process takes with that model, and what its parameters alone do."""
    config = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        max_batch_size=8,
        max_num_tokens=128,
        max_seq_len=128,
        max_tokens_in_paged_kv_cache=256,
    )
    engine = Engine.load(folder, config)
    engine.prepare_thread()
    gc.collect()
    process_bytes = psutil.Process().memory_info().rss  # before the plan, which takes some itself
    return {
        "weight_bytes": make_plan(folder, config).weight_bytes,
        "process_bytes": process_bytes,
    }


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for key, ratio in row["of_bfloat16"].items():
        yield f"{row[key] / 2**20:,.0f} ({ratio:.4f}x)"


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("scheme", "parameters, MiB", "process, MiB")
    for row in rows:
        table.add_row(row["scheme"], *_cells(row))
    Console().print(table, "in brackets: of what is not quantised", sep="\n")


if __name__ == "__main__":
    main()
