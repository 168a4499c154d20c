"""The commands ``inflight replay`` and ``inflight timeline``, and what commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar

import typer

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_backend.manager.user_scheduler import find_scheduler_class, make_guarded
from inflight_recorder.settings import RecordingError

if TYPE_CHECKING:
    from inflight_recorder.simulator import MakeScheduler

app = typer.Typer()

_Item = TypeVar("_Item")

RecordingArgument = Annotated[
    Path,
    typer.Argument(help="Recording, as `inflight record` or the setting record_file writes it."),
]
SchedulerClassOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:CLASS",
        help="The scheduler of your own that the recording was made with.",
    ),
]


@contextmanager
def reported_errors() -> Iterator[None]:
    """Errors made on purpose become one line on stderr and exit code 1."""
    try:
        yield
    except (ServingError, RecordingError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def keep_recording(recording: Path, output: Path) -> None:
    """`ConfigurationError` where ``output`` is the recording, however it is named."""
    if output.exists() and recording.exists() and output.samefile(recording):
        raise ConfigurationError(f"{output} is the recording: choose another name")


def check_output(recording: Path, output: Path, suffixes: Sequence[str]) -> str:
    """The suffix of a file that is to be written, in small letters.

    Asked before anything is computed for it. `ConfigurationError` for another suffix than these,
    without a folder, or for the recording itself.
    """
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        raise ConfigurationError(
            f"{output} ends in {suffix or 'nothing'}: choose one of {', '.join(suffixes)}"
        )
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output} cannot be written: there is no such folder")
    keep_recording(recording, output)
    return suffix


def shown_reading(what: str) -> Callable[[BinaryIO], AbstractContextManager[BinaryIO]]:
    """For `open_recording`: a progress bar on stderr if that is a terminal, gone at the end."""
    from rich.progress import wrap_file

    def watch(file: BinaryIO) -> AbstractContextManager[BinaryIO]:
        size, options = os.fstat(file.fileno()).st_size, _bar_options()
        return wrap_file(file, size, description=what, **options)

    return watch


def shown_each(items: Sequence[_Item], what: str) -> Iterable[_Item]:
    """``items`` with such a bar."""
    from rich.progress import track

    return track(items, what, **_bar_options())


def _bar_options() -> dict[str, Any]:
    from rich.console import Console

    console = Console(stderr=True)
    return {"console": console, "transient": True, "disable": not console.is_terminal}


def scheduler_maker(class_name: str | None) -> MakeScheduler:
    """Makes the scheduler that the settings name, or the user's class as the server runs it.

    The name comes from the command line: a recording never names code to be run.
    """
    from inflight_recorder.simulator import default_scheduler

    if class_name is None:
        return default_scheduler
    return partial(make_guarded, find_scheduler_class(class_name))


@app.command()
def replay(
    recording: RecordingArgument,
    scheduler_class: SchedulerClassOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decide again what a recording says was decided. Tells the first difference, if any."""
    from inflight_recorder.replay import replay as run_replay
    from inflight_recorder.storage import open_recording

    with reported_errors(), open_recording(recording, shown_reading("replaying")) as reader:
        result = run_replay(reader, scheduler_maker(scheduler_class))
    typer.echo(json.dumps(asdict(result)) if as_json else str(result))
    if result.divergence is not None:
        if scheduler_class is not None and not as_json:
            typer.echo(
                "One that decides by the clock, by deadlines, salts, adapters or texts decides "
                "otherwise here: recordings do not hold these."
            )
        raise typer.Exit(1)


@app.command()
def timeline(
    recording: RecordingArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="out.svg, out.html (interactive) or out.json (Perfetto trace)."
        ),
    ],
) -> None:
    """Draw what happened to every request. Waiting, context, generation, paused, resumed."""
    from inflight_recorder.exporters import MAX_ROWS, write_page, write_svg, write_trace
    from inflight_recorder.storage import open_recording
    from inflight_recorder.timeline import build_timeline

    writers = {".svg": write_svg, ".html": write_page, ".json": write_trace}
    with reported_errors():
        write = writers[check_output(recording, output, tuple(writers))]
        with open_recording(
            recording, shown_reading("reading")
        ) as reader:  # a picture without rows shows no reasons
            drawn = build_timeline(reader, MAX_ROWS if write is write_svg else None)
        with output.open("w", encoding="utf-8") as file:
            file.writelines(write(drawn))
    typer.echo(f"{output}: {len(drawn.lanes)} requests, {drawn.num_iterations} iterations")
