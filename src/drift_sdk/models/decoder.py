"""One decoder for the Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.linear import linear
from drift_sdk.models.rope import inverse_frequencies, rotary_tables, rotate
from drift_sdk.models.tree_attention import StepRows
from drift_sdk.models.weights import DecoderWeights, LayerWeights, load_weights, tensor_shapes

__all__ = ["Decoder"]


class Decoder:
    """A decoder in plain torch: token ids in, residual stream out; logits are computed for selected rows.

    It owns only weights. The rows of a step and the keys they see are given by an AttentionBatch; keys and
    values are kept in a KVCache.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = frequencies.to(self.device)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        config: DecoderConfig,
        tensors: TensorSource,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        on_tensor: Callable[[int, int], None] | None = None,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with weights converted to `dtype` on `device`.

        on_tensor(num_loaded, num_tensors) is called after each tensor.
        check_bytes(num_bytes) is called before memory is allocated, and may raise.

        Raises ModelLoadError naming tensor, file, found and expected shape.
        """
        weights = load_weights(
            config,
            tensors,
            device=torch.device(device),
            dtype=dtype,
            on_tensor=on_tensor,
            check_bytes=check_bytes,
        )
        return cls(config, weights)

    @classmethod
    def random(
        cls,
        config: DecoderConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int = 0,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with random weights of the configured shapes, drawn on the device, the same for the same
        seed. `check_bytes` as in `load`."""
        shapes = tensor_shapes(config)
        tensors = RandomTensors(shapes, device=torch.device(device), dtype=dtype, seed=seed)
        return cls.load(config, tensors, device=device, dtype=dtype, check_bytes=check_bytes)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        batch: StepRows,
        cache: KVCache,
        aux_layers: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The residual stream [N, hidden] after the last layer and at each of `aux_layers`, not normalised.

        token_ids:   [N] int64, in the batch's order of rows.
        aux_layers:  j stands for the input of layer j, num_layers for the output of the last layer.

        The rows' keys and values are written to the cache. Raises ValueError for another shape of `token_ids`
        or a layer out of range.
        """
        num_layers = self.config.num_layers
        if token_ids.shape != (batch.num_rows,):
            raise ValueError(f"token_ids of shape {list(token_ids.shape)}: expected [{batch.num_rows}]")

        if not all(0 <= aux_layer <= num_layers for aux_layer in aux_layers):
            raise ValueError(f"aux_layers={list(aux_layers)}: expected each from 0 to {num_layers}")

        cos, sin = rotary_tables(batch.positions, self._frequencies, self.dtype)
        hidden = F.embedding(token_ids, self.weights.embedding)
        aux_hidden = {}
        for index, layer in enumerate(self.weights.layers):
            if index in aux_layers:
                aux_hidden[index] = hidden

            query, key, value = self._project(layer, hidden, cos, sin)
            attended = batch.attend(query, key, value, cache, index)
            hidden = hidden + linear(attended, layer.output, layer.output_bias)
            hidden = hidden + self._mlp(layer, hidden)

        aux_hidden[num_layers] = hidden
        return hidden, [aux_hidden[aux_layer] for aux_layer in aux_layers]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, vocab] of rows [M, hidden] of the residual stream after the last layer, before
        the final norm."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.weights.head).to(torch.float32)

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, num_heads, head_dim] and keys [N, num_kv_heads, head_dim], both rotated, and values
        [N, num_kv_heads, head_dim], from the layer's input [N, hidden]."""
        config = self.config
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(
            -1, num_rotated + config.num_kv_heads, config.head_dim
        )
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query_key[:, : config.num_heads], layer.query_norm, config.rms_norm_eps)
            key = rms_norm(query_key[:, config.num_heads :], layer.key_norm, config.rms_norm_eps)
            query_key = torch.cat((query, key), dim=1)

        rotated = rotate(query_key, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times weight [D].

    The division is computed in float32, the product in x's dtype. RMSNorm: arXiv 1910.07467.
    """
    return weight * F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps).to(x.dtype)
