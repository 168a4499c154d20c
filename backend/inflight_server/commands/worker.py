"""The command ``inflight worker``: the ranks of one machine, for a model served by another."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from inflight_backend.errors import ConfigurationError, ServingError
from inflight_backend.models.parallel.place import Place
from inflight_backend.ranks.machines import DEFAULT_PORT, Machines, run_node
from inflight_server.serve.console import say

app = typer.Typer()

WITH_UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Options may be written as in Python, as others' servers and scripts have them."""

WorldSizeOption = Annotated[int | None, typer.Option("--world-size", min=1, hidden=True)]
NodesOption = Annotated[
    int,
    typer.Option("--nnodes", min=1, envvar="LWS_GROUP_SIZE", help="Machines that share the ranks."),
]
NodeRankOption = Annotated[
    int,
    typer.Option(
        "--node-rank",
        min=0,
        envvar="LWS_WORKER_INDEX",
        help="Which of them this is; the first, 0, serves.",
    ),
]
MasterAddressOption = Annotated[
    str,
    typer.Option(
        "--master-addr",
        envvar="LWS_LEADER_ADDRESS",
        help="Address of the first machine; default: MASTER_ADDR, but not that of torchrun, whose "
        "processes meet elsewhere.",
    ),
]
MasterPortOption = Annotated[
    int,
    typer.Option(
        "--master-port",
        min=1,
        max=65534,
        help="Port at which the others join; the one behind it is used, too.",
    ),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "--tp", min=1, help="Devices that hold a part of each layer."
    ),
]
PipelineParallelOption = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel-size",
        "--pp",
        min=1,
        help="Stages of neighbouring layers, each on as many devices.",
    ),
]
ExpertParallelOption = Annotated[
    bool,
    typer.Option("--expert-parallel", help="A device holds whole experts, not columns of all."),
]


class ExecutorBackend(str, Enum):
    """Who starts the ranks of other machines."""

    MP = "mp"
    RAY = "ray"


ExecutorOption = Annotated[
    ExecutorBackend,
    typer.Option(
        "--distributed-executor-backend",
        help="Who starts the ranks of other machines: mp: `inflight worker` on each; ray: a Ray "
        "cluster, of which this is a node.",
    ),
]
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID")
_TORCHRUN = "TORCHELASTIC_RUN_ID"


def first_machine(master_addr: str, master_port: int) -> str:
    """The address of the first machine, also by the environment; `ConfigurationError` for none, or
    where torchrun itself listens."""
    is_torchrun = _TORCHRUN in os.environ
    found = os.environ.get("MASTER_ADDR", "")
    address = master_addr or ("" if is_torchrun else found)
    if not address:
        raise ConfigurationError("--master-addr is not set: give the address of the first machine")
    if (
        is_torchrun
        and os.environ.get("MASTER_PORT") == str(master_port)
        and _is_same(address, found)
    ):
        raise ConfigurationError(
            f"port {master_port} of {address} is torchrun's own: give another --master-port, or "
            "start torchrun with --standalone"
        )
    return address


def machines_of(
    executor: ExecutorBackend, nnodes: int, master_addr: str, master_port: int
) -> Machines | None:
    """Those of a model that this machine serves; None: it has all ranks."""
    if executor is ExecutorBackend.RAY:
        from inflight_backend.ranks.ray_nodes import own_address

        if nnodes == 1:
            raise ConfigurationError("--distributed-executor-backend ray needs --nnodes, from 2")
        return Machines(nnodes, master_addr or own_address(), master_port)
    if nnodes == 1:
        return None
    return Machines(nnodes, first_machine(master_addr, master_port), master_port)


def ranks_elsewhere(
    executor: ExecutorBackend,
    machines: Machines | None,
    size: int,
    model: Path,
    parameters: Mapping[str, str],
) -> AbstractContextManager[None]:
    """To be entered while a model of ``size`` ranks is served: they run on the other machines."""
    if executor is not ExecutorBackend.RAY or machines is None:
        return nullcontext()
    from inflight_backend.ranks.ray_nodes import nodes_of_ray

    may_use_gpus = parameters.get("device") != "cpu"
    return nodes_of_ray(machines, size, model.absolute(), may_use_gpus=may_use_gpus)


def _is_same(host: str, other: str) -> bool:
    try:
        return socket.gethostbyname(host) == socket.gethostbyname(other)
    except OSError:
        return False


def check_serves_once() -> None:
    """`ConfigurationError` where torchrun starts a server for each device."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if _TORCHRUN in os.environ and count != "1":
        raise ConfigurationError(
            f"torchrun has started {count} of `inflight serve`, which starts the ranks of its "
            "machine itself: use --nproc-per-node 1, and `inflight worker` on the others"
        )


@app.command(context_settings=WITH_UNDERSCORES)
def worker(
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    nnodes: NodesOption = 1,
    node_rank: NodeRankOption = 1,
    master_addr: MasterAddressOption = "",
    master_port: MasterPortOption = DEFAULT_PORT,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The checkpoint on this machine, as for `serve`; default: the first one's folder.",
        ),
    ] = None,
) -> None:
    """Run the ranks of this machine, for `inflight serve` on the first one.

    Under torchrun or srun each process is one rank. It ends with the model of the first machine;
    whatever started it starts it again.
    """
    size = Place(tensor_size=tensor_parallel_size, pipeline_size=pipeline_parallel_size).size
    try:
        code = run_worker(size, nnodes, node_rank, master_addr, master_port, model)
    except (ServingError, OSError) as error:
        say(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)


def run_worker(
    size: int, nnodes: int, node_rank: int, master_addr: str, master_port: int, model: str | None
) -> int:
    """The ranks of a machine behind the first, of ``size`` in all; what the process exits with."""
    from inflight_backend.ranks.worker import join
    from inflight_server.checkpoints import find_checkpoint

    if nnodes < 2 or node_rank == 0:
        raise ConfigurationError(
            f"--nnodes is {nnodes} and --node-rank {node_rank}: workers are the machines behind "
            "the first one, from 1"
        )
    machines = Machines(nnodes, first_machine(master_addr, master_port), master_port)
    ranks = machines.ranks_of(node_rank, size)
    folder = None if model is None else find_checkpoint(model).absolute()
    local = next((os.environ[name] for name in _LOCAL_RANK if name in os.environ), None)
    if local is None:
        return run_node(machines, ranks, folder)
    if not local.isdecimal() or int(local) >= len(ranks):
        raise ConfigurationError(
            f"LOCAL_RANK is {local}, and this machine has {len(ranks)} ranks: start one process "
            "for each"
        )
    return join(machines, ranks[int(local)], int(local), str(folder or ""))
