"""The gate of an MLP: silu(gate) * up.

Bytes: three elements of the storage type for each of the output; nothing else counts.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_rows
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers

__all__ = ["swiglu", "swiglu_reference"]

BLOCK = 1_024
NUM_WARPS = 4


@triton.jit
def _swiglu(
    gate_up, output, gate_up_stride, output_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    gate_up += row * gate_up_stride + column
    gate = tl.load(gate_up, mask=is_column, other=0.0)
    up = tl.load(gate_up + SIZE, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    product = (gated * up.to(tl.float32)).to(gate.dtype)
    tl.store(output + row * output_stride + column, product, mask=is_column)


def swiglu(gate_up: Tensor, output: Tensor) -> None:
    """output [N, I] = silu(gate) * up of gate_up [N, 2 * I], gate before up, in one storage type.

    The gated value is rounded to that type before the product. Rows may stand apart. Raises ValueError for
    another shape, type or layout.
    """
    num_rows, size = output.shape
    check_rows("output", output, (num_rows, size), output.dtype)
    check_rows("gate_up", gate_up, (num_rows, 2 * size), output.dtype)
    _swiglu[(num_rows, -(-size // BLOCK))](
        gate_up,
        output,
        gate_up.stride(0),
        output.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
        PDL=uses_pdl(),
        num_warps=NUM_WARPS,
        **launch_options(),
    )


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the storage type."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
