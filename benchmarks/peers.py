"""Our engine beside others on one GPU, in the same run, on the same work, with the same KV cache.

    python benchmarks/peers.py                  all of them, at most 9 minutes, made for one H200
    python benchmarks/peers.py --quick          at most 3 minutes: attention kernels and vLLM
    python benchmarks/peers.py --peers vllm     some only, with all the time to themselves
    python benchmarks/peers.py --dry-run        tiny, on a CPU; reports no figures

Attention kernels: FlashAttention 3 and FlashInfer on the same tensors. Engines: each runs in a
process of its own and stays there while ours runs, and they take turns: ours, theirs, ours,
theirs. An engine that is missing, fails or takes too long has a row that says why.
``pack_peers.py`` puts their packages into one archive; unpacked, it is given as ``--site FOLDER``
(default: ``$PEERS``). The JSON is written after every row, to ``--output``, else to
``$OUT/peers.json``; those of the attention kernels are in ``peers.rows.jsonl`` beside it as soon as
they are made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BEGAN = time.monotonic()  # before torch is imported: up to 40 s where its files are not cached yet
ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("backend", "scheduler", "kernels", "client", "benchmarks")
sys.path[:0] = [str(ROOT / folder) for folder in _FOLDERS]

from gpu_parts import isolated  # noqa: E402  (the packages lie beside this script)
from gpu_parts.report import describe, write  # noqa: E402
from peer_parts.conversation import PeerError, Worker  # noqa: E402

Row = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """An engine, its variant, and seconds of a full and of a quick run (0: left out)."""

    engine: str
    variant: str
    full: int
    quick: int


# What says most comes first: time that one leaves over goes to the next.
PEERS = {
    "vllm": Peer("vllm", "", 150, 105),
    "mini-sglang": Peer("mini_sglang", "", 105, 0),
    "transformers-fa3": Peer("transformers", "fa3", 55, 0),
    "vllm-triton": Peer("vllm", "triton", 75, 0),
    "transformers": Peer("transformers", "", 40, 0),
    "vllm-uncompiled": Peer("vllm", "uncompiled", 0, 0),
    "vllm-fp8": Peer("vllm", "fp8", 0, 0),
}
_ATTENTION = "attention"
_ATTENTION_SECONDS = (90, 50)
_FULL_SECONDS, _QUICK_SECONDS = 535, 175
_MAX_ROUNDS = 3


def main() -> None:
    """Run all engines, write the JSON after each, print the table."""
    options = _parse()
    if options.part:
        _run_part(options)
        return
    stop_at = _BEGAN + _all_seconds(options)
    env = _environment(options)
    report: dict[str, Any] = {**describe(options.dry_run), "rows": []}
    for row in _all_rows(options, env, stop_at):
        report["rows"].append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        write(report, options.output)


def _all_rows(options: argparse.Namespace, env: Mapping[str, str], stop_at: float) -> Iterator[Row]:
    names = options.peers or [_ATTENTION, *PEERS]
    if _ATTENTION in names:
        seconds = _ATTENTION_SECONDS[options.quick] * _scale(options)
        seconds = 600 if options.dry_run else min(seconds, stop_at - time.monotonic())
        kept = options.output.with_suffix(".rows.jsonl") if options.output else None
        if kept:
            kept.write_bytes(b"")
        script = Path(__file__).resolve()
        for row in isolated.run_isolated(script, _ATTENTION, _flags(options), seconds, kept, env):
            yield {"peer": _ATTENTION, **row}
    chosen = [name for name in names if name in PEERS and (options.peers or _time(name, options))]
    if chosen:
        yield from _engine_rows(options, chosen, env, stop_at)


def _engine_rows(
    options: argparse.Namespace, names: list[str], env: Mapping[str, str], stop_at: float
) -> Iterator[Row]:
    """Ours is started for every precision that the peers have, and kept."""
    with tempfile.TemporaryDirectory() as folder:
        logs = options.output.parent if options.output else Path(folder)
        for variant in ("", "fp8"):
            group = [name for name in names if (PEERS[name].variant == "fp8") == bool(variant)]
            if not group:
                continue
            ours = Worker(
                "inflight", _budget(options, Path(folder), variant), env, logs / "ours.log"
            )
            try:
                facts = ours.facts(stop_at - time.monotonic())
                yield {"peer": "inflight", "variant": variant, **facts}
                for number, name in enumerate(group):
                    later = sum(_time(other, options) for other in group[number + 1 :])
                    end = stop_at if options.peers else stop_at - later
                    budget = _budget(options, Path(folder), PEERS[name].variant)
                    log = logs / f"{name}.log"
                    yield from _beside(options, ours, name, budget, env, log, end)
            except PeerError as error:
                yield {"peer": "inflight", "variant": variant, "error": str(error)}
            finally:
                ours.stop()


def _beside(
    options: argparse.Namespace, ours: Worker, name: str, budget: str, env: Mapping[str, str],
    log: Path, end: float,
) -> Iterator[Row]:  # fmt: skip
    """One peer: its facts, then a row for each piece of work. Its failure is a row."""
    if end - time.monotonic() < 5:
        yield {"peer": name, "error": "no time was left"}
        return
    peer = Worker(PEERS[name].engine, budget, env, log)
    try:
        facts = peer.facts(end - time.monotonic())
        yield {"peer": name, **(facts if not options.dry_run else {"is_ready": True})}
        for work in _works(options):
            row = _turns(options, ours, peer, work, end)
            yield {"peer": name, **row}
            if "error" in row:
                break
    except PeerError as error:
        yield {"peer": name, "error": str(error)}
    finally:
        peer.stop()


def _works(options: argparse.Namespace) -> list[Any]:
    from gpu_parts.offline import RAGGED, Work

    if options.dry_run:
        return [Work(3, (3, 9), (2, 5))]
    if options.quick:
        return [Work(64, (100, 512), (100, 256))]
    return [Work(1, (1000, 1000), (128, 128)), RAGGED]


def _turns(options: argparse.Namespace, ours: Worker, peer: Worker, work: Any, end: float) -> Row:
    """Both warmed up, then in turns while there is time: medians and the spread of all turns. One
    that is not finished leaves those before it, and its error."""
    from peer_parts.work import Budget

    shape = Budget(options.dry_run, "").shape
    prompts, output_lens = work.draw(shape["vocab_size"])
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    row: Row = {"what": work.label}
    num_rounds = 1 if options.dry_run else _MAX_ROUNDS
    took = 0.0
    for number in range(-1, num_rounds):
        if number > 0 and time.monotonic() + took > end:
            break
        start = time.monotonic()
        lens = [min(length, 16) for length in output_lens] if number < 0 else output_lens
        try:
            for side, worker in (("ours", ours), ("theirs", peer)):
                done = worker.ask(prompts, lens, end - time.monotonic())
                if done["num_tokens"] != sum(lens):
                    raise PeerError(f"{side}: {done['num_tokens']} tokens instead of {sum(lens)}")
                if number >= 0:
                    speeds[side].append(done["num_tokens"] / done["seconds"])
        except PeerError as error:
            if not speeds["theirs"]:
                raise
            row["error"] = str(error)
            break
        took = time.monotonic() - start
    row["rounds"] = len(speeds["theirs"])
    return row if options.dry_run else {**row, **_figures(speeds)}


def _figures(speeds: Mapping[str, list[float]]) -> Row:
    row: Row = {}
    for side, values in speeds.items():
        row[f"{side}_tokens_per_s"] = round(statistics.median(values), 1)
        row[f"{side}_spread"] = round((max(values) - min(values)) / statistics.median(values), 3)
    row["ours_over_theirs"] = round(row["ours_tokens_per_s"] / row["theirs_tokens_per_s"], 3)
    return row


def _budget(options: argparse.Namespace, folder: Path, variant: str) -> str:
    from peer_parts.model_folder import write_model_folder
    from peer_parts.work import Budget

    path = str(folder)
    budget = Budget.tiny(path, variant) if options.dry_run else Budget(False, path, variant=variant)
    write_model_folder(folder, budget)
    return budget.to_json()


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Our packages first; no engine may fetch anything or count its users."""
    path = [str(ROOT / folder) for folder in _FOLDERS]
    path += [str(options.site)] if options.site else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "TVM_FFI_CUDA_ARCH_LIST": "9.0a",
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
    }


def _run_part(options: argparse.Namespace) -> None:
    """The attention rows, in the process that `isolated` started."""
    stop_at = time.monotonic() + options.until - time.time()  # before what it needs is imported
    import torch

    from gpu_parts.common import Setting
    from peer_parts.attention_rows import rows

    device = torch.device("cpu" if options.dry_run else "cuda")
    setting = Setting(device, options.dry_run, options.quick, stop_at)
    for row in rows(setting):
        isolated.keep_row(options.rows, options.part, 0, row)
        if setting.seconds_left < 0:
            late = {"error": "its time was over"}
            isolated.keep_row(options.rows, options.part, 0, late)
            return


def _time(name: str, options: argparse.Namespace) -> float:
    peer = PEERS[name]
    return (peer.quick if options.quick else peer.full) * _scale(options)


def _all_seconds(options: argparse.Namespace) -> float:
    return float(options.seconds or (_QUICK_SECONDS if options.quick else _FULL_SECONDS))


def _scale(options: argparse.Namespace) -> float:
    """Of all times, where a run gets other seconds than it is made for."""
    return _all_seconds(options) / (_QUICK_SECONDS if options.quick else _FULL_SECONDS)


def _flags(options: argparse.Namespace) -> list[str]:
    flags = ["--dry-run"] if options.dry_run else []
    return [*flags, "--quick"] if options.quick else flags


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=[_ATTENTION, *PEERS], help="only these")
    site = Path(os.environ["PEERS"]) if os.environ.get("PEERS") else None
    parser.add_argument("--site", type=Path, default=site, help="folder of the peers' packages")
    options = isolated.parse(parser, "peers")
    if options.site is not None:
        sys.path.append(str(options.site))
    return options


if __name__ == "__main__":
    main()
