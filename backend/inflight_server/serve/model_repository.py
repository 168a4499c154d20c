"""The command ``inflight model-repository``: for people who run Triton themselves."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from inflight_backend.errors import ServingError
from inflight_server.serve.options import AddOption, DecoupledOption, SetOption, chosen_models
from inflight_server.serve.repository import install
from inflight_server.serve.settings import DEMO_MODEL, parse_overrides


def model_repository(
    out_dir: Annotated[
        Path, typer.Argument(help="Folder to write; may hold other models, which stay.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face checkpoint folder, as the server will see it."),
    ] = None,
    set_: SetOption = None,
    add: AddOption = None,
    decoupled: DecoupledOption = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace models that this command wrote before.")
    ] = False,
) -> None:
    """Write a model repository for a tritonserver of your own."""
    folder = model.absolute() if model is not None else DEMO_MODEL
    try:
        models = chosen_models(add or ())
        values = {
            **parse_overrides(set_ or (), folder, models),
            "gpt_model_path": str(folder),
            "decoupled_mode": str(decoupled).lower(),
        }
        install(out_dir, values, models, may_replace=force)
    except (ServingError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if not folder.is_dir():
        typer.echo(f"note: {folder} is not on this machine; the server must find it", err=True)
    typer.echo(
        "Written. Start: tritonserver "
        f"--model-repository={shlex.quote(str(out_dir))} --disable-auto-complete-config"
    )
