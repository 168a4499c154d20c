"""Which checkpoint `--model` means: one on this machine, or that of a name, fetched first."""

from __future__ import annotations

from pathlib import Path

from inflight_backend.errors import ConfigurationError
from inflight_server.checkpoints.hub import HubName
from inflight_server.checkpoints.smollm2 import NAME, find_smollm2
from inflight_server.serve.settings import DEMO_MODEL


def find_checkpoint(given: str | None, *, has_weights: bool = True) -> Path:
    """The folder or GGUF file of ``given``: one that is there, a name on the Hub (``ORG/NAME``,
    ``ORG/NAME@REVISION``, ``ORG/NAME:FILE.gguf``), ``smollm2-135m``, or None for the demo model.

    Without ``has_weights`` those of a name are not fetched. What is there as a file or folder is
    never taken for a name. `ConfigurationError` and
    `CheckpointError` say why a name cannot be fetched.
    """
    if given is None:
        return DEMO_MODEL
    folder = Path(given)
    if given == NAME and not folder.exists():
        return find_smollm2()
    name = None if folder.exists() else HubName.parse(given)
    if name is None:
        return folder.absolute()
    if folder.parent.is_dir():
        raise ConfigurationError(
            f"{given} does not exist in the folder {folder.parent}; to fetch that name from the "
            "Hub, start where there is no such folder"
        )
    return name.fetch(has_weights=has_weights)


def find_adapter(given: str) -> Path:
    """The folder of an adapter (``--lora``): one that is there, or a name on the Hub."""
    folder = Path(given)
    name = None if folder.exists() else HubName.parse(given)
    return folder.absolute() if name is None else name.fetch_adapter()
