"""The command ``inflight openai``; imports what needs the extra ``openai`` when it runs."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Annotated

import typer

from inflight_client.cli import (
    ApiKeyFileOption,
    ApiKeyOption,
    HeaderOption,
)
from inflight_client.errors import InflightError
from inflight_client.front_options import FrontOptions, with_front_options
from inflight_client.headers import parse_headers, read_api_keys
from inflight_openai.settings import FrontSettings

_DEFAULT = FrontSettings()


@with_front_options
def openai(
    url: Annotated[
        str | None,
        typer.Option(help="gRPC address of the inflight server.", show_default="127.0.0.1:8001"),
    ] = None,
    header: HeaderOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to other machines.")
    ] = _DEFAULT.host,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = _DEFAULT.port,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    *,
    front: FrontOptions,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may finish when stopping.")
    ] = _DEFAULT.drain_seconds,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="The server's metrics page, for /metrics; '' for none.",
            show_default="http://HOST OF --url:8002/metrics",
        ),
    ] = None,
) -> None:
    """Serve OpenAI's API and the live page in front of an inflight server.

    /v1/completions, /v1/chat/completions and /v1/models; for gateways and monitoring /health,
    /metrics, /version, /server_info and /model_info; for a browser /.
    """
    # gRPC's own lines would block its threads where stderr has no reader.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from inflight_openai.server import run

        run(
            FrontSettings(
                url=url,
                headers=parse_headers(header),
                host=host,
                port=port,
                api_keys=read_api_keys(api_key, api_key_file),
                drain_seconds=drain_seconds,
                metrics_url=metrics_url,
                **{each.name: getattr(front, each.name) for each in fields(front)},
            )
        )
    except ImportError as error:
        typer.echo(
            f"error: `inflight openai` needs the package {error.name}. "
            "Install it, in a clone of inflight: pip install '.[openai]'",
            err=True,
        )
        raise typer.Exit(1) from None
    except (InflightError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
