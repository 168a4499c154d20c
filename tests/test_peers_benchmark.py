"""`benchmarks/peers.py` and `pack_peers.py` where there is no GPU and no peer but transformers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def test_dry_run(tmp_path: Path) -> None:
    """Who can run here does, and answers as long as asked; who cannot has a row that says why."""
    output = tmp_path / "peers.json"
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--dry-run", "--output", str(output)]
    done = subprocess.run(
        [*command, "--peers", "attention", "vllm", "transformers"],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_peer.setdefault(row["peer"], []).append(row)
    kernels = [row for row in by_peer["attention"] if "kind" in row]
    assert [row["kind"] for row in kernels] == 2 * ["generation", "context"]
    assert "fa3" in kernels[0]
    assert "No module named 'flashinfer'" in kernels[2]["flashinfer"]
    assert by_peer["inflight"][0]["kv_tokens"] == 512
    assert by_peer["vllm"] == [
        {"peer": "vllm", "error": "ModuleNotFoundError: No module named 'vllm'"}
    ]
    assert by_peer["transformers"][1:] == [
        {"peer": "transformers", "what": "3 x 3-9/2-5", "rounds": 1}
    ]
    assert not [row for row in rows if any("tokens_per_s" in key or "_us" in key for key in row)]


def test_an_engine_that_says_nothing_is_ended(tmp_path: Path) -> None:
    from peer_parts.conversation import PeerError, Worker
    from peer_parts.work import Budget

    # A budget of wrong fields: it fails before it imports an engine.
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    worker = Worker("inflight", '{"no": "budget"}', environment, tmp_path / "log")
    with pytest.raises(PeerError, match="unexpected keyword argument"):
        worker.facts(60)
    worker.stop()
    budget = Budget.tiny(str(tmp_path)).to_json()
    worker = Worker("inflight", budget, environment, tmp_path / "log")
    with pytest.raises(PeerError, match="no answer within 0 s"):
        worker.facts(0)
    worker.stop()
    with pytest.raises(PeerError, match="its process"):
        worker.ask([[1]], [1], 5)


def entry(architecture: int, payload: bytes) -> bytes:
    """A cubin's entry of a fat binary, as nvcc lays it out."""
    head = struct.pack("<HHIQIIHHI", 2, 0x101, 64, len(payload), 0, 0, 8, 1, architecture)
    return head.ljust(64, b"\0") + payload


def test_code_of_other_gpus_is_blanked_and_nothing_else() -> None:
    from peer_parts.fatbin import blank_other_architectures

    entries = entry(75, b"old" * 40) + entry(90, b"hopper" * 20) + entry(100, b"new" * 8)
    binary = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    noise = struct.pack("<I", 0xBA55ED50) + b"but no fat binary"
    data = bytearray(b"code" + noise + binary + b"more" + binary)
    before = bytes(data)
    found = blank_other_architectures(data, 90)
    assert (found.binaries, found.kept, found.blanked) == (2, 2, 4)
    assert found.blanked_bytes == 2 * (120 + 24)
    assert bytes(data) == before.replace(b"old", b"\0\0\0").replace(b"new", b"\0\0\0")


def test_an_archive_holds_what_is_wanted(tmp_path: Path) -> None:
    import pack_peers
    from peer_parts.promises import broken_promises

    wheel = tmp_path / "vllm-0.26.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("vllm/sampling_params.py", "class SamplingParams:\n    max_tokens: int\n")
        made.writestr("vllm/vllm-rs", "left out")
        made.writestr("vllm-0.26.0.data/purelib/vllm/placed.py", "")
        made.writestr("vllm/_C_stable_libtorch.abi3.so", "library")
    site = tmp_path / "site"
    pack_peers._unpack(wheel, site)
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()) == [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/placed.py",
        "vllm/sampling_params.py",
    ]
    problems = broken_promises(site)
    assert "vllm/sampling_params.py: SamplingParams has no ignore_eos" in problems
    assert "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so is missing" in problems
    assert "vllm/_C_stable_libtorch.abi3.so is missing" not in problems
    assert not [problem for problem in problems if "max_tokens" in problem]
    assert not [problem for problem in problems if problem.startswith("minisgl")]
