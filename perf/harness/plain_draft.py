"""A draft's computation in float64, written apart from the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from drift_sdk.loading.draft import DraftTensors
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_config import draft_settings
from drift_sdk.quantised.weight import dense

__all__ = ["PlainDraft"]


class PlainDraft:
    """A draft's computation in float64, from its files, for all rows at once and without a cache."""

    def __init__(self, folder: Path, target: Decoder) -> None:
        self._settings = draft_settings(json.loads((folder / "config.json").read_text()))
        self._tensors, self._target = DraftTensors(folder), target
        self._names, self._eps = self._tensors.names(), self._settings.get("rms_norm_eps", 1e-6)

    @torch.inference_mode()
    def stages(
        self,
        aux_hidden: Sequence[torch.Tensor],
        final: torch.Tensor,
        token_ids: torch.Tensor,
        target_ids: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The output of each stage, in the order of computation.

        aux_hidden, final:  the target's residual streams and its last hidden state, [N, hidden] each.
        token_ids:          [N], the tokens to embed.
        target_ids:         the target's ids of the draft's vocabulary.
        """
        settings = self._settings
        hidden = self._features(aux_hidden, final)
        stages = {"fc": hidden}
        embedded = self._norm(self._embedding()[token_ids], "layers.0.input_layernorm.weight")
        normed = self._norm(hidden, "layers.0.hidden_norm.weight")
        is_first = "transformer_layer_config" in settings and "mask_token_id" not in settings
        hidden = normed if settings.get("norm_before_residual", is_first) else hidden
        for index in range(settings["num_hidden_layers"]):
            layer = f"layers.{index}"
            first = torch.cat((embedded, normed), -1)
            inputs = self._norm(hidden, f"{layer}.input_layernorm.weight") if index else first
            query, key = (self._heads(f"{layer}.self_attn.{n}", inputs) for n in "qk")
            value = self._project(f"{layer}.self_attn.v_proj", inputs)
            attended = _attend(settings, query, key, value)
            stages[f"attention.{index}"] = self._project(f"{layer}.self_attn.o_proj", attended)
            hidden = hidden + stages[f"attention.{index}"]
            normed_hidden = self._norm(hidden, f"{layer}.post_attention_layernorm.weight")
            gate, up = (self._project(f"{layer}.mlp.{n}_proj", normed_hidden) for n in ("gate", "up"))
            stages[f"mlp.{index}"] = self._project(f"{layer}.mlp.down_proj", F.silu(gate) * up)
            hidden = hidden + stages[f"mlp.{index}"]

        stages["pre_head"] = self._norm(hidden, "norm.weight")
        stages["logits"] = stages["pre_head"] @ self._head(target_ids).T
        return stages

    def _features(self, aux_hidden: Sequence[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        """The target's features, fused as the draft's settings say."""
        streams = [stream.double() for stream in aux_hidden]
        if not streams:
            weights, eps = self._target.weights, self._target.spec.final_norm.eps
            return rms_norm(final.double(), weights.final_norm.double(), eps)

        if self._settings.get("fc_norm"):
            streams = [self._norm(stream, f"fc_norm.{i}.weight") for i, stream in enumerate(streams)]

        joined = torch.cat(streams, -1)
        return self._project(
            "fc", self._norm(joined, "input_norm.weight") if self._settings.get("norm_before_fc") else joined
        )

    def _embedding(self) -> torch.Tensor:
        """The draft's own embedding table, or the target's."""
        if "embed_tokens.weight" in self._names:
            return self._weight("embed_tokens.weight")

        return dense(self._target.weights.embedding).double()

    def _head(self, target_ids: torch.Tensor) -> torch.Tensor:
        if "lm_head.weight" in self._names:
            return self._weight("lm_head.weight")

        if self._settings.get("tie_word_embeddings") and "embed_tokens.weight" in self._names:
            return self._embedding()[target_ids]

        return dense(self._target.weights.head)[target_ids].double()

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys, each head normalised if the draft has a norm of them."""
        heads, norm = self._project(f"{name}_proj", x), f"{name}_norm.weight"
        if norm not in self._names:
            return heads

        return self._norm(heads.view(len(x), -1, len(self._weight(norm))), norm).flatten(1)

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = x @ self._weight(f"{name}.weight").T
        return product + self._weight(f"{name}.bias") if f"{name}.bias" in self._names else product

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weight(name), self._eps)

    def _weight(self, name: str) -> torch.Tensor:
        return self._tensors.get(name).to(device=self._target.device, dtype=torch.float64)


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return scale * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _attend(
    settings: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Causal attention with rotary positions over all rows, [N, heads * head_dim]."""
    num_rows, num_heads = len(query), settings["num_attention_heads"]
    num_kv_heads = settings.get("num_key_value_heads", num_heads)
    query, key, value = (
        x.view(num_rows, heads, -1)
        for x, heads in ((query, num_heads), (key, num_kv_heads), (value, num_kv_heads))
    )
    turns = _angles(settings, num_rows, query.shape[-1]).to(query.device)[:, None]
    cos, sin = turns.cos(), turns.sin()

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    query, key = turn(query), turn(key)
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    is_hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu(1)
    if "sliding_attention" in settings.get("layer_types", ()):
        is_hidden |= torch.ones_like(is_hidden).tril(-settings["sliding_window"])
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(num_rows, -1)


def _angles(settings: Mapping[str, Any], num_rows: int, head_dim: int) -> torch.Tensor:
    """Rotation angles in radians of each row and pair, [num_rows, head_dim / 2]. Positions start at 0."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or settings.get("rope_theta") or 10_000.0
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    frequencies = theta ** (-2 * pairs / head_dim)
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    elif kind == "linear":
        frequencies = frequencies / factor

    return torch.arange(num_rows, dtype=torch.float64)[:, None] * frequencies
