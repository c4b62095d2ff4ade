"""The target's forward pass over chunks of prompts: cuBLAS products, and attention by tiles of rows."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.prefill_attention import prefill_attention, prefill_attention_config
from drift_sdk._kernels.gemm.cublas_gemm import library_product
from drift_sdk._kernels.layers.glu import glu
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.expert_forward import ExpertForward
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.execution.forward.quantised_products import expand, multiply_gated, multiply_quantised
from drift_sdk.execution.forward.residual_stream import ResidualStream, norm_kind
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import HiddenStates, LayerBuffers, take_gate_up
from drift_sdk.models.weights import LayerWeights
from drift_sdk.quantised.weight import Matrix, dense

__all__ = ["PrefillForward"]


MAX_KERNEL_ROWS = 512
"""Most rows for which products with quantised weights do not expand them first. Expanding reads a weight and
writes it in two bytes a number, which more rows than this pay for."""


class PrefillForward:
    """Computes the rows of some chunks, cut into `tiles` [num_tiles, 4] (see `prefill_tiles`), through all
    layers.

    Fast and not exact: cuBLAS chooses its kernels by the number of rows, so a row's bits may depend on it.
    For many rows, quantised weights are expanded one by one, which rounds each number to the storage type.

    hidden_states: of the rows, filled by `run`.
    """

    def __init__(
        self,
        model: ModelResources,
        rows: Rows,
        tiles: Tensor,
        block_table: Tensor,
        workspace: Workspace,
        hidden_states: HiddenStates,
    ) -> None:
        """block_table [S, max_blocks] int32. hidden_states: of as many rows as `rows` has."""
        decoder, config, num_rows = model.decoder, model.decoder.config, rows.slot.shape[0]
        self._decoder, self._cache = decoder, model.cache
        self._num_rows, self._workspace = num_rows, workspace
        self._rows, self._tiles, self._block_table = rows, tiles, block_table
        self._attention = prefill_attention_config(config.head_dim, decoder.dtype)
        self.hidden_states = hidden_states

        def take(name: str, num_columns: int) -> Tensor:
            return workspace.take(name, (num_rows, num_columns), decoder.dtype)

        self._buffers = LayerBuffers.take(workspace, decoder, num_rows)
        self._stream = ResidualStream(decoder, hidden_states, self._buffers.normed)
        self._qkv = take("prefill_qkv", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self._gate_up = take_gate_up(workspace, num_rows, 2 * config.mlp_size, decoder.dtype)
        self._delta = take("prefill_delta", config.hidden_size)
        self._experts = ExpertForward.take(
            model, rows.slot, self._buffers.normed, workspace, is_decoding=False
        )

    def run(self) -> None:
        """Record the kernels of all layers."""
        self._stream.embed(self._rows.token, self._rows.slot)
        for index, layer in enumerate(self._decoder.weights.layers):
            self._layer(index, layer)

    def _layer(self, index: int, layer: LayerWeights) -> None:
        stream, buffers = self._stream, self._buffers
        self._attend(layer, index)
        attended = buffers.attended.flatten(1)
        stream.add_attention(index, *self._multiply(attended, layer.output, layer.output_bias, self._delta))
        if self._experts is not None and layer.experts is not None:
            stream.add_mlp(index, self._experts.run(layer.experts, index))
            return

        self._activate(layer)
        down = self._multiply(buffers.activated, layer.down, layer.down_bias, self._delta)
        stream.add_mlp(index, *down)

    def _attend(self, layer: LayerWeights, index: int) -> None:
        """Store keys and values, and fill `attended`."""
        rows, cache, buffers, config = self._rows, self._cache, self._buffers, self._decoder.config
        kv = cache.layer(index)
        cos, sin = cache.rotations[index]
        product, bias = self._multiply(buffers.normed, layer.qkv, layer.qkv_bias, self._qkv)
        rotate_and_store(
            product,
            rows.slot,
            rows.position,
            self._block_table,
            cos,
            sin,
            buffers.query,
            kv,
            bias=bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=config.rms_norm_eps,
            norm_kind=norm_kind(config),
        )
        attention = LayerAttention(
            query=buffers.query,
            out=buffers.attended,
            kv=kv,
            block_table=self._block_table,
            window=config.windows[index] or 0,
            scale=config.attention_scale,
            sinks=layer.sinks,
        )
        prefill_attention(attention, self._tiles, self._attention)

    def _activate(self, layer: LayerWeights) -> None:
        """Fill `activated` with the gated activation of the normalised rows."""
        buffers, activation = self._buffers, self._decoder.config.activation
        if self._is_by_kernel(layer.gate_up):
            multiply_gated(
                self._workspace,
                buffers.normed,
                layer.gate_up,
                buffers.activated,
                activation,
                layer.gate_up_bias,
            )
            return

        self._multiply(buffers.normed, layer.gate_up, layer.gate_up_bias, self._gate_up)
        glu(self._gate_up, buffers.activated, activation)

    def _multiply(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x [R, in] times matrix [out, in] transposed, plus bias [out].

        Returns `out` and None; or, of a quantised matrix and few rows, partial sums and the bias that remains
        to be added.
        """
        if self._is_by_kernel(matrix):
            return multiply_quantised(self._workspace, x, matrix), bias

        if isinstance(matrix, KernelWeight):
            weight = expand(self._workspace, matrix, x.dtype)
        else:
            weight = dense(matrix)
        library_product(x, weight.T, bias, out)
        return out, None

    def _is_by_kernel(self, matrix: Matrix) -> TypeGuard[KernelWeight]:
        """Whether the kernels multiply by the quantised matrix, without expanding it."""
        return isinstance(matrix, KernelWeight) and self._num_rows <= MAX_KERNEL_ROWS
