"""The options that `inflight serve` passes on to `inflight openai`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer
from typer.testing import CliRunner

from inflight_client.front_options import FrontOptions, with_front_options

GIVEN = [
    "--served-model-name=org/name",
    "--chat-template=/a b/template.jinja",
    "--tool-parser=hermes",
    "--default-max-tokens=7",
    "--max-requests=3",
    "--max-body-bytes=2048",
    "--timeout=2.5",
    "--strict",
    "--allow-runtime-lora",
    "--no-page",
    "--show-text",
    "--allow-origin=https://a.example",
    "--allow-origin=*",
]


def read(words: list[str]) -> FrontOptions:
    """As a command reads ``words``."""
    app, seen = typer.Typer(), []

    @app.command()
    @with_front_options
    def command(*, front: FrontOptions) -> None:
        seen.append(front)

    CliRunner().invoke(app, words, catch_exceptions=False)
    return seen[0]


def test_every_option_is_passed_on_as_it_was_given() -> None:
    given, default = read(GIVEN), FrontOptions()
    for each in fields(FrontOptions):
        assert getattr(given, each.name) != getattr(default, each.name)
    assert given.command_line() == GIVEN
    assert (read([]), default.command_line()) == (default, [])


def test_a_file_is_found_from_any_folder() -> None:
    words = FrontOptions(chat_template=Path("template.jinja")).command_line()
    assert words == [f"--chat-template={Path.cwd()}/template.jinja"]
