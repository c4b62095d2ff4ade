"""Random quantised weights of each format that the kernels take, and their numbers."""

from __future__ import annotations

import torch
from msgspec import Struct

from drift_sdk._kernels.quantised.packing import CodeType, PackedWeight, pack_weight
from drift_sdk.quantised.formats import MAGNITUDES

__all__ = ["FORMATS", "QuantisedFormat", "draw"]


class QuantisedFormat(Struct, frozen=True):
    """A format: codes, columns of a group (None: one scale a row), type of scales, zero points, offsets."""

    name: str
    codes: CodeType
    group_size: int | None
    scales: torch.dtype = torch.float32
    has_zeros: bool = False
    has_offsets: bool = False

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
    QuantisedFormat("int4 by 32 with offsets", "int4", 32, torch.float32, False, True),
    QuantisedFormat("int8 by 32", "int8", 32, torch.float16),
    QuantisedFormat("int8 by 32 with offsets", "int8", 32, torch.float16, False, True),
    QuantisedFormat("int8 by 16", "int8", 16),
    QuantisedFormat("e2m1 by 16", "e2m1", 16),
    QuantisedFormat("int8 by 16 with offsets", "int8", 16, torch.float32, False, True),
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
    """A weight and its numbers [num_columns, inner] float64, of a size that gives products of about 1. Those
    with offsets have been rounded as float32 after each operation."""
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
    elif kind.codes == "int8":
        codes = integers(256, *shape).to(torch.uint8)
        numbers = codes.view(torch.int8).double()
        scales = (spread * inner**-0.5 / 74).to(kind.scales)
    elif kind.codes == "e2m1":
        codes = integers(16, *shape).to(torch.uint8)
        numbers = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)], device=device)[
            codes.long()
        ].double()
        scales = (spread * inner**-0.5 / 3).to(kind.scales)
    elif kind.has_offsets:
        codes = integers(16, *shape).to(torch.uint8)
        numbers = codes.double()
        scales = (spread * inner**-0.5 / 8).to(kind.scales)
    else:
        codes = integers(16, *shape).to(torch.uint8)
        points = torch.full((num_columns, num_groups), 8, device=device) if zeros is None else zeros
        numbers = codes.double() - repeated(points, kind.group_size, inner)
        scales = (spread * inner**-0.5 / 8).to(kind.scales)
    numbers = numbers * repeated(scales, kind.group_size, inner)
    offsets = None
    if kind.has_offsets:
        middle = 7.5 if kind.codes == "int4" else 0.5
        offsets = (-middle * scales.float() * (0.9 + spread / 10)).to(kind.scales)
        numbers = numbers.float() + repeated(offsets, kind.group_size, inner).float()
    packed = pack_weight(
        codes,
        scales,
        zeros,
        kind.codes,
        group_size=kind.group_size,
        offsets=offsets,
        is_gated=is_gated,
        is_whole=is_whole,
    )
    return packed, numbers.double()


def repeated(values: torch.Tensor, group_size: int | None, inner: int) -> torch.Tensor:
    """[N, inner] float64 of a value for each group."""
    return values.double().repeat_interleave(group_size or inner, dim=1)[:, :inner]
