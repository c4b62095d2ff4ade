"""An EAGLE-3 head in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import required_shapes
from drift_sdk.models.layers import rotary_tables, rotate
from drift_sdk.spec.model import ModelSpec

from .head import DraftHead, HeadPass, TakeStep, layer_settings
from .target import Target

__all__ = ["EagleHead", "EaglePass", "eagle_settings"]


def eagle_settings(target: ModelSpec, draft_vocab_size: int, intermediate_size: int) -> dict[str, Any]:
    """The config.json of a head of one layer."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **layer_settings(target, intermediate_size),
        "torch_dtype": "bfloat16",
        "draft_vocab_size": draft_vocab_size,
    }


class EagleHead(DraftHead):
    """An EAGLE-3 head of one layer: see `DraftHead`."""

    config: DraftConfig

    def read_config(self, settings: dict[str, Any], target: ModelSpec) -> None:
        self.config = DraftConfig.from_hf(settings, target)
        self.eps, self.aux_layers = self.config.norm.eps, self.config.aux_layers

    @classmethod
    def shapes(cls, settings: dict[str, Any], target: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        shapes = required_shapes(DraftConfig.from_hf(settings, target))
        return {cls.published_name(name): shape for name, shape in shapes.items()}

    @staticmethod
    def published_name(name: str) -> str:
        return name.replace("layers.0.", "midlayer.")

    def open(self, weights: dict[str, torch.Tensor], length: int) -> EaglePass:
        return EaglePass(self, weights, length)


class EaglePass(HeadPass):
    """The steps of drafting from every row of a batch of sequences at once.

    Row i of step k continues a draft that began at row i, and has position i + k. It sees the rows up to i of
    step 0, which the target has verified, and of the steps after that the rows i of its own draft.
    """

    def __init__(self, head: EagleHead, weights: dict[str, torch.Tensor], length: int) -> None:
        super().__init__(head, weights, length)
        self._config = head.config
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        rope = head.config.attention.rope
        assert rope is not None
        self._frequencies, self._magnitude = rope.frequencies().to(head.target_ids.device), rope.magnitude

    def draft(
        self, target: Target, token_ids: torch.Tensor, features: torch.Tensor, number: int, take: TakeStep
    ) -> None:
        hidden, newest = self.fuse(features), token_ids.roll(-1, 1)
        for step in range(number):
            hidden = self.step(hidden, target.embed(newest))
            newest = take(step, hidden)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Inputs [batch, length, hidden] of step 0, from features of the target."""
        return self._project(features, "fc")

    def step(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The features [batch, length, hidden] that the next step takes.

        features: of this step, as `fuse` or the step before returned them.
        embedded: embeddings of the newest token of each draft, [batch, length, hidden].
        """
        embedded = self._norm(embedded, "midlayer.input_layernorm")
        attended = self._attend(torch.cat((embedded, self._norm(features, "midlayer.hidden_norm")), dim=-1))
        hidden = features + self._project(attended, "midlayer.self_attn.o_proj")
        return hidden + self._mlp(hidden, "midlayer")

    def _attend(self, inputs: torch.Tensor) -> torch.Tensor:
        """Attention [batch, length, num_heads * head_dim] of the rows of a new step."""
        spec, index = self._config.attention, len(self._keys)
        positions = torch.arange(index, index + self._length, device=inputs.device)
        rotary = rotary_tables(positions, self._frequencies, inputs.dtype, self._magnitude)
        query, key, value = (
            self._project(inputs, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, spec.head_dim))
            for name in "qkv"
        )
        # The scale of scores is cheapest to apply to queries, and does not round if it is a power of 2.
        query, key = rotate(query, *rotary) * spec.head_dim**-0.5, rotate(key, *rotary)
        # [batch, kv heads, queries of a kv head, length, head_dim]
        query = query.transpose(1, 2).unflatten(1, (spec.num_kv_heads, -1))
        self._keys.append(key.transpose(1, 2)[:, :, None])
        self._values.append(value.transpose(1, 2)[:, :, None])
        scores = (query @ self._keys[0].transpose(-1, -2)).masked_fill_(self._is_hidden, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in self._keys[1:]]
        # torch computes a softmax of bfloat16 in float32.
        shares = torch.cat((scores, *own), dim=-1).softmax(-1)
        output: torch.Tensor = shares[..., : self._length] @ self._values[0]
        for place, value in enumerate(self._values[1:], self._length):
            output = output + shares[..., place, None] * value
        return output.flatten(1, 2).transpose(1, 2).flatten(2)
