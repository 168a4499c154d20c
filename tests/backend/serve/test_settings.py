"""``--set key=value``: what is taken and what is refused; addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight_backend.errors import ConfigurationError
from inflight_server.serve.repository import DEFAULT_MODELS, OPTIONAL_MODELS
from inflight_server.serve.settings import DEMO_MODEL, ServeSettings, parse_overrides

MODEL = Path("checkpoint")


def test_pairs_become_parameters_and_relative_paths_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    items = ["max_batch_size=64", "scheduler_class=a.b:C", "guided_decoding_backend=none"]
    values = parse_overrides([*items, "tokenizer_dir=t", "record_file="], MODEL)
    given = dict(item.split("=") for item in items)
    assert values == {**given, "tokenizer_dir": str(tmp_path / "t"), "record_file": ""}


def test_keys_of_other_models_need_one_of_them_and_are_no_parameters_of_the_llm() -> None:
    items = ["accumulate_tokens=true", "add_special_tokens=false", "skip_special_tokens=FALSE"]
    items += ["tensorrt_llm_model_name=mine-2", "max_batch_size=4"]
    values = parse_overrides(items, MODEL, OPTIONAL_MODELS)
    assert values == dict(item.split("=") for item in items)
    assert ServeSettings(parameters=values).llm_parameters.max_batch_size == 4
    for model in ("tensorrt_llm_bls", "vllm_model"):
        assert parse_overrides(["tensorrt_llm_model_name=mine"], MODEL, (*DEFAULT_MODELS, model))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["max_batch_size"], "needs key=value, got 'max_batch_size'"),
        (["=4"], "needs key=value"),
        (["max_batch=4"], "did you mean max_batch_size"),
        (["max_batch_size=0"], "max_batch_size is 0: it must be between 1 and 65536"),
        (["max_batch_size=x"], "max_batch_size must be a whole number, got 'x'"),
        (["device=tpu"], "choose one of auto, cpu, cuda"),
        (["max_batch_size=4", "max_batch_size=8"], "max_batch_size twice: '4' and '8'"),
        (["gpt_model_path=x"], "cannot change gpt_model_path: give the checkpoint with --model"),
        (["drain_file=x"], "cannot change drain_file"),
        (["FORCE_CPU_ONLY_INPUT_TENSORS=yes"], "unknown setting"),
        (["enable_trt_overlap=true"], "not supported"),
        (["accumulate_tokens=true"], "is for the model tensorrt_llm_bls: ask for it, --add"),
        (["add_special_tokens=1"], "add_special_tokens must be true or false, got '1'"),
        (["skip_special_tokens=true"], "is for the model postprocessing: ask for it, --add"),
        (["tensorrt_llm_model_name=x"], "is for the model tensorrt_llm_bls or vllm_model"),
    ],
)
def test_bad_items_are_refused_by_name(items: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_overrides(items, MODEL, (*DEFAULT_MODELS, "preprocessing"))


def test_a_model_name_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="must be the name of a model"):
        parse_overrides(["tensorrt_llm_model_name=${x}"], MODEL, OPTIONAL_MODELS)


@pytest.mark.parametrize(
    ("host", "local_address", "local_host", "addresses"),
    [
        ("0.0.0.0", "127.0.0.1", "127.0.0.1", ("0.0.0.0", "0.0.0.0")),
        ("::", "::1", "[::1]", ("ipv6:::", "[::]")),
        ("10.1.2.3", "10.1.2.3", "10.1.2.3", ("10.1.2.3", "10.1.2.3")),
    ],
)
def test_an_address_is_written_as_each_server_of_triton_reads_it(
    host: str, local_address: str, local_host: str, addresses: tuple[str, str]
) -> None:
    settings = ServeSettings(host=host)
    assert settings.is_public == host.endswith(("0.0", "::"))
    assert (settings.local_address, settings.local_host) == (local_address, local_host)
    assert settings.addresses == {
        "--http-address": addresses[0],
        "--metrics-address": addresses[0],
        "--grpc-address": addresses[1],
    }


def test_the_tokenizer_is_that_of_the_model_unless_another_folder_is_given() -> None:
    assert ServeSettings().is_demo
    assert ServeSettings().tokenizer_dir == DEMO_MODEL
    assert ServeSettings(parameters={"tokenizer_dir": "/t"}).tokenizer_dir == Path("/t")
