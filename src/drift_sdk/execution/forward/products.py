"""Products of a forward pass with the weights of layers: exact ones, and those of the vendor's library.

Products that have cuBLAS load what the prefill steps of a model use, while the model itself is loaded.

cuBLAS allocates its workspace when it is first used, and the driver loads each of its kernels when that is
first launched. Together this takes some tenths of a second, without the interpreter's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.exchange import PeerSums
from drift_sdk._kernels.gemm.gemm import GemmConfig, fastest_gated_multiply, fastest_multiply, library_product
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.gates import glu
from drift_sdk._kernels.layers.soft_cap import soft_cap
from drift_sdk._kernels.quantised.packing import dequantise
from drift_sdk._kernels.quantised.quantised_gemm import quantised_gated_multiply, quantised_multiply
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.rows import take_gate_up, take_partials
from drift_sdk.models.channels import MlpWeights, ParallelWeights
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.weights import meta_weights
from drift_sdk.quantised.weight import Matrix, dense
from drift_sdk.spec.model import Activation, ModelSpec


def multiply_quantised(workspace: Workspace, x: Tensor, weight: KernelWeight) -> Tensor:
    """Partial sums [num_slices, R, N] of x [R, K] times weight [N, K] transposed, valid until the next
    product. A row has the same bits whatever R is."""
    packed = weight.packed
    sums = take_partials(workspace, packed.num_slices, x.shape[0], packed.num_columns)
    quantised_multiply(x, packed, sums)
    return sums


def multiply_gated(
    workspace: Workspace,
    x: Tensor,
    weight: KernelWeight,
    out: Tensor,
    activation: Activation,
    bias: Tensor | None,
) -> None:
    """Fill out [R, N] with the gated activation of x [R, K] times weight [2 N, K] transposed, plus bias
    [2 N]. A row has the same bits whatever R is."""
    gate_up = take_gate_up(workspace, x.shape[0], weight.packed.num_columns, x.dtype)
    quantised_gated_multiply(x, weight.packed, out, gate_up, activation, bias)


def expand(workspace: Workspace, weight: KernelWeight, dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] of a weight, each rounded to `dtype`, valid until the next weight is expanded."""
    out = workspace.take("expanded_weight", weight.shape, dtype)
    dequantise(weight.packed, out)
    return out


def multiply_head(
    normed: Tensor, head: Matrix, logits: Tensor, tuned: TunedTable, cap: float | None = None
) -> None:
    """Fill logits [R, V] fp32 with normed [R, H] times head [V, H] transposed.

    normed: the normalised residual stream after the last layer. cap: as `ModelSpec.logits_cap`.
    """
    _multiply(normed, head, logits, tuned)
    if cap is not None:
        soft_cap(logits, cap)


def _multiply(normed: Tensor, head: Matrix, logits: Tensor, tuned: TunedTable) -> None:
    if isinstance(head, KernelWeight):
        quantised_multiply(normed, head.packed, logits[None])
        return

    weight = dense(head)
    gemm = tuned.gemm(weight.shape[0], weight.shape[1], is_whole=True)
    if not fastest_multiply(normed, weight, logits[None], gemm.config(normed.shape[0])):
        tuned.refuse(weight.shape[0], weight.shape[1])


MAX_KERNEL_ROWS = 512
"""Most rows for which `LibraryProducts` with quantised weights do not expand them first. Expanding reads a
weight and writes it in two bytes a number, which more rows than this pay for."""

Product = tuple[Tensor, Tensor | None]
"""A product [R, out], or its partial sums [P, R, out] in fp32, and the bias [out] that remains to be added.
Valid until the next product."""


class Products(Protocol):
    """Products of R rows. Matrices are [out, in]; rows are multiplied by their transposes."""

    def multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Product:
        """x [R, in] by the first matrix of a mixer."""

    def multiply_down(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """`multiply` for the last matrix of a mixer or channel, whose columns GPUs divide: all their partial
        sums, if there are several. index: of the sum in the step."""

    def activate(
        self, x: Tensor, gate_up: Matrix, bias: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        """Fill out [R, N] with the gated activation of x [R, in] by gate_up [2 N, in], plus bias [2 N]."""


class ExactProducts:
    """Products with the one reduction tree of each weight: a row's bits do not depend on the others."""

    def __init__(
        self, tuned: TunedTable, exchange: Exchange | None, workspace: Workspace, num_rows: int
    ) -> None:
        self._tuned, self._exchange, self._workspace, self._num_rows = tuned, exchange, workspace, num_rows
        self._configs: dict[tuple[torch.Size, bool], GemmConfig] = {}  # by the weight's shape

    def multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Product:
        return self._multiply(x, matrix), bias

    def multiply_down(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        if self._exchange is None:
            return self._multiply(x, matrix), bias

        weight = dense(matrix)
        num_columns, inner = weight.shape
        slices = self._exchange.shard.column_slices(num_columns, inner)
        config = self._tuned.gemm(num_columns, inner, slices=slices).config(self._num_rows)
        # Slices of different GPUs are added one after the other, as those of one GPU are.
        config = replace(config, is_spread=True)
        sums = self._exchange.sums(index, (slices, self._num_rows, num_columns))
        if not fastest_multiply(x, weight, sums.own, config):
            self._tuned.refuse(num_columns, inner)
        return sums, bias

    def activate(
        self, x: Tensor, gate_up: Matrix, bias: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        if isinstance(gate_up, KernelWeight):
            multiply_gated(self._workspace, x, gate_up, out, activation, bias)
            return

        weight = dense(gate_up)
        if bias is None:
            config = self._config(weight, is_gated=True)
            buffer = None
            if config.is_library:
                buffer = take_gate_up(self._workspace, self._num_rows, weight.shape[0], out.dtype)
            if not fastest_gated_multiply(x, weight, out, config, buffer, activation):
                self._tuned.refuse(*weight.shape, is_gated=True)
            return

        total, *others = self._multiply(x, weight)
        for part in others:
            total = total + part
        glu((total + bias).to(out.dtype), out, activation)

    def num_partials(self, matrix: Matrix) -> int:
        """Partial sums of a product of `multiply_into`."""
        return (
            matrix.packed.num_slices
            if isinstance(matrix, KernelWeight)
            else self._config(dense(matrix)).num_partials
        )

    def multiply_into(self, x: Tensor, matrix: Matrix, partials: Tensor) -> None:
        """Fill partials [num_partials, R, N] fp32."""
        if isinstance(matrix, KernelWeight):
            quantised_multiply(x, matrix.packed, partials)
            return

        weight = dense(matrix)
        if not fastest_multiply(x, weight, partials, self._config(weight)):
            self._tuned.refuse(*weight.shape)

    def _multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Partial sums [num_partials, R, N]."""
        if isinstance(matrix, KernelWeight):
            return multiply_quantised(self._workspace, x, matrix)

        weight = dense(matrix)
        config = self._config(weight)
        partials = take_partials(self._workspace, config.num_partials, self._num_rows, weight.shape[0])
        if not fastest_multiply(x, weight, partials, config):
            self._tuned.refuse(*weight.shape)
        return partials

    def _config(self, weight: Tensor, *, is_gated: bool = False) -> GemmConfig:
        """The configuration of a product with a weight whose rows GPUs divide, if there are several."""
        key = weight.shape, is_gated
        if key not in self._configs:
            num_columns, inner = weight.shape
            slices = None
            if self._exchange is not None and not is_gated:
                slices = self._exchange.shard.row_slices(num_columns, inner)
            gemm = self._tuned.gemm(num_columns, inner, is_gated=is_gated, slices=slices)
            self._configs[key] = gemm.config(self._num_rows)
        return self._configs[key]


class LibraryProducts:
    """Products of cuBLAS. For many rows, quantised weights are expanded one by one, which rounds each number
    to the storage type."""

    def __init__(self, workspace: Workspace, num_rows: int) -> None:
        self._workspace, self._num_rows = workspace, num_rows

    def multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Product:
        return self._multiply(x, matrix, bias, "prefill_first")

    def multiply_down(self, x: Tensor, matrix: Matrix, bias: Tensor | None, index: int) -> Product:
        return self._multiply(x, matrix, bias, "prefill_delta")

    def activate(
        self, x: Tensor, gate_up: Matrix, bias: Tensor | None, activation: Activation, out: Tensor
    ) -> None:
        if self._is_by_kernel(gate_up):
            multiply_gated(self._workspace, x, gate_up, out, activation, bias)
            return

        product = take_gate_up(self._workspace, self._num_rows, gate_up.shape[0], x.dtype)
        library_product(x, self._weight(gate_up, x).T, bias, product)
        glu(product, out, activation)

    def _multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None, buffer: str) -> Product:
        """The whole product; or, of a quantised matrix and few rows, partial sums. buffer: its name."""
        if self._is_by_kernel(matrix):
            return multiply_quantised(self._workspace, x, matrix), bias

        out = self._workspace.take(buffer, (self._num_rows, matrix.shape[0]), x.dtype)
        library_product(x, self._weight(matrix, x).T, bias, out)
        return out, None

    def _weight(self, matrix: Matrix, x: Tensor) -> Tensor:
        return expand(self._workspace, matrix, x.dtype) if isinstance(matrix, KernelWeight) else dense(matrix)

    def _is_by_kernel(self, matrix: Matrix) -> TypeGuard[KernelWeight]:
        """Whether the kernels multiply by the quantised matrix, without expanding it."""
        return isinstance(matrix, KernelWeight) and self._num_rows <= MAX_KERNEL_ROWS


LibraryProduct = tuple[Tensor, Tensor, Tensor | None, Tensor]
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
) -> list[LibraryProduct]:
    """The products with larger ones first, in memory that all of them share."""
    layer = meta_weights(spec, dtype).layers[0]
    mixer, mlp = layer.mixer, layer.channel
    bias_of: dict[str, Tensor | None] = {}
    if isinstance(mixer, AttentionWeights):
        bias_of = {"qkv": mixer.qkv_bias, "output": mixer.output_bias}
    pairs = [(dense(matrix), bias_of.get(name)) for name, matrix in mixer.matrices.items()]
    if isinstance(mlp, ParallelWeights):
        mlp = mlp.mlp
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
