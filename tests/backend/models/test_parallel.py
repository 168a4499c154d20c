"""Models on several ranks, which are threads here: logits, what each reads, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from backend.models.test_families import assert_close, logits_in_parts
from support.checkpoints import write_checkpoint
from support.families import write_family
from support.quantized import GPT_OSS, SCHEMES, write_quantized
from support.rank_threads import run_ranks

from inflight_backend.engine import EngineConfig
from inflight_backend.engine.memory_plan import make_plan
from inflight_backend.errors import CheckpointError, ConfigurationError
from inflight_backend.models.blocks.mlp import Moe
from inflight_backend.models.config import MoeConfig
from inflight_backend.models.families.registry import read_model
from inflight_backend.models.layers import parameter_tensors
from inflight_backend.models.ops import TORCH_OPS
from inflight_backend.models.parallel.place import Place
from inflight_backend.models.parallel.shards import local_model, local_parameters
from inflight_backend.models.parameters import decoder_parameters
from inflight_backend.models.weights import Checkpoint

PAIRS, FOURS = Place(tensor_size=2), Place(tensor_size=4)
STAGES = Place(pipeline_size=2)
PAIRS_OF_STAGES = Place(tensor_size=2, pipeline_size=2)
BY_EXPERTS = Place(tensor_size=2, splits_experts=True)
_PLACES = {
    "tp2": PAIRS,
    "tp4": FOURS,
    "pp2": STAGES,
    "tp2-pp2": PAIRS_OF_STAGES,
    "ep2": BY_EXPERTS,
}

_CASES = [  # what a part of a layer could get wrong, each in the smallest place where it shows
    ("llama-bias", "tp2-pp2"),  # biases of sums, and a table of an own size
    ("qwen3", "tp4"),  # fewer heads of keys than ranks; norms of heads
    ("gpt2", "tp2-pp2"),  # turned and fused linears, positions, a tied head
    ("gpt_oss", "tp2"),  # sinks, windows, experts with biases that take turns
    ("gpt_oss", "ep2"),
    ("deepseek_v3", "tp2-pp2"),  # latents, groups of experts and a shared one
]
_MORE_CASES = [
    *((name, "tp2-pp2") for name in (
        "mistral", "mixtral", "qwen2_moe-mixed", "gemma2", "gemma3", "falcon-40b", "falcon-rw",
        "bloom", "mpt", "gpt_neox", "codegen", "olmo2", "phi3", "dbrx", "opt-350m", "minicpm3",
        "llama4", "cohere2", "xglm", "persimmon",
    )),
    *((name, "tp2") for name in ("qwen3_next", "gemma3n", "gemma4-e2b", "gemma4-moe", "apertus")),
    *((name, "ep2") for name in ("mixtral", "qwen2_moe", "llama4", "deepseek_v3")),
    ("olmo2", "tp4"),
    ("falcon-7b", "tp4"),
    ("mixtral", "pp2"),
]  # fmt: skip


def check_family(folder: Path, name: str, place: str) -> None:
    tokens, expected = write_family(folder, name)
    found = run_ranks(
        _PLACES[place], lambda ranks: logits_in_parts(folder, tokens, "torch", ranks=ranks)
    )
    for logits in found[: _PLACES[place].tensor_size]:
        assert_close(logits, expected, is_recurrent=name.startswith("qwen3_next"))


@pytest.mark.parametrize(("name", "place"), _CASES)
def test_logits_of_ranks_are_those_of_transformers(tmp_path: Path, name: str, place: str) -> None:
    check_family(tmp_path, name, place)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), _MORE_CASES)
def test_logits_of_more_families(tmp_path: Path, name: str, place: str) -> None:
    check_family(tmp_path, name, place)


def test_what_stands_for_an_expert_of_another_rank_may_be_infinite() -> None:
    """As float16 may get; its weight, 0, would make no number of it."""
    config = MoeConfig(num_experts=2, top_k=1, size=4, held_experts=(0, 1))
    chooses_the_other = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    found = torch.tensor([[torch.inf], [2.0]], dtype=torch.float16).expand(2, 3)
    moe = Moe(
        config, lambda x: chooses_the_other, None, None, gate_up=lambda x, *_: x.repeat(1, 8),
        down=lambda *_: found, shared=None, shared_gate=None, ops=TORCH_OPS,
    )  # fmt: skip
    weight = chooses_the_other[1].softmax(0)[0]
    expected = torch.stack([torch.zeros(3), torch.full((3,), 2.0 * float(weight))]).half()
    torch.testing.assert_close(moe(torch.ones(2, 3, dtype=torch.float16)), expected)


_QUANTISED = [
    "ct-w4a16", "awq", "gptq-asymmetric", "ct-mxfp4", "bnb-nf4-double", "bnb-8",
    "gptq-order", "gptq-8-order", "ct-w4a16-order",
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return write_checkpoint(folder, "llama-mha", attention_bias=True, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", _QUANTISED)
def test_scales_are_cut_with_their_columns(tmp_path: Path, plain: Path, name: str) -> None:
    """And columns that are ordered by activation (desc_act) in that order."""
    folder, _ = write_quantized(plain, tmp_path, SCHEMES[name])
    tokens = torch.tensor([(7 * index + 3) % 97 for index in range(40)])
    expected = logits_in_parts(folder, tokens, "torch")
    found = run_ranks(PAIRS, lambda ranks: logits_in_parts(folder, tokens, "torch", ranks=ranks))
    assert_close(found[0], expected)


def test_an_expert_ordered_by_activation_is_not_parted(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", "mixtral", intermediate_size=64)
    pattern = re.compile(r".*experts\..*\.weight")
    folder, _ = write_quantized(tmp_path / "plain", tmp_path, SCHEMES["gptq-order"], pattern)
    assert_not_parted(folder, r"w2: .*desc_act.*tensor_parallel_size 1, or expert_parallel")


def test_a_group_of_one_scale_is_not_parted(tmp_path: Path) -> None:
    """96 columns are three groups; of experts the error names what works."""
    write_family(tmp_path / "plain", "gpt_oss")
    pattern = re.compile(r".*experts\.(gate_up|down)_proj")
    folder, _ = write_quantized(tmp_path / "plain", tmp_path, GPT_OSS, pattern)
    assert_not_parted(folder, r"down_proj: .*groups of 32.*part them at 48.*, or expert_parallel")


def assert_not_parted(folder: Path, message: str) -> None:
    model = read_model(folder)
    with Checkpoint(folder) as checkpoint:
        model = checkpoint.fit(model)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(local_parameters(model, PAIRS), torch.float32, "cpu")


class _CountingSlice:
    """A slice of a file that counts what is read of it."""

    def __init__(self, opened: object, counts: list[int]) -> None:
        self._opened, self._counts = opened, counts

    def __getitem__(self, place: object) -> torch.Tensor:
        found: torch.Tensor = self._opened[place]  # type: ignore[index]
        self._counts.append(found.numel())
        return found


class _CountingFile:
    def __init__(self, opened: object, counts: list[int]) -> None:
        self._opened, self._counts = opened, counts

    def get_slice(self, name: str) -> _CountingSlice:
        return _CountingSlice(self._opened.get_slice(name), self._counts)  # type: ignore[attr-defined]

    def get_tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._opened.get_tensor(name)  # type: ignore[attr-defined]
        self._counts.append(found.numel())
        return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "codegen"])
def test_a_rank_reads_its_part_only(tmp_path: Path, name: str) -> None:
    """Fused, turned and stacked tensors too: nothing is read that is not held, but for small
    ones (biases whose columns are sorted)."""
    write_family(tmp_path, name)
    model = read_model(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        model = checkpoint.fit(model)
        counts: list[int] = []
        for file, opened in checkpoint._files.items():
            checkpoint._files[file] = _CountingFile(opened, counts)
        specs = local_parameters(model, FOURS)
        parameters = checkpoint.load(specs, torch.float32, "cpu")
    held = sum(each.numel() for part in parameters.values() for each in parameter_tensors(part))
    assert held <= sum(counts) < 1.1 * held
    shapes = {name: tuple(part.shape) for name, part in parameters.items()}  # type: ignore[union-attr]
    local = {spec.name: spec.shape for spec in decoder_parameters(local_model(model, FOURS))}
    is_cut = {"embedding", "head.weight", "head.bias"}
    own = {name: shape for name, shape in shapes.items() if name not in is_cut}
    assert own == {name: shape for name, shape in local.items() if name in own}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"tensor_parallel_size": 3}, {}, "3, which does not divide the 4 heads of queries"),
        ({"tensor_parallel_size": 4}, {"num_key_value_heads": 4, "intermediate_size": 110},
         "4, which does not divide the 110 inner numbers"),
        ({"pipeline_parallel_size": 4}, {}, "4, and the model has only 3 layers"),
        ({"expert_parallel": True}, {}, "LlamaForCausalLM has no experts"),
        ({"tensor_parallel_size": 0}, {}, "tensor_parallel_size must be between 1 and"),
    ],
)  # fmt: skip
def test_what_cannot_be_parted_is_refused_by_name(
    tmp_path: Path, settings: dict[str, int], changes: dict[str, int], message: str
) -> None:
    write_family(tmp_path, "llama", **changes)
    with pytest.raises(ConfigurationError, match=message):
        make_plan(tmp_path, EngineConfig(**settings))  # type: ignore[arg-type]


def test_the_plan_is_that_of_a_rank(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    whole = make_plan(tmp_path, EngineConfig())
    part = make_plan(tmp_path, EngineConfig(tensor_parallel_size=2))
    assert part.num_parameters == whole.num_parameters
    assert part.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    assert whole.weight_bytes / 2 < part.weight_bytes < 0.55 * whole.weight_bytes
