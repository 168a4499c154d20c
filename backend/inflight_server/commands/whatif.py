"""The command ``inflight whatif``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_backend.errors import ConfigurationError
from inflight_server.commands.common import (
    RecordingArgument,
    check_output,
    keep_recording,
    reported_errors,
    scheduler_maker,
)
from inflight_server.commands.whatif_output import (
    MEASURED,
    TOLERANCE,
    Answer,
    Prediction,
    format_table,
    recordings_folder,
    write_timelines,
)
from inflight_server.commands.whatif_requests import (
    DEFAULT_NUM_MADE_UP,
    DEFAULT_OUTPUT,
    DEFAULT_PROMPT,
    OtherRequests,
    Requests,
)

if TYPE_CHECKING:
    from inflight_recorder.cost_model import CostModel
    from inflight_recorder.latency import Summary
    from inflight_recorder.records import Settings
    from inflight_recorder.simulation import MakeScheduler
    from inflight_recorder.whatif import Variant

app = typer.Typer()

MAX_VARIANTS = 64
MAX_SURE_JOBS = 5000
"""For more requests the range of the first tokens, two more predictions each, is left out."""


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
            help=f"Of these ({DEFAULT_NUM_MADE_UP} by default), or the first ones of the trace.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Others at random; 0 by default.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="The requests of a published trace instead: JSON lines (Mooncake, Bailian) or "
            "CSV (Azure, BurstGPT, Vidur, Splitwise). With --rate they come at random."
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
    timelines: Annotated[
        Path | None,
        typer.Option(help="A page (out.html) with the timelines of all settings on one time axis."),
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
    from inflight_recorder.files import open_recording
    from inflight_recorder.workload import read_workload

    others = OtherRequests(
        trace=trace,
        columns=trace_columns,
        unit=trace_unit,
        block=trace_block,
        speed=speed,
        rate=rate,
        prompt=prompt,
        output=output,
        num_requests=num_requests,
        seed=seed,
    )
    with reported_errors():
        if timelines is not None:
            check_output(recording, timelines, (".html",))
            if recording.is_fifo():
                raise ConfigurationError(
                    "--timelines reads the recording twice: write it to a file first"
                )
        with open_recording(recording) as reader:
            settings = reader.header.settings
            workload = read_workload(reader)
        cost = fit_cost_model(workload.samples)
        requests = others.read(workload)
        own = scheduler_class if settings.scheduler_class is None else None
        sizes = {
            "num_blocks": kv_blocks,
            "max_num_tokens": max_num_tokens,
            "max_batch_size": max_batch_size,
        }
        variants = list(_variants(settings, policy, sizes, own))
        if save is not None:
            for variant in variants:
                keep_recording(recording, save / _file_name(variant))
        make = scheduler_maker(scheduler_class)
        measured = workload.latencies.summary()
        with recordings_folder(save, is_needed=timelines is not None) as folder:
            rows = _run(variants, requests, cost, make, folder)
            if requests.are_recorded:
                rows.insert(0, Prediction(MEASURED, measured, recording=recording))
            answer = Answer(
                rows,
                cost,
                len(requests.jobs),
                len(workload.samples),
                measured.max_batch,
                num_found=requests.num_found,
                num_unended=requests.num_unended,
                num_left_out=requests.num_left_out,
            )
            typer.echo(answer.to_json() if as_json else format_table(answer.table()))
            if timelines is not None:
                write_timelines(timelines, answer)


def _variants(
    settings: Settings,
    policies: Sequence[str] | None,
    sizes: Mapping[str, Sequence[int] | None],
    own: str | None,
) -> Iterator[Variant]:
    """The recorded settings, then every combination of the others.

    ``own``: a scheduler of the user to be compared, alone and under all ``sizes``.
    """
    from inflight_recorder.header import check_settings
    from inflight_recorder.whatif import Variant
    from inflight_scheduler import CapacitySchedulerPolicy

    yield Variant("as recorded", settings)
    names = {policy.name.lower(): policy for policy in CapacitySchedulerPolicy}
    for name in policies or ():
        if name not in names:
            raise ConfigurationError(f"--policy {name}: choose one of {', '.join(names)}")
    combinations = _combinations({"policy": [names[name] for name in policies or ()], **sizes})
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
            changes["scheduler_class"] = None
        yield Variant(name, check_settings(replace(settings, **changes)))


def _combinations(choices: Mapping[str, Sequence[Any] | None]) -> list[dict[str, Any]]:
    """A value for each field that has some; none where no field has."""
    given = {field: values for field, values in choices.items() if values}
    products = itertools.product(*given.values()) if given else ()
    return [dict(zip(given, values, strict=True)) for values in products]


def _name(changes: Mapping[str, Any]) -> str:
    words = []
    for field, value in changes.items():
        if field == "policy":
            words.append(value.name.lower())
        else:
            words.append(value if field == "scheduler_class" else f"{field}={value}")
    return " ".join(words)


def _run(
    variants: Sequence[Variant],
    requests: Requests,
    cost: CostModel,
    make: MakeScheduler,
    folder: Path | None,
) -> list[Prediction]:
    """One prediction per variant, with its recording in ``folder``, and how sure it is."""
    from inflight_recorder.simulation import default_scheduler
    from inflight_recorder.whatif import predict

    predictions = []
    for variant in variants:
        maker = make if variant.settings.scheduler_class is not None else default_scheduler
        path = None if folder is None else folder / _file_name(variant)
        run = partial(
            predict,
            variant.settings,
            requests.jobs,
            book=requests.book,
            make_scheduler=maker,
            num_recorded_steps=requests.num_recorded_steps,
        )
        summary = _predict_into(path, variant.settings, partial(run, cost))
        span: tuple[float, float] | None = None
        if len(requests.jobs) <= MAX_SURE_JOBS:
            others = (run(cost.scaled(1 + part)).ttft_p50 for part in (-TOLERANCE, TOLERANCE))
            middles = sorted((summary.ttft_p50, *others))  # what is drawn may turn two about
            span = middles[0], middles[-1]
        predictions.append(Prediction(variant.name, summary, span, path))
    return predictions


def _predict_into(path: Path | None, settings: Settings, run: Callable[..., Summary]) -> Summary:
    """The prediction ``run``, recorded where there is a ``path``."""
    from inflight_recorder.files import RecordingFile
    from inflight_recorder.recorder import FlightRecorder
    from inflight_recorder.whatif import Clock

    if path is None:
        return run()
    clock = Clock()
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder = FlightRecorder(settings, software="whatif", sink=RecordingFile(path), clock=clock)
    try:
        return run(recorder=recorder, clock=clock)
    finally:
        recorder.close()


def _file_name(variant: Variant) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_=]+', '-', variant.name)}.jsonl"
