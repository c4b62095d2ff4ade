from __future__ import annotations

import math

import pytest
import torch

from drift_sdk.loading.stored_formats import BLOCK_BYTES, MAX_SCALE, dequantise_mxfp4
from drift_sdk.quantised.formats import MXFP4_BLOCK

# The sixteen codes of e2m1, as the OCP specification lists them: sign, two bits of exponent with bias 1, one
# bit of mantissa.
E2M1 = {
    0b0000: 0.0,
    0b0001: 0.5,
    0b0010: 1.0,
    0b0011: 1.5,
    0b0100: 2.0,
    0b0101: 3.0,
    0b0110: 4.0,
    0b0111: 6.0,
    0b1000: -0.0,
    0b1001: -0.5,
    0b1010: -1.0,
    0b1011: -1.5,
    0b1100: -2.0,
    0b1101: -3.0,
    0b1110: -4.0,
    0b1111: -6.0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_bytes_and_scales_are_exact(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, BLOCK_BYTES)
    codes = [code for byte in range(256) for code in (byte % 16, byte // 16)]
    values = torch.tensor([E2M1[code] for code in codes], dtype=torch.float64)
    for scale in range(MAX_SCALE + 1):
        found = dequantise_mxfp4(blocks, torch.full((16,), scale, dtype=torch.uint8), dtype)
        assert found.dtype == dtype
        found = found.double().flatten()
        assert torch.equal(found, values * 2.0 ** (scale - 127))
        assert torch.equal(found.signbit(), values.signbit())


def test_larger_scales_are_not_finite() -> None:
    blocks = torch.full((1, BLOCK_BYTES), 0x77, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (253, 254):
            assert dequantise_mxfp4(blocks, torch.tensor([scale], dtype=torch.uint8), dtype).isinf().all()
        assert dequantise_mxfp4(blocks, torch.tensor([255], dtype=torch.uint8), dtype).isnan().all()


def test_each_block_has_its_own_scale_and_order_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 5, BLOCK_BYTES), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 3, 5), generator=generator, dtype=torch.uint8)
    found = dequantise_mxfp4(blocks, scales, torch.float32)
    assert found.shape == (2, 3, 5 * MXFP4_BLOCK)
    for expert, row, column in ((0, 0, 0), (1, 2, 159), (0, 1, 33), (1, 0, 64), (1, 1, 95)):
        block, place = divmod(column, MXFP4_BLOCK)
        byte = int(blocks[expert, row, block, place // 2])
        code = byte >> 4 if place % 2 else byte & 15
        expected = math.ldexp(E2M1[code], int(scales[expert, row, block]) - 127)
        assert found[expert, row, column] == expected
