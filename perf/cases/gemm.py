"""Cases of a decoder's matrix products: the engine's kernels as tuned, and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.gemm import GemmConfig, fastest_gated_multiply, fastest_multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.spec.model import LatentAttention
from perf.cases.case import Case, Prepared, num_copies
from perf.harness.shapes import Model

__all__ = ["WeightShape", "gemm_cases", "weight_roles", "weight_shapes"]

ITEMSIZE = 2
"""Bytes of a bfloat16."""


class WeightShape(Struct, frozen=True):
    """The shape [num_columns, inner] of a weight; num_columns counts gate and up where it is gated."""

    num_columns: int
    inner: int
    is_gated: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_columns * self.inner * ITEMSIZE

    def __str__(self) -> str:
        return f"{self.num_columns}x{self.inner}{' gated' if self.is_gated else ''}"


def weight_shapes(model: Model) -> tuple[WeightShape, ...]:
    """Return the weights of `weight_roles`, in the same order."""
    return tuple(weight_roles(model).values())


def weight_roles(model: Model) -> dict[str, WeightShape]:
    """Return the weights of a layer by their roles, in the order in which they are used, and the head.

    They are qkv (queries, keys and values), output, gate_up and down; in a model with experts, qkv, output
    and the router; with latents, latent and query_up in the place of qkv.
    """
    spec, attention = model.spec, model.spec.attention
    hidden, queries = spec.hidden_size, attention.num_heads * attention.head_dim
    roles = {"qkv": WeightShape(queries + attention.kv.size, hidden)}
    if isinstance(attention, LatentAttention):
        queries, rank = attention.num_heads * attention.query_dim, attention.query_rank
        roles = {"latent": WeightShape((rank or queries) + attention.head_dim, hidden)}
        if rank is not None:
            roles["query_up"] = WeightShape(queries, rank)
    roles["output"] = WeightShape(hidden, attention.output_size)
    if spec.experts is not None:
        roles["router"] = WeightShape(spec.experts.num_experts, hidden)
    else:
        roles["gate_up"] = WeightShape(2 * spec.mlp_size, hidden, is_gated=True)
        roles["down"] = WeightShape(hidden, spec.mlp_size)
    return roles | {"lm_head": WeightShape(spec.vocab_size, hidden)}


def gemm_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield each weight and number of rows as the engine multiplies, then with cuBLAS where that is something
    else; in bfloat16."""
    for weight in weight_shapes(model):
        for num_rows in row_counts:
            kernels = [("gemm", prepare_ours), ("cublas", prepare_cublas)]
            if config_of(weight, num_rows, table).is_library:
                kernels.pop()
            for kernel, prepare in kernels:
                yield Case(
                    kernel=kernel,
                    shape=str(weight),
                    num_rows=num_rows,
                    num_bytes=weight.num_bytes + num_rows * weight.inner * ITEMSIZE,
                    num_flops=2 * num_rows * weight.num_columns * weight.inner,
                    prepare=partial(prepare, weight, num_rows, table, device),
                )


def config_of(weight: WeightShape, num_rows: int, table: TunedTable) -> GemmConfig:
    return table.gemm(weight.num_columns, weight.inner, is_gated=weight.is_gated).config(num_rows)


def prepare_ours(weight: WeightShape, num_rows: int, table: TunedTable, device: str) -> Prepared:
    """Make the inputs of the engine's kernel, in the configuration that the table names."""
    config = config_of(weight, num_rows, table)
    if weight.is_gated:
        out = torch.empty(num_rows, weight.num_columns // 2, dtype=torch.bfloat16, device=device)
        gate_up = torch.empty(num_rows, weight.num_columns, dtype=torch.bfloat16, device=device)

        def call(x: Tensor, w: Tensor) -> None:
            fastest_gated_multiply(x, w, out, config, gate_up)

        return _prepared(weight, num_rows, device, call, out)

    sums = torch.empty(config.num_partials, num_rows, weight.num_columns, device=device)
    return _prepared(weight, num_rows, device, lambda x, w: fastest_multiply(x, w, sums, config), sums)


def prepare_cublas(weight: WeightShape, num_rows: int, table: TunedTable, device: str) -> Prepared:
    """Make the inputs of cuBLAS, for the product alone: a gated weight's activation is left out."""
    out = torch.empty(num_rows, weight.num_columns, dtype=torch.bfloat16, device=device)
    return _prepared(weight, num_rows, device, lambda x, w: torch.mm(x, w.T, out=out), out)


def _prepared(
    weight: WeightShape, num_rows: int, device: str, call: Callable[[Tensor, Tensor], object], out: Tensor
) -> Prepared:
    """Return calls on random rows x [num_rows, inner] and several weights, which write `out`."""
    x = torch.randn(num_rows, weight.inner, device=device, dtype=torch.bfloat16)
    weights = [
        torch.randn(weight.num_columns, weight.inner, device=device, dtype=torch.bfloat16).mul_(
            weight.inner**-0.5
        )
        for _ in range(num_copies(weight.num_bytes))
    ]

    def step() -> None:
        for w in weights:
            call(x, w)

    return Prepared(step, len(weights), (out,))
