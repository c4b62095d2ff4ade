"""Compare a draft's arithmetic with a plain float64 computation from the same files, stage by stage.

    python -m perf.compare_stages TARGET DRAFT --text prompt.txt --dtype bfloat16
    python -m perf.compare_stages TARGET DRAFT --tokens 1 5 9 12 --json

The target runs once; both computations start from its residual streams. The stages are fc, attention and mlp
of each layer, pre_head (the input of the head) and logits. Figures are over all rows: mean and largest
difference, smallest cosine, and the share of the reference's k largest entries that are among the draft's k
largest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct, to_builtins

from drift_sdk.loading.draft import DraftTensors
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.draft_config import draft_settings
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.tree_attention import StepRows
from drift_sdk.quantised.weight import dense

__all__ = ["StageDifference", "compare", "main"]

BLOCK_SIZE = 16


class StageDifference(Struct, frozen=True, kw_only=True):
    """Differences of a stage over all rows."""

    stage: str
    mean_difference: float
    max_difference: float
    min_cosine: float
    top_k_overlap: float


class RecordedDraft(DraftDecoder):
    """A draft that records the outputs of attention and mlp, and the input of the head."""

    stages: dict[str, torch.Tensor]

    def _attention(
        self,
        index: int,
        inputs: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: StepRows,
        cache: KVCache,
    ) -> torch.Tensor:
        added = super()._attention(index, inputs, rotary, batch, cache)
        self.stages[f"attention.{index}"] = added
        return added

    def _mlp(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        added = super()._mlp(index, hidden)
        self.stages[f"mlp.{index}"] = added
        return added

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        self.stages["pre_head"] = super()._head_input(hidden)
        return self.stages["pre_head"]


def compare(
    target: Decoder, folder: Path, token_ids: Sequence[int], *, top_k: int = 10, **options: Any
) -> list[StageDifference]:
    """The differences of all stages.

    folder:     of the draft.
    token_ids:  two or more. The target runs all but the last, the draft embeds all but the first.
    options:    as in DraftDecoder.load.
    """
    draft = RecordedDraft.load(folder, target, **options)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=target.device)
    num_rows = len(token_ids) - 1
    aux_hidden, final = _target_states(target, tokens[:-1], draft.aux_layers)
    config = draft.config
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(
        draft.num_layers,
        num_blocks,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        draft.dtype,
        draft.device,
    )
    rows = SequenceRows(range(num_blocks), 0, num_rows)
    batch = AttentionBatch([rows], cache, slot_offset=DRAFT_KV_OFFSET)
    features = draft.fuse(aux_hidden, final)
    draft.stages = {"fc": features}
    draft.stages["logits"] = draft.logits(draft.forward(features, tokens[1:], batch, cache))
    expected = PlainDraft(folder, target).stages(aux_hidden, final, tokens[1:], draft.target_ids)
    return [_difference(stage, draft.stages[stage], expected[stage], top_k) for stage in expected]


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
        is_nested = "transformer_layer_config" in settings
        hidden = normed if settings.get("norm_before_residual", is_nested) else hidden
        for index in range(settings["num_hidden_layers"]):
            layer = f"layers.{index}"
            first = torch.cat((embedded, normed), -1)
            inputs = self._norm(hidden, f"{layer}.input_layernorm.weight") if index else first
            query, key, value = (self._project(f"{layer}.self_attn.{n}_proj", inputs) for n in "qkv")
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
            weights, eps = self._target.weights, self._target.config.rms_norm_eps
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


@torch.inference_mode()
def _target_states(
    target: Decoder, tokens: torch.Tensor, aux_layers: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The target's residual streams at `aux_layers`, and its last hidden state."""
    config, num_blocks = target.config, -(-len(tokens) // BLOCK_SIZE)
    cache = KVCache(
        config.num_layers,
        num_blocks,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        target.dtype,
        target.device,
    )
    batch = AttentionBatch([SequenceRows(range(num_blocks), 0, len(tokens))], cache)
    final, aux_hidden = target.forward(tokens, batch, cache, aux_layers)
    return aux_hidden, final


def _difference(stage: str, found: torch.Tensor, expected: torch.Tensor, top_k: int) -> StageDifference:
    difference = (found.double() - expected).abs()
    top_k = min(top_k, expected.shape[-1])
    mine, theirs = (x.topk(top_k, -1).indices for x in (found.double(), expected))
    is_common = (mine[:, :, None] == theirs[:, None]).any(1)
    return StageDifference(
        stage=stage,
        mean_difference=difference.mean().item(),
        max_difference=difference.max().item(),
        min_cosine=F.cosine_similarity(found.double(), expected, dim=-1).min().item(),
        top_k_overlap=is_common.double().mean().item(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="folder, .gguf file or hub id")
    parser.add_argument("draft", type=Path, help="folder")
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens", type=int, nargs="+", help="token ids, two or more")
    tokens.add_argument("--text", type=Path, help="a file of text")
    parser.add_argument("--max-tokens", type=int, default=512, help="of the text, from its start")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--aux-layer-convention", choices=("output", "boundary"))
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    source = resolve(options.target)
    token_ids = options.tokens
    if token_ids is None:
        token_ids = source.tokenizer().encode(options.text.read_text(encoding="utf-8"))[: options.max_tokens]

    if len(token_ids) < 2:
        parser.error(f"{len(token_ids)} tokens: expected 2 or more")

    dtype = getattr(torch, options.dtype)
    config = DecoderConfig.from_hf(source.config)
    target = Decoder.load(config, source.tensors(), device=options.device, dtype=dtype)
    found = compare(
        target,
        options.draft,
        token_ids,
        top_k=options.top_k,
        aux_layer_convention=options.aux_layer_convention,
    )
    if options.json:
        print(json.dumps([to_builtins(difference) for difference in found], indent=2))
        return

    print(f"{'stage':<14}{'mean':>12}{'max':>12}{'cosine':>12}{'top-k':>8}")
    for row in found:
        numbers = f"{row.mean_difference:>12.3e}{row.max_difference:>12.3e}{row.min_cosine:>12.8f}"
        print(f"{row.stage:<14}{numbers}{row.top_k_overlap:>8.3f}")


if __name__ == "__main__":
    main()
