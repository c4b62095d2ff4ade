"""References of the kernels of `drift_sdk._kernels.quantised`."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.quantised.packing import BYTE_CODES, CODE_UNIT, PANEL, UNIT, PackedWeight, row_order
from drift_sdk.quantised.formats import MAGNITUDES


def dequantise_reference(weight: PackedWeight) -> Tensor:
    """Return the numbers of a weight, float32 [num_columns, inner], in plain torch."""
    panels, padded = weight.num_panels, -(-weight.inner // UNIT) * UNIT
    if weight.code_type in BYTE_CODES:
        # (panel, unit, tile, chunk, g, t, half of rows, 16 columns, neighbour, half of 16 columns)
        parts = weight.codes.view(panels, padded // 64, 4, 2, 8, 4, 2, 2, 2, 2)
        parts = parts.permute(0, 2, 6, 4, 1, 3, 7, 9, 5, 8)
        kind = torch.float8_e4m3fn if weight.code_type == "e4m3" else torch.int8
        parts = parts.reshape(panels * PANEL, padded).view(kind)
    else:
        # (panel, unit, tile, g, t, half of rows, 32 columns, neighbour, 16 columns, half of those)
        pairs = weight.codes.view(panels, padded // 64, 4, 8, 4, 2, 2, 2, 2)
        parts = torch.stack((pairs & 15, pairs >> 4), dim=-1).permute(0, 2, 5, 3, 1, 6, 8, 9, 4, 7)
    if weight.code_type == "e2m1":
        numbers_of_codes = [*MAGNITUDES, *(-size for size in MAGNITUDES)]
        parts = torch.tensor(numbers_of_codes, dtype=torch.float32, device=parts.device)[parts.long()]
    numbers = parts.to(torch.float32).reshape(panels * PANEL, padded)

    def by_column(values: Tensor) -> Tensor:
        rows = values.to(torch.float32).permute(0, 2, 4, 3, 1).reshape(panels * PANEL, -1)
        return rows.repeat_interleave(weight.group_size, dim=1)

    if weight.zeros is not None:
        numbers += by_column(weight.zeros) * CODE_UNIT
    else:
        numbers -= weight.zero_point
    if weight.scales is not None:
        numbers *= by_column(weight.scales)
    if weight.offsets is not None:
        numbers += by_column(weight.offsets)
    numbers = numbers[: weight.num_columns, : weight.inner]
    if weight.row_scales is not None:
        numbers *= weight.row_scales[:, None]
    natural = torch.empty_like(numbers)
    natural[row_order(weight.num_columns, weight.is_gated, numbers.device)] = numbers
    return natural
