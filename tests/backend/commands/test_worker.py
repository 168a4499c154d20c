"""The places of machines on the command line, and in the environment that launchers set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import typer
from support.command_runner import run
from typer.testing import CliRunner

from inflight_backend.errors import ConfigurationError
from inflight_backend.ranks.machines import Machines
from inflight_server.commands import worker as worker_command
from inflight_server.commands.serve import serve
from inflight_server.commands.worker import WITH_UNDERSCORES, first_machine, worker
from inflight_server.serve import launcher
from inflight_server.serve.settings import ServeSettings

OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SECOND = ["--nnodes", "2", "--node-rank", "1", "--tp", "2"]


@pytest.mark.parametrize(
    ("command", "arguments", "environment", "message"),
    [
        (worker, ["--nnodes", "2", "--node-rank", "0"], {}, "workers are the machines behind"),
        (worker, SECOND, {}, "--master-addr is not set"),
        (worker, SECOND, OF_TORCHRUN, "--master-addr is not set"),
        (worker, [*SECOND, "--master-addr", "localhost"], OF_TORCHRUN,
         "port 29500 of localhost is torchrun's own: give another --master-port"),
        (worker, [*SECOND, "--master-addr", "h"], {"LOCAL_RANK": "1"}, "this machine has 1 ranks"),
        (serve, ["--nnodes", "2", "--tp", "2"], {}, "--master-addr is not set"),
        (serve, ["--world-size", "4", "--tp", "2"], {}, "--world_size is 4, and tensor_parallel"),
        (serve, ["--distributed-executor-backend", "ray"], {}, "ray needs --nnodes, from 2"),
        (serve, [], OF_TORCHRUN, "torchrun has started 2 of `inflight serve`"),
    ],
)  # fmt: skip
def test_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., None],
    arguments: list[str],
    environment: Mapping[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run(command, *arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["--tp", "4"], [2, 3]),
        (["--set", "tensor_parallel_size=2", "--set", "pipeline_parallel_size=2"], [2, 3]),
        (["--pp", "2", "--set", "tensor_parallel_size=3"], [3, 4, 5]),
        (["--set", "gpu_device_ids=0,1"], [2, 3]),
    ],
)
def test_ranks_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], ranks: list[int]
) -> None:
    """However `serve` is told how many there are."""
    found: list[int] = []

    def run_node(_: Machines, ranks: Sequence[int], __: Path | None) -> int:
        found.extend(ranks)
        return 0

    monkeypatch.setattr(worker_command, "run_node", run_node)
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "host"]
    assert run(serve, *place, *arguments).exit_code == 0
    assert found == ranks


def test_places_in_a_leader_worker_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose variables are all that a pod is told."""
    found: list[tuple[Machines, list[int]]] = []

    def run_node(machines: Machines, ranks: Sequence[int], _: Path | None) -> int:
        found.append((machines, list(ranks)))
        return 0

    monkeypatch.setattr(worker_command, "run_node", run_node)
    for name, value in {"GROUP_SIZE": "3", "WORKER_INDEX": "2", "LEADER_ADDRESS": "h-0.h"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)
    assert run(worker, "--tp", "6").exit_code == 0
    assert found == [(Machines(3, "h-0.h", 29500), [4, 5])]
    monkeypatch.setenv("LWS_WORKER_INDEX", "0")
    settings: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "run", settings.append)
    assert run(serve, "--tp", "6").exit_code == 0
    parameters = settings[0].parameters
    assert (parameters["num_nodes"], parameters["rank_address"]) == ("3", "h-0.h:29500")


def test_where_the_first_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert first_machine("", 29500) == "127.0.0.1"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert first_machine("localhost", 29501) == "localhost"
    assert first_machine("no.such.machine.invalid", 29500) == "no.such.machine.invalid"
    with pytest.raises(ConfigurationError):
        first_machine("", 29501)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--world_size", "2"], {"tensor_parallel_size": "2"}),
        (["--world_size", "4", "--tp", "2", "--pp", "2"],
         {"tensor_parallel_size": "2", "pipeline_parallel_size": "2"}),
        (["--world_size", "1"], {}),
        (["--world_size", "4", "--set", "gpu_device_ids=0,1,2,3"], {"gpu_device_ids": "0,1,2,3"}),
    ],
)  # fmt: skip
def test_flags_of_launch_triton_server(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], sizes: Mapping[str, str]
) -> None:
    """With underscores, as it has them."""
    found: list[ServeSettings] = []
    monkeypatch.setattr(launcher, "run", found.append)
    app = typer.Typer()
    app.command(context_settings=WITH_UNDERSCORES)(serve)
    ports = ["--http_port", "8100", "--grpc_port", "8101", "--metrics_port", "8102"]
    result = CliRunner().invoke(app, [*arguments, *ports], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (settings,) = found
    assert list(settings.ports.values()) == [8100, 8101, 8102]
    assert {key: settings.parameters.get(key) for key in sizes} == sizes
