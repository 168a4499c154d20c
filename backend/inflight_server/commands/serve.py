"""The commands ``inflight serve`` and ``inflight model-repository``."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_backend.ranks.machines import DEFAULT_PORT
from inflight_client.cli import ApiKeyFileOption, ApiKeyOption
from inflight_client.errors import InflightError
from inflight_client.front_options import FrontOptions, with_front_options
from inflight_client.headers import read_api_keys
from inflight_server.commands.recordings import reported_errors
from inflight_server.commands.worker import (
    WITH_UNDERSCORES,
    ExecutorBackend,
    ExecutorOption,
    ExpertParallelOption,
    MasterAddressOption,
    MasterPortOption,
    NodeRankOption,
    NodesOption,
    PipelineParallelOption,
    TensorParallelOption,
    WorldSizeOption,
    check_serves_once,
    machines_of,
    ranks_elsewhere,
    run_worker,
)
from inflight_server.serve.console import say
from inflight_server.serve.repository import (
    DEFAULT_MODELS,
    DRAFT_MODELS,
    OPTIONAL_MODELS,
    install,
)
from inflight_server.serve.settings import ServeSettings, parse_overrides, rank_sizes, with_draft

app = typer.Typer()

_MODEL_HELP = (
    "A folder with a checkpoint or a GGUF file, its name on the Hub (Qwen/Qwen3-0.6B), or "
    "smollm2-135m"
)
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
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A smaller checkpoint with the same tokenizer, which guesses for the model: requests "
        "to tensorrt_llm_bls with num_draft_tokens use it.",
    ),
]
DraftSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-set", metavar="KEY=VALUE", help="--set of the draft model; may be repeated."
    ),
]
DecoupledOption = Annotated[
    bool,
    typer.Option(
        "--decoupled/--no-decoupled",
        help="Streaming, or one response per request for clients that call without a stream.",
    ),
]


def chosen_models(added: Sequence[str], *, has_draft: bool = False) -> tuple[str, ...]:
    """The default models and the added ones; ``ConfigurationError`` for one that is not known."""
    for name in added:
        if name not in OPTIONAL_MODELS:
            known = ", ".join(OPTIONAL_MODELS)
            raise ConfigurationError(f"--add {name}: there is no such model; known are {known}")
    return (*DEFAULT_MODELS, *dict.fromkeys([*added, *(DRAFT_MODELS if has_draft else ())]))


def _read_draft(
    model: str | None, items: Sequence[str], parameters: Mapping[str, str]
) -> tuple[Path | None, dict[str, str], dict[str, str]]:
    """The checkpoint that guesses, and the parameters of both; None if there is none."""
    from inflight_server.checkpoints import find_checkpoint  # as for `serve`

    if model is None:
        if items:
            raise ConfigurationError("--draft-set needs --draft-model")
        return None, dict(parameters), {}
    folder = find_checkpoint(model)
    return folder, *with_draft(parameters, parse_overrides(items, folder))


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
    draft_model: DraftModelOption = None,
    draft_set: DraftSetOption = None,
    decoupled: DecoupledOption = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace models that this command wrote before.")
    ] = False,
) -> None:
    """Write a model repository for a tritonserver of your own."""
    from inflight_server.checkpoints import find_checkpoint  # as for `serve`

    with reported_errors():
        folder = find_checkpoint(model)
        models = chosen_models(add or (), has_draft=draft_model is not None)
        draft, values, draft_values = _read_draft(
            draft_model, draft_set or (), parse_overrides(set_ or (), folder, models)
        )
        mode = {"decoupled_mode": str(decoupled).lower()}
        values |= {"gpt_model_path": str(folder), **mode}
        draft_values |= {"gpt_model_path": str(draft), **mode}
        install(out_dir, values, models, draft_values, may_replace=force)
    if not folder.exists():
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


@app.command(context_settings=WITH_UNDERSCORES)
@with_front_options
def serve(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"{_MODEL_HELP}; the demo model if not given."),
    ] = None,
    http_port: Annotated[int, _port("HTTP endpoint")] = _DEFAULT.http_port,
    grpc_port: Annotated[int, _port("gRPC endpoint")] = _DEFAULT.grpc_port,
    metrics_port: Annotated[int, _port("Prometheus metrics")] = _DEFAULT.metrics_port,
    openai_port: Annotated[
        int, typer.Option(min=0, max=_HIGHEST_PORT, help="Port of OpenAI's API; 0: none.")
    ] = _DEFAULT.openai_port,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 (or ::) opens it to other machines.")
    ] = _DEFAULT.host,
    set_: SetOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="An adapter (LoRA) as PEFT saves it, by folder or by its name on the Hub; may be "
            "repeated.",
        ),
    ] = None,
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    expert_parallel: ExpertParallelOption = False,
    world_size: WorldSizeOption = None,
    nnodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    master_addr: MasterAddressOption = "",
    master_port: MasterPortOption = DEFAULT_PORT,
    distributed_executor_backend: ExecutorOption = ExecutorBackend.MP,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    *,
    front: FrontOptions,
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
    draft_model: DraftModelOption = None,
    draft_set: DraftSetOption = None,
    decoupled: DecoupledOption = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log of the server.")
    ] = _DEFAULT.is_verbose,
) -> None:
    """Serve a checkpoint with Triton, and OpenAI's API, until Ctrl-C."""
    # Only this command pays for these imports.
    from inflight_server.checkpoints import find_checkpoint
    from inflight_server.serve.launcher import run
    from inflight_server.serve.preflight import address_of

    try:
        folder = find_checkpoint(model)
        models = chosen_models(add or (), has_draft=draft_model is not None)
        overrides = [
            *(set_ or ()),
            *_adapters_override(lora or ()),
            *_ranks_override(
                tensor_parallel_size, pipeline_parallel_size, is_by_experts=expert_parallel
            ),
        ]
        tensor, pipeline = rank_sizes(parse_overrides(overrides, folder, models), folder, nnodes)
        if world_size is not None and world_size > tensor * pipeline == 1:
            overrides.append(f"tensor_parallel_size={world_size}")
            tensor = world_size
        size = tensor * pipeline
        if world_size not in (None, size):
            raise ConfigurationError(
                f"--world_size is {world_size}, and tensor_parallel_size * pipeline_parallel_size "
                f"{size}"
            )
        if node_rank:
            code = run_worker(size, nnodes, node_rank, master_addr, master_port, model)
            raise typer.Exit(code)
        check_serves_once()
        machines = machines_of(distributed_executor_backend, nnodes, master_addr, master_port)
        if machines is not None:
            overrides += [f"num_nodes={nnodes}", f"rank_address={machines.host}:{machines.port}"]
        draft, parameters, draft_parameters = _read_draft(
            draft_model, draft_set or (), parse_overrides(overrides, folder, models)
        )
        read_api_keys(api_key, api_key_file)  # an error before the model is loaded
        settings = ServeSettings(
            model=folder,
            host=address_of(host),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            parameters=parameters,
            draft_model=draft,
            draft_parameters=draft_parameters,
            openai_port=openai_port,
            front=front,
            api_key=api_key,
            api_key_file=api_key_file and api_key_file.absolute(),
            drain_seconds=drain_seconds,
            max_restarts=max_restarts,
            max_connection_seconds=max_connection_seconds,
            load_seconds=load_seconds,
            is_verbose=verbose,
            is_decoupled=decoupled,
            models=models,
        )
        elsewhere = ranks_elsewhere(
            distributed_executor_backend, machines, size, folder, parameters
        )
        with elsewhere:
            run(settings)
    except (ServingError, InflightError, OSError) as error:
        say(f"error: {_in_one_line(error)}", err=True)
        raise typer.Exit(1) from None


def _adapters_override(items: Sequence[str]) -> list[str]:
    """``--lora`` as a parameter of the model; names on the Hub are fetched."""
    from inflight_server.checkpoints import find_adapter

    modules: dict[str, str] = {}
    for item in items:
        name, equals, folder = item.partition("=")
        if not (name and equals and folder):
            raise ConfigurationError(f"--lora needs NAME=FOLDER, got {item!r}")
        if name in modules:
            raise ConfigurationError(f"--lora gives {name} twice")
        modules[name] = str(find_adapter(folder))
    return [f"lora_modules={json.dumps(modules)}"] if modules else []


def _ranks_override(tensor: int, pipeline: int, *, is_by_experts: bool) -> list[str]:
    """The options for several devices as parameters of the model, but for those that say one."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    found = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return [*found, "expert_parallel=true"] if is_by_experts else found


def _in_one_line(error: Exception) -> str:
    """A folder that cannot be copied is a list of files, each with its reason."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])
    return str(error)
