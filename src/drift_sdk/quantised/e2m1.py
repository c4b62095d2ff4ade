"""4-bit floating-point numbers (e2m1): a sign, two bits of exponent and one of mantissa."""

from __future__ import annotations

import torch

__all__ = ["MAGNITUDES", "MAX_E2M1", "pairs_of_bytes", "quantise_e2m1"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7. The code's fourth bit is the sign."""
MAX_E2M1 = MAGNITUDES[-1]


def pairs_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, that of its low four bits first: [256, 2]."""
    magnitudes = torch.tensor(MAGNITUDES, dtype=dtype, device="cpu")
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)


def quantise_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The codes of the numbers next to those of a tensor, uint8; of equally near ones the even code.

    Numbers beyond MAX_E2M1 become MAX_E2M1.
    """
    size = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for code in range(1, len(MAGNITUDES)):
        bound = (MAGNITUDES[code - 1] + MAGNITUDES[code]) / 2
        codes += size > bound if code % 2 else size >= bound
    return codes
