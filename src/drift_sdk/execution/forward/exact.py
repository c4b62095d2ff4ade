"""The target's forward pass with bits that do not depend on the other rows of the step."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.gemm.cublas_gemm import fastest_gated_multiply, fastest_multiply
from drift_sdk._kernels.gemm.gemm import GemmConfig
from drift_sdk._kernels.layers.glu import glu
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.expert_forward import ExpertForward
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.execution.forward.quantised_products import multiply_gated, multiply_quantised
from drift_sdk.execution.forward.residual_stream import ResidualStream, norm_kind
from drift_sdk.execution.forward.row_attention import RowAttention
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import HiddenStates, LayerBuffers, take_gate_up, take_partials
from drift_sdk.models.weights import LayerWeights
from drift_sdk.quantised.weight import Matrix, dense

__all__ = ["ExactForward"]


class ExactForward:
    """Computes rows through all layers: rows that are decoded or verified, or rows of prompts.

    A row gets the bits that it gets alone: products use the one reduction tree of each weight, and attention
    has partitions at fixed positions.

    cache: where the rows' keys and values are stored. hidden_states: of the rows, filled by `run`.
    normed [R, hidden]: the normalised residual stream after the last layer, filled by `run`.
    """

    def __init__(
        self,
        model: ModelResources,
        rows: Rows,
        block_table: Tensor,
        workspace: Workspace,
        attention: RowAttention,
        hidden_states: HiddenStates,
    ) -> None:
        """block_table [S, max_blocks] int32. attention, hidden_states: of the rows in `rows`."""
        self._decoder, self.cache, self._tuned = model.decoder, model.cache, model.tuned
        self._exchange = model.exchange
        self._rows, self._block_table, self._workspace = rows, block_table, workspace
        self._attention = attention
        self._num_rows = rows.slot.shape[0]
        self._configs: dict[tuple[torch.Size, bool], GemmConfig] = {}  # of products, by the weight's shape
        self._buffers = LayerBuffers.take(workspace, model.decoder, self._num_rows)
        self._stream = ResidualStream(model.decoder, hidden_states, self._buffers.normed)
        self.hidden_states = hidden_states
        self.normed = self._buffers.normed
        self._experts = ExpertForward.take(model, rows.slot, self.normed, workspace, is_decoding=True)

    def share_drafts(self, parent: Tensor | None = None) -> None:
        """Replace the rows, which were drafted, by those of the first GPU, if there are several.

        parent [R] int32: of rows that are nodes of trees, whose positions follow from it.
        """
        if self._exchange is not None:
            rows = self._rows
            self._exchange.share_drafts((rows.slot, rows.token, rows.position if parent is None else parent))

    def run(self) -> None:
        """Record the kernels of all layers."""
        rows, stream = self._rows, self._stream
        if self._exchange is not None:
            self._exchange.begin()
        stream.embed(rows.token, rows.slot)
        self._attention.plan()
        for index, layer in enumerate(self._decoder.weights.layers):
            self._layer(index, layer)

    def _layer(self, index: int, layer: LayerWeights) -> None:
        stream, buffers = self._stream, self._buffers
        self._attend(layer, index)
        attended = buffers.attended.view(self._num_rows, -1)
        stream.add_attention(index, self._multiply_down(attended, layer.output, 2 * index), layer.output_bias)
        if self._experts is not None and layer.experts is not None:
            stream.add_mlp(index, self._experts.run(layer.experts, index))
            return

        self._activate(layer)
        down = self._multiply_down(buffers.activated, layer.down, 2 * index + 1)
        stream.add_mlp(index, down, layer.down_bias)

    def _attend(self, layer: LayerWeights, index: int) -> None:
        """Compute queries, store keys and values, and fill `attended`."""
        rows, cache, buffers, config = self._rows, self.cache, self._buffers, self._decoder.config
        kv = cache.layer(index)
        cos, sin = cache.rotations[index]
        rotate_and_store(
            self._multiply(buffers.normed, layer.qkv),
            rows.slot,
            rows.position,
            self._block_table,
            cos,
            sin,
            buffers.query,
            kv,
            bias=layer.qkv_bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=config.rms_norm_eps,
            norm_kind=norm_kind(config),
            row_kv_slot=rows.kv_slot,
        )
        self._attention.attend(
            LayerAttention(
                query=buffers.query,
                out=buffers.attended,
                kv=kv,
                block_table=self._block_table,
                window=config.windows[index] or 0,
                scale=config.attention_scale,
                sinks=layer.sinks,
                index=index,
            )
        )

    def _activate(self, layer: LayerWeights) -> None:
        """Fill `activated` with the gated activation of the normalised rows."""
        normed, activated, dtype = self._buffers.normed, self._buffers.activated, self._decoder.dtype
        activation = self._decoder.config.activation
        if isinstance(layer.gate_up, KernelWeight):
            multiply_gated(self._workspace, normed, layer.gate_up, activated, activation, layer.gate_up_bias)
            return

        weight = dense(layer.gate_up)
        if layer.gate_up_bias is None:
            config = self._config(weight, is_gated=True)
            gate_up = None
            if config.is_library:
                gate_up = take_gate_up(self._workspace, self._num_rows, weight.shape[0], dtype)
            if not fastest_gated_multiply(normed, weight, activated, config, gate_up, activation):
                self._tuned.refuse(*weight.shape, is_gated=True)
            return

        total, *others = self._multiply(normed, weight)
        for part in others:
            total = total + part
        glu((total + layer.gate_up_bias).to(dtype), activated, activation)

    def _multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Partial sums [num_partials, R, N] of x times matrix transposed, valid until the next product."""
        if isinstance(matrix, KernelWeight):
            return multiply_quantised(self._workspace, x, matrix)

        weight = dense(matrix)
        config = self._config(weight)
        partials = take_partials(self._workspace, config.num_partials, self._num_rows, weight.shape[0])
        if not fastest_multiply(x, weight, partials, config):
            self._tuned.refuse(*weight.shape)
        return partials

    def _multiply_down(self, x: Tensor, matrix: Matrix, index: int) -> Tensor | PeerSums:
        """`_multiply` for a matrix whose columns GPUs divide: all their partial sums, if there are several.

        index: of the sum in the step.
        """
        if self._exchange is None:
            return self._multiply(x, matrix)

        weight = dense(matrix)
        num_columns, inner = weight.shape
        slices = self._exchange.shard.column_slices(num_columns, inner)
        config = self._tuned.gemm(num_columns, inner, slices=slices).config(self._num_rows)
        # Slices of different GPUs are added one after the other, as those of one GPU are.
        config = replace(config, is_spread=True)
        sums = self._exchange.sums(index, (slices, self._num_rows, num_columns))
        if not fastest_multiply(x, weight, sums.own, config):
            self._tuned.refuse(num_columns, inner)
        return sums

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
