"""The command ``inflight models``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the model families that are served, by architecture and model_type of config.json, with
    what each goes without; and those of GGUF files."""
    from inflight_backend.models.families.registry import FAMILIES
    from inflight_backend.models.families.sample import read_sample
    from inflight_backend.models.gguf.architectures import ARCHITECTURES
    from inflight_server.checkpoints.restrictions import restrictions_of

    rows = [
        (name, ", ".join(family.model_types), restrictions_of(read_sample(family)))
        for name, family in sorted(FAMILIES.items())
    ]
    if as_json:
        listed = {name: {"model_type": kinds, "without": missing} for name, kinds, missing in rows}
        typer.echo(json.dumps(listed, indent=1))
        return
    rows_of_text = [("architecture", "model_type", "status")]
    rows_of_text += [
        (name, kinds, f"without {', '.join(missing)}" if missing else "CPU and GPU")
        for name, kinds, missing in rows
    ]
    widths = [max(len(row[column]) for row in rows_of_text) for column in (0, 1)]
    for name, kinds, status in rows_of_text:
        typer.echo(f"{name:<{widths[0]}}  {kinds:<{widths[1]}}  {status}")
    typer.echo(f"\nGGUF files by general.architecture: {', '.join(ARCHITECTURES)}")
