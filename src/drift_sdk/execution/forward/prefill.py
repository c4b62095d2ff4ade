"""The decoder over the chunks of a prefill step: cuBLAS products, and attention by tiles of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.attention.prefill_attention import PrefillAttentionConfig, prefill_attention
from drift_sdk._kernels.common.launch_order import note_library_kernel
from drift_sdk._kernels.layers.embedding import embed_norm
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk._kernels.layers.swiglu import swiglu
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.decode import Rows, aux_buffers
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.models.decoder import Decoder

__all__ = ["PrefillForward"]


class PrefillForward:
    """Runs the rows of some chunks, cut into `tiles` [num_tiles, 4] (see `prefill_tiles`), through all
    layers.

    Fast, and near enough: cuBLAS chooses its kernels by the number of rows. `hidden` [N, H] is the residual
    stream after the last layer, not normalised.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        block_table: Tensor,
        rows: Rows,
        tiles: Tensor,
        workspace: Workspace,
        attention: PrefillAttentionConfig,
        aux_layers: Sequence[int] = (),
    ) -> None:
        config, dtype = decoder.config, decoder.dtype
        num_rows = rows.slot.shape[0]
        self._decoder, self._cache, self._block_table = decoder, cache, block_table
        self._rows, self._tiles, self._attention = rows, tiles, attention
        size = config.hidden_size
        self._aux_layers = aux_layers
        self._aux_hidden = aux_buffers(workspace, "prefill_aux_hidden", aux_layers, num_rows, size, dtype)

        def take(name: str, *shape: int) -> Tensor:
            return workspace.take(name, (num_rows, *shape), dtype)

        query_size = config.num_heads * config.head_dim
        self.hidden = take("prefill_hidden", config.hidden_size)
        self._normed = take("normed", config.hidden_size)
        self._qkv = take("qkv", query_size + 2 * config.num_kv_heads * config.head_dim)
        self._query = take("query", config.num_heads, config.head_dim)
        self._attended = take("attended", query_size)
        self._gate_up = take("gate_up", 2 * config.intermediate_size)
        self._activated = take("activated", config.intermediate_size)
        self._delta = take("delta", config.hidden_size)

    @property
    def aux_hidden(self) -> list[Tensor]:
        """The residual stream [N, H] at each boundary, low to high."""
        return [self._aux_hidden[aux_layer] for aux_layer in self._aux_layers]

    def run(self) -> None:
        decoder, weights, rows, cache = self._decoder, self._decoder.weights, self._rows, self._cache
        eps = decoder.config.rms_norm_eps
        first_norm = weights.layers[0].input_norm
        embed_norm(rows.token, rows.slot, weights.embedding, first_norm, self.hidden, self._normed, eps=eps)
        if 0 in self._aux_hidden:
            self._aux_hidden[0].copy_(self.hidden)
        norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            _multiply(self._normed, layer.qkv, layer.qkv_bias, self._qkv)
            rotate_and_store(
                self._qkv,
                rows.slot,
                rows.position,
                self._block_table,
                cache.cos,
                cache.sin,
                self._query,
                cache.keys[index],
                cache.values[index],
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=eps,
            )
            prefill_attention(
                self._query,
                cache.keys[index],
                cache.values[index],
                self._block_table,
                self._tiles,
                self._attended,
                self._attention,
            )
            _multiply(self._attended, layer.output, layer.output_bias, self._delta)
            add_norm(self.hidden, self._delta, layer.mlp_norm, self._normed, eps=eps)
            _multiply(self._normed, layer.gate_up, layer.gate_up_bias, self._gate_up)
            swiglu(self._gate_up, self._activated)
            _multiply(self._activated, layer.down, layer.down_bias, self._delta)
            aux_hidden = self._aux_hidden.get(index + 1)
            add_norm(self.hidden, self._delta, next_norm, self._normed, eps=eps, aux_hidden=aux_hidden)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [N, out] = x [N, in] times weight [out, in] transposed, plus bias [out]."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)
    note_library_kernel(out)
