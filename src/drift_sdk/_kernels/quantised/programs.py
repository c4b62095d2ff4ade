"""The CUDA programs of quantised weights: when they apply, and the format of a weight as their arguments."""

from __future__ import annotations

import torch

from drift_sdk._kernels.common.cuda_programs import CudaKernel, has_compiler
from drift_sdk._kernels.quantised.packing import STEP, UNIT, PackedWeight

__all__ = ["has_programs", "program", "programs_run"]

FILES = ("common/types.cu", "common/dependent_launch.cu", "quantised/formats.cu", "common/hopper.cu")
"""What the programs begin with."""
SCALES = {torch.float32: "GROUP_FLOAT32", torch.bfloat16: "GROUP_BFLOAT16", torch.float16: "GROUP_FLOAT16"}


def has_programs(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether the programs take a weight, for numbers of `dtype` beside it."""
    return weight.inner % UNIT == 0 and programs_run(weight.codes.device, dtype)


def programs_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the programs run on a device, for numbers of `dtype` beside the weights."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False

    return torch.cuda.get_device_capability(device) == (9, 0) and has_compiler()


def program(
    weight: PackedWeight, files: tuple[str, ...], name: str, function: str, more: str, **macros: int
) -> CudaKernel:
    """A kernel for a weight's format.

    files: behind FILES. name: of the kernel. function: the macro that stands for a function, of the same
    name in lower case, with its template arguments: the format, then `more`. macros: numbers.
    """
    scales = "CHANNEL" if weight.scales is None else SCALES[weight.scales.dtype]
    shifts = "ZEROS" if weight.zeros is not None else "NO_SHIFTS" if weight.offsets is None else "OFFSETS"
    num_groups = STEP // weight.group_size
    arguments = f"{weight.code_type.upper()}, {scales}, {shifts}, {num_groups}, {more}"
    return CudaKernel(
        (*FILES, *files),
        name,
        (
            (function, f"{function.lower()}<{arguments}>"),
            *((key, str(value)) for key, value in macros.items()),
        ),
    )
