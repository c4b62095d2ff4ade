"""A draft head in training: float32 weights, and its files; what all kinds of heads have."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import save

from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.models.layers import rms_norm
from drift_sdk.spec.model import Channel, ModelSpec, experts_of, mlp_of

from .target import Target

__all__ = ["DraftHead", "HeadPass", "TakeStep", "feature_sizes", "layer_settings", "mlp_width"]

FEATURES, FINAL_NORM, HEAD = "fc.weight", "norm.weight", "lm_head.weight"
SMALL_OUTPUTS = ("o_proj", "down_proj")
SMALL_GAIN = 0.1
"""Factor of the first weights of outputs that are added to the residual stream."""
MIN_FEATURE_SIZE = 1e-3

TakeStep = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a step's number and its outputs [batch, length, hidden], the inputs of `HeadPass.logits`, and returns
the token ids [batch, length] that were drafted."""


def layer_settings(target: ModelSpec, intermediate_size: int) -> dict[str, Any]:
    """The settings of layers in a config.json, with the heads of the target's attention."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": target.attention.num_heads,
        "num_key_value_heads": target.attention.num_kv_heads,
        "head_dim": target.attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.final_norm.eps,
        "rope_theta": target.ropes[0].theta if target.ropes else 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }


def mlp_width(target: ModelSpec) -> int:
    """The width of the target's widest MLP, that of experts being the sum of those that compute a row."""
    return max(_width(layer.channel) for layer in target.layers)


def _width(channel: Channel) -> int:
    experts, mlp = experts_of(channel), mlp_of(channel)
    own = 0 if experts is None else experts.num_active * experts.intermediate_size
    return own + (0 if mlp is None else mlp.intermediate_size)


class DraftHead(ABC):
    """A head: float32 weights by their published names, and the tokens that it can propose.

    settings:    its config.json.
    eps:         of its norms.
    aux_layers:  the target's layers whose input its features are.
    target_ids:  [draft_vocab] int64, ascending: the target's token id for each of its own.
    feature_rms: [num_features * target_hidden] float32, the size of each element of the features. The
                 residual stream has elements that are a hundred times larger than others; the projection is
                 trained for features divided by their size, and files have it for the features themselves.
    weights:     the embedding is the target's, and without `lm_head.weight` so is the output projection.
    """

    eps: float
    aux_layers: tuple[int, ...]

    def __init__(
        self,
        settings: dict[str, Any],
        target: Target,
        target_ids: torch.Tensor,
        feature_rms: torch.Tensor,
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.settings = settings
        self.read_config(settings, target.spec)
        self.feature_rms = feature_rms.to(target.device, torch.float32)
        self.propose(target, target_ids)
        self.weights = {
            name: weight.to(target.device, torch.float32).requires_grad_() for name, weight in weights.items()
        }

    @abstractmethod
    def read_config(self, settings: dict[str, Any], target: ModelSpec) -> None:
        """Set `eps`, `aux_layers` and what the kind has besides."""

    @classmethod
    @abstractmethod
    def shapes(cls, settings: dict[str, Any], target: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        """The published names and shapes of its weights, without embedding and output projection."""

    @abstractmethod
    def open(self, weights: dict[str, torch.Tensor], length: int) -> HeadPass:
        """A pass over sequences of `length` tokens. weights: as `cast` returns them."""

    def propose(self, target: Target, target_ids: torch.Tensor) -> None:
        """Set the tokens that it can propose."""
        self.target_ids = target_ids.to(target.device)
        self.is_proposable = torch.zeros(target.spec.vocab_size, dtype=torch.bool, device=target.device)
        self.is_proposable[self.target_ids] = True
        self.target_rows = target.head_rows(self.target_ids)

    @classmethod
    def start(
        cls,
        settings: dict[str, Any],
        target: Target,
        target_ids: torch.Tensor,
        feature_rms: torch.Tensor,
        *,
        seed: int,
        has_head: bool = True,
    ) -> Self:
        """A head to train from the beginning. At first it takes the target's last feature, and has the
        target's output projection, which is trained with `has_head`."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in cls.shapes(settings, target.spec).items():
            if len(shape) == 1:
                weights[name] = torch.ones(shape)
                continue

            gain = SMALL_GAIN if any(part in name for part in SMALL_OUTPUTS) else 1.0
            weights[name] = torch.randn(shape, generator=generator) * gain * shape[1] ** -0.5

        width = target.spec.hidden_size
        if len(weights[FEATURES]) == width:
            weights[FEATURES] *= SMALL_GAIN
            last = feature_rms[-width:].cpu()
            weights[FEATURES][:, -width:] += torch.diag(last / last.square().mean().sqrt())
            offset = 1.0 if target.spec.final_norm.kind == "offset" else 0.0
            weights[FINAL_NORM] = target.decoder.weights.final_norm + offset
        if has_head:
            weights[HEAD] = target.head_rows(target_ids.to(target.device))
        return cls(settings, target, target_ids, feature_rms, weights)

    @classmethod
    def load(cls, folder: Path, target: Target, feature_rms: torch.Tensor) -> Self:
        """A head that `save` wrote, to be trained further."""
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = DraftTensors(folder)
        stored = {cls.published_name(name): name for name in tensors.names()}
        names = cls.shapes(settings, target.spec).keys() | {HEAD}
        weights = {name: tensors.get(stored[name]) for name in names & stored.keys()}
        weights[FEATURES] = weights[FEATURES].float() * feature_rms.cpu()
        ids = read_target_ids(tensors, target.spec.vocab_size, settings["draft_vocab_size"])
        return cls(settings, target, ids, feature_rms, weights)

    @staticmethod
    def published_name(name: str) -> str:
        """The published name of a tensor that `DraftTensors` names."""
        return name

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16. A folder that exists is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        cast = self.cast(torch.bfloat16)
        tensors = {name: cast[name].detach().cpu() for name in self.weights}
        ids = self.target_ids.cpu()
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": self.is_proposable.cpu()}
        part = folder / "model.part"
        # Not by save_file, whose files no other user may read.
        part.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        (folder / "config.json").write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
        part.rename(folder / "model.safetensors")

    def cast(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights in the dtype of computation; gradients flow back to those in float32."""
        changed = {FEATURES: self.weights[FEATURES] / self.feature_rms}
        weights = {HEAD: self.target_rows} | self.weights | changed
        return {name: weight.to(dtype) for name, weight in weights.items()}


def feature_sizes(
    target: Target, aux_layers: tuple[int, ...], token_ids: Sequence[list[int]]
) -> torch.Tensor:
    """The root mean squares [num_features * target_hidden] of the elements of features over sequences,
    without their first tokens, whose features are of another size."""
    squares = [
        target.run(torch.tensor([ids], device=target.device), aux_layers)[0][0, 1:].float().square()
        for ids in token_ids
    ]
    return torch.cat(squares).mean(0).sqrt().clamp(min=MIN_FEATURE_SIZE)


class HeadPass(ABC):
    """A pass of a head over whole sequences, that drafts from every row at once.

    weights: as `DraftHead.cast` returns them.
    """

    def __init__(self, head: DraftHead, weights: dict[str, torch.Tensor], length: int) -> None:
        self._weights, self._eps, self._length = weights, head.eps, length
        # Keys of the target's features that a row does not see.
        hidden = torch.ones(length, length, dtype=torch.bool, device=head.target_ids.device)
        self._is_hidden = hidden.triu_(1)

    @abstractmethod
    def draft(
        self, target: Target, token_ids: torch.Tensor, features: torch.Tensor, number: int, take: TakeStep
    ) -> None:
        """Call `take` for `number` steps of drafting. Row i of step k drafts token i + 2 + k, from the
        target's features of the rows up to i and token i + 1.

        token_ids: [batch, length]. features: as `Target.run` returns them.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., draft_vocab] of rows [..., hidden] that `take` was given."""
        return self._project(self._norm(hidden, "norm"), "lm_head").float()

    def _mlp(self, hidden: torch.Tensor, layer: str) -> torch.Tensor:
        """The output of a layer's MLP for the residual stream before it."""
        normed = self._norm(hidden, f"{layer}.post_attention_layernorm")
        gate = self._project(normed, f"{layer}.mlp.gate_proj")
        product = F.silu(gate) * self._project(normed, f"{layer}.mlp.up_proj")
        return self._project(product, f"{layer}.mlp.down_proj")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self._eps)

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])
