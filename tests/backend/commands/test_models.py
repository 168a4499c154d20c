"""`inflight models`."""

from __future__ import annotations

import json

from support.command_runner import run

from inflight_backend.models.families.registry import FAMILIES
from inflight_server.commands.models import models


def test_every_family_is_listed() -> None:
    lines = run(models).stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FAMILIES)
    assert ["Qwen3ForCausalLM", "qwen3"] in [line.split() for line in lines]
    assert json.loads(run(models, "--json").stdout)["Qwen3ForCausalLM"] == "qwen3"
