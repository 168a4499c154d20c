"""The figures of docs/reliability.md, from the reports under benchmarks/results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from page import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"

_MODEL, _SERVER = "triton_python_backend_stub", "tritonserver"
_LAUNCHER, _FRONT, _RELAY = "inflight serve", "inflight openai", "tensorrt_llm_bls"


def render() -> str:
    """A part for each report there is."""
    parts = [
        part(json.loads(path.read_text(encoding="utf-8")))
        for name, part in (("soak", _soak), ("reload", _reload), ("tiny_requests", _tiny))
        if (path := RESULTS / f"{name}.json").exists()
    ]
    return "\n".join(["## Measured\n", *parts])


def _soak(result: dict[str, Any]) -> str:
    parts = result["policies"]
    rows = [
        ("load of the machine, least / median / most", *(_load(part) for part in parts)),
        ("requests before any process was killed", *(_count(part, "load") for part in parts)),
        ("requests while processes were killed", *(_count(part, "kills") for part in parts)),
        ("of the first, by outcome", *(_outcomes(part["load"]) for part in parts)),
        ("of the second", *(_outcomes(part["kills"]) for part in parts)),
        ("final responses of a request read to its end", *(_finals(part) for part in parts)),
        ("statistics asked beside; unanswered; slowest", *(_questions(part) for part in parts)),
        ("leaked requests, blocks, ids, regions, files", *(_leaks(part) for part in parts)),
        ("more threads / descriptors: model, server", *(_threads(part) for part in parts)),
        ("model process, MB in the warm-up", *(_memory(part, _MODEL, "warm_up") for part in parts)),
        ("model process, MB after it", *(_memory(part, _MODEL, "steady") for part in parts)),
        ("tritonserver, MB after it", *(_memory(part, _SERVER, "steady") for part in parts)),
        ("OpenAI's API, MB after it", *(_memory(part, _FRONT, "steady") for part in parts)),
        ("launcher, MB after it", *(_memory(part, _LAUNCHER, "steady") for part in parts)),
        ("model that relays, MB after it", *(_memory(part, _RELAY, "steady") for part in parts)),
        ("more threads / descriptors of it", *(_more(part, _RELAY) for part in parts)),
        ("seconds until served again", *(_recoveries(part) for part in parts)),
        (
            "more threads / descriptors of the launcher after kills",
            *(_more(part, "launcher after the kills") for part in parts),
        ),
        ("seconds until open streams ended, median / most", *map(_ends, parts)),
    ]
    failures = _shortened(result["failures"])
    warm_up = result.get("warm_up_seconds", 720)  # of reports that do not say it
    return (
        f"### {result['minutes']:g} minutes of mixed load\n\n"
        f"{result['workers']} clients on {result['settings']['max_batch_size']} places and a "
        "quarter of the KV cache that those can need. The warm-up lasts until the recorder's ring "
        f"has been filled four times, and for {warm_up / 60:g} minutes; "
        f"flat means less than {_flat(result)} after it.\n\n"
        + table(("", *(part["policy"] for part in parts)), rows)
        + f"\nBroken promises: **{failures}**. {_origin(result, 'soak')}\n"
    )


def _reload(result: dict[str, Any]) -> str:
    growth = next(value for key, value in result.items() if key.startswith("growth_mb_since"))
    return (
        f"### {result['reloads']} reloads\n\n"
        f"Load, answer, unload on a plain tritonserver: {growth:+.1f} MB of the server since the "
        f"fifth, {result['more_threads']:+d} threads, {result['more_descriptors']:+d} descriptors, "
        f"{result['regions_left']} regions of shared memory left; a load took "
        f"{result['load_seconds_p50']:g} s (median; load of the machine {_load(result)}). "
        f"Broken promises: **{'; '.join(result['failures']) or 'none'}**. "
        f"{_origin(result, 'reload')}\n"
    )


def _tiny(result: dict[str, Any]) -> str:
    memory, in_use = result["resident_mb"], result["in_use_mb"]
    kept = result["growth_bytes_per_request"]
    return (
        f"### {result['requests']:,} requests of one token\n\n"
        "Through the whole model process but the engine, which counts: "
        f"in use without the recorder's\nring {in_use[0]:.2f} MB after the warm-up, "
        f"{in_use[-1]:.2f} MB at the end, {kept:.2f} bytes per request; "
        f"resident {memory[0]:.1f} and {memory[-1]:.1f} MB. "
        f"{_origin(result, 'tiny_requests')}\n"
    )


def _shortened(failures: Sequence[str]) -> str:
    """Each kind once, with how often it happened; the report has them in full."""
    kinds = Counter(" ".join(failure.split())[:100] for failure in failures)
    return "; ".join(f"{kind} ({times})" for kind, times in kinds.items()) or "none"


def _count(part: dict[str, Any], phase: str) -> str:
    return f"{part[phase]['requests']:,}"


def _load(part: dict[str, Any]) -> str:
    load = part["load_average"]
    return f"{load['min']:g} / {load['median']:g} / {load['max']:g}"


def _outcomes(phase: dict[str, Any]) -> str:
    told = [f"{count:,} {what}" for what, count in phase["outcomes"].items()]
    return "<br>".join([*told, f"**{phase['wrong']} wrong**"])


def _finals(part: dict[str, Any]) -> str:
    told = []
    for phase in ("load", "kills", "questions"):
        finals = part[phase].get("finals_per_request_read_to_its_end", {})  # of questions: new
        told += [
            f"{number} in {times:,} of {sum(finals.values()):,}" for number, times in finals.items()
        ]
    return "<br>".join(told)


def _questions(part: dict[str, Any]) -> str:
    asked = part["questions"]
    return f"{asked['asked']:,}; {asked['not_answered']}; {asked['seconds_max']:g} s"


def _leaks(part: dict[str, Any]) -> str:
    counts = [count for count in part["leaks"].values() if isinstance(count, int)]
    return str(sum(counts))


def _threads(part: dict[str, Any]) -> str:
    held = [part["leaks"][name] for name in (_MODEL, _SERVER)]
    told = ", ".join(f"{each['threads']:+d} / {each['descriptors']:+d}" for each in held)
    kinds = Counter[str]()
    for each in held:
        kinds.update(each.get("more_of", {}))
    return told + (f" ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})" if kinds else "")


def _memory(part: dict[str, Any], program: str, phase: str) -> str:
    held = part["memory"][program][phase]
    told = f"{held['first_mb']:.0f} to {held['last_mb']:.0f} in {held['seconds'] / 60:.0f} min"
    if phase == "warm_up":
        return told
    judged = "" if part["memory"]["is_judged"] else " (too short to be judged)"
    slope = (
        f"{held['slope_mb_per_hour']:+.1f} MB/h, {held['bytes_per_request']:+.0f} bytes a request"
    )
    if "bytes_per_cancelled_call" in held:
        slope += f", {held['bytes_per_cancelled_call']:+.0f} bytes a cancelled gRPC call"
    return f"{told}, {slope}{judged}"


def _recoveries(part: dict[str, Any]) -> str:
    return "<br>".join(
        f"{each['what']}: {each['seconds_until_served_again']:.0f}" for each in part["recoveries"]
    )


def _flat(result: dict[str, Any]) -> str:
    told = f"{result['max_slope_mb_per_hour']:g} MB/h"
    if "max_bytes_per_request" in result:
        told += f" and {result['max_bytes_per_request']:g} bytes per request"
    if more := result.get("max_bytes_per_cancelled_call"):
        told += f", for tritonserver and {more:g} bytes for each gRPC call that was cancelled"
    return told


def _more(part: dict[str, Any], what: str) -> str:
    more = part["leaks"][what]
    return f"{more['threads']:+d} / {more['descriptors']:+d}"


def _ends(part: dict[str, Any]) -> str:
    return "<br>".join(
        f"{each['what']}: {each['seconds_until_they_ended_p50']:.1f} / "
        f"{each['seconds_until_they_ended_max']:.1f}"
        for each in part["recoveries"]
        if each["open_streams"]
    )


def _origin(result: dict[str, Any], name: str) -> str:
    note = f"Note: {result['note']}. " if result.get("note") else ""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return (
        f"{note}`{result['command'].partition(' --note')[0]}`, {result['date']}, commit "
        f"{result['commit']}, {result['processor']}, {result['cores']} cores; {versions}. "
        f"[{name}.json](../benchmarks/results/{name}.json)"
    )
