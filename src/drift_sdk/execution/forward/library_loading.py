"""Products that have cuBLAS load what the prefill steps of a model use, while the model itself is loaded.

cuBLAS allocates its workspace when it is first used, and the driver loads each of its kernels when that is
first launched. Together this takes some tenths of a second, without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drift_sdk._kernels.gemm.cublas_gemm import library_product
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.weights import meta_weights
from drift_sdk.quantised.weight import dense

__all__ = ["load_library"]

MAX_SHARE = 1 / 16
"""Most of a GPU's free memory that is taken meanwhile."""


def load_library(
    config: DecoderConfig, dtype: torch.dtype, row_counts: Sequence[int], device: torch.device
) -> None:
    """Multiply arbitrary numbers as prefill steps of `row_counts` rows do, once by each matrix of a layer.

    Without memory for that, and without row counts, cuBLAS is only started.
    """
    layer = meta_weights(config, dtype).layers[0]
    products = [
        (dense(layer.qkv), layer.qkv_bias),
        (dense(layer.output), layer.output_bias),
        (dense(layer.gate_up), layer.gate_up_bias),
        (dense(layer.down), layer.down_bias),
    ]
    products = [(matrix, bias) for matrix, bias in products if matrix.numel()]
    if dtype != torch.float32:
        rows = torch.zeros(1, 16, 16, dtype=dtype, device=device)
        torch.bmm(rows, rows, out_dtype=torch.float32)  # as products of decoding, in slices
    room = MAX_SHARE * _free_bytes(device)
    for num_rows in sorted(row_counts, reverse=True):
        for matrix, bias in products:
            num_columns, inner = matrix.shape
            if dtype.itemsize * (num_rows * (inner + num_columns) + matrix.numel()) <= room:
                library_product(
                    torch.empty(num_rows, inner, dtype=dtype, device=device),
                    torch.empty_like(matrix, device=device),
                    None if bias is None else torch.empty_like(bias, device=device),
                    torch.empty(num_rows, num_columns, dtype=dtype, device=device),
                )


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
