"""Attention of a forward pass: projections, rotation, keys and values in the cache, and the output."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.layers.gates import gate_attention
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.execution.forward.products import Products
from drift_sdk.execution.forward.row_attention import RowAttention
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import LayerBuffers
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.spec.model import Attention

__all__ = ["AttentionForward"]


class AttentionForward:
    """Kernels that compute the attention of R rows in a layer."""

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
        self._attention, self._products = attention, products
        self._buffers = LayerBuffers.take(workspace, model.decoder, rows.slot.shape[0])

    def run(
        self, x: Tensor, weights: AttentionWeights, spec: Attention, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """Store keys and values of layer `index`. Returns its output for x [R, hidden], normalised, as
        `Products` return it."""
        rows, cache, query, attended = self._rows, self._cache, self._buffers.query, self._buffers.attended
        kv, rotation = cache.layer(index), cache.rotation(spec)
        product, bias = self._products.multiply(x, weights.qkv, weights.qkv_bias)
        width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim
        rotate_and_store(
            product[..., :width],
            rows.slot,
            rows.position,
            self._block_table,
            rotation.cos,
            rotation.sin,
            query,
            kv,
            bias=None if bias is None else bias[:width],
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            eps=0.0 if spec.head_norm is None else spec.head_norm.eps,
            norm_kind="rounded" if spec.head_norm is None else spec.head_norm.kind,
            row_kv_slot=rows.kv_slot,
            query_scale=rotation.query_factors,
        )
        self._attention.attend(
            LayerAttention(
                query=query,
                out=attended,
                kv=kv,
                block_table=self._block_table,
                window=spec.window or 0,
                scale=spec.scale,
                sinks=weights.sinks,
                index=index,
            )
        )
        rows_of_heads = attended.flatten(1)
        if spec.has_gate:
            gate_attention(rows_of_heads, product[..., width:])
        return self._products.multiply_down(rows_of_heads, weights.output, weights.output_bias, 2 * index)
