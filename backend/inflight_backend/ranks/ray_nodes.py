"""Ranks on the nodes of a Ray cluster, which reserves their devices and starts them.

A placement group has a bundle for each machine of the model; an actor in each but the first runs
the ranks of its machine, as `inflight worker` does, and again when they have ended. Ray carries
nothing of what ranks tell one another: that goes the way it goes without Ray.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inflight_backend.errors import ConfigurationError
from inflight_backend.ranks.machines import JOIN_SECONDS, Machines, run_node

_AGAIN_SECONDS = 1.0


class NodeRanks:
    """The actor: the ranks of one machine."""

    def run(self, machines: Machines, node: int, num_ranks: int, model: str) -> None:
        """Until the model is unloaded; ``num_ranks``: of all machines."""
        while run_node(machines, machines.ranks_of(node, num_ranks), Path(model)):
            time.sleep(_AGAIN_SECONDS)


def own_address() -> str:
    """Of this machine, as the nodes of a cluster see it."""
    address: str = _import_ray().util.get_node_ip_address()
    return address


@contextmanager
def nodes_of_ray(
    machines: Machines, num_ranks: int, model: Path, *, may_use_gpus: bool
) -> Iterator[None]:
    """The ranks of all ``machines`` but the first, this one, run for as long as this is entered.

    ``RAY_ADDRESS`` says which cluster; without it, that of this machine. ``model``: the same folder
    on all nodes. ``may_use_gpus``: where the cluster has GPUs a rank takes one, else a CPU.
    `ConfigurationError` where Ray is not installed, there is no cluster, or it has no room.
    """
    ray = _import_ray()
    size = len(machines.ranks_of(0, num_ranks))
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise ConfigurationError(f"there is no Ray cluster: {error}") from None
    kind = "GPU" if may_use_gpus and "GPU" in ray.cluster_resources() else "CPU"
    try:
        yield from _run(ray, machines, num_ranks, model, {kind: size})
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigurationError(
            "--distributed-executor-backend ray needs Ray: pip install '.[ray]' in a clone"
        ) from None
    return ray


def _run(
    ray: Any, machines: Machines, num_ranks: int, model: Path, devices: dict[str, float]
) -> Iterator[None]:
    from ray.util import get_node_ip_address, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    here = {f"node:{get_node_ip_address()}": 0.001}
    bundles = [devices | (here if node == 0 else {}) for node in range(machines.num_nodes)]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    actors = []
    try:
        if not group.wait(JOIN_SECONDS):
            wanted = ", ".join(f"{count:g} {name}" for name, count in devices.items())
            raise ConfigurationError(
                f"Ray finds no {machines.num_nodes} nodes with {wanted} free each within "
                f"{JOIN_SECONDS:g} s, of which one is this machine; it has "
                f"{ray.available_resources()}"
            )
        for node in range(1, machines.num_nodes):
            actor = ray.remote(NodeRanks).options(
                num_cpus=devices.get("CPU", 0),
                num_gpus=devices.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=node
                ),
            )
            actors.append(actor.remote())
            actors[-1].run.remote(machines, node, num_ranks, str(model))
        yield
    finally:
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        remove_placement_group(group)
