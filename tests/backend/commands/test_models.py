"""`inflight models`."""

from __future__ import annotations

import json
import re

import pytest
from support.command_runner import run
from support.families import FAMILY_VARIANTS, read_config

from inflight_backend.models.families.registry import FAMILIES
from inflight_backend.models.families.sample import read_sample
from inflight_server.checkpoints.restrictions import restrictions_of
from inflight_server.commands.models import models


def test_every_family_is_listed() -> None:
    heads, *lines, empty, of_gguf = run(models).stdout.splitlines()
    assert heads.split() == ["architecture", "model_type", "status"]
    assert empty == ""
    assert of_gguf.startswith("GGUF files by general.architecture: llama, llama4, ")
    assert [line.split()[0] for line in lines] == sorted(FAMILIES)
    found = {re.split(" {2,}", line)[0]: re.split(" {2,}", line)[1:] for line in lines}
    assert found["Qwen3ForCausalLM"] == ["qwen3", "CPU and GPU"]
    assert found["Qwen3NextForCausalLM"] == ["qwen3_next", "without deterministic_mode, drafts"]
    listed = json.loads(run(models, "--json").stdout)
    assert listed["Gemma3nForCausalLM"] == {
        "model_type": "gemma3n_text",
        "without": ["pipeline parallelism"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_VARIANTS)
def test_what_is_listed_holds_for_a_checkpoint(name: str) -> None:
    """The sample that is asked has the traits of the family's models; what else is refused depends
    on sizes."""
    model = read_config(name)
    of_traits = {"adapters", "drafts", "KV cache reuse"}
    listed = restrictions_of(read_sample(FAMILIES[model.architecture]))
    assert of_traits.intersection(listed) == of_traits.intersection(restrictions_of(model))
