"""Random quantised weights of each format that the kernels take, and their numbers."""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.quantised.packing import CodeType, PackedWeight, pack_weight

__all__ = ["FORMATS", "QuantisedFormat", "draw"]


class QuantisedFormat(Struct, frozen=True):
    """A format: codes, columns of a group (None: one scale a row), type of scales, zero points."""

    name: str
    codes: CodeType
    group_size: int | None
    scales: torch.dtype = torch.float32
    has_zeros: bool = False

    def __str__(self) -> str:
        return self.name


FORMATS = (
    QuantisedFormat("fp8 by channel", "e4m3", None),
    QuantisedFormat("fp8 by block", "e4m3", 128),
    QuantisedFormat("int4 by channel", "int4", None),
    QuantisedFormat("int4 by 128", "int4", 128, torch.float16),
    QuantisedFormat("int4 by 128 with zeros", "int4", 128, torch.bfloat16, True),
    QuantisedFormat("int4 by 64", "int4", 64, torch.bfloat16),
    QuantisedFormat("int4 by 32 with zeros", "int4", 32, torch.float16, True),
)


def draw(
    kind: QuantisedFormat,
    num_columns: int,
    inner: int,
    device: str,
    *,
    is_gated: bool = False,
    is_whole: bool = False,
    seed: int = 0,
) -> tuple[PackedWeight, torch.Tensor]:
    """A weight and its numbers [num_columns, inner] float64, of a size that gives products of about 1."""
    generator = torch.Generator(device).manual_seed(seed + num_columns * inner)
    shape = num_columns, inner
    num_groups = 1 if kind.group_size is None else -(-inner // kind.group_size)

    def integers(end: int, *sizes: int) -> torch.Tensor:
        return torch.randint(end, sizes, generator=generator, device=device)

    spread = 0.5 + torch.rand(num_columns, num_groups, generator=generator, device=device)
    zeros = integers(16, num_columns, num_groups) if kind.has_zeros else None
    if kind.codes == "e4m3":
        values = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        codes, numbers = values.view(torch.uint8), values.double()
        scales = (spread * inner**-0.5).to(kind.scales)
    else:
        codes = integers(16, *shape).to(torch.uint8)
        points = torch.full((num_columns, num_groups), 8, device=device) if zeros is None else zeros
        numbers = codes.double() - repeated(points, kind.group_size, inner)
        scales = (spread * inner**-0.5 / 8).to(kind.scales)
    numbers = numbers * repeated(scales, kind.group_size, inner)
    packed = pack_weight(
        codes,
        scales,
        zeros,
        kind.codes,
        group_size=kind.group_size,
        is_gated=is_gated,
        is_whole=is_whole,
    )
    return packed, numbers


def repeated(values: torch.Tensor, group_size: int | None, inner: int) -> torch.Tensor:
    """[N, inner] float64 of a value for each group."""
    return values.double().repeat_interleave(group_size or inner, dim=1)[:, :inner]
