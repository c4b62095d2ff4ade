"""One decoder for all families of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F

from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.experts import QuantisedMatrices, apply_experts
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.kv_numbers import KVForm, stored_shape
from drift_sdk.models.linear import embed, linear
from drift_sdk.models.matrix_reader import WeightForm
from drift_sdk.models.rope import rotary_tables, rotate
from drift_sdk.models.tree_attention import StepRows
from drift_sdk.models.weights import DecoderWeights, LayerWeights, load_weights, tensor_shapes

__all__ = ["Decoder", "random_tensors"]

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, as `rotary_tables` returns them."""


class Decoder:
    """A decoder in plain torch: token ids in, residual stream out; logits are computed for selected rows.

    It owns only weights. The rows of a step and the keys they see are given by an AttentionBatch; keys and
    values are kept in a KVCache.

    embedding_multiplier: the config's, rounded to the model's dtype where the config says so.
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self._frequencies = [rope.frequencies().to(self.device) for rope in config.ropes]
        self.embedding_multiplier = config.embedding_multiplier
        if config.has_rounded_multiplier:
            rounded = torch.tensor(config.embedding_multiplier, dtype=self.dtype, device="cpu")
            self.embedding_multiplier = float(rounded)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        config: DecoderConfig,
        tensors: TensorSource,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        form: WeightForm = "expanded",
        kv_form: KVForm | None = None,
        on_tensor: Callable[[int, int], None] | None = None,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with weights on `device`, in `dtype` or as `form` says.

        kv_form: of its KV cache, see `KVScales`; None: it is of `dtype`.
        on_tensor(num_loaded, num_tensors) is called after each tensor.
        check_bytes(num_bytes) is called before memory is allocated, and may raise.

        Raises ModelLoadError naming tensor, file, found and expected shape.
        """
        weights = load_weights(
            config,
            tensors,
            device=torch.device(device),
            dtype=dtype,
            form=form,
            kv_form=kv_form,
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
        form: WeightForm = "expanded",
        kv_form: KVForm | None = None,
        seed: int = 0,
        check_bytes: Callable[[int], None] | None = None,
    ) -> Decoder:
        """A decoder with random weights of the configured shapes, drawn on the device, the same for the same
        seed. `form`, `kv_form` and `check_bytes` as in `load`."""
        tensors = random_tensors(config, device=torch.device(device), dtype=dtype, seed=seed)
        return cls.load(
            config,
            tensors,
            device=device,
            dtype=dtype,
            form=form,
            kv_form=kv_form,
            check_bytes=check_bytes,
        )

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def kv_form(self) -> KVForm | None:
        """The form of its KV cache; None: it is of `dtype`."""
        return None if self.weights.kv_scales is None else self.weights.kv_scales.form

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of its KV cache."""
        return stored_shape(self.config.head_dim, self.dtype, self.kv_form)[0]

    def empty_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A KV cache for this decoder, not initialised."""
        config = self.config
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return KVCache(shape, self.dtype, self.device, self.weights.kv_scales)

    @cached_property
    def max_expert_scale(self) -> int:
        """The largest scale of the experts' MXFP4 weights; 0 without such weights."""
        largest = [
            matrices.scales.amax()
            for layer in self.weights.layers
            if layer.experts is not None
            for matrices in (layer.experts.gate_up, layer.experts.down)
            if isinstance(matrices, QuantisedMatrices)
        ]
        return int(torch.stack(largest).max()) if largest else 0

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

        rotary = self._rotary(batch)
        hidden = self._embed(token_ids)
        aux_hidden = {}
        for index in range(num_layers):
            if index in aux_layers:
                aux_hidden[index] = hidden

            hidden = self._add(hidden, self._attention(index, hidden, rotary[index], batch, cache))
            hidden = self._add(hidden, self._mlp(index, hidden))

        aux_hidden[num_layers] = hidden
        return hidden, [aux_hidden[aux_layer] for aux_layer in aux_layers]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, vocab] of rows [M, hidden] of the residual stream after the last layer, before
        the final norm."""
        logits = linear(self.normalise(hidden, self.weights.final_norm), self.weights.head)
        return logits.to(torch.float32).div_(self.config.logits_divisor)

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., D], normalised with `weight` [D] as the model's norms do."""
        if self.config.has_wide_norms:
            norm = wide_rms_norm
        else:
            norm = offset_rms_norm if self.config.has_offset_norms else rms_norm
        return norm(x, weight, self.config.rms_norm_eps)

    def _rotary(self, batch: StepRows) -> list[Rotary | None]:
        """The rotation tables of each layer; None without rotation."""
        tables = [
            rotary_tables(batch.positions, frequencies, self.dtype, rope.magnitude)
            for rope, frequencies in zip(self.config.ropes, self._frequencies, strict=True)
        ]
        return [None if rope is None else tables[rope] for rope in self.config.layer_ropes]

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = embed(token_ids, self.weights.embedding, self.dtype)
        return embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier

    def _add(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The residual stream [N, hidden] after the output [N, hidden] of attention or an MLP."""
        multiplier = self.config.residual_multiplier
        return hidden + (output if multiplier == 1.0 else output * multiplier)

    def _attention(
        self, index: int, hidden: torch.Tensor, rotary: Rotary | None, batch: StepRows, cache: KVCache
    ) -> torch.Tensor:
        """The attention output [N, hidden] of layer `index`, from its input [N, hidden]."""
        layer, config = self.weights.layers[index], self.config
        query, key, value = self._project(layer, hidden, rotary)
        attended = batch.attend(
            query,
            key,
            value,
            cache,
            index,
            window=config.windows[index],
            scale=config.attention_scale,
            sinks=layer.sinks,
        )
        output = linear(attended, layer.output, layer.output_bias)
        return (
            output if layer.attention_post_norm is None else self.normalise(output, layer.attention_post_norm)
        )

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [N, num_heads, head_dim] and keys [N, num_kv_heads, head_dim], both rotated, and values
        [N, num_kv_heads, head_dim], from the layer's input [N, hidden]."""
        config = self.config
        normed = self.normalise(hidden, layer.input_norm)
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(
            -1, num_rotated + config.num_kv_heads, config.head_dim
        )
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self.normalise(query_key[:, : config.num_heads], layer.query_norm)
            key = self.normalise(query_key[:, config.num_heads :], layer.key_norm)
            query_key = torch.cat((query, key), dim=1)

        if rotary is not None:
            query_key = rotate(query_key, *rotary)

        return query_key[:, : config.num_heads], query_key[:, config.num_heads :], value

    def _mlp(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        layer, experts = self.weights.layers[index], self.config.layer_experts(index)
        normed = self.normalise(hidden, layer.mlp_norm)
        if experts is not None and layer.experts is not None:
            return apply_experts(normed, layer.experts, experts)

        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        gate = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        output = linear(gate.mul_(up), layer.down, layer.down_bias)
        return output if layer.mlp_post_norm is None else self.normalise(output, layer.mlp_post_norm)


def random_tensors(
    config: DecoderConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> RandomTensors:
    """The random weights of a decoder, drawn on a device."""
    norm_mean = 0.0 if config.has_offset_norms else 1.0
    return RandomTensors(tensor_shapes(config), device=device, dtype=dtype, seed=seed, norm_mean=norm_mean)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times weight [D].

    The division is computed in float32, the product in x's dtype. RMSNorm: arXiv 1910.07467.
    """
    return weight * F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps).to(x.dtype)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times 1 + weight [D], all in
    float32: the norm of Gemma."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)


def wide_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] divided by its root mean square over the last dimension, times weight [D], all in float32:
    the norm of gpt-oss."""
    normed = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    return (normed * weight.to(torch.float32)).to(x.dtype)
