"""A draft head in training: float32 weights, its pass over whole sequences, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save

from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import required_shapes
from drift_sdk.models.layers import rms_norm, rotary_tables, rotate
from drift_sdk.spec.model import Channel, ModelSpec, experts_of, mlp_of

from .target import Target

__all__ = ["DraftHead", "HeadPass", "feature_sizes", "head_settings", "mlp_width"]

FEATURES, FINAL_NORM, HEAD = "fc.weight", "norm.weight", "lm_head.weight"
SMALL_OUTPUTS = ("o_proj", "down_proj")
SMALL_GAIN = 0.1
MIN_FEATURE_SIZE = 1e-3
"""Factor of the first weights of outputs that are added to the residual stream."""


def head_settings(target: ModelSpec, draft_vocab_size: int, intermediate_size: int) -> dict[str, Any]:
    """The config.json of a head of one layer, with the heads of the target's attention."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.attention.num_heads,
        "num_key_value_heads": target.attention.num_kv_heads,
        "head_dim": target.attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.final_norm.eps,
        "rope_theta": target.ropes[0].theta if target.ropes else 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }


def mlp_width(target: ModelSpec) -> int:
    """The width of the target's widest MLP, that of experts being the sum of those that compute a row."""
    return max(_width(layer.channel) for layer in target.layers)


def _width(channel: Channel) -> int:
    experts, mlp = experts_of(channel), mlp_of(channel)
    own = 0 if experts is None else experts.num_active * experts.intermediate_size
    return own + (0 if mlp is None else mlp.intermediate_size)


class DraftHead:
    """An EAGLE-3 head: float32 weights by their published names, and the tokens that it can propose.

    settings:    its config.json.
    target_ids:  [draft_vocab] int64, ascending: the target's token id for each of its own.
    feature_rms: [num_features * target_hidden] float32, the size of each element of the features. The
                 residual stream has elements that are a hundred times larger than others; the projection is
                 trained for features divided by their size, and files have it for the features themselves.
    weights:     the embedding is the target's, and without `lm_head.weight` so is the output projection.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        target: Target,
        target_ids: torch.Tensor,
        feature_rms: torch.Tensor,
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.settings = settings
        self.config = DraftConfig.from_hf(settings, target.spec)
        self.feature_rms = feature_rms.to(target.device, torch.float32)
        self.propose(target, target_ids)
        self.weights = {
            name: weight.to(target.device, torch.float32).requires_grad_() for name, weight in weights.items()
        }

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
    ) -> DraftHead:
        """A head to train from the beginning. At first it takes the target's last feature, and has the
        target's output projection, which is trained with `has_head`."""
        config = DraftConfig.from_hf(settings, target.spec)
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in required_shapes(config).items():
            if len(shape) == 1:
                weights[stored_name(name)] = torch.ones(shape)
                continue

            gain = SMALL_GAIN if any(part in name for part in SMALL_OUTPUTS) else 1.0
            weights[stored_name(name)] = torch.randn(shape, generator=generator) * gain * shape[1] ** -0.5

        if config.hidden_size == config.target_hidden_size:
            weights[FEATURES] *= SMALL_GAIN
            last = feature_rms[-config.hidden_size :].cpu()
            weights[FEATURES][:, -config.hidden_size :] += torch.diag(last / last.square().mean().sqrt())
            offset = 1.0 if target.spec.final_norm.kind == "offset" else 0.0
            weights[FINAL_NORM] = target.decoder.weights.final_norm + offset
        if has_head:
            weights[HEAD] = target.head_rows(target_ids.to(target.device))
        return cls(settings, target, target_ids, feature_rms, weights)

    @classmethod
    def load(cls, folder: Path, target: Target, feature_rms: torch.Tensor) -> DraftHead:
        """A head that `save` wrote, to be trained further."""
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = DraftTensors(folder)
        names = required_shapes(DraftConfig.from_hf(settings, target.spec)).keys() | {HEAD}
        weights = {stored_name(name): tensors.get(name) for name in names & set(tensors.names())}
        weights[FEATURES] = weights[FEATURES].float() * feature_rms.cpu()
        ids = read_target_ids(tensors, settings["vocab_size"], settings["draft_vocab_size"])
        return cls(settings, target, ids, feature_rms, weights)

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


def stored_name(name: str) -> str:
    """The published name of a tensor of the first layer."""
    return name.replace("layers.0.", "midlayer.")


class HeadPass:
    """The steps of drafting from every row of a batch of sequences at once.

    Row i of step k continues a draft that began at row i, and has position i + k. It sees the rows up to i of
    step 0, which the target has verified, and of the steps after that the rows i of its own draft.

    weights: as `DraftHead.cast` returns them.
    """

    def __init__(self, head: DraftHead, weights: dict[str, torch.Tensor], length: int) -> None:
        self._config = head.config
        self._weights = weights
        self._length = length
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        device = head.target_ids.device
        rope = head.config.attention.rope
        assert rope is not None
        self._frequencies, self._magnitude = rope.frequencies().to(device), rope.magnitude
        self._is_hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)

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
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate = self._project(normed, "midlayer.mlp.gate_proj")
        product = F.silu(gate) * self._project(normed, "midlayer.mlp.up_proj")
        return hidden + self._project(product, "midlayer.mlp.down_proj")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., draft_vocab] of rows [..., hidden] that `step` returned."""
        return self._project(self._norm(hidden, "norm"), "lm_head").float()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self._config.norm.eps)

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

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
