"""The commands ``inflight serve`` and ``inflight model-repository``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_server.commands.recordings import reported_errors
from inflight_server.serve.console import say
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS, install
from inflight_server.serve.settings import ServeSettings, parse_overrides

app = typer.Typer()

_MODEL_HELP = "A folder with a checkpoint, its name on the Hub (Qwen/Qwen3-0.6B), or smollm2-135m"
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of the model, such as max_batch_size=64; may be repeated.",
    ),
]
AddOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL",
        help=f"Another model: {', '.join(OPTIONAL_MODELS)}; may be repeated.",
    ),
]
DecoupledOption = Annotated[
    bool,
    typer.Option(
        "--decoupled/--no-decoupled",
        help="Streaming, or one response per request for clients that call without a stream.",
    ),
]


def chosen_models(added: Sequence[str]) -> tuple[str, ...]:
    """The default models and the added ones; ``ConfigurationError`` for one that is not known."""
    for name in added:
        if name not in OPTIONAL_MODELS:
            known = ", ".join(OPTIONAL_MODELS)
            raise ConfigurationError(f"--add {name}: there is no such model; known are {known}")
    return (*DEFAULT_MODELS, *dict.fromkeys(added))


@app.command()
def model_repository(
    out_dir: Annotated[
        Path, typer.Argument(help="Folder to write; may hold other models, which stay.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"{_MODEL_HELP}; a folder as the server will see it."),
    ] = None,
    set_: SetOption = None,
    add: AddOption = None,
    decoupled: DecoupledOption = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace models that this command wrote before.")
    ] = False,
) -> None:
    """Write a model repository for a tritonserver of your own."""
    from inflight_server.checkpoints import find_checkpoint  # as for `serve`

    with reported_errors():
        folder = find_checkpoint(model)
        models = chosen_models(add or ())
        values = {
            **parse_overrides(set_ or (), folder, models),
            "gpt_model_path": str(folder),
            "decoupled_mode": str(decoupled).lower(),
        }
        install(out_dir, values, models, may_replace=force)
    if not folder.is_dir():
        typer.echo(f"note: {folder} is not on this machine; the server must find it", err=True)
    typer.echo(
        "Written. Start: tritonserver "
        f"--model-repository={shlex.quote(str(out_dir))} --disable-auto-complete-config"
    )


_DEFAULT = ServeSettings()
_HIGHEST_PORT = 65535
_MIN_CONNECTION_SECONDS = 0.001
_MAX_CONNECTION_SECONDS = 2_000_000.0  # gRPC counts milliseconds in 31 bits


def _at_least_a_millisecond(seconds: float) -> float:
    """``seconds``, of which Triton counts thousandths."""
    if 0 < seconds < _MIN_CONNECTION_SECONDS:
        raise typer.BadParameter(f"{seconds:g} is neither 0 nor at least {_MIN_CONNECTION_SECONDS}")
    return seconds


def _port(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        min=1, max=_HIGHEST_PORT, help=f"Port of the {what}."
    )
    return option


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"{_MODEL_HELP}; the demo model if not given."),
    ] = None,
    http_port: Annotated[int, _port("HTTP endpoint")] = _DEFAULT.http_port,
    grpc_port: Annotated[int, _port("gRPC endpoint")] = _DEFAULT.grpc_port,
    metrics_port: Annotated[int, _port("Prometheus metrics")] = _DEFAULT.metrics_port,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 (or ::) opens it to other machines.")
    ] = _DEFAULT.host,
    set_: SetOption = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may finish when stopping.")
    ] = _DEFAULT.drain_seconds,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="After a failure, starts in a row that may fail before it gives up."
        ),
    ] = _DEFAULT.max_restarts,
    max_connection_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=_MAX_CONNECTION_SECONDS,
            callback=_at_least_a_millisecond,
            help="Age at which a gRPC connection takes no new streams; open ones may last as long "
            "again, and any request twice as long (--set max_run_seconds=...). It ends streams "
            "that is not read; 0: never.",
        ),
    ] = _DEFAULT.max_connection_seconds,
    load_seconds: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="How long loading may stand still, at its beginning, between two tensors or after "
            "the last one, before the server counts as hung.",
        ),
    ] = _DEFAULT.load_seconds,
    add: AddOption = None,
    decoupled: DecoupledOption = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log of the server.")
    ] = _DEFAULT.is_verbose,
) -> None:
    """Serve a checkpoint with Triton until Ctrl-C."""
    # Only this command pays for these imports.
    from inflight_server.checkpoints import find_checkpoint
    from inflight_server.serve.launcher import run
    from inflight_server.serve.preflight import address_of

    try:
        folder = find_checkpoint(model)
        models = chosen_models(add or ())
        run(
            ServeSettings(
                model=folder,
                host=address_of(host),
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                parameters=parse_overrides(set_ or (), folder, models),
                drain_seconds=drain_seconds,
                max_restarts=max_restarts,
                max_connection_seconds=max_connection_seconds,
                load_seconds=load_seconds,
                is_verbose=verbose,
                is_decoupled=decoupled,
                models=models,
            )
        )
    except (ServingError, OSError) as error:
        say(f"error: {_in_one_line(error)}", err=True)
        raise typer.Exit(1) from None


def _in_one_line(error: Exception) -> str:
    """A folder that cannot be copied is a list of files, each with its reason."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])
    return str(error)
