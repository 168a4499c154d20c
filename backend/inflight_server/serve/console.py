"""What the launcher prints: messages, a progress bar while weights load, one block when ready.

Printing must never block the launcher or its server: the reader of the pipe may be gone (Ctrl-C to
``inflight serve 2>&1 | tee log`` ends `tee` as well) or not reading (a pager, a log driver, a slow
terminal, Ctrl-S), and the disk of a log may be full. Then messages are lost; a drain or restart
continues.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from inflight_backend.models.checkpoint_files import checkpoint_name
from inflight_backend.status import ModelStatus
from inflight_protocol import ENSEMBLE_MODEL_NAME
from inflight_server.serve.preflight import has_chat_template, has_tokenizer
from inflight_server.serve.settings import ServeSettings

_STDERR = 2
_CHUNK_BYTES = 2**16  # what a pipe holds
_PATIENCE_SECONDS = 0.5  # with a reader; one that is only slow has read something by then

_writers_lock = threading.Lock()
_writers: dict[int, threading.Thread] = {}  # the last of each descriptor


def say(text: str, *, err: bool = False) -> None:
    """A line on stdout, or stderr; it is lost, or comes later, where it cannot be written."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:
        _write(stream, f"{text}\n")


@contextmanager
def shown() -> Iterator[int]:
    """A descriptor for processes that end within the block; their output comes to our stderr.

    They never wait for its reader, as they would if they wrote there themselves.
    """
    reader, writer = os.pipe()
    thread = threading.Thread(target=_copy_to_stderr, args=(reader,), name="ServerLog", daemon=True)
    thread.start()
    try:
        yield writer
    finally:
        os.close(writer)
        thread.join(_PATIENCE_SECONDS)


def occupy_standard_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed, as for some service managers.

    Otherwise the next opened file would get their numbers, and all output to stderr.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)


class ForgivingStream:
    """A stream for rich, which ends the process when its output has no reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as much as can be written."""
        _write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Nothing is ever left to be passed on."""


def _write(stream: TextIO, text: str) -> None:
    """Past the buffer of ``stream``: Python writes the rest of a buffer when it ends, and has exit
    code 120 if that fails."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # that of a test, which has none
        stream.write(text)
        return
    with suppress(RuntimeError):  # there may be no room for a thread
        _write_on_thread(descriptor, text.encode(stream.encoding, errors="replace"))


def _write_on_thread(descriptor: int, data: bytes) -> None:
    """On a thread, since a write may block although the descriptor was writable: a terminal takes
    a part of a line. While that thread is blocked, further messages are dropped."""
    with _writers_lock:
        before = _writers.get(descriptor)
        if before is not None and before.is_alive():
            return
        writer = threading.Thread(
            target=_write_all, args=(descriptor, data), name="Message", daemon=True
        )
        writer.start()
        _writers[descriptor] = writer
        writer.join(_PATIENCE_SECONDS)


def _copy_to_stderr(reader: int) -> None:
    while data := os.read(reader, _CHUNK_BYTES):
        with suppress(RuntimeError):
            _write_on_thread(_STDERR, data)
    os.close(reader)


def _write_all(descriptor: int, data: bytes) -> None:
    with suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


_DEFAULT = ServeSettings()


class LoadingDisplay:
    """Progress on stderr: a bar on a terminal, else one line."""

    def __init__(self, settings: ServeSettings) -> None:
        stream = cast(TextIO, ForgivingStream(sys.stderr)) if sys.stderr is not None else None
        console = Console(file=stream, stderr=True)
        self._name = checkpoint_name(settings.model)
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

    def update(self, status: ModelStatus) -> None:
        """Show how far loading is."""
        if status.phase == "loading":
            num_loaded, num_total = (status.fields[f"{name}_bytes"] for name in ("loaded", "total"))
            verb = "warming up" if num_loaded == num_total > 0 else "loading"
            self._progress.update(
                self._task,
                description=f"{verb} {self._name}",
                completed=num_loaded,
                total=num_total or None,
            )


def ready_block(settings: ServeSettings, status: ModelStatus) -> str:
    """All a user needs once the server is ready: addresses, model, commands to type."""
    fields = status.fields
    host = settings.local_host
    http = f"http://{host}:{settings.http_port}"
    tokens = fields["num_blocks"] * fields["tokens_per_block"]
    scheduler = settings.parameters.get("scheduler_class") or fields["policy"]
    note = f"  (listening on {settings.host}: open to other machines)" if settings.is_public else ""
    return f"""
inflight is ready{note}

  model      {fields["model"]}, {fields["dtype"]} on {fields["device"]}
  OpenAI     {_openai_address(settings)}{_page(settings)}
  HTTP       {http}
  gRPC       {host}:{settings.grpc_port}
  metrics    http://{host}:{settings.metrics_port}/metrics
  KV cache   {fields["num_blocks"]} blocks x {fields["tokens_per_block"]} = {tokens} tokens
  scheduler  {scheduler}, max batch {fields["max_batch_size"]}, \
up to {fields["max_seq_len"]} tokens per request
             and {fields["max_num_tokens"]} tokens per iteration

{_next_steps(settings, http, settings.front.served_name or fields["model"])}
Ctrl-C stops the server."""


def _openai_address(settings: ServeSettings) -> str:
    if settings.why_no_openai:
        return f"off: {settings.why_no_openai}"
    return f"http://{settings.local_host}:{settings.openai_port}/v1"


def _page(settings: ServeSettings) -> str:
    if settings.why_no_openai or not settings.front.has_page:
        return ""
    return f"\n  page       http://{settings.local_host}:{settings.openai_port}/"


def _next_steps(settings: ServeSettings, http: str, model: str) -> str:
    if not has_tokenizer(settings):
        return "The model has no tokenizer: send token ids (input_ids) to tensorrt_llm.\n"
    prompt = "1 2 3 4" if settings.is_demo else "Hello"
    is_default = (settings.local_host, settings.grpc_port) == (_DEFAULT.host, _DEFAULT.grpc_port)
    url = "" if is_default else f" --url {settings.local_host}:{settings.grpc_port}"
    steps = [f'inflight generate "{prompt}" --max-tokens 40{url}']
    if not settings.why_no_openai:
        steps += _openai_steps(settings, prompt, model)
    elif settings.is_decoupled:
        body = f'{{"text_input": "{prompt}", "max_tokens": 40, "stream": true}}'
        path = f"{http}/v2/models/{ENSEMBLE_MODEL_NAME}/generate_stream"
        steps.append(f"curl -N {path} -d '{body}'")
    else:
        body = f'{{"text_input": "{prompt}", "max_tokens": 40, "stream": false}}'
        steps = [f'inflight generate "{prompt}" --max-tokens 40 --no-stream{url}']
        steps.append(f"curl {http}/v2/models/{ENSEMBLE_MODEL_NAME}/generate -d '{body}'")
    return "In another terminal:\n" + "".join(f"  {step}\n" for step in steps)


def _openai_steps(settings: ServeSettings, prompt: str, model: str) -> list[str]:
    """The same question by `curl` and by the `openai` package."""
    base = _openai_address(settings)
    path, said, call = "completions", f'"prompt": "{prompt}"', "completions"
    python = f'prompt="{prompt}"'
    if has_chat_template(settings):
        path, call = "chat/completions", "chat.completions"
        said = f'"messages": [{{"role": "user", "content": "{prompt}"}}]'
        python = f'messages=[{{"role": "user", "content": "{prompt}"}}]'
    has_key = (settings.api_key or settings.api_key_file) is not None
    header = ' -H "Authorization: Bearer $INFLIGHT_API_KEY"' if has_key else ""
    key = "KEY" if has_key else "none"
    body = f'{{"model": "{model}", {said}, "max_tokens": 40}}'
    return [
        f"curl {base}/{path}{header} -d '{body}'",
        f'python: openai.OpenAI(base_url="{base}", api_key="{key}").{call}.create('
        f'model="{model}", {python}, max_tokens=40)',
    ]
