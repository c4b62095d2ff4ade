"""The EAGLE-3 draft: a Llama layer or a few that read the target's features beside the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.source import Source, resolve
from drift_sdk.models.attention import AttentionBatch
from drift_sdk.models.decoder import Decoder, rms_norm
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_weights import DraftWeights, load_draft_weights, required_shapes, shareable_shapes
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.linear import linear
from drift_sdk.models.rope import inverse_frequencies, rotary_tables, rotate

__all__ = ["DRAFT_KV_OFFSET", "DraftDecoder"]

# Row i, of position i, holds (feature of token i, token i + 1). It lies at the slot of token i + 1, so that a
# block's draft keys and values follow from the block's own tokens and those before.
DRAFT_KV_OFFSET = 1


def _read_config(source: Source, target: Decoder, aux_layer_convention: str | None) -> DraftConfig:
    try:
        return DraftConfig.from_hf(source.config, target.config, aux_layer_convention=aux_layer_convention)
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.path}: {error}") from error


class DraftDecoder:
    """Row i, made of the feature at position i and token i + 1, in; what token i + 2 follows from, out.

    It owns weights only, in the dtype and on the device of its target, some of them shared with it. What
    rows see comes in an AttentionBatch made with `slot_offset=DRAFT_KV_OFFSET`, what they remember in a
    KVCache of `num_layers` layers.
    """

    def __init__(self, config: DraftConfig, weights: DraftWeights, target: Decoder) -> None:
        self.config = config
        self.weights = weights
        self._target_norm, self._target_eps = target.weights.final_norm, target.config.rms_norm_eps
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = frequencies.to(self.device)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        folder: str | Path,
        target: Decoder,
        *,
        aux_layer_convention: str | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """From a folder or, for a str alone, a hub id. `aux_layer_convention` as in DraftConfig.from_hf.

        Raises ModelLoadError naming the file and what of it is broken, not implemented or does not fit the
        target.
        """
        source = resolve(folder, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        config = _read_config(source, target, aux_layer_convention)
        tensors = DraftTensors(source.path)
        ids = read_target_ids(tensors, config.vocab_size, config.draft_vocab_size)
        return cls(config, load_draft_weights(config, tensors, ids, target.weights), target)

    @classmethod
    @torch.inference_mode()
    def random(cls, config: DraftConfig, target: Decoder, seed: int = 0) -> Self:
        """Random weights with an embedding and a head of their own, the same for the same seed. A reduced
        vocabulary is spread evenly over the target's."""
        shapes = required_shapes(config) | shareable_shapes(config)
        tensors = RandomTensors(shapes, device=target.device, dtype=target.dtype, seed=seed)
        ids = (
            torch.arange(config.draft_vocab_size, device="cpu") * config.vocab_size // config.draft_vocab_size
        )
        return cls(config, load_draft_weights(config, tensors, ids, target.weights), target)

    @classmethod
    def load_random(
        cls,
        folder: str | Path,
        target: Decoder,
        *,
        aux_layer_convention: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Random weights for the config in a folder or hub id; ModelLoadError if it does not fit."""
        source = resolve(folder, revision=None, cache_dir=cache_dir, local_files_only=local_files_only)
        return cls.random(_read_config(source, target, aux_layer_convention), target)

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The boundaries of the target whose residual stream `fuse` takes, low to high."""
        return self.config.aux_layers

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's id of each of the draft's, [draft_vocab] int64."""
        return self.weights.target_ids

    @torch.inference_mode()
    def fuse(self, aux_hidden: Sequence[torch.Tensor], final_hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, hidden] from what the target's `forward` returns: the residual stream at `aux_layers`,
        [N, target_hidden] each, and after the last layer, [N, target_hidden]. None is normalised yet.

        A row that the draft feeds back to itself is a feature already and does not pass through here.
        """
        if len(aux_hidden) != len(self.aux_layers):
            raise ValueError(f"aux_hidden: {len(aux_hidden)} tensors: expected {len(self.aux_layers)}")

        weights, eps = self.weights, self.config.rms_norm_eps
        if weights.fc is None:
            return rms_norm(final_hidden, self._target_norm, self._target_eps)

        if weights.feature_norms:
            pairs = zip(aux_hidden, weights.feature_norms, strict=True)
            aux_hidden = [rms_norm(feature, norm, eps) for feature, norm in pairs]

        features = torch.cat(tuple(aux_hidden), dim=-1)
        if weights.input_norm is not None:
            features = rms_norm(features, weights.input_norm, eps)

        return linear(features, weights.fc)

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, batch: AttentionBatch, cache: KVCache
    ) -> torch.Tensor:
        """The next features [N, hidden], to be fed back with the tokens chosen from their logits.

        features [N, hidden] of positions i, token_ids [N] int64 of the target's vocabulary at i + 1; the
        batch has the positions i. The rows' keys and values are written to the cache.
        """
        expected = (batch.num_rows, self.config.hidden_size)
        if features.shape != expected or token_ids.shape != expected[:1]:
            raise ValueError(
                f"features of shape {list(features.shape)} and token_ids of {list(token_ids.shape)}: "
                f"expected {list(expected)} and [{expected[0]}]"
            )

        weights, eps = self.weights, self.config.rms_norm_eps
        rotary = rotary_tables(batch.positions, self._frequencies, self.dtype)
        hidden = features
        for index, layer in enumerate(weights.layers):
            if index == 0:
                embedded = F.embedding(token_ids, weights.embedding)
                normed = rms_norm(features, weights.hidden_norm, eps)
                hidden = normed if self.config.is_residual_normed else features
                inputs = torch.cat((rms_norm(embedded, layer.input_norm, eps), normed), dim=-1)
            else:
                inputs = rms_norm(hidden, layer.input_norm, eps)

            hidden = hidden + self._attention(index, inputs, rotary, batch, cache)
            hidden = hidden + self._mlp(index, hidden)

        return rms_norm(hidden, weights.final_norm, eps) if self.config.is_output_normed else hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, draft_vocab] of rows [M, hidden] that `forward` returned."""
        return linear(self._head_input(hidden), self.weights.head).to(torch.float32)

    def _attention(
        self,
        index: int,
        inputs: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """What layer `index` adds to the residual stream, [N, hidden], from its normalised inputs."""
        layer, head_dim = self.weights.layers[index], self.config.head_dim
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = linear(inputs, layer.qkv, layer.qkv_bias).view(-1, num_heads + 2 * num_kv_heads, head_dim)
        query_key, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        rotated = rotate(query_key, *rotary)
        attended = batch.attend(rotated[:, :num_heads], rotated[:, num_heads:], value, cache, index)
        return linear(attended, layer.output, layer.output_bias)

    def _mlp(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.weights.layers[index]
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.is_output_normed:
            return hidden

        return rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
