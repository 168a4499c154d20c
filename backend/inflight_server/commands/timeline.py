"""The command ``inflight timeline``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inflight_server.commands.common import RecordingArgument, check_output, reported_errors

if TYPE_CHECKING:
    from inflight_recorder.history import History

app = typer.Typer()

_SUFFIXES = (".svg", ".html", ".json")


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
    with reported_errors():
        suffix = check_output(recording, output, _SUFFIXES)
        history = _read(recording, is_svg=suffix == ".svg")
        with output.open("w", encoding="utf-8") as file:
            file.writelines(_writer(suffix)(history))
    typer.echo(f"{output}: {len(history.rows)} requests, {history.num_iterations} iterations")


def _read(recording: Path, *, is_svg: bool) -> History:
    from inflight_recorder.files import open_recording
    from inflight_recorder.history import build_history
    from inflight_recorder.svg import MAX_ROWS

    # Reasons cost as much as all the rest, and a picture without rows shows none. To
    # know whether it has rows the recording is read twice, which a pipe does not allow.
    is_large = is_svg and recording.is_file() and _num_requests(recording) > MAX_ROWS
    with open_recording(recording) as reader:
        return build_history(reader, with_reasons=not is_large)


def _num_requests(recording: Path) -> int:
    from inflight_recorder.files import open_recording

    with open_recording(recording) as reader:
        return len(reader.header.active) + sum(len(iteration.arrivals) for iteration in reader)


def _writer(suffix: str) -> Callable[[History], Iterable[str]]:
    if suffix == ".svg":
        from inflight_recorder.svg import write_svg

        return lambda history: [write_svg(history)]
    if suffix == ".html":
        from inflight_recorder.page import write_page

        return write_page
    from inflight_recorder.trace import write_trace

    return write_trace
