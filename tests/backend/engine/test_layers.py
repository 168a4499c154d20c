"""The linear layers, also on a GPU whose library has no FP8 product with a scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inflight_backend.models import layers, triton_ops
from inflight_backend.models.layers import Fp8Linear, Linear, Quantized, is_refused, quantize
from inflight_backend.models.triton_ops import TritonFp8Linear, TritonLinear

ROWS, COLUMNS = 48, 96


class Library:
    """`torch._scaled_mm` of a GPU: it refuses scales per row for up to ``most_refused`` tokens."""

    def __init__(self, most_refused: int, message: str = "CUBLAS_STATUS_NOT_SUPPORTED") -> None:
        self.most_refused = most_refused
        self.message = message
        self.num_asked = 0

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert use_fast_accum
        self.num_asked += 1
        assert (scale_a.shape, scale_b.shape) == ((len(x), 1), (1, weight.shape[1]))
        if len(x) <= self.most_refused:
            raise RuntimeError(f"CUDA error: {self.message} when calling `cublasLtMatmul`")
        product = (x.float() @ weight.float()) * scale_a * scale_b
        return (product if bias is None else product + bias).to(out_dtype)


@pytest.fixture(autouse=True)
def _nothing_was_refused() -> Iterator[None]:
    layers._refused.clear()
    yield
    layers._refused.clear()


class CudaLinear(TritonFp8Linear):
    """Products as on a GPU."""

    def __call__(self, x: Quantized) -> Tensor:
        product = None if len(x.values) <= self._most_tokens else self._library_product(x)
        return self._without_library(x) if product is None else product


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_the_library_refuses_is_made_without_it(
    monkeypatch: pytest.MonkeyPatch, has_bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(most_refused=8)
    monkeypatch.setattr(torch, "_scaled_mm", library)
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    bias = torch.randn(ROWS, dtype=torch.bfloat16) if has_bias else None
    linear, plain = CudaLinear(weight, bias, is_deterministic=False), Fp8Linear(weight, bias)
    few, many = (torch.randn(count, COLUMNS, dtype=torch.bfloat16) for count in (5, 9))
    for _ in range(3):
        for x in (few, many):
            found = linear(quantize(x))
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, plain(quantize(x)), rtol=1e-2, atol=1e-2)
    assert library.num_asked == 1 + 3, "a shape is asked for once"
    assert is_refused(5, ROWS, COLUMNS)
    assert not is_refused(9, ROWS, COLUMNS)
    assert caplog.text.count("no FP8 product") == 1


def test_few_tokens_do_not_ask_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    library = Library(most_refused=0)
    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.setattr(Linear, "__call__", lambda _, x: asked.append(len(x)))
    monkeypatch.setattr(triton_ops, "few_tokens", lambda _: 16)
    weight = torch.randn(ROWS, COLUMNS)
    plain, fp8 = (
        TritonLinear(weight, is_deterministic=False),
        CudaLinear(weight, is_deterministic=False),
    )
    for count in (1, 16, 17):
        x = torch.randn(count, COLUMNS)
        plain(x)
        fp8(quantize(x))
    assert asked == [17]
    assert library.num_asked == 1


def test_other_errors_of_the_device_stay_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Library(8, "an illegal memory access"))
    linear = CudaLinear(torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16), is_deterministic=False)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        linear(quantize(torch.randn(5, COLUMNS, dtype=torch.bfloat16)))
    assert not is_refused(5, ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((8, 9), "2.11.0+cu130", False),
        ((8, 9), "2.12.1", True),
        ((9, 0), "2.11.0+cu130", True),
        ((12, 0), "2.10.0", True),
    ],
)
def test_ada_of_an_old_torch_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "__version__", version)
    takes_row_scales = layers._takes_row_scales.__wrapped__
    assert takes_row_scales(torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize(("num_tokens", "has_bias"), [(1, True), (3, False), (600, True)])
def test_linear_in_every_dtype(
    dtype: torch.dtype, tolerance: float, num_tokens: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.inference_mode():
        answer = Linear(weight, bias)(x)
    assert answer.dtype == dtype
    torch.testing.assert_close(answer.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_bias", [True, False])
def test_fp8_linear(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator)
    weight[3] *= 1000  # a large row has a scale of its own and spoils no other
    bias = torch.randn(48, generator=generator) if has_bias else None
    x = torch.randn(64, 256, generator=generator)
    x[2] /= 100
    found = Fp8Linear(weight, bias)(quantize(x)) - (0 if bias is None else bias)
    expected = x @ weight.T
    # Two roundings to 4 bits, at most 2^-4 each; errors of 256 products average out.
    error = (found - expected).norm(dim=0) / expected.norm(dim=0)
    assert float(error.max()) < 0.06
    assert float(error.min()) > 0.001
    assert found.dtype == weight.dtype


def test_quantised_rows_use_the_whole_range() -> None:
    values, scales = quantize(torch.tensor([[1.0, -7.0, 0.0], [0.0, 0.0, 0.0], [2e4, 1.0, -3e4]]))
    assert values.float().abs().amax(dim=1).tolist() == [448.0, 0.0, 448.0]
    assert torch.isfinite(scales).all()
    assert (values.float() * scales)[0, 1] == pytest.approx(-7.0)
