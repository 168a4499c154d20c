"""Write docs/performance.md from the JSON under benchmarks/results; ``--check`` only compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from page import ROOT, table, write_or_check

RESULTS = ROOT / "benchmarks" / "results"

Result = dict[str, Any]

HEAD = """\
# Measured

Written by `python tools/write_performance_docs.py` from `benchmarks/results/*.json`; do not edit.
Every figure comes from a script that you can run; rows that we lose are here too.

**No figure of a GPU is here yet**: the kernels are checked in Triton's interpreter and compiled for
sm_80 and sm_90 in every test run, but they have not run on a GPU. All this was measured on a
shared 2-core machine, so trust ratios within one table more than absolute numbers.
"""


def serving(result: Result) -> str:
    """The demo model through the real server, beside the engine alone."""
    rows = [
        (
            str(row["streams"]),
            f"{row['engine']['tokens_per_second']:,.0f}",
            f"{row['served']['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['served']['first_token_ms_p50']:.0f}",
            f"{row['served']['gap_ms_p50']:.0f} / {row['served']['gap_ms_p99']:.0f}",
            f"{row['served']['tokens_per_response']:.1f}",
        )
        for row in result["rows"]
    ]
    head = (
        "streams",
        "engine alone, tokens/s",
        "served, tokens/s",
        "served / alone",
        "first token p50, ms",
        "gap p50 / p99, ms",
        "tokens per response",
    )
    return (
        "## What the front costs\n\n"
        "The demo model, once through tritonserver over HTTP and once with the callbacks of "
        "`GptManager` alone.\nServer, model process and client share the cores, so the ratio at "
        "many streams is mostly the price of\nrunning all three on two cores.\n\n"
    ) + table(head, rows, is_numeric=True)


def cpu_engine(result: Result) -> str:
    """Our engine beside transformers."""
    medians = result["median_tokens_per_second"]
    ours = medians["inflight"]
    others = [name for name in medians if name != "inflight"]
    rows = [
        (
            num,
            f"{ours[num]:.0f}",
            *(
                f"{medians[name][num]:.0f} ({ours[num] / medians[name][num]:.2f}x)"
                for name in others
            ),
        )
        for num in ours
    ]
    parameters = result["model"]["parameters"] / 1e6
    return (
        "## The engine on a CPU\n\n"
        f"A random Llama of {parameters:.0f} million parameters in float32, "
        f"{result['input_tokens']} tokens in and {result['output_tokens']} out; tokens per second, "
        "medians of\ninterleaved rounds. In brackets: how much faster ours is.\n\n"
    ) + table(("requests at once", "inflight", *others), rows, is_numeric=True)


def cpu_steps(result: Result) -> str:
    """Prefill and decode step of the engine, beside those of an earlier commit."""

    def cells(milliseconds: dict[str, float]) -> tuple[str, ...]:
        before = milliseconds["before"]
        changed = (milliseconds["served"], milliseconds["spinning"])
        return f"{before:.0f}", *(f"{each:.0f} ({before / each:.2f}x)" for each in changed)

    rows = [
        (
            row["model"],
            row["dtype"],
            str(row["requests"]),
            *cells(row["prefill_ms"]),
            *cells(row["decode_ms"]),
        )
        for row in result["medians"]
    ]
    phases = [f"{phase}, ms: {name}" for phase in ("prefill", "decode") for name in _STEP_COLUMNS]
    return (
        "## A step on a CPU\n\n"
        f"Random weights of these models' shapes; prompts of {result['prompt_tokens']} tokens, all "
        "in one step, then decode steps.\n*Before*: commit "
        f"{result['before']}. *Served*: this version as `inflight serve` starts it. *Spinning*: "
        "the same with\n`GOMP_SPINCOUNT=5000` in the environment, so that OpenMP threads look for "
        "work for some 0.1 ms before\nthey sleep. `inflight serve` leaves that to you: where other "
        "programs use the cores a step takes longer\nwith it, and so does the first token after "
        "an idle time. In brackets: how much faster than before.\n\n"
    ) + table(("model", "type", "requests", *phases), rows, is_numeric=True)


_STEP_COLUMNS = ("before", "served", "spinning")


def responses(result: Result) -> str:
    """What building responses costs."""
    rows = [
        (
            row["form"],
            str(row["tokens_per_response"]),
            f"{row['loop_us_per_token']:.1f}",
            f"{row['sender_us_per_token']:.1f}",
            f"{row['us_per_token']:.1f}",
            f"{row['median_us_per_token']:.1f}",
        )
        for row in result["rows"]
    ]
    head = ("streamed", "tokens per response", "loop, us", "sender, us", "together, us", "median")
    return (
        "## What a response costs the host\n\n"
        f"Processor time per token streamed, {result['streams']} streams at once, from the drawn "
        "token to the tensors that\nTriton is given; the goal is "
        f"{result['limit_us_per_token']:.0f} us. The round of least cost, and the median of all: "
        f"others use the machine too.\n\n"
    ) + table(head, rows)


def speculative(result: Result) -> str:
    """Prompt look-up on and off."""
    rows = [
        (
            row["text"],
            str(row["requests"]),
            f"{row['tokens_per_cpu_second']['off']:.0f}",
            f"{row['tokens_per_cpu_second']['on']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['accepted_draft_tokens']} of {row['draft_tokens']}",
            f"{row['steps']['on']} of {row['steps']['off']}",
        )
        for row in result["rows"]
    ]
    head = ("text", "requests at once", "off", "on", "speedup", "drafts accepted", "steps")
    parameters = result["model"]["parameters"] / 1e6
    return (
        "## Speculative decoding\n\n"
        f"Prompt look-up, a random Llama of {parameters:.0f} million parameters in float32, "
        f"{result['output_tokens']} tokens per request; tokens\nper second of processor time, one "
        "thread. *repeats*: the text is a cycle, every guess is right; *misleads*: every\npair of "
        "tokens has been seen, one guess in six is right; *new*: nothing is found.\n\n"
    ) + table(head, rows, is_numeric=True)


def _scheduler_cases(rows: list[Result], share: str) -> list[tuple[str, ...]]:
    """A line per policy and number of requests: that ``share`` of each design's times, in ms."""
    found = {(row["policy"], row["active"], row["reuse"], row["design"]): row for row in rows}
    lines = []
    for policy, active in dict.fromkeys((row["policy"], row["active"]) for row in rows):
        figures = [
            found[policy, active, reuse, design]
            for design in ("incremental", "overlapped", "naive")
            for reuse in (False, True)
        ]
        times = (f"{figure[share] / 1000:.2f}" for figure in figures)
        lines.append((policy, f"{active:,}", *times))
    return lines


def scheduler(result: Result) -> str:
    """An iteration of the scheduler, ours and the naive design; with a whole and a short pool."""
    whole = [row for row in result["rows"] if row["pool"] == 1.0]
    short = [row for row in result["rows"] if row["pool"] < 1.0]
    goals = {f"{row['active']:,}": row["target_us"] for row in whole}
    num_turns = len(result["rows"][0]["total_us_p50_of_repeats"])
    num_iterations = result["rows"][0]["iterations"]
    head = (
        "policy",
        "requests",
        "ours",
        "ours, block reuse",
        "overlapped",
        "overlapped, block reuse",
        "all anew",
        "all anew, block reuse",
    )
    rows = [
        (*row, "" if goals[row[1]] is None else f"{goals[row[1]] / 1000:.1f}")
        for row in _scheduler_cases(whole, "total_us_p50")
    ]
    return (
        "## What the scheduler costs\n\n"
        "Milliseconds of processor time per iteration: decide, plan, apply the tokens (median; of "
        f"{num_turns} turns\nthe best, since neighbours can only add). All requests run; one in "
        f"{result['new_tokens']} ends in each iteration and another\none comes. *Overlapped*: "
        "the loop for a GPU, which does this while the step before runs.\n*All anew*: the "
        "same decision, with everything summed up from all requests in each\niteration, as in "
        "TensorRT-LLM's published Python scheduler. Thousands of requests do not fit a\ncore's "
        "cache, so the last rows say as much about the memory of the machine as about the code:\n"
        "on this one, which others use too, they vary by a factor of two from turn to turn.\n\n"
        + table((*head, "goal"), rows, is_numeric=True)
        + f"\nThe same with a pool of {short[0]['pool']:.0%} of the blocks that all requests "
        "need. Under MAX_UTILIZATION some are paused\nevery few iterations, under "
        "GUARANTEED_NO_EVICT the others wait. The 99th percentile: of "
        f"{num_iterations} iterations\n{num_iterations - int(num_iterations * 0.99)} took as long, "
        "or longer, with pauses or with a look of Python's garbage collector.\n\n"
        + table(head, _scheduler_cases(short, "total_us_p99"), is_numeric=True)
    )


def idle(result: Result) -> str:
    """What a server without requests costs."""
    names = {"this": "inflight", "compared": "the version before"}
    rows = []
    for server, found in result["servers"].items():
        parts = found["processes"].items()
        rows.append(
            (
                names[server],
                f"{found['cpu_percent']:.2f} %",
                ", ".join(f"{name} {part['cpu_percent']:.2f} %" for name, part in parts),
                ", ".join(f"{part['wakeups_per_second']:.0f}" for _, part in parts),
                f"{found['first_token_ms_p50']:.1f}",
            )
        )
    head = ("server", "of a core", "of which", "wake-ups per second", "first token after it, ms")
    note = f" Note: {result['note']}." if result["note"] else ""
    return (
        "## An idle server\n\n"
        "The demo model, and nobody asks: processor time of every process of `inflight serve` in "
        f"{result['rounds']} times of {result['seconds']:.0f} s,\nafter each of which one request "
        f"comes (median).{note}\n\n"
    ) + table(head, rows)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "serving": serving,
    "idle": idle,
    "scheduler": scheduler,
    "cpu_engine": cpu_engine,
    "cpu_steps": cpu_steps,
    "responses": responses,
    "speculative": speculative,
}


def render() -> str:
    """The whole page, a section for each result there is."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            parts.append(section(result) + "\n" + _origin(name, result))
    return "\n".join(parts)


def _origin(name: str, result: Result) -> str:
    versions = "".join(f", {package} {version}" for package, version in result["versions"].items())
    return (
        f"`{result['command']}`, {result['date']}, commit {result['commit']}, "
        f"{result['processor']}, {result['cores']} cores{versions}. "
        f"Raw: [{name}.json](../benchmarks/results/{name}.json).\n"
    )


def main() -> int:
    """Write the page, or with ``--check`` fail if it is not what the results say."""
    return write_or_check(__doc__, "performance.md", lambda old: render())


if __name__ == "__main__":
    sys.exit(main())
