"""Latent attention of a forward pass: its products, and latents in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.exchange import PeerSums
from drift_sdk._kernels.layers.latent_rows import multiply_heads, split_queries, store_latents
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.attention import (
    ChunkAttention,
    ExpandedKeys,
    MixedAttention,
    RowAttention,
)
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.products import Product, Products
from drift_sdk.execution.forward.rows import LayerBuffers, Rows
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.quantised.weight import Matrix
from drift_sdk.spec.model import LatentAttention


class LatentLayer(Struct, frozen=True, kw_only=True):
    """Latents of a layer in the cache, rotation tables, and buffers of R rows.

    cos, sin: [max_positions, rotary_dim / 2]. query [R, num_heads, head_dim], attended [R, num_heads,
    latent_dim]. index, first_key: as of LayerAttention.
    """

    kv: LayerKV
    cos: Tensor
    sin: Tensor
    query: Tensor
    attended: Tensor
    index: int = 0
    first_key: int = 0


class TakeRows(Protocol):
    """Takes a buffer [R, *shape] in the storage type by its name."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...


class LatentHeads:
    """Kernels that compute the heads of latent attention of R rows in a layer."""

    def __init__(
        self,
        rows: Rows,
        block_table: Tensor,
        take: TakeRows,
        multiply: Callable[[Tensor, Matrix, Tensor | None], Product],
        attend: Callable[[LayerAttention], None],
        expanded: ExpandedKeys | None = None,
    ) -> None:
        """block_table [S, max_blocks] int32. multiply: as of `Products`. attend: as of `RowAttention`; it
        leaves out the rows of `expanded`."""
        self._rows, self._block_table = rows, block_table
        self._take, self._multiply, self._attend = take, multiply, attend
        self._expanded = expanded

    def run(self, x: Tensor, weights: LatentWeights, spec: LatentAttention, layer: LatentLayer) -> Tensor:
        """Store the latents of a layer. Returns the outputs of heads [R, num_heads * output_dim] for x
        [R, hidden], normalised."""
        rows, query, attended = self._rows, layer.query, layer.attended
        query_latent = None
        if spec.query_rank is not None:
            query_latent = self._take("query_latent", spec.query_rank)
        product, bias = self._multiply(x, weights.down, weights.down_bias)
        store_latents(
            product,
            rows.slot,
            rows.position,
            self._block_table,
            layer.cos,
            layer.sin,
            layer.kv,
            weights.latent_norm,
            bias=bias,
            query_norm=weights.query_norm,
            query_latent=query_latent,
            eps=spec.norm.eps,
            row_kv_slot=rows.kv_slot,
        )
        if query_latent is not None and weights.query_up is not None:
            product, _ = self._multiply(query_latent, weights.query_up, None)
        plain = self._take("plain_query", spec.num_heads, spec.plain_dim)
        whole, left_out = None, None
        if self._expanded is not None:
            left_out = self._expanded.rows
            whole = self._take("whole_query", spec.num_heads, spec.query_dim)
        split_queries(product, rows.slot, rows.position, layer.cos, layer.sin, plain, query, whole)
        of_keys, of_values = weights.up.split((spec.plain_dim, spec.output_dim), dim=1)
        multiply_heads(plain, of_keys.transpose(1, 2), query[..., : spec.latent_dim], left_out)
        attention = LayerAttention(
            query=query,
            out=attended,
            kv=layer.kv,
            block_table=self._block_table,
            scale=spec.scale,
            index=layer.index,
            first_key=layer.first_key,
        )
        self._attend(attention)
        values = self._take("latent_values", spec.num_heads, spec.output_dim)
        multiply_heads(attended, of_values, values, left_out)
        if self._expanded is not None and whole is not None:
            self._expanded.attend(replace(attention, query=whole, out=values), weights.up)
        return values.flatten(1)


class LatentForward:
    """Kernels that compute the latent attention of R rows in a layer of the model."""

    def __init__(
        self,
        model: ModelResources,
        rows: Rows,
        block_table: Tensor,
        workspace: Workspace,
        attention: RowAttention,
        products: Products,
    ) -> None:
        """block_table [S, max_blocks] int32. attention: of the rows."""
        self._cache, self._products, num_rows = model.cache, products, rows.slot.shape[0]
        self._buffers = LayerBuffers.take(workspace, model.decoder, num_rows)

        def take(name: str, *shape: int) -> Tensor:
            return workspace.take(name, (num_rows, *shape), model.decoder.dtype)

        expanded = None
        if isinstance(attention, ChunkAttention | MixedAttention):
            expanded = attention.expanded
        self._heads = LatentHeads(rows, block_table, take, products.multiply, attention.attend, expanded)

    def run(
        self, x: Tensor, weights: LatentWeights, spec: LatentAttention, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """Store the latents of layer `index`. Returns its output for x [R, hidden], normalised, as `Products`
        return it."""
        query, attended = self._buffers.heads[spec.num_heads, spec.head_dim]
        rotation = self._cache.rotation(spec)
        assert rotation.cos is not None and rotation.sin is not None
        layer = LatentLayer(
            kv=self._cache.layer(index),
            cos=rotation.cos,
            sin=rotation.sin,
            query=query,
            attended=attended,
            index=index,
        )
        values = self._heads.run(x, weights, spec, layer)
        return self._products.multiply_down(values, weights.output, weights.output_bias, 2 * index)
