"""The forward pass of an EAGLE-3 draft. Drafted tokens are verified, so its bits do not affect the output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.draft.draft_inputs import draft_inputs
from drift_sdk._kernels.gemm.cublas_gemm import fastest_multiply, library_product
from drift_sdk._kernels.gemm.gemm import gated_multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.glu import glu
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.draft_kv_cache import DraftKVCache
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.quantised_products import multiply_gated, multiply_quantised
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import take_partials
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.channels.mlp import MlpWeights
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.quantised.weight import Matrix, dense

__all__ = ["Attend", "DraftForward"]

MAX_MULTIPLY_ROWS = 128
"""Most rows for which `fastest_multiply` is faster than cuBLAS alone; products of more rows use cuBLAS."""

Attend = Callable[[LayerAttention], None]
"""Fills the output of a layer's attention for all rows of a pass."""


class DraftForward:
    """Computes rows through all layers of the draft; their keys and values go to the cache.

    `rows.position` is a row's place in the cache.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        cache: DraftKVCache,
        block_table: Tensor,
        workspace: Workspace,
        tuned: TunedTable,
        *,
        max_num_rows: int,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """block_table [S, max_blocks] int32. max_num_rows: most rows of a `run`."""
        self._draft, self._cache, self._block_table = draft, cache, block_table
        self._workspace, self._tuned, self._stages = workspace, tuned, stages
        # Taken at their largest: smaller requests are views of these.
        self._inputs(max_num_rows)
        self.hidden(max_num_rows)

    def hidden(self, num_rows: int) -> Tensor:
        """The residual stream [num_rows, hidden] after the last layer, as the latest `run` left it."""
        return self._take("draft_hidden", num_rows, self._draft.config.hidden_size)

    def normed(self, num_rows: int) -> Tensor:
        """`hidden` after the final norm [num_rows, hidden], as the latest `run` left it."""
        return self._take("draft_normed", num_rows, self._draft.config.hidden_size)

    def output(self, num_rows: int) -> Tensor:
        """The rows [num_rows, hidden] that the next drafted row takes as its feature: `normed` or `hidden`,
        as the draft's config says."""
        is_normed = self._draft.config.is_output_normed
        return self.normed(num_rows) if is_normed else self.hidden(num_rows)

    def run(self, rows: Rows, features: Tensor, attend: Attend, *, is_fused: bool) -> None:
        """Record the kernels of all layers.

        features [R, hidden]: of the position before each row's place, as `draft_inputs` takes them.
        is_fused: whether the features come from the target. If so, the feature of each block's last token is
        kept beside the block; where there are fewer features than rows, the features of the last rows are
        read from there.
        """
        config, weights, cache = self._draft.config, self._draft.weights, self._cache
        num_rows, eps = rows.slot.shape[0], config.rms_norm_eps
        hidden, normed = self.hidden(num_rows), self.normed(num_rows)
        inputs = self._inputs(num_rows)
        draft_inputs(
            rows.slot,
            rows.token,
            rows.position,
            features,
            dense(weights.embedding),
            weights.layers[0].mixer_norm,
            weights.hidden_norm,
            hidden,
            inputs,
            eps=eps,
            is_residual_normed=config.is_residual_normed,
            block_table=self._block_table,
            block_features=cache.block_features if is_fused else None,
            block_size=cache.block_size,
        )
        norms = [layer.mixer_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            with self._stages("draft_attention"):
                mixer = layer.mixer
                assert isinstance(mixer, AttentionWeights)
                attended = self._attend(mixer, index, rows, normed if index else inputs, attend)
                product = self.multiply(attended, mixer.output)
                bias = mixer.output_bias
                add_norm(hidden, product, layer.channel_norm, normed, eps=eps, bias=bias)
            with self._stages("draft_mlp"):
                mlp = layer.channel
                assert isinstance(mlp, MlpWeights)
                product = self.multiply(self._activated(mlp, normed), mlp.down)
                add_norm(hidden, product, next_norm, normed, eps=eps, bias=mlp.down_bias)

    def multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        """x [R, in] times matrix [out, in] transposed: fp32 partial sums [num_partials, R, out], to be added
        in order, for at most MAX_MULTIPLY_ROWS rows or a quantised matrix; else the whole product [R, out].
        Valid until the next product."""
        if isinstance(matrix, KernelWeight):
            return multiply_quantised(self._workspace, x, matrix)

        weight = dense(matrix)
        num_rows, num_columns = x.shape[0], weight.shape[0]
        if num_rows > MAX_MULTIPLY_ROWS:
            product = self._take("draft_product", num_rows, num_columns)
            library_product(x, weight.T, None, product)
            return product

        config = self._tuned.gemm(*weight.shape).config(num_rows)
        partials = take_partials(self._workspace, config.num_partials, num_rows, num_columns)
        fastest_multiply(x, weight, partials, config)
        return partials

    def _attend(
        self, mixer: AttentionWeights, index: int, rows: Rows, inputs: Tensor, attend: Attend
    ) -> Tensor:
        """The attention output [R, num_heads * head_dim] of layer `index`, whose input is `inputs`."""
        spec, cache = self._draft.config.attention, self._cache
        num_rows, kv = rows.slot.shape[0], cache.layer(index)
        query = self._take("draft_query", num_rows, spec.num_heads, spec.head_dim)
        attended = self._take("draft_attended", num_rows, spec.num_heads, spec.head_dim)
        rotate_and_store(
            self.multiply(inputs, mixer.qkv),
            rows.slot,
            rows.position,
            self._block_table,
            cache.cos,
            cache.sin,
            query,
            kv,
            bias=mixer.qkv_bias,
            row_kv_slot=rows.kv_slot,
        )
        attend(
            LayerAttention(
                query=query,
                out=attended,
                kv=kv,
                block_table=self._block_table,
                first_key=DRAFT_KV_OFFSET,
            )
        )
        return attended.flatten(1)

    def _activated(self, mlp: MlpWeights, normed: Tensor) -> Tensor:
        """The gated activation [R, intermediate] of the normalised rows [R, hidden]."""
        num_rows, size = normed.shape[0], self._draft.config.mlp.intermediate_size
        activated = self._take("draft_activated", num_rows, size)
        bias = mlp.gate_up_bias
        if isinstance(mlp.gate_up, KernelWeight):
            multiply_gated(self._workspace, normed, mlp.gate_up, activated, "silu", bias)
            return activated

        weight = dense(mlp.gate_up)
        if bias is None and num_rows <= MAX_MULTIPLY_ROWS:
            gemm = self._tuned.gemm(*weight.shape, is_gated=True)
            gated_multiply(normed, weight, activated, gemm.config(num_rows))
            return activated

        gate_up = self._take("draft_product", num_rows, 2 * size)
        library_product(normed, weight.T, bias, gate_up)
        glu(gate_up, activated)
        return activated

    def _inputs(self, num_rows: int) -> Tensor:
        """The first layer's input [num_rows, 2 * hidden]: token embedding and feature, both normalised."""
        return self._take("draft_inputs", num_rows, 2 * self._draft.config.hidden_size)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._workspace.take(name, shape, self._draft.dtype)
