"""Products of a forward pass with the weights of layers: exact ones, and those of the vendor's library."""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.gemm.fastest_gemm import fastest_gated_multiply, fastest_multiply, library_product
from drift_sdk._kernels.gemm.gemm import GemmConfig
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.gates import glu
from drift_sdk._kernels.quantised.quantised_gemm import quantised_multiply
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.quantised_products import expand, multiply_gated, multiply_quantised
from drift_sdk.execution.forward.step_buffers import take_gate_up, take_partials
from drift_sdk.quantised.weight import Matrix, dense
from drift_sdk.spec.model import Activation

__all__ = ["ExactProducts", "LibraryProducts", "Product", "Products"]

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
