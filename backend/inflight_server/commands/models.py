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
    """List the model families that are served, by architecture and model_type of config.json."""
    from inflight_backend.models.families.registry import FAMILIES

    rows = {name: ", ".join(family.model_types) for name, family in sorted(FAMILIES.items())}
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    width = max(map(len, rows))
    for name, model_type in rows.items():
        typer.echo(f"{name:<{width}}  {model_type}")
