"""Commands of ``inflight`` that need the server side.

Each module of this folder with a typer app named ``app`` adds its commands: a new command is a new
file. Importing a module must be light, because ``inflight --help`` imports them all: no torch, no
server; a command imports what is heavy when it runs.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import typer

from inflight_client.cli import add_missing_command

app = typer.Typer()

for _found in iter_modules(__path__, f"{__name__}."):
    try:
        _commands = getattr(import_module(_found.name), "app", None)
    except ImportError as error:
        add_missing_command(app, _found.name.rpartition(".")[2].replace("_", "-"), error)
    else:
        if _commands is not None:
            app.registered_commands += _commands.registered_commands
