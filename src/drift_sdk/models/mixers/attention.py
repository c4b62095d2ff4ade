"""Attention in plain torch: weights and forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from msgspec import Struct

from drift_sdk.models.allocation import Allocation
from drift_sdk.models.attention import StepRows
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import linear, normalise, rms_norm, rotate
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import Attention, AttentionNames, QueryScaling
from drift_sdk.spec.rope import Rope


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of one layer's attention. Matrices may be quantised.

    qkv:                    [(num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim, hidden]:
                            queries, keys, values; with a gate num_heads * value_dim rows more. Without keys
                            and values of its own, or without values, it has fewer rows.
    qkv_bias:               [rows of qkv]: zeros for the gate.
    output:                 [hidden, num_heads * value_dim].
    output_bias:            [hidden].
    query_norm, key_norm:   [head_dim].
    sinks:                  [num_heads].
    """

    qkv: Matrix
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    sinks: torch.Tensor | None = None

    @property
    def matrices(self) -> dict[str, Matrix]:
        """All matrices, by name."""
        return {"qkv": self.qkv, "output": self.output}


class AttentionStep(Struct, frozen=True):
    """What attention of a step needs beside the rows of the stream.

    rotary: cosines and sines of the rows by rotation, as `rotary_tables` returns them.
    """

    rows: StepRows
    cache: KVCache
    rotary: dict[Rope, tuple[torch.Tensor, torch.Tensor]]


def allocate_attention(
    spec: Attention, names: AttentionNames, layer: str, hidden: int, allocation: Allocation
) -> AttentionWeights:
    """layer: prefix of the layer's tensors. hidden: columns of its input."""
    prefix = f"{layer}.{names.module}"
    query, key, value = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.num_kv_heads * spec.value_dim,
    )
    rows = {names.query: query}
    if spec.kv_of is None:
        rows |= {names.key: key, names.value: value} if spec.has_values else {names.key: key}
    if names.fused is not None:
        rows = {names.fused: query + key + value}
    gate, order = {}, None
    if spec.is_gate_interleaved:
        rows[names.query] *= 2
        order = _gate_order(spec)
    elif spec.has_gate:
        gate = {names.gate: spec.output_size}

    def head_weights(name: str) -> torch.Tensor | None:
        if spec.head_norm is None:
            return None

        if spec.has_head_weights:
            return allocation.tensor(f"{prefix}.{name}.weight", spec.head_dim)

        return allocation.full(0.0 if spec.head_norm.kind == "offset" else 1.0, spec.head_dim)

    bias = None
    if spec.has_bias:
        num_biased = sum(rows.values())
        bias = allocation.in_order(allocation.full(0.0, num_biased + sum(gate.values())), order)
        names_of_biases = (f"{prefix}.{name}.bias" for name in rows)
        parts = bias[:num_biased].split(list(rows.values()))
        allocation.places.update(zip(names_of_biases, parts, strict=True))
    output = f"{prefix}.{names.output}"
    return AttentionWeights(
        qkv=allocation.projection(
            {f"{prefix}.{name}.weight": size for name, size in (rows | gate).items()}, hidden, order
        ),
        qkv_bias=bias,
        query_norm=head_weights(names.query_norm),
        key_norm=head_weights(names.key_norm) if spec.kv_of is None else None,
        output=allocation.matrix(f"{output}.weight", hidden, spec.output_size),
        output_bias=allocation.tensor(f"{output}.bias", hidden) if spec.has_output_bias else None,
        sinks=allocation.tensor(f"{prefix}.{names.sinks}", spec.num_heads) if spec.has_sinks else None,
    )


def _gate_order(spec: Attention) -> torch.Tensor:
    """The rows of files, with query and gate of each head together, as qkv has them."""
    num_query, dim = spec.output_size, spec.head_dim
    both = torch.arange(2 * num_query, device="cpu").view(spec.num_heads, 2, dim)
    num_kv = spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    keys_values = 2 * num_query + torch.arange(num_kv, device="cpu")
    return torch.cat((both[:, 0].flatten(), keys_values, both[:, 1].flatten()))


def attend(
    x: torch.Tensor, weights: AttentionWeights, spec: Attention, step: AttentionStep, index: int
) -> torch.Tensor:
    """The output [N, hidden] of the attention of layer `index`, from its normalised input [N, hidden]. Keys
    and values are written to the cache, if they are the layer's own."""
    has_own = spec.kv_of is None
    query, key, value, gate = project(x, weights, spec, step)
    attended = step.rows.attend(
        query,
        key if has_own else None,
        value if has_own else None,
        step.cache,
        index if spec.kv_of is None else spec.kv_of,
        window=spec.window,
        scale=spec.scale,
        sinks=weights.sinks,
    )
    if spec.has_gate:
        attended = attended * torch.sigmoid(gate)
    return linear(attended, weights.output, weights.output_bias)


def project(
    x: torch.Tensor, weights: AttentionWeights, spec: Attention, step: AttentionStep
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [N, heads, dim], rotated, and what the gate is computed from. Without keys and
    values of the layer's own, these are empty or undefined."""
    has_own = spec.kv_of is None
    rotated = spec.num_heads + (spec.num_kv_heads if has_own else 0)
    sizes = rotated * spec.head_dim, spec.num_kv_heads * spec.value_dim if has_own and spec.has_values else 0
    projected = linear(x, weights.qkv, weights.qkv_bias)
    query_key, value = projected[:, : sizes[0]], projected[:, sizes[0] : sum(sizes)]
    if not spec.has_values:
        value = query_key[:, spec.num_heads * spec.head_dim :]
    query, key = _rotated(query_key.view(-1, rotated, spec.head_dim), weights, spec, step)
    gate = projected[:, sum(sizes) :]
    return query, key, _values(value, spec) if has_own else value, gate


def _values(projected: torch.Tensor, spec: Attention) -> torch.Tensor:
    """Values [N, num_kv_heads, value_dim], of these as projected [N, num_kv_heads * value_dim]."""
    values = projected.reshape(-1, spec.num_kv_heads, spec.value_dim)
    if not spec.has_value_norm or spec.head_norm is None:
        return values

    return rms_norm(values, torch.ones_like(values[0, 0]), spec.head_norm.eps)


def _rotated(
    query_key: torch.Tensor, weights: AttentionWeights, spec: Attention, step: AttentionStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [N, num_heads, head_dim] and keys [N, num_kv_heads or 0, head_dim], normalised, rotated and
    scaled, of both as projected."""
    num_heads = spec.num_heads
    if spec.head_norm is not None and weights.query_norm is not None:
        parts = [normalise(query_key[:, :num_heads], weights.query_norm, spec.head_norm)]
        if weights.key_norm is not None:
            parts.append(normalise(query_key[:, num_heads:], weights.key_norm, spec.head_norm))
        query_key = torch.cat(parts, dim=1)

    if spec.rope is not None:
        query_key = rotate(query_key, *step.rotary[spec.rope])

    query, key = query_key[:, :num_heads], query_key[:, num_heads:]
    if spec.query_scaling is not None:
        query = query * query_factors(spec.query_scaling, step.rows.positions, query.dtype)[:, None, None]
    return query, key


def query_factors(scaling: QueryScaling, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factors of queries at positions [N], in `dtype`."""
    quotients = torch.floor(positions.to(torch.float32) / scaling.context)
    return (1 + scaling.beta * torch.log(1 + quotients)).to(dtype)
