"""The decoder over a few rows a sequence, in kernels whose bits do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.cublas_gemm import fastest_gated_multiply, fastest_multiply
from drift_sdk._kernels.gemm.tuning import TunedGemm, TunedTable
from drift_sdk._kernels.layers.embedding import embed_norm
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk._kernels.layers.swiglu import swiglu
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import LayerWeights
from drift_sdk.steps import ExecutorLimits

__all__ = ["DecodeForward", "Rows", "attention_groups", "aux_buffers"]


class Rows(Struct, frozen=True):
    """What a step's rows are, on the device: slot (-1: padding), token and its position, int32 [R] each."""

    slot: Tensor
    token: Tensor
    position: Tensor

    @classmethod
    def take(cls, workspace: Workspace, num_rows: int) -> Rows:
        fields = ("slot", "token", "position")
        return cls(*(workspace.take(f"row_{name}", (num_rows,), torch.int32) for name in fields))


def aux_buffers(
    workspace: Workspace, name: str, aux_layers: Sequence[int], num_rows: int, size: int, dtype: torch.dtype
) -> dict[int, Tensor]:
    """A buffer [num_rows, size] for the residual stream at each boundary. Some may be named twice."""
    return {index: workspace.take(f"{name}_{index}", (num_rows, size), dtype) for index in aux_layers}


def attention_groups(
    decoder: Decoder, limits: ExecutorLimits, workspace: Workspace, *, num_sequences: int, num_rows: int
) -> AttentionGroups:
    """For up to so many sequences, each with up to `num_rows` rows."""
    config = decoder.config
    return AttentionGroups(
        workspace,
        decoder.device,
        num_sequences=num_sequences,
        num_rows=num_rows,
        num_kv_heads=config.num_kv_heads,
        group=config.num_heads // config.num_kv_heads,
        head_dim=config.head_dim,
        max_num_keys=limits.max_model_len + 1,
    )


class DecodeForward:
    """Runs `num_rows` rows, `rows_per_sequence` of each sequence, through all layers.

    A row's bits are those it has alone: products by the one tree of each weight, attention by partitions at
    fixed positions. `hidden` [R, H], a buffer of that name, is the residual stream after the last layer,
    `normed` the same normalised.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        block_table: Tensor,
        rows: Rows,
        workspace: Workspace,
        tuned: TunedTable,
        attention: AttentionGroups,
        *,
        hidden: str,
        aux_hidden: str,
        rows_per_sequence: int,
        aux_layers: Sequence[int] = (),
    ) -> None:
        config, dtype = decoder.config, decoder.dtype
        num_rows = rows.slot.shape[0]
        self._decoder, self._cache, self._block_table, self._rows = decoder, cache, block_table, rows
        self._workspace, self._tuned = workspace, tuned
        self._rows_per_sequence = rows_per_sequence
        self._num_rows = num_rows
        self.hidden = workspace.take(hidden, (num_rows, config.hidden_size), dtype)
        self.normed = workspace.take("normed", (num_rows, config.hidden_size), dtype)
        self._query = workspace.take("query", (num_rows, config.num_heads, config.head_dim), dtype)
        self._attended = workspace.take("attended", (num_rows, config.num_heads, config.head_dim), dtype)
        self._activated = workspace.take("activated", (num_rows, config.intermediate_size), dtype)
        self._attention = attention
        self._aux_layers = aux_layers
        self._aux_hidden = aux_buffers(workspace, aux_hidden, aux_layers, num_rows, config.hidden_size, dtype)

    @property
    def aux_hidden(self) -> list[Tensor]:
        """The residual stream [R, H] at each boundary, low to high."""
        return [self._aux_hidden[aux_layer] for aux_layer in self._aux_layers]

    def run(self) -> None:
        decoder, weights, rows = self._decoder, self._decoder.weights, self._rows
        eps = decoder.config.rms_norm_eps
        first_norm = weights.layers[0].input_norm
        embed_norm(rows.token, rows.slot, weights.embedding, first_norm, self.hidden, self.normed, eps=eps)
        if 0 in self._aux_hidden:
            self._aux_hidden[0].copy_(self.hidden)
        self._attention.plan(rows.slot, rows.position, self._rows_per_sequence)
        norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            self._attend(layer, index)
            product = self._multiply(self._attended.view(self._num_rows, -1), layer.output)
            add_norm(self.hidden, product, layer.mlp_norm, self.normed, eps=eps, bias=layer.output_bias)
            self._activate(layer)
            product = self._multiply(self._activated, layer.down)
            add_norm(
                self.hidden,
                product,
                next_norm,
                self.normed,
                eps=eps,
                bias=layer.down_bias,
                aux_hidden=self._aux_hidden.get(index + 1),
            )

    def _attend(self, layer: LayerWeights, index: int) -> None:
        rows, cache = self._rows, self._cache
        keys, values = cache.keys[index], cache.values[index]
        rotate_and_store(
            self._multiply(self.normed, layer.qkv),
            rows.slot,
            rows.position,
            self._block_table,
            cache.cos,
            cache.sin,
            self._query,
            keys,
            values,
            bias=layer.qkv_bias,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._decoder.config.rms_norm_eps,
        )
        self._attention.attend(
            self._query,
            keys,
            values,
            self._block_table,
            rows.slot,
            rows.position,
            self._attended,
            self._rows_per_sequence,
        )

    def _activate(self, layer: LayerWeights) -> None:
        if layer.gate_up_bias is None:
            config = self._gemm(layer.gate_up, is_gated=True).config(self._num_rows)
            shape = (self._num_rows, layer.gate_up.shape[0])
            dtype = self._decoder.dtype
            gate_up = self._workspace.take("gate_up", shape, dtype) if config.is_library else None
            if not fastest_gated_multiply(self.normed, layer.gate_up, self._activated, config, gate_up):
                self._tuned.refuse(*layer.gate_up.shape, is_gated=True)
            return

        total, *others = self._multiply(self.normed, layer.gate_up)
        for part in others:
            total = total + part
        swiglu((total + layer.gate_up_bias).to(self._decoder.dtype), self._activated)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Partial sums [num_partials, R, N] of x times weight transposed."""
        config = self._gemm(weight).config(self._num_rows)
        shape = (config.num_partials, self._num_rows, weight.shape[0])
        partials = self._workspace.take("partials", shape, torch.float32)
        if not fastest_multiply(x, weight, partials, config):
            self._tuned.refuse(*weight.shape)
        return partials

    def _gemm(self, weight: Tensor, *, is_gated: bool = False) -> TunedGemm:
        return self._tuned.gemm(weight.shape[0], weight.shape[1], is_gated=is_gated)
