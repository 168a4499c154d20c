"""The command ``inflight``: generate, chat, top, bench, stop, stats, why, record, health, demo, and
plug-ins.

A package adds commands with an entry point of the group ``inflight.commands`` that names a typer
app, or one command as a function with typer annotations. Heavy imports happen inside the commands,
so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import EntryPoint, entry_points, version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_client.errors import InflightError
from inflight_client.headers import API_KEY_VARIABLE, parse_headers
from inflight_scheduler.sampling import SETTINGS

if TYPE_CHECKING:
    from inflight_client.address import Protocol
    from inflight_client.client import InflightClient
    from inflight_client.options import GenerateOptions

PLUGIN_GROUP = "inflight.commands"

_OPENAI_URL = "http://127.0.0.1:9000"
_NOT_READY = "not ready: the model is loading, shutting down, stuck or not there\n"

EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C."""

# A model may emit anything; on a terminal, control characters would be commands to it.
_CONTROL_CHARACTERS = {
    code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}

app = typer.Typer(
    name="inflight",
    # Its boxes cut off long names of options on a terminal of 80 columns.
    rich_markup_mode=None,
    help="Serve a model with in-flight batching, and talk to it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

UrlOption = Annotated[
    str | None,
    typer.Option(help="host:port of the server.", show_default="127.0.0.1:8001, with --http :8000"),
]
HttpOption = Annotated[bool, typer.Option("--http", help="Use HTTP instead of gRPC.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        help="A key that clients of OpenAI's API must send; others on the machine see options, so "
        "better in the environment or a file.",
    ),
]
ApiKeyFileOption = Annotated[
    Path | None, typer.Option(help="A file with such keys, one in a line.")
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        "-H",
        metavar="NAME: VALUE",
        help="Header of every call to the server, or @FILE with some; repeatable.",
        show_default=False,
    ),
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        _write(f"inflight {version('inflight')}\n")
        raise typer.Exit


@app.callback()
def _every_command(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """What stands before the name of a command."""


def _with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` an option for each sampling setting that has a help text."""
    options = []
    for setting in SETTINGS.values():
        if setting.help:
            kind: Any = float | None if setting.dtype == "FP32" else int | None
            option = Annotated[kind, typer.Option(help=setting.help)]
            parameter = Parameter(
                setting.option, Parameter.KEYWORD_ONLY, default=None, annotation=option
            )
            options.append(parameter)
    own = [*signature(command, eval_str=True).parameters.values()][:-1]  # without **sampling
    command.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in [*own, *options]}
    return command


@app.command()
@_with_sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 64,
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
    request_id: Annotated[str, typer.Option(help="Id by which `inflight stop` finds it.")] = "",
    stream: Annotated[
        bool,
        typer.Option(help="Print the text as it comes; a server with --no-decoupled cannot."),
    ] = True,
    stop_word: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token that ends the answer; may be repeated.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Text not to be said; may be repeated.")
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(help="json, or json_schema=FILE, regex=FILE or ebnf_grammar=FILE."),
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="Name of the adapter that the server answers with.")
    ] = None,
    priority: Annotated[float | None, typer.Option(help="0 to 1, the higher the earlier.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="Share cached text only with requests of the same salt.")
    ] = None,
    max_queue_time_ms: Annotated[
        int | None, typer.Option(help="Fail unless it has started by then.")
    ] = None,
    allotted_time_ms: Annotated[
        int | None, typer.Option(help="End by then, with what there is.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer and how it ended as JSON.")
    ] = False,
    **sampling: float | None,
) -> None:
    """Continue a text. Ctrl-C cancels the request."""
    settings: dict[str, Any] = {
        "stop_words": stop_word or None,
        "stop_token_ids": stop_token_id or None,
        "bad_words": bad_word or None,
        "lora": lora,
        "priority": priority,
        "cache_salt": cache_salt,
        "max_queue_time_ms": max_queue_time_ms,
        "allotted_time_ms": allotted_time_ms,
    }
    settings |= {**sampling, **_read_guide(guide)}
    options: Any = {name: value for name, value in settings.items() if value is not None}
    with _reported_errors(), _connect(url, http, header) as client:
        if as_json:
            result = client.generate(prompt, max_tokens, request_id=request_id, **options)
            _write(json.dumps(asdict(result)) + "\n")
            return
        for text in _answer(client, prompt, max_tokens, request_id, stream, options):
            _write(text)
        _write("\n")


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(help="Where OpenAI's API is: of inflight, or of any other server.")
    ] = _OPENAI_URL,
    api_key: ApiKeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the one that the server names first.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Of each answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.")] = None,
) -> None:
    """Talk to a model. /help tells the commands; Ctrl-C ends an answer, Ctrl-D the chat.

    Into a pipe only what the model says; each line of the input is a message, and the exit code is
    1 if one was not answered.
    """
    from inflight_client.terminal.chat import (
        Chat,
        Conversation,
        connect,
        first_model,
        remember_lines,
    )

    settings = {"max_tokens": max_tokens, "temperature": temperature}
    with _reported_errors(), connect(url, api_key) as client:
        chosen = {name: value for name, value in settings.items() if value is not None}
        conversation = Conversation(model or first_model(client), system, chosen)
        if sys.stdin.isatty():
            remember_lines()
        talk = Chat(client, conversation, _write, lambda text: typer.echo(text, err=True))
        if not talk.run() and not sys.stdin.isatty():
            raise typer.Exit(1)


@app.command()
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 0.5,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
) -> None:
    """Watch a server: tokens a second, latencies, the cache, and a row for each request.

    Into a file or pipe: JSON lines.
    """
    import time

    from rich.console import Console
    from rich.live import Live

    from inflight_client.terminal.top import Board

    board, console, cursor = Board(), Console(), ""
    json_lines = json_lines or not (once or sys.stdout.isatty())
    is_drawn = not json_lines and not once
    live = Live(
        get_renderable=lambda: board.render(console.height),
        console=console,
        screen=is_drawn,
        auto_refresh=False,
    )
    with _reported_errors(), _connect(url, http, header) as client:
        if is_drawn:
            live.start()
        try:
            while True:
                answer = client.live(cursor)
                cursor = answer["cursor"]
                board.take(answer)
                if json_lines:
                    _write(json.dumps(answer) + "\n")
                elif once:
                    console.print(board.render(len(answer["requests"]) + 9))
                else:
                    live.refresh()
                if once:
                    return
                time.sleep(interval)
        finally:
            if is_drawn:
                live.stop()


@app.command()
def bench(
    url: Annotated[
        str | None,
        typer.Option(
            help="The server, by HTTP.", show_default=f"{_OPENAI_URL}, with --api kserve :8000"
        ),
    ] = None,
    api: Annotated[str, typer.Option(help="openai (completions) or kserve.")] = "openai",
    api_key: ApiKeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the one that the server names first.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", min=1, help="Clients at once; repeatable."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", "-r", min=0.001, help="Or requests a second; repeatable."),
    ] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1)] = 64,
    prompt_words: Annotated[int, typer.Option(min=1, help="Of random prompts, in words.")] = 32,
    prompt: Annotated[str | None, typer.Option(help="One text for all, instead.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have all tokens; not all servers can.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    json_line: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a server: latencies and throughput, with so many clients or at a rate.

    The load shares this machine with the server if that is here. Exit code 1 if a request failed.
    """
    from inflight_client.terminal.bench import run_bench

    with _reported_errors():
        outcomes = run_bench(
            url=url,
            api=api,
            api_key=api_key,
            model=model,
            concurrency=concurrency or ([] if rate else [1, 8]),
            rates=rate or [],
            num_requests=num_requests,
            prompts=prompt or prompt_words,
            max_tokens=max_tokens,
            ignores_eos=ignore_eos,
            timeout=timeout,
            seed=seed,
            shows_progress=sys.stderr.isatty() and not json_line,
        )
    if json_line:
        _write(json.dumps([each.figures() for each in outcomes]) + "\n")
    else:
        from rich.console import Console

        from inflight_client.terminal.bench import bench_table

        Console().print(bench_table(outcomes))
        for each in outcomes:
            for reason, number in each.errors.items():
                typer.echo(f"{each.load}: {number} x {reason}", err=True)
    if any(each.errors for each in outcomes):
        raise typer.Exit(1)


@app.command()
def stop(
    request_id: Annotated[str, typer.Argument(help="The id the request was started with.")],
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
) -> None:
    """End a running request. Its client gets the tokens so far."""
    with _reported_errors(), _connect(url, http, header) as client:
        client.stop(request_id)


@app.command()
def stats(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show every iteration.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
) -> None:
    """Show the statistics of the batch manager. Followed into a file or pipe: JSON lines."""
    with _reported_errors(), _connect(url, http, header) as client:
        if json_lines or (follow and not sys.stdout.isatty()):
            for values in client.stats(follow):
                _write(json.dumps(values) + "\n")
        else:
            _show_table(client, follow, url or "the server")


@app.command()
def why(
    request_id: Annotated[str, typer.Argument(help="The id the request was started with.")],
    json_line: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
) -> None:
    """Tell why a request waits, and its place in the queue.

    Exit code 1 if none with this id is in flight.
    """
    from inflight_protocol import NOT_IN_FLIGHT

    with _reported_errors(), _connect(url, http, header) as client:
        answer = client.why(request_id)
    is_unknown = answer.get("state") == NOT_IN_FLIGHT
    if json_line:
        _write(json.dumps(answer) + "\n")
    elif is_unknown:
        typer.echo(f"{NOT_IN_FLIGHT}: {answer.get('reason')}", err=True)
    else:
        _write(_in_words(answer))
    if is_unknown:
        raise typer.Exit(1)


def _in_words(answer: dict[str, Any]) -> str:
    where = [
        f"{what} {answer[what]} of {answer[number]}"
        for what, number in (("sequence", "num_sequences"), ("place", "num_waiting"))
        if what in answer and number in answer
    ]
    details = f" ({', '.join(where)})" if where else ""
    return f"{answer.get('state')}{details}: {answer.get('reason')}\n"


@app.command()
def record(
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is stdout.")],
    url: UrlOption = None,
    http: HttpOption = False,
    header: HeaderOption = None,
) -> None:
    """Fetch what the scheduler decided lately. For `inflight replay` and `inflight timeline`."""
    with _reported_errors(), _connect(url, http, header) as client:
        text = client.recording()
    if output == "-":
        _write(text)
        return
    try:
        with open(output, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        typer.echo(f"error: {output} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(1) from None


@app.command()
def health(url: UrlOption = None, http: HttpOption = False, header: HeaderOption = None) -> None:
    """Tell whether the model takes requests. Exit code 0 if it does, else 1."""
    with _reported_errors(), _connect(url, http, header) as client:
        is_ready = client.health()
        _write("ready\n" if is_ready else _NOT_READY)
        if not is_ready:
            raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Start a server and stream four counts side by side. One is stopped; ends with statistics."""
    from inflight_client.demo import run_demo

    with _reported_errors():
        raise typer.Exit(run_demo())


def main() -> None:
    """Run the command line: ``inflight`` and ``python -m inflight_client.cli``."""
    arguments = sys.argv[1:]
    own = {command.callback.__name__ for command in app.registered_commands if command.callback}
    if not arguments or arguments[0] not in own:
        add_plugins(app, list(entry_points(group=PLUGIN_GROUP)))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a narrow terminal encoding is no reason to fail
    app()


def add_plugins(target: typer.Typer, plugins: Sequence[EntryPoint]) -> None:
    """Add the commands of other packages; one that cannot be loaded says what is missing."""
    for plugin in plugins:
        try:
            loaded = plugin.load()
        except ImportError as error:
            add_missing_command(target, plugin.name, error)
            continue
        if isinstance(loaded, typer.Typer):
            target.registered_commands += loaded.registered_commands
        else:
            target.command(plugin.name)(loaded)


def add_missing_command(target: typer.Typer, name: str, error: ImportError) -> None:
    """Add a command in place of ``name``, which tells what to install."""
    missing = error.name or str(error)

    @target.command(
        name,
        help=f"Not installed ({missing} is missing): in a clone, pip install '.[server]'",
        short_help=f"Not installed ({missing} is missing).",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def refuse() -> None:
        typer.echo(
            f"error: `inflight {name}` needs the package {missing}. "
            "Install the server side, in a clone of inflight: pip install '.[server]'",
            err=True,
        )
        raise typer.Exit(1)


@contextmanager
def _reported_errors() -> Iterator[None]:
    """Errors become one line on stderr and exit code 1; Ctrl-C ends in silence."""
    try:
        yield
    except InflightError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _read_guide(argument: str | None) -> dict[str, str]:
    """The options of a guide: a kind, or a kind and the file that holds it."""
    if argument is None:
        return {}
    guide_type, has_file, file = argument.partition("=")
    if not has_file:
        return {"guide_type": guide_type}
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"error: --guide: {file} cannot be read: {error}", err=True)
        raise typer.Exit(1) from None
    return {"guide_type": guide_type, "guide": text.removesuffix("\n")}


def _connect(url: str | None, is_http: bool, headers: Sequence[str] | None) -> InflightClient:
    from inflight_client.client import InflightClient

    is_http = is_http or (url or "").startswith(("http://", "https://"))
    protocol: Protocol = "http" if is_http else "grpc"
    return InflightClient(url, protocol=protocol, headers=parse_headers(headers))


def _answer(
    client: InflightClient,
    prompt: str,
    max_tokens: int,
    request_id: str,
    is_streaming: bool,
    options: GenerateOptions,
) -> Iterator[str]:
    if not is_streaming:
        yield client.generate(prompt, max_tokens, request_id=request_id, **options).text
        return
    for chunk in client.stream(prompt, max_tokens, request_id=request_id, **options):
        yield chunk.text


def _show_table(client: InflightClient, follow: bool, source: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from inflight_client.stats_table import stats_table

    latest: dict[str, Any] = {}
    console = Console()
    if not follow:
        for latest in client.stats(follow=False):
            console.print(stats_table(latest, source))
        return
    # Iterations may be far quicker than eyes: the display takes the latest ten times a second.
    with Live(get_renderable=lambda: stats_table(latest, source), refresh_per_second=10):
        for latest in client.stats():  # noqa: B007
            pass


def _write(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_CONTROL_CHARACTERS)
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
