"""The layer of a model's files that predicts one more token, as a formula in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

__all__ = ["LatentReference", "Reference", "ReferenceBehind"]


class Reference:
    """The layer in float64, over whole sequences, from the tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.c = config.get("text_config", config)
        stored = load_file(folder / "model.safetensors")
        self.w = {name: tensor.double() for name, tensor in stored.items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.c.get("rms_norm_eps", 1e-6)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + self.w[f"mtp.{name}.weight"])

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.w[f"mtp.{name}.weight"], self.w.get(f"mtp.{name}.bias"))

    def outputs(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The outputs for features of positions from 0 on, and the tokens after them."""
        embedded = self.w[next(name for name in self.w if name.endswith("embed_tokens.weight"))][tokens]
        joined = (self.norm(embedded, "pre_fc_norm_embedding"), self.norm(features, "pre_fc_norm_hidden"))
        x = self.project(torch.cat(joined, -1), "fc")
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"))
        x = x + self.channel(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = (
            self.c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        both = self.project(x, "layers.0.self_attn.q_proj").view(-1, heads, 2, dim)
        query = self.rotate(self.norm(both[:, :, 0], "layers.0.self_attn.q_norm"))
        key = self.project(x, "layers.0.self_attn.k_proj").view(-1, kv_heads, dim)
        key = self.rotate(self.norm(key, "layers.0.self_attn.k_norm"))
        value = self.project(x, "layers.0.self_attn.v_proj").view(-1, kv_heads, dim)
        attended = self.attended(query, key, value) * both[:, :, 1].sigmoid()
        return self.project(attended.flatten(1), "layers.0.self_attn.o_proj")

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of (tokens, heads, size) queries to keys and values of as many or fewer heads."""
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        rope = self.c["rope_parameters"]
        size = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = (torch.arange(len(x)).double()[:, None] * frequencies)[:, None]
        first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self.project(x, f"{name}.gate_proj"), self.project(x, f"{name}.up_proj")
        return self.project(F.silu(gate) * up, f"{name}.down_proj")

    def channel(self, x: torch.Tensor) -> torch.Tensor:
        name = "layers.0.mlp"
        if "num_experts" not in self.c:
            return self.mlp(x, name)
        probabilities = self.project(x, f"{name}.gate").softmax(-1)
        shares, experts = probabilities.topk(self.c["num_experts_per_tok"], dim=-1)
        if self.c.get("norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        gate = self.project(x, f"{name}.shared_expert_gate").sigmoid()
        total = gate * self.mlp(x, f"{name}.shared_expert")
        for row in range(len(x)):
            for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
                total[row] += share * self.expert(x[row], expert)
        return total

    def expert(self, x: torch.Tensor, index: int) -> torch.Tensor:
        prefix = "mtp.layers.0.mlp.experts"
        if f"{prefix}.gate_up_proj" not in self.w:
            return self.mlp(x, f"layers.0.mlp.experts.{index}")
        gate, up = (self.w[f"{prefix}.gate_up_proj"][index] @ x).chunk(2)
        return self.w[f"{prefix}.down_proj"][index] @ (F.silu(gate) * up)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        names = [name for name in self.w if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
        return outputs @ self.w[max(names, key=lambda name: name.endswith("lm_head.weight"))].T


class ReferenceBehind(Reference):
    """The layer of a model that has it behind the others, with experts that a sigmoid chooses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prefix = f"model.layers.{self.c['num_hidden_layers']}"

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        eps = self.c["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{self.prefix}.{name}.weight"]

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"{self.prefix}.{name}"
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def outputs(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.w["model.embed_tokens.weight"][tokens]
        joined = torch.cat((self.norm(embedded, "enorm"), self.norm(features, "hnorm")), -1)
        x = self.project(joined, "eh_proj")
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.channel(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "shared_head.norm")

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = (
            self.c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        query = self.project(x, "self_attn.q_proj").view(-1, heads, dim)
        key = self.project(x, "self_attn.k_proj").view(-1, kv_heads, dim)
        value = self.project(x, "self_attn.v_proj").view(-1, kv_heads, dim)
        if self.c["use_qk_norm"]:
            query, key = self.norm(query, "self_attn.q_norm"), self.norm(key, "self_attn.k_norm")
        attended = self.attended(self.rotate(query), self.rotate(key), value)
        return self.project(attended.flatten(1), "self_attn.o_proj")

    def channel(self, x: torch.Tensor) -> torch.Tensor:
        num_groups, size = self.c["n_group"], self.c["n_routed_experts"] // self.c["n_group"]
        scores = self.project(x, "mlp.gate").sigmoid()
        choice = scores + self.w[f"{self.prefix}.mlp.gate.e_score_correction_bias"]
        groups = choice.view(-1, num_groups, size).topk(min(2, size), dim=-1).values.sum(-1)
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter(
            1, groups.topk(self.c["topk_group"], dim=-1).indices, True
        )
        choice = choice.masked_fill(~kept.repeat_interleave(size, dim=1), -math.inf)
        experts = choice.topk(self.c["num_experts_per_tok"], dim=-1).indices
        shares = scores.gather(1, experts)
        if self.c["norm_topk_prob"]:
            shares = shares / shares.sum(-1, keepdim=True)
        total = self.mlp(x, "mlp.shared_experts")
        for row in range(len(x)):
            for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
                total[row] += self.c["routed_scaling_factor"] * share * self.expert(x[row], expert)
        return total

    def expert(self, x: torch.Tensor, index: int) -> torch.Tensor:
        prefix = f"{self.prefix}.mlp.experts"
        if f"{prefix}.gate_up_proj" not in self.w:
            return self.mlp(x, f"mlp.experts.{index}")
        gate, up = (self.w[f"{prefix}.gate_up_proj"][index] @ x).chunk(2)
        return self.w[f"{prefix}.down_proj"][index] @ (F.silu(gate) * up)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """By the model's own head: the copy is wrong in no file, and not read."""
        return outputs @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T


class LatentReference(ReferenceBehind):
    """The layer of a model with latent attention, whose heads have keys and values of their own."""

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, plain, rotated, latent = (
            self.c[name]
            for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        if self.c["q_lora_rank"] is None:
            query = self.project(x, "self_attn.q_proj")
        else:
            query = self.norm(self.project(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
            query = self.project(query, "self_attn.q_b_proj")
        own_query, query_rope = query.view(-1, heads, plain + rotated).split((plain, rotated), -1)
        compressed, key_rope = self.project(x, "self_attn.kv_a_proj_with_mqa").split((latent, rotated), -1)
        both = self.project(self.norm(compressed, "self_attn.kv_a_layernorm", 1e-6), "self_attn.kv_b_proj")
        own_key, value = both.view(-1, heads, plain + self.c["v_head_dim"]).tensor_split((plain,), -1)
        scores = torch.einsum("qhd,khd->hqk", own_query, own_key)
        key = self.rotate(key_rope[:, None]).squeeze(1)
        scores = (scores + torch.einsum("qhd,kd->hqk", self.rotate(query_rope), key)) / math.sqrt(
            plain + rotated
        )
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self.project(attended.flatten(1), "self_attn.o_proj")

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of (tokens, heads, size) queries to keys and values of as many or fewer heads."""
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """As complex numbers of pairs."""
        size = x.shape[-1]
        frequencies = self.c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = (torch.arange(len(x)).double()[:, None] * frequencies)[:, None]
        pairs = x.unflatten(-1, (-1, 2)) if self.c["rope_interleave"] else x.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)
