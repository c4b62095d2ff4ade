"""FP8 weights: e4m3 numbers [out, in] with scales for the tensor, for each row or for each block."""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_tensors import Shape, StoredTensors
from drift_sdk.quantised.fp8 import Fp8Weight
from drift_sdk.quantised.scheme import Scheme

__all__ = ["FP8_SCALES", "SCALE_DTYPES", "fp8_bytes", "fp8_shape", "read_fp8"]

FP8_SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def fp8_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight."""
    return stored.matrix_shape("weight")


def fp8_bytes(stored: StoredTensors, shape: Shape, scheme: Scheme) -> int:
    """Bytes that a weight takes. Raises ModelLoadError unless the headers of all its tensors are as the
    scheme says."""
    (rows, columns), (height, width) = shape, _check(stored, shape, scheme)
    return rows * columns + 4 * -(-rows // height) * -(-columns // width)


def read_fp8(stored: StoredTensors, shape: Shape, scheme: Scheme) -> Fp8Weight:
    """A weight: `weight`, and its scales in one of FP8_SCALES. One scale becomes one of each row."""
    (rows, columns), (height, width) = shape, _check(stored, shape, scheme)
    scales = stored.read_finite(_scale_part(stored, scheme)).to(torch.float32)
    counts = -(-rows // height), -(-columns // width)
    scales = scales.reshape(1, 1).expand(counts) if scales.numel() == 1 else scales.reshape(counts)
    return Fp8Weight(stored.read("weight"), scales.contiguous(), (height, width))


def _check(stored: StoredTensors, shape: Shape, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of the weight that share a scale in memory."""
    rows, columns = shape
    stored.check("weight", [shape], (torch.float8_e4m3fn,))
    part, allowed = _scale_part(stored, scheme), _allowed_shapes(rows, columns, scheme)
    found = stored.check(part, [shape for shape, _ in allowed], SCALE_DTYPES)
    fitting = [block for shape, block in allowed if shape == found]
    if len({(min(height, rows), width) for height, width in fitting}) > 1:
        sizes = " and of ".join(f"{height}x{width}" for height, width in fitting)
        raise ModelLoadError(f"{stored.place(part)} fits blocks of {sizes}")

    return (1, columns) if torch.Size(found).numel() == 1 else fitting[0]


def _allowed_shapes(rows: int, columns: int, scheme: Scheme) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """The shapes that scales may have, each with the rows and columns that share a scale."""
    allowed: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    if "tensor" in scheme.scale_shapes:
        allowed += [(shape, (rows, columns)) for shape in ((1,), (), (1, 1))]
    if "channel" in scheme.scale_shapes:
        allowed += [(shape, (1, columns)) for shape in ((rows, 1), (rows,))]
    for height, width in scheme.blocks:
        block = height, min(width, columns)
        allowed.append(((-(-rows // block[0]), -(-columns // block[1])), block))
    return allowed


def _scale_part(stored: StoredTensors, scheme: Scheme) -> str:
    """The last part of the name of the scales, also if they are missing."""
    found = [part for part in FP8_SCALES if stored.has(part)]
    if len(found) > 1:
        raise ModelLoadError(f"{stored.place(found[0])} is beside {found[1]}, expected one of them")

    usual = FP8_SCALES[0] if scheme.name == "fp8" and scheme.blocks else FP8_SCALES[1]
    return found[0] if found else usual
