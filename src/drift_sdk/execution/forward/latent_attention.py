"""Latent attention of a forward pass: its products, and latents in the cache."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.gemm.head_gemm import multiply_heads
from drift_sdk._kernels.layers.latent_rows import split_queries, store_latents
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.attention import RowAttention
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.products import Products
from drift_sdk.execution.forward.rows import LayerBuffers, Rows
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.spec.model import LatentAttention


class LatentForward:
    """Kernels that compute the latent attention of R rows in a layer."""

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
        self._cache, self._rows, self._block_table = model.cache, rows, block_table
        self._attention, self._products, self._workspace = attention, products, workspace
        self._buffers = LayerBuffers.take(workspace, model.decoder, rows.slot.shape[0])

    def run(
        self, x: Tensor, weights: LatentWeights, spec: LatentAttention, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """Store the latents of layer `index`. Returns its output for x [R, hidden], normalised, as `Products`
        return it."""
        rows, (query, attended) = self._rows, self._buffers.heads[spec.num_heads, spec.head_dim]
        kv, rotation = self._cache.layer(index), self._cache.rotation(spec)
        assert rotation.cos is not None and rotation.sin is not None
        query_latent = None
        if spec.query_rank is not None:
            query_latent = self._take("query_latent", spec.query_rank)
        product, bias = self._products.multiply(x, weights.down, weights.down_bias)
        store_latents(
            product,
            rows.slot,
            rows.position,
            self._block_table,
            rotation.cos,
            rotation.sin,
            kv,
            weights.latent_norm,
            bias=bias,
            query_norm=weights.query_norm,
            query_latent=query_latent,
            eps=spec.norm.eps,
            row_kv_slot=rows.kv_slot,
        )
        if query_latent is not None and weights.query_up is not None:
            product, _ = self._products.multiply(query_latent, weights.query_up, None)
        plain = self._take("plain_query", spec.num_heads, spec.plain_dim)
        split_queries(product, rows.slot, rows.position, rotation.cos, rotation.sin, plain, query)
        of_keys, of_values = weights.up.split((spec.plain_dim, spec.output_dim), dim=1)
        multiply_heads(plain, of_keys.transpose(1, 2), query[..., : spec.latent_dim])
        self._attention.attend(
            LayerAttention(
                query=query,
                out=attended,
                kv=kv,
                block_table=self._block_table,
                scale=spec.scale,
                index=index,
            )
        )
        values = self._take("latent_values", spec.num_heads, spec.output_dim)
        multiply_heads(attended, of_values, values)
        return self._products.multiply_down(values.flatten(1), weights.output, weights.output_bias, 2 * index)

    def _take(self, name: str, *shape: int) -> Tensor:
        rows = self._rows.slot.shape[0]
        return self._workspace.take(name, (rows, *shape), self._buffers.normed.dtype)
