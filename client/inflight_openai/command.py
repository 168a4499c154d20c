"""The command ``inflight openai``; imports what needs the extra ``openai`` when it runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from inflight_client.cli import (
    ApiKeyFileOption,
    ApiKeyOption,
    ChatTemplateOption,
    HeaderOption,
    ServedNameOption,
    ToolParserOption,
)
from inflight_client.errors import InflightError
from inflight_client.headers import parse_headers, read_api_keys
from inflight_openai.settings import FrontSettings

_DEFAULT = FrontSettings()


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
    served_model_name: ServedNameOption = None,
    chat_template: ChatTemplateOption = None,
    tool_parser: ToolParserOption = None,
    default_max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Bound of chat answers that name none; default: all that fits."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests at once; more are answered with 429.")
    ] = _DEFAULT.max_requests,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, help="Size of a request body.")
    ] = _DEFAULT.max_body_bytes,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for a request, until its answer is read.")
    ] = _DEFAULT.timeout,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may finish when stopping.")
    ] = _DEFAULT.drain_seconds,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse unknown fields of requests.")
    ] = False,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="The server's metrics page, for /metrics; '' for none.",
            show_default="http://HOST OF --url:8002/metrics",
        ),
    ] = None,
    allow_runtime_lora: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora",
            help="Let clients load and unload adapters, of folders below the server's lora_root.",
        ),
    ] = False,
    page: Annotated[
        bool, typer.Option(help="Serve the live page at /, which needs a key where calls do.")
    ] = _DEFAULT.has_page,
    show_text: Annotated[
        bool,
        typer.Option(
            "--show-text", help="Show prompts and answers on the page, to all with a key."
        ),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages whose browser may call it; * for any; repeatable."),
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
                served_name=served_model_name,
                chat_template=chat_template,
                tool_parser=tool_parser,
                default_max_tokens=default_max_tokens,
                max_requests=max_requests,
                max_body_bytes=max_body_bytes,
                timeout=timeout,
                drain_seconds=drain_seconds,
                is_strict=strict,
                metrics_url=metrics_url,
                allowed_origins=tuple(allow_origin or ()),
                loads_adapters=allow_runtime_lora,
                has_page=page,
                shows_text=show_text,
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
