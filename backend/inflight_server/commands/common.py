"""What the commands share: errors as one line, and the scheduler of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from inflight_recorder.errors import RecordingError
from inflight_recorder.simulation import MakeScheduler, default_scheduler

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_backend.manager.user_scheduler import find_scheduler_class, make_guarded

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


def scheduler_maker(class_name: str | None) -> MakeScheduler:
    """Makes the scheduler that the settings name, or the user's class as the server runs it.

    The name comes from the command line: a recording never names code to be run.
    """
    if class_name is None:
        return default_scheduler
    return partial(make_guarded, find_scheduler_class(class_name))
