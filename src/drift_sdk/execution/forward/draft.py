"""The forward pass of a draft head. Drafted tokens are verified, so its bits do not affect the output."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.draft.draft_rows import Residual, draft_inputs
from drift_sdk._kernels.gemm.gemm import fastest_multiply, gated_multiply, library_product
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.gates import gate_attention, glu
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.execution.forward.caches import DraftKVCache
from drift_sdk.execution.forward.channels import ExpertForward, has_few_rows, take_counts
from drift_sdk.execution.forward.kernel_weights import KernelWeight
from drift_sdk.execution.forward.latent_attention import LatentHeads, LatentLayer
from drift_sdk.execution.forward.products import Product, multiply_gated, multiply_quantised
from drift_sdk.execution.forward.rows import Rows, take_partials
from drift_sdk.models.channels import ExpertWeights, MlpWeights
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.models.weights import ChannelWeights
from drift_sdk.quantised.weight import Matrix, dense
from drift_sdk.spec.model import Attention, Experts, LatentAttention, Mlp

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
        num_rows, norm = rows.slot.shape[0], config.norm
        hidden, normed = self.hidden(num_rows), self.normed(num_rows)
        inputs = self._inputs(num_rows)
        draft_inputs(
            rows.slot,
            rows.token,
            rows.position,
            features,
            dense(weights.embedding),
            weights.embedding_norm,
            weights.hidden_norm,
            hidden,
            inputs,
            eps=norm.eps,
            norm_kind=norm.kind,
            residual=_residual(config),
            block_table=self._block_table,
            block_features=cache.block_features if is_fused else None,
            block_size=cache.block_size,
        )
        if weights.joint is not None:
            first_norm = weights.layers[0].mixer_norm
            self._add(hidden, self.multiply(inputs, weights.joint), first_norm, normed)
            inputs = normed
        norms = [layer.mixer_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            with self._stages("draft_attention"):
                mixer, x = layer.mixer, normed if index else inputs
                assert isinstance(mixer, AttentionWeights | LatentWeights)
                if isinstance(mixer, LatentWeights):
                    attended = self._attend_latents(mixer, index, rows, x, attend)
                else:
                    attended = self._attend(mixer, index, rows, x, attend)
                product = self.multiply(attended, mixer.output)
                bias = mixer.output_bias
                self._add(hidden, product, layer.channel_norm, normed, bias)
            with self._stages("draft_mlp"):
                product, bias = self._channel(layer.channel, rows, normed)
                self._add(hidden, product, next_norm, normed, bias)

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
        assert isinstance(spec, Attention)
        num_rows, kv = rows.slot.shape[0], cache.layer(index)
        query = self._take("draft_query", num_rows, spec.num_heads, spec.head_dim)
        attended = self._take("draft_attended", num_rows, spec.num_heads, spec.head_dim)
        head_norm, width = spec.head_norm, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        product = self.multiply(inputs, mixer.qkv)
        bias = None if mixer.qkv_bias is None else mixer.qkv_bias[:width]
        rotate_and_store(
            product[..., :width],
            rows.slot,
            rows.position,
            self._block_table,
            cache.cos,
            cache.sin,
            query,
            kv,
            bias=bias,
            query_norm=mixer.query_norm,
            key_norm=mixer.key_norm,
            eps=0.0 if head_norm is None else head_norm.eps,
            norm_kind="rounded" if head_norm is None else head_norm.kind,
            row_kv_slot=rows.kv_slot,
        )
        attend(
            LayerAttention(
                query=query,
                out=attended,
                kv=kv,
                block_table=self._block_table,
                window=spec.window or 0,
                scale=spec.scale,
                first_key=DRAFT_KV_OFFSET,
            )
        )
        rows_of_heads = attended.flatten(1)
        if spec.has_gate:
            gate_attention(rows_of_heads, product[..., width:])
        return rows_of_heads

    def _attend_latents(
        self, mixer: LatentWeights, index: int, rows: Rows, inputs: Tensor, attend: Attend
    ) -> Tensor:
        """As `_attend`, [R, num_heads * output_dim], of a layer with latent attention."""
        spec, cache, num_rows = self._draft.config.attention, self._cache, rows.slot.shape[0]
        assert isinstance(spec, LatentAttention)

        def take(name: str, *shape: int) -> Tensor:
            return self._take(f"draft_{name}", num_rows, *shape)

        def multiply(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Product:
            return self.multiply(x, matrix), bias

        layer = LatentLayer(
            kv=cache.layer(index),
            cos=cache.cos,
            sin=cache.sin,
            query=take("query", spec.num_heads, spec.head_dim),
            attended=take("attended", spec.num_heads, spec.value_dim),
            first_key=DRAFT_KV_OFFSET,
        )
        return LatentHeads(rows, self._block_table, take, multiply, attend).run(inputs, mixer, spec, layer)

    def _channel(self, weights: ChannelWeights, rows: Rows, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output of a layer's MLP or experts for the normalised rows [R, hidden], as `add_norm` takes it,
        and the bias that remains to be added."""
        spec = self._draft.config.layer.channel
        if isinstance(weights, MlpWeights):
            assert isinstance(spec, Mlp)
            activated = self._activated(weights, normed, spec.intermediate_size)
            return self.multiply(activated, weights.down), weights.down_bias

        assert isinstance(spec, Experts) and isinstance(weights, ExpertWeights)
        counts = take_counts(self._workspace, self._draft.num_layers, spec, "draft_expert_counts")
        experts = ExpertForward(
            spec,
            self._tuned,
            rows.slot,
            normed,
            self._workspace,
            counts=counts,
            max_scale=0 if has_few_rows(normed.shape[0], spec) else None,
            joins_sigmoids=isinstance(self._draft.config.layer.mixer, LatentAttention),
        )
        return experts.run(weights, 0), None

    def _add(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, normed: Tensor, bias: Tensor | None = None
    ) -> None:
        """Add to the residual stream, and normalise it with `weight`; as `add_norm` takes them."""
        norm = self._draft.config.norm
        add_norm(hidden, delta, weight, normed, eps=norm.eps, bias=bias, norm_kind=norm.kind)

    def _activated(self, mlp: MlpWeights, normed: Tensor, size: int) -> Tensor:
        """The gated activation [R, size] of the normalised rows [R, hidden]."""
        num_rows = normed.shape[0]
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
        """Token embedding and feature [num_rows, 2 * hidden], both normalised."""
        return self._take("draft_inputs", num_rows, 2 * self._draft.config.hidden_size)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._workspace.take(name, shape, self._draft.dtype)


def _residual(config: DraftConfig) -> Residual:
    """What the residual stream begins with."""
    if config.has_joint:
        return "zeros"

    return "normed" if config.is_residual_normed else "feature"
