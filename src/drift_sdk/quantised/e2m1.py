"""4-bit floating-point numbers (e2m1): a sign, two bits of exponent and one of mantissa."""

from __future__ import annotations

import torch

__all__ = ["MAGNITUDES", "MAX_E2M1", "pairs_of_bytes"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7. The code's fourth bit is the sign."""
MAX_E2M1 = MAGNITUDES[-1]


def pairs_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, that of its low four bits first: [256, 2]."""
    magnitudes = torch.tensor(MAGNITUDES, dtype=dtype, device="cpu")
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)
