"""What the launcher shows: a progress bar while weights load, one block when ready."""

from __future__ import annotations

import sys
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from inflight_backend.status import ModelStatus
from inflight_protocol import ENSEMBLE_MODEL_NAME
from inflight_server.serve.checks import has_tokenizer
from inflight_server.serve.messages import ForgivingStream, say
from inflight_server.serve.settings import ServeSettings

_DEFAULT = ServeSettings()


class LoadingDisplay:
    """Progress on stderr: a bar on a terminal, one line elsewhere."""

    def __init__(self, settings: ServeSettings) -> None:
        stream = cast(TextIO, ForgivingStream(sys.stderr)) if sys.stderr is not None else None
        console = Console(file=stream, stderr=True)
        self._name = settings.model.name
        self._is_live = console.is_terminal and not settings.is_verbose
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._is_live,
        )
        self._task = self._progress.add_task("starting tritonserver", total=None)

    def __enter__(self) -> LoadingDisplay:
        if not self._is_live:
            say(f"starting tritonserver with {self._name} ...", err=True)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, status: ModelStatus | None) -> None:
        """Show how far loading is."""
        if status is not None and status.phase == "loading":
            self._progress.update(
                self._task,
                description=f"loading {self._name}",
                completed=status.fields["loaded_bytes"],
                total=status.fields["total_bytes"] or None,
            )


def ready_block(settings: ServeSettings, status: ModelStatus) -> str:
    """All a user needs once the server is ready: where it listens, what it runs, what to type."""
    fields = status.fields
    host = settings.local_host
    http = f"http://{host}:{settings.http_port}"
    tokens = fields["num_blocks"] * fields["tokens_per_block"]
    scheduler = settings.parameters.get("scheduler_class") or fields["policy"]
    note = f"  (listening on {settings.host}: open to other machines)" if settings.is_public else ""
    return f"""
inflight is ready{note}

  model      {fields["model"]}, {fields["dtype"]} on {fields["device"]}
  HTTP       {http}
  gRPC       {host}:{settings.grpc_port}
  metrics    http://{host}:{settings.metrics_port}/metrics
  KV cache   {fields["num_blocks"]} blocks x {fields["tokens_per_block"]} = {tokens} tokens
  scheduler  {scheduler}, max batch {fields["max_batch_size"]}, \
up to {fields["max_seq_len"]} tokens per request
             and {fields["max_num_tokens"]} tokens per iteration

{_next_steps(settings, http)}
Ctrl-C stops the server."""


def _without_tokenizer(settings: ServeSettings) -> str:
    if not (settings.tokenizer_dir / "tokenizer.model").is_file():
        return "send token ids (input_ids) to tensorrt_llm"
    # One from before tokenizer.json.
    return (
        "send token ids (input_ids) to tensorrt_llm,\nor convert its tokenizer.model: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _next_steps(settings: ServeSettings, http: str) -> str:
    if not has_tokenizer(settings):
        return f"The model has no tokenizer.json: {_without_tokenizer(settings)}.\n"
    prompt = "1 2 3 4" if settings.is_demo else "Hello"
    is_default = (settings.local_host, settings.grpc_port) == (_DEFAULT.host, _DEFAULT.grpc_port)
    url = "" if is_default else f" --url {settings.local_host}:{settings.grpc_port}"
    stream, endpoint, option = "true", "generate_stream", ""
    if not settings.is_decoupled:
        stream, endpoint, option = "false", "generate", " --no-stream"
    body = f'{{"text_input": "{prompt}", "max_tokens": 40, "stream": {stream}}}'
    return f"""\
In another terminal:
  inflight generate "{prompt}" --max-tokens 40{option}{url}
  curl -N {http}/v2/models/{ENSEMBLE_MODEL_NAME}/{endpoint} -d '{body}'
"""
