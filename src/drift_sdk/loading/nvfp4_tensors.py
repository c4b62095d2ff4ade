"""NVFP4 weights in the forms of compressed-tensors and ModelOpt.

Both store codes [out, in / 2] as uint8, the even column of a pair in the low four bits, scales
[out, in / 16] as e4m3, and a scale of the tensor as float32. The latter divides the others in
compressed-tensors (weight_global_scale), and multiplies them in ModelOpt (weight_scale_2).
"""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_tensors import Shape, StoredTensors
from drift_sdk.quantised.nvfp4 import NVFP4_GROUP, Nvfp4Weight
from drift_sdk.quantised.scheme import Scheme

__all__ = [
    "compressed_nvfp4_bytes",
    "compressed_nvfp4_shape",
    "modelopt_nvfp4_bytes",
    "modelopt_nvfp4_shape",
    "read_compressed_nvfp4",
    "read_modelopt_nvfp4",
]

COMPRESSED = "weight_packed", "weight_global_scale"
MODELOPT = "weight", "weight_scale_2"
"""Names of the codes and of the scale of the tensor."""


def compressed_nvfp4_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of compressed-tensors."""
    rows, num_bytes = stored.matrix_shape("weight_packed")
    return rows, 2 * num_bytes


def modelopt_nvfp4_shape(stored: StoredTensors) -> Shape:
    """Rows and columns of a weight of ModelOpt."""
    rows, num_bytes = stored.matrix_shape("weight")
    return rows, 2 * num_bytes


def compressed_nvfp4_bytes(stored: StoredTensors, shape: Shape, _: Scheme) -> int:
    """Bytes that a weight of compressed-tensors takes. Raises ModelLoadError unless the headers of all its
    tensors are as they have to be."""
    return _check(stored, shape, *COMPRESSED)


def modelopt_nvfp4_bytes(stored: StoredTensors, shape: Shape, _: Scheme) -> int:
    """The same of a weight of ModelOpt."""
    return _check(stored, shape, *MODELOPT)


def read_compressed_nvfp4(stored: StoredTensors, shape: Shape, _: Scheme) -> Nvfp4Weight:
    """A weight of compressed-tensors: weight_packed, weight_scale and weight_global_scale."""
    return _read(stored, shape, *COMPRESSED, is_divided=True)


def read_modelopt_nvfp4(stored: StoredTensors, shape: Shape, _: Scheme) -> Nvfp4Weight:
    """A weight of ModelOpt: weight, weight_scale and weight_scale_2."""
    return _read(stored, shape, *MODELOPT, is_divided=False)


def _check(stored: StoredTensors, shape: Shape, codes: str, global_scale: str) -> int:
    rows, num_bytes = shape[0], shape[1] // 2
    num_groups = -(-shape[1] // NVFP4_GROUP)
    stored.check(codes, [(rows, num_bytes)], (torch.uint8,))
    stored.check("weight_scale", [(rows, num_groups)], (torch.float8_e4m3fn,))
    stored.check(global_scale, [(1,), ()], (torch.float32,))
    return rows * (num_bytes + num_groups + 4)


def _read(
    stored: StoredTensors, shape: Shape, codes: str, global_scale: str, *, is_divided: bool
) -> Nvfp4Weight:
    _check(stored, shape, codes, global_scale)
    scale = stored.read(global_scale).reshape(1)
    if not 0 < scale.item() < float("inf"):
        raise ModelLoadError(
            f"{stored.place(global_scale)} has {scale.item():g}, expected a positive finite number"
        )

    scales = stored.read_finite("weight_scale")
    return Nvfp4Weight(stored.read(codes), scales, scale.expand(shape[0]).contiguous(), is_divided)
