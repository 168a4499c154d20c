"""Options that `inflight serve` and `inflight model-repository` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from inflight_backend.errors import ConfigurationError
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS

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
DecoupledOption = Annotated[
    bool,
    typer.Option(
        "--decoupled/--no-decoupled",
        help="Streaming, or one response per request for clients that call without a stream.",
    ),
]


def chosen_models(added: Sequence[str]) -> tuple[str, ...]:
    """The default models and the added ones; ``ConfigurationError`` for one that is not known."""
    for name in added:
        if name not in OPTIONAL_MODELS:
            known = ", ".join(OPTIONAL_MODELS)
            raise ConfigurationError(f"--add {name}: there is no such model; known are {known}")
    return (*DEFAULT_MODELS, *dict.fromkeys(added))
