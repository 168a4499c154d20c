"""Writes the tables of docs/models.md from the registry of model families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from page import table, write

from inflight_backend.models.families.registry import FAMILIES, ReadFamily
from inflight_backend.models.families.sample import read_sample
from inflight_backend.models.families.wrapped import WRAPPERS
from inflight_backend.models.gguf.architectures import ARCHITECTURES
from inflight_server.checkpoints.restrictions import restrictions_of

HEADING = "## Families\n"
NOTE = "\nThe tables are filled by `python tools/write_models_docs.py`.\n\n"


def render(old: str) -> str:
    """``old`` with the families as they are now."""
    names: dict[ReadFamily, list[str]] = {}
    for name in sorted(FAMILIES.keys() - WRAPPERS.keys()):
        names.setdefault(FAMILIES[name].reads, []).append(name)
    rows = [
        (_listed(found), _types(found), _summary(read), _status(found[0]))
        for read, found in names.items()
    ]
    parts = [
        HEADING,
        NOTE,
        table(("architecture", "`model_type`", "beside a Llama", "goes without"), rows),
        "\nDecoders inside multimodal checkpoints; `text_config` may name another one:\n\n",
        table(("architecture", "`model_type`", "usual decoder"), _wrappers()),
        "\nGGUF files; several families may share a name:\n\n",
        table(("`general.architecture`", "family"), _gguf()),
    ]
    return old.partition(HEADING)[0] + "".join(parts)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _types(architectures: Iterable[str]) -> str:
    found = (each for name in architectures for each in FAMILIES[name].model_types)
    return _listed(dict.fromkeys(found))


def _summary(read: ReadFamily) -> str:
    """The first paragraph of what the family's function says."""
    text = (read.__doc__ or "").partition("\n\n")[0].replace("``", "`")
    return " ".join(text.split())


def _status(architecture: str) -> str:
    return ", ".join(restrictions_of(read_sample(FAMILIES[architecture])))


def _wrappers() -> Iterator[tuple[str, str, str]]:
    for name, (model_type, text_type) in sorted(WRAPPERS.items()):
        yield f"`{name}`", f"`{model_type}`", f"`{text_type}`"


def _gguf() -> Iterator[tuple[str, str]]:
    for name, architecture in sorted(ARCHITECTURES.items()):
        yield f"`{name}`", f"`{architecture.name}`"


if __name__ == "__main__":
    write(__doc__, "models.md", render)
