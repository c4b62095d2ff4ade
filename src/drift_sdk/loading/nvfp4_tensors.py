"""NVFP4 weights in the forms of compressed-tensors and ModelOpt.

Both store codes [out, in / 2] as uint8, the even column of a pair in the low four bits, scales
[out, in / 16] as e4m3, and a scale of the tensor as float32. The latter divides the others in
compressed-tensors (weight_global_scale), and multiplies them in ModelOpt (weight_scale_2).
"""

from __future__ import annotations

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.stored_tensors import StoredTensors
from drift_sdk.quantised.nvfp4 import NVFP4_GROUP, Nvfp4Weight
from drift_sdk.quantised.scheme import Scheme

__all__ = [
    "compressed_nvfp4_shape",
    "modelopt_nvfp4_shape",
    "read_compressed_nvfp4",
    "read_modelopt_nvfp4",
]


def compressed_nvfp4_shape(stored: StoredTensors) -> tuple[int, int]:
    """Rows and columns of a weight of compressed-tensors."""
    rows, num_bytes = stored.matrix_shape("weight_packed")
    return rows, 2 * num_bytes


def modelopt_nvfp4_shape(stored: StoredTensors) -> tuple[int, int]:
    """Rows and columns of a weight of ModelOpt."""
    rows, num_bytes = stored.matrix_shape("weight")
    return rows, 2 * num_bytes


def read_compressed_nvfp4(stored: StoredTensors, _: Scheme) -> Nvfp4Weight:
    """A weight of compressed-tensors: weight_packed, weight_scale and weight_global_scale."""
    return _read(stored, "weight_packed", "weight_global_scale", is_divided=True)


def read_modelopt_nvfp4(stored: StoredTensors, _: Scheme) -> Nvfp4Weight:
    """A weight of ModelOpt: weight, weight_scale and weight_scale_2."""
    return _read(stored, "weight", "weight_scale_2", is_divided=False)


def _read(stored: StoredTensors, codes: str, global_scale: str, *, is_divided: bool) -> Nvfp4Weight:
    rows, num_bytes = stored.matrix_shape(codes)
    num_groups = -(-2 * num_bytes // NVFP4_GROUP)
    found = stored.shape(global_scale)
    if found not in ((), (1,)):
        raise ModelLoadError(f"{stored.place(global_scale)} has shape {list(found)}, expected [1]")

    scale = stored.read(global_scale, found, (torch.float32,)).reshape(1)
    if not 0 < scale.item() < float("inf"):
        raise ModelLoadError(
            f"{stored.place(global_scale)} has {scale.item():g}, expected a positive finite number"
        )

    return Nvfp4Weight(
        stored.read(codes, (rows, num_bytes), (torch.uint8,)),
        stored.read("weight_scale", (rows, num_groups), (torch.float8_e4m3fn,)),
        scale.expand(rows).contiguous(),
        is_divided,
    )
