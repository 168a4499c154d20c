"""The command ``inflight replay``."""

from __future__ import annotations

import typer

from inflight_server.commands.common import (
    RecordingArgument,
    SchedulerClassOption,
    reported_errors,
    scheduler_maker,
)

app = typer.Typer()


@app.command()
def replay(recording: RecordingArgument, scheduler_class: SchedulerClassOption = None) -> None:
    """Decide again what a recording says was decided. Tells the first difference, if any."""
    from inflight_recorder.files import open_recording
    from inflight_recorder.replay import replay as run_replay

    with reported_errors(), open_recording(recording) as reader:
        result = run_replay(reader, scheduler_maker(scheduler_class))
    typer.echo(str(result))
    if result.divergence is not None:
        if scheduler_class is not None:
            typer.echo(
                "One that decides by the clock, by deadlines, salts, adapters or texts decides "
                "otherwise here: recordings do not hold these."
            )
        raise typer.Exit(1)
