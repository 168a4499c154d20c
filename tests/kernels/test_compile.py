"""Gates on compiled code, without a GPU: spills, shared memory, the instructions that matter, and
that one kernel serves steps of any shape.

The cases are compiled once, in a process of their own: here Triton interprets (see `conftest`),
and it cannot do both in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Shared memory one program may take (CUDA C++ Programming Guide, compute capabilities 8.0, 8.9, 9.0
# and 12.0), and what a multiprocessor has: 1 KiB per resident program is the system's.
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
SHARED_TOTAL = {80: 164 * 1024, 89: 100 * 1024, 90: 228 * 1024, 120: 100 * 1024}
REGISTERS_TOTAL = 65536

Report = dict[str, Any]

# Compiling is a minute of one core; a busy machine may share it among many.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


def kept_cache(cache: pytest.Cache) -> Path:
    """Triton's cache, kept from run to run: it compiles a kernel again when source, arguments,
    target or compiler differ. Entries live for two weeks, or those of old sources would pile up."""
    folder = cache.mkdir("triton")
    for entry in folder.iterdir():
        if time.time() - entry.stat().st_mtime > 14 * 24 * 3600:
            shutil.rmtree(entry)
    return folder


@pytest.fixture(scope="module")
def compile_cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Runs `compile_cases` with arguments, variables and another Triton's folder; returns what it
    wrote."""
    folder = tmp_path_factory.mktemp("compile")
    cache = kept_cache(request.config.cache) if request.config.cache else folder / "cache"
    tests = Path(__file__).parents[1]
    search = [str(tests), str(tests.parent / "kernels"), os.environ.get("PYTHONPATH", "")]

    def run(*arguments: str, triton: Path | None = None, **variables: str) -> dict[str, Any]:
        output = folder / "results.json"
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(triton or ""), *search])),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-m", "support.compile_cases", "--output", str(output), *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        loaded: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return loaded

    return run


@pytest.fixture(scope="module")
def results(compile_cases: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Of all cases."""
    return compile_cases()


@pytest.fixture(scope="module")
def reports(results: dict[str, Any]) -> list[Report]:
    """One entry per compiled kernel; see `compile_recorder`."""
    loaded: list[Report] = results["reports"]
    return loaded


@pytest.fixture(scope="module")
def gpu_machine_reports(compile_cases: Callable[..., dict[str, Any]]) -> list[Report]:
    """The draw, a layer and quantised linears, by the Triton of the machine with a GPU."""
    folder = Path(sys.prefix) / "gpu-machine"
    assert (folder / "triton").is_dir(), f"{folder} is missing: `make test-all` installs it"
    loaded: list[Report] = compile_cases("--only", "draw", "layer", "quantized", triton=folder)[
        "reports"
    ]
    return loaded


def refused(reports: list[Report], is_good: Callable[[Report], bool]) -> list[Report]:
    """The kernels that break a rule."""
    return [report for report in reports if not is_good(report)]


def of_kernel(reports: list[Report], name: str) -> list[Report]:
    """The reports of one kernel; there are some for 8.0 and 9.0 at least."""
    found = [report for report in reports if report["name"] == name]
    assert {report["capability"] for report in found} >= {80, 90}
    return found


def with_wide_heads(reports: list[Report]) -> list[Report]:
    """Without heads of 16 and 32, whose tiles have less than 16 bytes for each thread."""
    return [report for report in reports if not report["label"].startswith(("head 16", "head 32"))]


def resident_programs(report: Report) -> int:
    """Programs that fit one multiprocessor by registers and shared memory."""
    by_shared = SHARED_TOTAL[report["capability"]] // (report["shared_bytes"] + 1024)
    # Registers are handed out to warps in units of 256: 8 per thread.
    per_thread = -(-report["registers"] // 8) * 8
    return int(min(by_shared, REGISTERS_TOTAL // (per_thread * report["num_threads"])))


def test_no_register_is_spilled(reports: list[Report], gpu_machine_reports: list[Report]) -> None:
    every = reports + gpu_machine_reports
    assert refused(every, lambda report: report["stack_bytes"] == 0) == []


def test_the_search_of_a_threshold_takes_no_number_twice(
    reports: list[Report], gpu_machine_reports: list[Report]
) -> None:
    """Its loops, by count and by mass, take some 200 instructions (a third one sums). Over a table
    [TILE, 16] Triton 3.6.0 divided and took exponentials of bf16 logits once for each of 16 digits:
    1,548."""
    kernels = of_kernel(reports, "_sample_kernel")
    kernels += of_kernel(gpu_machine_reports, "_sample_kernel")
    for report in kernels:
        lengths = report["loop_lengths"]
        assert len(lengths) == 3, report
        assert max(lengths) < 300, report


def test_shared_memory_fits(reports: list[Report]) -> None:
    limits = SHARED_LIMIT
    assert refused(reports, lambda r: r["shared_bytes"] <= limits[r["capability"]]) == []


def test_generation_attention_reads_16_bytes_at_a_time(reports: list[Report]) -> None:
    kernels = with_wide_heads(of_kernel(reports, "_paged_attention_generation_kernel"))
    assert refused(kernels, lambda report: report["num_async_copies_16"] >= 6) == []


def test_generation_attention_shares_a_multiprocessor(reports: list[Report]) -> None:
    """Two programs at least, or one waits for memory alone (see `choose_tile`); 12.0 has no room
    for two with a cache of bf16, and sums of heads above 256 fill half of the registers."""
    kernels = of_kernel(reports, "_paged_attention_generation_kernel")
    kernels = [report for report in kernels if report["capability"] != 120]
    kernels = [r for r in kernels if not r["label"].startswith(("head 512", "latents"))]
    assert refused(kernels, lambda report: resident_programs(report) >= 2) == []


@pytest.mark.parametrize("op", ["generation", "context"])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_attention_looks_a_block_of_32_up_once(reports: list[Report], op: str, cache: str) -> None:
    """It is the default, and half a tile. Looked up by every token, ids took up to half of the
    loop's instructions (a tenth to a fifth of the kernel's)."""
    sizes = {
        report["label"]: report["num_instructions"]
        for report in of_kernel(reports, f"_paged_attention_{op}_kernel")
        if report["capability"] == 90
    }
    assert sizes[f"8B {cache} blocks of 32"] <= 1.08 * sizes[f"8B {cache} blocks of 64"]


def test_generation_attention_over_an_fp8_cache_unpacks_words(reports: list[Report]) -> None:
    """No number of it is read alone, and fewer than 16 bytes are copied of a block's id only: in
    the loop, and for each of the six tiles ahead. Four programs share a multiprocessor."""
    kernels = with_wide_heads(of_kernel(reports, "_paged_attention_generation_kernel"))
    kernels = [r for r in kernels if "float8" in r["label"] and r["capability"] == 90]
    assert len(kernels) == 6
    assert refused(kernels, lambda report: report["num_byte_reads"] == 0) == []
    small = [report for report in kernels if report["label"].endswith("blocks of 32")]
    assert refused(small, lambda report: report["num_narrow_copies"] <= 2 * 7) == []
    large = [report for report in kernels if report not in small]
    assert refused(large, lambda report: report["num_narrow_copies"] <= 7) == []
    assert refused(kernels, lambda report: resident_programs(report) >= 4) == []


def test_grouped_generation_attention_uses_tensor_cores(reports: list[Report]) -> None:
    kernels = of_kernel(reports, "_paged_attention_generation_kernel")
    packed = [r for r in kernels if r["label"].startswith("8B") and "float32" not in r["label"]]
    assert packed
    assert refused(packed, lambda report: report["num_mma"] > 0) == []


def test_context_attention_uses_warpgroup_products_on_hopper(reports: list[Report]) -> None:
    """wgmma from 64 rows on, which heads above 256 always have; 16-row tiles (a few draft tokens)
    and sm_80 use mma.sync."""
    kernels = of_kernel(reports, "_paged_attention_context_kernel")
    kernels = [report for report in kernels if "float32" not in report["label"]]
    small = [r for r in kernels if r["label"] == "8B bfloat16 max_query_len=4"]
    hopper = [r for r in kernels if r["capability"] == 90 and r not in small]
    others = [r for r in kernels if r["capability"] == 80 or r in small]
    assert hopper
    assert small
    assert refused(hopper, lambda r: r["num_wgmma"] > 0 and r["num_mma"] == 0) == []
    assert refused(others, lambda r: r["num_wgmma"] == 0 and r["num_mma"] > 0) == []


def test_context_attention_reads_16_bytes_at_a_time(reports: list[Report]) -> None:
    kernels = with_wide_heads(of_kernel(reports, "_paged_attention_context_kernel"))
    # Of 8 bits, half as wide, there are fewer beside a window, where one loop takes all tiles, and
    # on 8.0, whose programs keep one tile ahead.
    few = [r for r in kernels if "float8" in r["label"] and "sliding_window" in r["label"]]
    fewest = [r for r in kernels if "int8" in r["label"] and r["capability"] == 80]
    many = [r for r in kernels if r not in few + fewest and r["capability"] != 120]
    assert few
    assert fewest
    assert refused(fewest, lambda report: report["num_async_copies_16"] >= 8) == []
    assert refused(many, lambda report: report["num_async_copies_16"] >= 16) == []
    assert refused(few, lambda report: report["num_async_copies_16"] >= 12) == []
    assert refused(kernels, lambda report: report["num_loads_16"] > 0) == []  # the query


@pytest.mark.parametrize(
    "name",
    ["_rms_norm_kernel", "_silu_mul_kernel", "_rope_write_kv_kernel", "_copy_blocks_kernel"],
)
def test_token_kernels_read_and_write_16_bytes_at_a_time(reports: list[Report], name: str) -> None:
    kernels = of_kernel(reports, name)
    assert refused(kernels, lambda report: report["num_loads_16"] > 0) == []
    plain = [report for report in kernels if "fp8" not in report["label"]]
    assert refused(plain, lambda report: report["num_stores_16"] > 0) == []


def test_the_invariant_linear_is_pipelined_on_tensor_cores(reports: list[Report]) -> None:
    kernels = of_kernel(reports, "_invariant_linear_kernel")
    assert refused(kernels, lambda report: report["num_async_copies_16"] >= 8) == []
    hopper = [report for report in kernels if report["capability"] == 90]
    assert refused(hopper, lambda report: report["num_wgmma"] > 0) == []


def test_quantised_linears_widen_words_on_tensor_cores(reports: list[Report]) -> None:
    """Words go to the threads that multiply them in registers of two, never byte by byte; loops of
    odd groups read scales for every number."""
    kernels = of_kernel(reports, "_quantized_linear_kernel")
    kernels = [r for r in kernels if "float32" not in r["label"]]
    assert refused(kernels, lambda report: report["num_byte_reads"] == 0) == []
    for capability, units in ((80, "num_mma"), (90, "num_wgmma")):
        own = [report for report in kernels if report["capability"] == capability]
        assert refused(own, lambda report, units=units: report[units] > 0) == []  # type: ignore[misc]
    assert refused(kernels, lambda report: report["num_async_copies_16"] >= 6) == []


def test_no_product_loses_what_it_reads_from_registers(reports: list[Report]) -> None:
    """The assembler that Triton brings for Hopper is known to make such code (`machine_code`)."""
    hopper = [report for report in reports if report["num_wgmma"] > 0]
    assert sum(report["num_register_inputs"] for report in hopper) >= 4 * len(hopper)
    assert refused(hopper, lambda report: report["overwritten_inputs"] == []) == []


def test_sampling_reads_16_bytes_at_a_time(reports: list[Report]) -> None:
    kernels = of_kernel(reports, "_chunk_kernel") + of_kernel(reports, "_sample_kernel")
    assert refused(kernels, lambda report: report["num_loads_16"] > 0) == []


def test_one_compiled_kernel_serves_steps_of_any_shape(results: dict[str, Any]) -> None:
    """Another number of requests, width of a table or place of a view must not mean waiting for
    the compiler in the middle of serving (see `key_cases`)."""
    counts = results["counts"]
    assert "_generation_fp8 _combine_splits_kernel" in counts
    assert {kernel: count for kernel, count in counts.items() if count != 1} == {}
