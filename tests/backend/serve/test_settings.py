"""``--set key=value``: what is taken and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings, parse_overrides

MODEL = Path("checkpoint")


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    values = parse_overrides(["max_batch_size=64", "scheduler_class=a.b:C"], MODEL)
    assert values == {"max_batch_size": "64", "scheduler_class": "a.b:C"}


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_overrides(["tokenizer_dir=t"], MODEL) == {"tokenizer_dir": str(tmp_path / "t")}


def test_keys_of_other_models_are_no_parameters_of_the_llm() -> None:
    items = ["accumulate_tokens=true", "add_special_tokens=false", "skip_special_tokens=FALSE"]
    items += ["tensorrt_llm_model_name=mine-2", "max_batch_size=4"]
    values = parse_overrides(items, MODEL, OPTIONAL_MODELS)
    assert values == dict(item.split("=") for item in items)
    assert ServeSettings(parameters=values).llm_parameters.max_batch_size == 4
    for item in items[:-1]:
        with pytest.raises(ConfigurationError, match=f"{item.split('=')[0]} is for the model"):
            parse_overrides([item], MODEL)


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "vllm_model"])
def test_a_key_of_two_models_needs_one_of_them(model: str) -> None:
    item = "tensorrt_llm_model_name=mine"
    assert parse_overrides([item], MODEL, (*DEFAULT_MODELS, model)) == dict([item.split("=")])
    with pytest.raises(ConfigurationError, match="is for the model tensorrt_llm_bls or vllm_model"):
        parse_overrides([item], MODEL, (*DEFAULT_MODELS, "preprocessing"))


@pytest.mark.parametrize("item", ["accumulate_tokens=1", "tensorrt_llm_model_name=${x}"])
def test_values_of_other_models_are_checked(item: str) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        parse_overrides([item], MODEL, OPTIONAL_MODELS)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["max_batch_size"], "needs key=value, got 'max_batch_size'"),
        (["=4"], "needs key=value"),
        (["max_batch=4"], "did you mean max_batch_size"),
        (["max_batch_size=0"], "max_batch_size is 0: it must be between 1 and 65536"),
        (["device=tpu"], "choose one of auto, cpu, cuda"),
        (["max_batch_size=4", "max_batch_size=8"], "max_batch_size twice: '4' and '8'"),
        (["gpt_model_path=x"], "cannot change gpt_model_path: give the checkpoint with --model"),
        (["drain_file=x"], "cannot change drain_file"),
        (["FORCE_CPU_ONLY_INPUT_TENSORS=yes"], "unknown setting"),
        (["enable_trt_overlap=true"], "not supported"),
    ],
)
def test_bad_items_are_refused_by_name(items: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_overrides(items, MODEL)


def test_derived_values() -> None:
    settings = ServeSettings(host="0.0.0.0")
    assert settings.is_demo
    assert settings.is_public
    assert settings.local_host == "127.0.0.1"
    assert set(settings.addresses.values()) == {"0.0.0.0"}
    assert settings.tokenizer_dir == DEMO_MODEL
    assert ServeSettings(parameters={"tokenizer_dir": "/t"}).tokenizer_dir == Path("/t")


def test_an_ipv6_address_is_written_as_each_server_of_triton_reads_it() -> None:
    settings = ServeSettings(host="::")
    assert settings.is_public
    assert (settings.local_address, settings.local_host) == ("::1", "[::1]")
    assert settings.addresses == {
        "--http-address": "ipv6:::",
        "--metrics-address": "ipv6:::",
        "--grpc-address": "[::]",
    }
