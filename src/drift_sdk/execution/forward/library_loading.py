"""Products that have cuBLAS load what the prefill steps of a model use, while the model itself is loaded.

cuBLAS allocates its workspace when it is first used, and the driver loads each of its kernels when that is
first launched. Together this takes some tenths of a second, without the interpreter's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.gemm.fastest_gemm import library_product
from drift_sdk.models.channels.mlp import MlpWeights
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.weights import meta_weights
from drift_sdk.quantised.weight import dense
from drift_sdk.spec.model import ModelSpec

__all__ = ["library_loader"]

Product = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Arguments of `library_product`."""


def library_loader(
    spec: ModelSpec, dtype: torch.dtype, row_counts: Sequence[int], device: torch.device, room: int
) -> Callable[[], None]:
    """Return a function that multiplies arbitrary numbers as prefill steps of `row_counts` rows do, once by
    each matrix of a layer. It takes up to `room` bytes of memory. If that is too little, and without row
    counts, it only starts cuBLAS.

    The function is for another thread: it waits for the interpreter's lock no more than once a product.
    """
    rows = torch.empty(1, 16, 16, dtype=dtype, device=device)
    products = _products(spec, dtype, row_counts, device, room)

    def load() -> None:
        if dtype != torch.float32:
            torch.bmm(rows, rows, out_dtype=torch.float32)  # as products of decoding, in slices
        for product in products:
            library_product(*product)

    return load


def _products(
    spec: ModelSpec, dtype: torch.dtype, row_counts: Sequence[int], device: torch.device, room: int
) -> list[Product]:
    """The products with larger ones first, in memory that all of them share."""
    layer = meta_weights(spec, dtype).layers[0]
    mixer, mlp = layer.mixer, layer.channel
    bias_of: dict[str, Tensor | None] = {}
    if isinstance(mixer, AttentionWeights):
        bias_of = {"qkv": mixer.qkv_bias, "output": mixer.output_bias}
    pairs = [(dense(matrix), bias_of.get(name)) for name, matrix in mixer.matrices.items()]
    if isinstance(mlp, MlpWeights):
        pairs += [(dense(mlp.gate_up), mlp.gate_up_bias), (dense(mlp.down), mlp.down_bias)]
    most_columns, most_inner = (max(weight.shape[dim] for weight, _ in pairs) for dim in (0, 1))
    most_rows = max(row_counts, default=0)
    sizes = (
        most_rows * most_inner,
        max(weight.numel() for weight, _ in pairs),
        most_columns,
        most_rows * most_columns,
    )
    if not row_counts or sum(sizes) * dtype.itemsize > room:
        return []

    x, weights, biases, out = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
    return [
        (
            _first(x, num_rows, weight.shape[1]),
            _first(weights, *weight.shape).T,
            None if bias is None else _first(biases, *bias.shape),
            _first(out, num_rows, weight.shape[0]),
        )
        for num_rows in sorted(row_counts, reverse=True)
        for weight, bias in pairs
    ]


def _first(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)
