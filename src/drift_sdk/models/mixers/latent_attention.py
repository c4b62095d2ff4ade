"""Latent attention (MLA) in plain torch: weights and forward pass, in the absorbed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drift_sdk.models.allocation import Allocation
from drift_sdk.models.layers import linear, normalise, rotate
from drift_sdk.models.mixers.attention import AttentionStep
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import LatentAttention, LatentNames


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of one layer's latent attention. Matrices may be quantised.

    The rotated elements of a query or key are those of files with the pairs' first elements before all second
    ones.

    down:        [query_rank + latent_dim + rotary_dim, hidden]: latents of queries, then of keys and values,
                 then the rotated part of keys. Without a latent of queries, these are its first rows.
    down_bias:   [rows of down]: zeros for queries that have no latent.
    query_norm:  [query_rank].
    query_up:    [num_heads * query_dim, query_rank].
    latent_norm: [latent_dim].
    up:          [num_heads, plain_dim + output_dim, latent_dim], the matrices of each head: of keys, then of
                 values. They are never quantised: queries are multiplied by their rows, outputs by columns.
    output:      [hidden, num_heads * output_dim].
    output_bias: [hidden].
    """

    down: Matrix
    down_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    query_up: Matrix | None
    latent_norm: torch.Tensor
    up: torch.Tensor
    output: Matrix
    output_bias: torch.Tensor | None

    @property
    def matrices(self) -> dict[str, Matrix]:
        """All matrices that rows are multiplied by, by name."""
        found = {"down": self.down, "output": self.output}
        return found if self.query_up is None else found | {"query_up": self.query_up}


def allocate_latent(
    spec: LatentAttention, names: LatentNames, layer: str, hidden: int, allocation: Allocation
) -> LatentWeights:
    """layer: prefix of the layer's tensors. hidden: columns of its input."""
    prefix, heads, query_size = f"{layer}.{names.module}", spec.num_heads, spec.num_heads * spec.query_dim
    rows = {names.query: query_size} if spec.query_rank is None else {names.query_down: spec.query_rank}
    rows |= {names.latent: spec.head_dim}
    query_norm: torch.Tensor | None = None
    query_up: Matrix | None = None
    if spec.query_rank is not None:
        query_norm = allocation.tensor(f"{prefix}.{names.query_norm}.weight", spec.query_rank)
        query_up = allocation.projection(
            {f"{prefix}.{names.query_up}.weight": query_size}, spec.query_rank, _query_order(spec)
        )
    bias = None
    if spec.has_bias:
        bias = allocation.in_order(allocation.full(0.0, sum(rows.values())), _down_order(spec))
        parts = zip(rows, bias.split(list(rows.values())), strict=True)
        biased = {f"{prefix}.{name}.bias": part for name, part in parts if name != names.query}
        allocation.places.update(biased)
    up = allocation.tensor(
        f"{prefix}.{names.up}.weight", heads * (spec.plain_dim + spec.output_dim), spec.latent_dim
    )
    output = f"{prefix}.{names.output}"
    return LatentWeights(
        down=allocation.projection(
            {f"{prefix}.{name}.weight": size for name, size in rows.items()}, hidden, _down_order(spec)
        ),
        down_bias=bias,
        query_norm=query_norm,
        query_up=query_up,
        latent_norm=allocation.tensor(f"{prefix}.{names.latent_norm}.weight", spec.latent_dim),
        up=up.view(heads, -1, spec.latent_dim),
        output=allocation.matrix(f"{output}.weight", hidden, spec.output_size),
        output_bias=allocation.tensor(f"{output}.bias", hidden) if spec.has_bias else None,
    )


def _pair_order(spec: LatentAttention) -> torch.Tensor:
    """The places in files of rotated elements."""
    order = torch.arange(spec.rotary_dim, device="cpu")
    return order.view(-1, 2).T.flatten() if spec.is_interleaved else order


def _query_order(spec: LatentAttention) -> torch.Tensor | None:
    """The places in files of the rows of all queries; None: they are in order."""
    if not spec.is_interleaved:
        return None

    one = torch.cat((torch.arange(spec.plain_dim, device="cpu"), spec.plain_dim + _pair_order(spec)))
    firsts = torch.arange(spec.num_heads, device="cpu") * spec.query_dim
    return (firsts[:, None] + one).flatten()


def _down_order(spec: LatentAttention) -> torch.Tensor | None:
    """The places in files of the rows of `down`; None: they are in order."""
    if not spec.is_interleaved:
        return None

    queries = _query_order(spec) if spec.query_rank is None else torch.arange(spec.query_rank, device="cpu")
    assert queries is not None
    latent = len(queries) + torch.arange(spec.latent_dim, device="cpu")
    return torch.cat((queries, latent, len(queries) + spec.latent_dim + _pair_order(spec)))


def attend_latent(
    x: torch.Tensor, weights: LatentWeights, spec: LatentAttention, step: AttentionStep, index: int
) -> torch.Tensor:
    """The output [N, hidden] of the attention of layer `index`, from its normalised input [N, hidden].
    Latents are written to the cache."""
    projected = linear(x, weights.down, weights.down_bias)
    num_queries = projected.shape[1] - spec.head_dim
    query, latent, key = projected.split((num_queries, spec.latent_dim, spec.rotary_dim), dim=1)
    if weights.query_up is not None and weights.query_norm is not None:
        query = linear(normalise(query, weights.query_norm, spec.norm), weights.query_up)
    plain, rotated = query.unflatten(1, (spec.num_heads, -1)).split((spec.plain_dim, spec.rotary_dim), dim=2)
    cos, sin = step.rotary[spec.rope]
    of_keys, of_values = weights.up.split((spec.plain_dim, spec.output_dim), dim=1)
    absorbed = torch.einsum("nhd,hdc->nhc", plain, of_keys)
    latent = normalise(latent, weights.latent_norm, spec.norm)[:, None]
    attended = step.rows.attend(
        torch.cat((absorbed, rotate(rotated, cos, sin)), dim=-1),
        torch.cat((latent, rotate(key[:, None], cos, sin)), dim=-1),
        latent,
        step.cache,
        index,
        scale=spec.scale,
    )
    sums = attended.unflatten(1, (spec.num_heads, spec.latent_dim))
    output = torch.einsum("nhc,hdc->nhd", sums, of_values)
    return linear(output.flatten(1), weights.output, weights.output_bias)
