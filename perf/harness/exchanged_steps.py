"""Steps in which GPUs add partial sums: small products, and those of a part's layers."""

from __future__ import annotations

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.exchange import add_norm_across
from drift_sdk._kernels.gemm.gemm import GemmConfig, fastest_gated_multiply, fastest_multiply, multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk.execution.device.device import Device
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.spec.model import ModelSpec

__all__ = ["LAYERS", "SUMS", "Layers", "PartWeights", "Sums"]

SUMS = 64
"""Additions of a step: those of 32 layers."""
LAYERS = 8
"""Layers whose products are timed."""
INNER = 64
"""Inner dimension of the products, which so take hardly any time."""


class Sums:
    """The step on one GPU: with `exchange` of one slice, without it of all slices."""

    def __init__(self, device: Device, size: int, num_rows: int, exchange: Exchange | None, num_gpus: int):
        self._exchange, self._rows = exchange, num_rows
        place = device.torch_device
        generator = torch.Generator(place).manual_seed(num_rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=place, dtype=torch.bfloat16)

        x, weights = draw(num_rows, num_gpus * INNER), draw(size, num_gpus * INNER) / 8
        self.hidden, self._norm = draw(num_rows, size), draw(size)
        self._first = self.hidden.clone()
        self._normed = torch.empty_like(self.hidden)
        own = slice(None)
        if exchange is not None:
            rank = exchange.shard.rank
            own = slice(rank * INNER, (rank + 1) * INNER)
        self._x, self._weights = x[:, own].contiguous(), weights[:, own].contiguous()
        self._config = GemmConfig(num_slices=1 if exchange is not None else num_gpus, tile_k=INNER)
        self._partials = torch.empty(num_gpus, num_rows, size, device=place)

    def step(self) -> None:
        self.hidden.copy_(self._first)
        if self._exchange is not None:
            self._exchange.begin()
        for index in range(SUMS):
            if self._exchange is None:
                multiply(self._x, self._weights, self._partials, self._config)
                add_norm(self.hidden, self._partials, self._norm, self._normed, eps=1e-5)
            else:
                sums = self._exchange.sums(index, (1, self._rows, self.hidden.shape[1]))
                multiply(self._x, self._weights, sums.own, self._config)
                add_norm_across(self.hidden, sums, self._norm, self._normed, eps=1e-5)


class PartWeights(Struct, frozen=True):
    """Random weights of LAYERS layers of a GPU's part: one of each matrix for each layer."""

    qkv: list[Tensor]
    output: list[Tensor]
    gate_up: list[Tensor]
    down: list[Tensor]

    @classmethod
    def random(cls, spec: ModelSpec, device: torch.device) -> PartWeights:
        """spec: of the part."""
        size, attention = spec.hidden_size, spec.attention

        def draw(num_columns: int, inner: int) -> list[Tensor]:
            return [
                torch.randn(num_columns, inner, device=device, dtype=torch.bfloat16).mul_(inner**-0.5)
                for _ in range(LAYERS)
            ]

        return cls(
            qkv=draw(attention.num_heads * attention.head_dim + attention.kv.size, size),
            output=draw(size, attention.output_size),
            gate_up=draw(2 * spec.mlp_size, size),
            down=draw(size, spec.mlp_size),
        )


class Layers:
    """The step of LAYERS layers on one GPU, whose additions are across GPUs or of its own slices."""

    def __init__(
        self, weights: PartWeights, num_rows: int, exchange: Exchange, table: TunedTable, *, is_local: bool
    ) -> None:
        self._weights, self._rows = weights, num_rows
        self._exchange, self._is_local = exchange, is_local
        device, shard = weights.qkv[0].device, exchange.shard

        def rows_of(inner: int) -> Tensor:
            return torch.randn(num_rows, inner, device=device, dtype=torch.bfloat16)

        (columns, size), inner = weights.qkv[0].shape, weights.output[0].shape[1]
        slices = {"qkv": shard.row_slices(columns, size)}
        slices |= {name: shard.column_slices(*getattr(weights, name)[0].shape) for name in ("output", "down")}
        self._configs = {
            name: replace(
                table.gemm(*getattr(weights, name)[0].shape, slices=number).config(num_rows), is_spread=True
            )
            for name, number in slices.items()
        }
        gate_up = table.gemm(*weights.gate_up[0].shape, is_gated=True).config(num_rows)
        self._configs["gate_up"] = gate_up
        self._hidden, self._normed, self._attended = rows_of(size), rows_of(size), rows_of(inner)
        self._activated = rows_of(weights.down[0].shape[1])
        self._gate_up = rows_of(weights.gate_up[0].shape[0]) if gate_up.is_library else None
        self._norm = torch.ones(size, device=device, dtype=torch.bfloat16)
        self._partials = torch.empty(slices["qkv"], num_rows, columns, device=device)
        self._sums = {
            name: torch.empty(slices[name], num_rows, size, device=device) for name in ("output", "down")
        }

    def step(self) -> None:
        weights = self._weights
        self._exchange.begin()
        for index in range(LAYERS):
            fastest_multiply(self._normed, weights.qkv[index], self._partials, self._configs["qkv"])
            self._add(self._attended, weights.output[index], "output", 2 * index)
            fastest_gated_multiply(
                self._normed, weights.gate_up[index], self._activated, self._configs["gate_up"], self._gate_up
            )
            self._add(self._activated, weights.down[index], "down", 2 * index + 1)

    def _add(self, x: Tensor, weight: Tensor, name: str, index: int) -> None:
        if self._is_local:
            fastest_multiply(x, weight, self._sums[name], self._configs[name])
            add_norm(self._hidden, self._sums[name], self._norm, self._normed, eps=1e-5)
            return

        num_slices, num_rows, size = self._sums[name].shape
        sums = self._exchange.sums(index, (num_slices, num_rows, size))
        fastest_multiply(x, weight, sums.own, self._configs[name])
        add_norm_across(self._hidden, sums, self._norm, self._normed, eps=1e-5)
