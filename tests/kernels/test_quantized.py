"""What numbers of few bits stand for."""

from __future__ import annotations

import torch

from inflight_kernels import reference


def test_every_number_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # NaN
    values = codes.view(torch.float8_e4m3fn)[None]
    wide = reference.dequantize(values, torch.tensor([[0.5]]))
    assert torch.equal(wide, values.float() * 0.5)


def test_groups_have_scales_and_zeros_of_their_own() -> None:
    """The last group of 8 bits is not full; of 4 bits the low ones come first."""
    values = torch.arange(-5, 5, dtype=torch.int8).view(1, 10)
    scales, zeros = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 1.0, 2.0]])
    wide = reference.dequantize(values, scales, zeros, 4)
    assert wide.tolist() == [[-5, -4, -3, -2, -4, -2, 0, 2, 3, 6]]
    packed = reference.pack_nibbles(torch.tensor([[1, 15, 8, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0xF1, 0x08]]
    assert reference.dequantize(packed, scales[:, 1:], zeros[:, 1:], 2).tolist() == [
        [0, 28, 18, -6]
    ]


def test_the_largest_number_of_a_row_becomes_127() -> None:
    numbers, scales = reference.quantize_int8(torch.tensor([[2.54, -1.0], [0.0, 0.0]]))
    assert numbers.tolist() == [[127, -50], [0, 0]]
    torch.testing.assert_close(scales[0], torch.tensor([0.02]))


def test_numbers_of_a_codebook() -> None:
    codebook = torch.arange(16.0).square()
    packed = reference.pack_nibbles(torch.tensor([[1, 15, 8, 0], [2, 3, 4, 5]], dtype=torch.uint8))
    scales = torch.tensor([[1.0, -2.0], [0.5, 0.25]])
    wide = reference.dequantize(packed, scales, None, 2, codebook)
    assert wide.tolist() == [[1, 225, -128, 0], [2, 4.5, 4, 6.25]]
