"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import inflight_client

HEAVY = ("tritonclient", "grpc", "httpx", "typer", "rich", "torch")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*(name for name in {HEAVY} if name in sys.modules))"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


def test_the_table_needs_no_client_library() -> None:
    assert loaded_by("import inflight_protocol") == set()


def test_the_command_line_starts_light() -> None:
    assert loaded_by("import inflight_client.cli") <= {"typer", "rich"}


@pytest.mark.parametrize("name", inflight_client.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(inflight_client, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Client'"):
        inflight_client.Client  # noqa: B018
