"""The command ``inflight whatif``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_backend.errors import ConfigurationError
from inflight_server.commands.recordings import (
    RecordingArgument,
    keep_recording,
    reported_errors,
    scheduler_maker,
    shown_each,
    shown_reading,
)
from inflight_server.commands.whatif_report import TOLERANCE, Answer, Prediction

if TYPE_CHECKING:
    from inflight_recorder.cost_model import CostModel
    from inflight_recorder.settings import Settings
    from inflight_recorder.simulator import MakeScheduler
    from inflight_recorder.workload import Workload

ROUTER_NAMES = ("round_robin", "least_load", "cache_aware")
DEFAULT_PROMPT, DEFAULT_OUTPUT = "64-512", "16-256"
DEFAULT_NUM_RANDOM = 500
_OF_A_TRACE = "is about a trace: name its file with --trace"
_OF_RANDOM_REQUESTS = "is about random requests: give their --rate, and no --trace"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

app = typer.Typer()

MAX_VARIANTS = 64
MAX_JOBS_WITH_RANGE = 5000
"""For more requests the range of the first tokens, two more predictions each, is left out."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings with a name for the table, of one server or of several behind a ``router``."""

    name: str
    settings: Settings
    num_replicas: int = 1
    router: str | None = None


@app.command()
def whatif(
    recording: RecordingArgument,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="guaranteed_no_evict, max_utilization, static_batch; may be repeated."),
    ] = None,
    kv_blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks of the pool; may be repeated.")
    ] = None,
    max_num_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per iteration; may be repeated.")
    ] = None,
    max_batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in flight; may be repeated.")
    ] = None,
    replicas: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=1000, help="Servers behind a router, which share the requests; repeatable."
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            help=f"How it chooses: {', '.join(ROUTER_NAMES)} (the first by default); repeatable."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests a second that come at random instead."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help=f"Their prompt tokens: 100 or 50-200 ({DEFAULT_PROMPT} by default)."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help=f"The tokens they generate ({DEFAULT_OUTPUT} by default).")
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help=f"Of these ({DEFAULT_NUM_RANDOM} by default), or the first ones of the trace.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Others at random; 0 by default.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="The requests of a published trace instead: JSON lines (Mooncake) or CSV (Azure). "
            "With --rate they come at random."
        ),
    ] = None,
    trace_columns: Annotated[
        str | None,
        typer.Option(
            metavar="ARRIVAL,PROMPT,OUTPUT",
            help="Its columns; those of the traces above are known.",
        ),
    ] = None,
    trace_unit: Annotated[
        str | None, typer.Option(help="What its arrivals count in: s, ms, us or ns.")
    ] = None,
    trace_block: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Tokens for each of its hash_ids.")
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(min=0.001, help="So many times as fast as the trace tells its requests come."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder for a recording of each prediction, to be drawn.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    scheduler_class: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="The scheduler of your own that the recording was made with; else one to compare.",
        ),
    ] = None,
) -> None:
    """Predict throughput and latency under other settings. Of the recorded requests, or others."""
    from inflight_recorder.cost_model import fit_cost_model
    from inflight_recorder.storage import open_recording
    from inflight_recorder.workload import Workload, make_workload, read_workload

    has_trace, has_rate = trace is not None, rate is not None
    of_replicas = "is about several servers: give --replicas, which are predicted and not recorded"
    is_random = has_rate and not has_trace
    with reported_errors():
        _check_use(
            ("--trace-columns", trace_columns, has_trace, _OF_A_TRACE),
            ("--trace-unit", trace_unit, has_trace, _OF_A_TRACE),
            ("--trace-block", trace_block, has_trace, _OF_A_TRACE),
            ("--speed", speed, has_trace, _OF_A_TRACE),
            (
                "--speed",
                speed,
                not has_rate,
                "is about the times of the trace, --rate makes others",
            ),
            ("--router", router, bool(replicas), of_replicas),
            ("--prompt", prompt, is_random, _OF_RANDOM_REQUESTS),
            ("--output", output, is_random, _OF_RANDOM_REQUESTS),
            ("--seed", seed, has_rate, "is about random arrivals: give their --rate"),
            (
                "--num-requests",
                num_requests,
                has_trace or has_rate,
                "is about others than the recorded requests: give a --rate or a --trace",
            ),
        )
        with open_recording(recording, shown_reading("reading")) as reader:
            settings = reader.settings
            recorded = requests = read_workload(reader)
        cost = fit_cost_model(recorded.samples)
        if trace is not None:
            from inflight_recorder.request_traces import TraceOptions, read_trace

            options = TraceOptions(
                columns=_parse_columns(trace_columns),
                unit=_parse_unit(trace_unit),
                hash_tokens=trace_block,
                num_requests=num_requests,
                rate=rate,
                speed=speed or 1.0,
                seed=seed or 0,
                tokens_per_block=settings.tokens_per_block,
            )
            requests = read_trace(trace, options)
        elif rate is not None:
            prompts = _parse_range("--prompt", prompt, DEFAULT_PROMPT)
            outputs = _parse_range("--output", output, DEFAULT_OUTPUT)
            count = num_requests or DEFAULT_NUM_RANDOM
            requests = Workload(make_workload(rate, prompts, outputs, count, seed or 0))
        sizes = {
            "num_blocks": kv_blocks,
            "max_num_tokens": max_num_tokens,
            "max_batch_size": max_batch_size,
        }
        own = scheduler_class if settings.scheduler_class is None else None
        variants = list(_variants(settings, policy, sizes, own))
        if replicas:
            variants = _fleets(variants, replicas, router or ROUTER_NAMES[:1], requests)
        if save is not None:
            if replicas:
                raise ConfigurationError("--save is about single servers: leave out --replicas")
            for variant in variants:
                keep_recording(recording, save / _file_name(variant))
        rows = _run(variants, requests, cost, scheduler_maker(scheduler_class), save)
        answer = Answer(rows, cost, recorded, requests)
        typer.echo(answer.to_json() if as_json else answer.to_text())


def _check_use(*options: tuple[str, object, bool, str]) -> None:
    """`ConfigurationError` for an option without effect: its name, value, effect and meaning."""
    for option, value, has_effect, meaning in options:
        if value is not None and not has_effect:
            raise ConfigurationError(f"{option} {meaning}")


def _variants(
    settings: Settings,
    policies: Sequence[str] | None,
    sizes: Mapping[str, Sequence[int] | None],
    own: str | None,
) -> Iterator[Variant]:
    """The recorded settings, then every combination of the others.

    ``own``: a scheduler of the user to be compared, alone and under all ``sizes``.
    """
    from inflight_recorder.schema import SettingsRecord
    from inflight_scheduler import POLICIES, find_policy

    yield Variant("as recorded", settings)
    for name in policies or ():
        if name not in POLICIES:
            raise ConfigurationError(f"--policy {name}: choose one of {', '.join(POLICIES)}")
    combinations = _combinations({"policy": policies, **sizes})
    if own is not None:
        own_ones = [{}, *_combinations(sizes)]
        combinations += [{"scheduler_class": own, **changes} for changes in own_ones]
    if len(combinations) > MAX_VARIANTS:
        raise ConfigurationError(
            f"{len(combinations)} combinations are more than {MAX_VARIANTS}: give fewer values"
        )
    for changes in combinations:
        name = _name(changes)
        if "policy" in changes:
            changes |= {"policy": find_policy(changes["policy"]), "scheduler_class": None}
        changed = replace(settings, **changes)
        SettingsRecord.of(changed)  # raises where a number is out of its bounds
        yield Variant(name, changed)


def _fleets(
    variants: Sequence[Variant],
    replicas: Sequence[int],
    routers: Sequence[str],
    requests: Workload,
) -> list[Variant]:
    """One server as recorded, then the changed settings (or, without any, the recorded ones) for
    each number of servers with each router."""
    for name in routers:
        if name not in ROUTER_NAMES:
            raise ConfigurationError(f"--router {name}: choose one of {', '.join(ROUTER_NAMES)}")
    if "cache_aware" in routers and not any(job.hashes for job in requests.jobs):
        raise ConfigurationError(
            "--router cache_aware: nothing is known of what these requests have in common; record "
            "with enable_kv_cache_reuse, or give a --trace with hash_ids"
        )
    first, *changed = variants
    fleets = [first]
    for variant, number, name in itertools.product(changed or [first], replicas, routers):
        prefix = f"{variant.name} " if changed else ""
        title = f"{prefix}replicas={number} {name}"
        fleets.append(replace(variant, name=title, num_replicas=number, router=name))
    if len(fleets) > MAX_VARIANTS:
        raise ConfigurationError(
            f"{len(fleets)} combinations are more than {MAX_VARIANTS}: give fewer values"
        )
    return fleets


def _combinations(choices: Mapping[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """A value for each field that has some; none where no field has."""
    given = {field: values for field, values in choices.items() if values}
    products = itertools.product(*given.values()) if given else ()
    return [dict(zip(given, values, strict=True)) for values in products]


def _name(changes: Mapping[str, Any]) -> str:
    return " ".join(
        value if field in ("policy", "scheduler_class") else f"{field}={value}"
        for field, value in changes.items()
    )


def _run(
    variants: Sequence[Variant],
    requests: Workload,
    cost: CostModel,
    make: MakeScheduler,
    folder: Path | None,
) -> list[Prediction]:
    """One prediction per variant, with its recording in ``folder``, and how sure it is."""
    from inflight_recorder.fleet.prediction import predict_fleet
    from inflight_recorder.fleet.routers import ROUTERS
    from inflight_recorder.simulator import default_scheduler
    from inflight_recorder.storage import RecordingFile
    from inflight_recorder.whatif import predict

    predictions = []
    for variant in shown_each(variants, "predicting"):
        maker = make if variant.settings.scheduler_class is not None else default_scheduler
        if variant.router is not None:
            summary = predict_fleet(
                variant.settings,
                requests.jobs,
                cost,
                variant.num_replicas,
                ROUTERS[variant.router](variant.settings.tokens_per_block),
                make_scheduler=maker,
                num_recorded_steps=requests.num_steps,
            )
            predictions.append(
                Prediction(variant.name, summary, None, variant.num_replicas, variant.router)
            )
            continue
        run = partial(
            predict,
            variant.settings,
            requests.jobs,
            make_scheduler=maker,
            num_recorded_steps=requests.num_steps,
        )
        if folder is None:
            summary = run(cost)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with closing(RecordingFile(folder / _file_name(variant))) as sink:
                summary = run(cost, sink=sink)
        span: tuple[float, float] | None = None
        if len(requests.jobs) <= MAX_JOBS_WITH_RANGE:
            others = (run(cost.scaled(1 + part)).ttft_p50 for part in (-TOLERANCE, TOLERANCE))
            middles = sorted((summary.ttft_p50, *others))  # the drawn noise may swap two
            span = middles[0], middles[-1]
        predictions.append(Prediction(variant.name, summary, span))
    return predictions


def _file_name(variant: Variant) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_=]+', '-', variant.name)}.jsonl"


def _parse_columns(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 3 or not all(names):
        raise ConfigurationError(
            f"--trace-columns {text}: write three names, as arrival,prompt_tokens,output_tokens"
        )
    return names


def _parse_unit(text: str | None) -> str | None:
    from inflight_recorder.request_traces import UNITS

    if text is not None and text not in UNITS:
        raise ConfigurationError(f"--trace-unit {text}: choose one of {', '.join(UNITS)}")
    return text


def _parse_range(option: str, given: str | None, default: str) -> tuple[int, int]:
    text = default if given is None else given
    match = _RANGE.fullmatch(text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 1 <= low <= high <= 2**20:
        raise ConfigurationError(f"{option} {text}: write a number of tokens, or two, as 50-200")
    return low, high
