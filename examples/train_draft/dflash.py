"""A DFlash head in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drift_sdk.models.dflash import DFlashConfig, dflash_shapes
from drift_sdk.models.layers import rms_norm, rotary_tables, rotate
from drift_sdk.spec.model import Attention, ModelSpec

from .head import DraftHead, HeadPass, TakeStep, layer_settings
from .target import Target

__all__ = ["DFlashHead", "DFlashPass", "dflash_settings"]


def dflash_settings(
    target: ModelSpec,
    draft_vocab_size: int,
    intermediate_size: int,
    *,
    aux_layers: Sequence[int],
    num_layers: int,
    num_masks: int,
    mask_token_id: int,
) -> dict[str, Any]:
    """The config.json of a head, in the format of the speculators library.

    aux_layers: the target's layers whose input its features are. mask_token_id: of a token that texts do not
    have; its embedding is not trained.
    """
    greedy = {"proposal_type": "greedy", "speculative_tokens": num_masks}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": num_layers,
            **layer_settings(target, intermediate_size),
        },
        "torch_dtype": "bfloat16",
        "draft_vocab_size": draft_vocab_size,
        "block_size": num_masks + 1,
        "mask_token_id": mask_token_id,
        "aux_hidden_state_layer_ids": list(aux_layers),
    }


class DFlashHead(DraftHead):
    """A DFlash head: see `DraftHead`."""

    config: DFlashConfig

    def read_config(self, settings: dict[str, Any], target: ModelSpec) -> None:
        self.config = DFlashConfig.from_hf(settings, target)
        self.eps, self.aux_layers = self.config.shape.final_norm.eps, self.config.aux_layers

    @classmethod
    def shapes(cls, settings: dict[str, Any], target: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return dflash_shapes(DFlashConfig.from_hf(settings, target), has_tables=False)

    def open(self, weights: dict[str, torch.Tensor], length: int) -> DFlashPass:
        return DFlashPass(self, weights, length)


class DFlashPass(HeadPass):
    """The blocks of drafts behind every row of a batch of sequences at once.

    The block of row i is token i + 1 and the masks behind it, at the positions from i + 1 on. Its rows see
    each other, and the target's features up to row i; the mask of step k is at position i + 2 + k, whose
    token it drafts.
    """

    def __init__(self, head: DFlashHead, weights: dict[str, torch.Tensor], length: int) -> None:
        super().__init__(head, weights, length)
        self._config = head.config
        (rope,) = head.config.shape.ropes
        self._frequencies, self._magnitude = rope.frequencies().to(head.target_ids.device), rope.magnitude

    def draft(
        self, target: Target, token_ids: torch.Tensor, features: torch.Tensor, number: int, take: TakeStep
    ) -> None:
        anchors, num_masks = token_ids.roll(-1, 1), self._config.num_masks
        masks = torch.full_like(anchors, self._config.mask_token_id)
        context = self._norm(self._project(features, "fc"), "hidden_norm")
        # [batch, block, length, hidden]
        hidden = target.embed_as_input(torch.stack((anchors, *[masks] * num_masks), 1))
        for index in range(self._config.shape.num_layers):
            layer = f"layers.{index}"
            attended = self._attend(context, self._norm(hidden, f"{layer}.input_layernorm"), layer)
            hidden = hidden + self._project(attended, f"{layer}.self_attn.o_proj")
            hidden = hidden + self._mlp(hidden, layer)
        for step in range(number):
            take(step, hidden[:, 1 + step])

    def _attend(self, context: torch.Tensor, inputs: torch.Tensor, layer: str) -> torch.Tensor:
        """Attention [batch, block, length, num_heads * head_dim] of the rows of blocks, for their inputs
        [batch, block, length, hidden] and the features [batch, length, hidden]."""
        places = torch.arange(self._length, device=inputs.device)
        of_blocks = torch.cat([places + 1 + offset for offset in range(inputs.shape[1])])
        keys = self._heads(context, places, f"{layer}.self_attn.k")
        values = self._split(context, f"{layer}.self_attn.v")
        shape = inputs.shape[1:3]
        rows = inputs.flatten(1, 2)
        query, own_keys = (
            self._heads(rows, of_blocks, f"{layer}.self_attn.{name}").unflatten(1, shape) for name in "qk"
        )
        own_values = self._split(rows, f"{layer}.self_attn.v").unflatten(1, shape)
        # Batch, block (q, and s of keys), length (l, and m of keys), kv head, query of it, and head_dim.
        query = query.unflatten(3, (keys.shape[2], -1)) * query.shape[-1] ** -0.5
        scores = torch.einsum("bqlkgd,bmkd->bkgqlm", query, keys)
        scores = scores.masked_fill(self._is_hidden, float("-inf"))
        own = torch.einsum("bqlkgd,bslkd->bkgqls", query, own_keys)
        shares, own_shares = torch.cat((scores, own), -1).softmax(-1).split((self._length, shape[0]), -1)
        output = torch.einsum("bkgqlm,bmkd->bqlkgd", shares, values)
        output = output + torch.einsum("bkgqls,bslkd->bqlkgd", own_shares, own_values)
        return output.flatten(3)

    def _heads(self, x: torch.Tensor, positions: torch.Tensor, name: str) -> torch.Tensor:
        """Queries or keys [batch, rows, heads, head_dim], normalised and rotated."""
        heads = rms_norm(self._split(x, name), self._weights[f"{name}_norm.weight"], self._eps)
        return rotate(heads, *rotary_tables(positions, self._frequencies, x.dtype, self._magnitude))

    def _split(self, x: torch.Tensor, name: str) -> torch.Tensor:
        attention = self._config.shape.layers[0].mixer
        assert isinstance(attention, Attention)
        heads: torch.Tensor = self._project(x, f"{name}_proj").unflatten(-1, (-1, attention.head_dim))
        return heads
