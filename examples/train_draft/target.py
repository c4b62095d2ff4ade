"""The model that a head is trained for: its prompts, its features, and its predictions."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from msgspec import Struct

from drift_sdk import EngineConfig
from drift_sdk.errors import ModelLoadError
from drift_sdk.events import ignore_progress
from drift_sdk.loading.source import read_config, resolve
from drift_sdk.models.attention import AttentionBatch, with_sinks
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.layers import embed, linear
from drift_sdk.quantised.weight import take_rows
from drift_sdk.spec.model import Attention
from drift_sdk.startup.text_startup import load_text
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["ChatFormat", "Target", "load_chat_format", "load_target"]

MARK = "QUESTION"


class ChatFormat(Struct, frozen=True, kw_only=True):
    """The form of a model's conversations, and its longest sequence in tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    max_model_len: int

    def prompt_ids(self, prompt: str) -> list[int]:
        """The tokens of a conversation that begins with a question, up to the answer."""
        return self._encode(self._render(prompt))

    def question_start_ids(self) -> list[int]:
        """The tokens of a conversation up to the first question. What the model writes then is a question."""
        return self._encode(self._render(MARK).partition(MARK)[0])

    def _render(self, prompt: str) -> str:
        return self.template.render([{"role": "user", "content": prompt}])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class Target:
    """A decoder that computes whole sequences at once, without a cache."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.spec = decoder.spec

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., hidden] of token ids [...]."""
        flat = embed(token_ids.reshape(-1), self.decoder.weights.embedding, self.decoder.dtype)
        return flat.view(*token_ids.shape, -1)

    def embed_as_input(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream [..., hidden] before the target's first layer, of token ids [...]."""
        flat = self.decoder.embedded(token_ids.reshape(-1))
        return flat.view(*token_ids.shape, -1)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [N, hidden] of the output projection for token ids [N]."""
        rows = take_rows(self.decoder.weights.head, ids)
        return rows if isinstance(rows, torch.Tensor) else rows.dequantise(self.decoder.dtype)

    def run(self, token_ids: torch.Tensor, aux_layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and final hidden states of sequences of token ids [batch, length], padded at their ends.

        Returns the residual stream at `aux_layers`, [batch, length, len(aux_layers) * hidden], and that after
        the last layer and its norm, [batch, length, hidden].
        """
        # The decoder reads positions and calls `attend`, and is given rows that need no cache.
        num_sequences, length = token_ids.shape
        mixers = [layer.mixer for layer in self.spec.layers]
        shared = {mixer.kv_of for mixer in mixers if isinstance(mixer, Attention)}
        rows = cast(AttentionBatch, WholeSequences(num_sequences, length, token_ids.device, shared))
        hidden, aux = self.decoder.forward(token_ids.reshape(-1), rows, cast(KVCache, None), aux_layers)
        with torch.inference_mode():
            final = self.decoder.final_normed(hidden)
            features = torch.cat(aux, dim=-1)
        # Copies, because tensors made in inference mode cannot take part in training.
        return features.clone().view(*token_ids.shape, -1), final.clone().view(*token_ids.shape, -1)

    def logits(self, final: torch.Tensor, head_rows: torch.Tensor) -> torch.Tensor:
        """Logits [..., N] for hidden states [..., hidden] that `run` returned and rows of the projection."""
        logits = linear(final, head_rows).float() / self.spec.logits_divisor
        cap = self.spec.logits_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class WholeSequences:
    """The rows of sequences of equal length, each of which sees itself and the rows of its sequence before
    it; in the place of an AttentionBatch.

    shared: layers whose keys and values later layers use.
    """

    def __init__(
        self, num_sequences: int, length: int, device: torch.device, shared: Collection[int | None] = ()
    ) -> None:
        self.num_rows = num_sequences * length
        self.positions = torch.arange(length, device=device).repeat(num_sequences)
        self._shape = num_sequences, length
        self._masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        self._shared, self._kept = shared, dict[int, tuple[torch.Tensor, torch.Tensor]]()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: object,
        layer: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [N, num_heads * value_dim] of rows, as of AttentionBatch."""
        if key is None or value is None:
            key, value = self._kept[layer]
        elif layer in self._shared:
            self._kept[layer] = key, value
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        query, key, value = (x.unflatten(0, self._shape).transpose(1, 2) for x in (query, key, value))
        is_causal = window is None and sinks is None
        if sinks is not None:
            scale = head_dim**-0.5 if scale is None else scale
            query, key, value = with_sinks(query, key, value, sinks / scale)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_causal else self._mask(window, sinks is not None),
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
        )
        return output[..., :value_dim].transpose(1, 2).flatten(0, 1).flatten(1)

    def _mask(self, window: int | None, has_sinks: bool) -> torch.Tensor:
        """The keys that each row of a sequence sees, [length, length] bool, with a last column for sinks."""
        if (window, has_sinks) not in self._masks:
            positions = self.positions[: self._shape[1]]
            distances = positions[:, None] - positions
            visible = (distances >= 0) & (distances < (window or self._shape[1]))
            self._masks[window, has_sinks] = F.pad(visible, (0, int(has_sinks)), value=True)
        return self._masks[window, has_sinks]


def load_chat_format(model: str | Path) -> ChatFormat:
    """The form of a model's conversations. Raises ModelLoadError for a model without a chat template."""
    source = resolve(model)
    spec = read_config(source, EngineConfig())
    text = load_text(source, EngineConfig(), spec.vocab_size, ignore_progress)
    if text.chat_template is None:
        raise ModelLoadError(f"{source.path}: has no chat template: expected a model for conversations")

    return ChatFormat(
        tokenizer=text.tokenizer,
        template=text.chat_template,
        max_model_len=spec.max_position_embeddings,
    )


def load_target(model: str | Path, device: torch.device) -> Target:
    """A model on a device: in bfloat16 on a GPU, which engines use there, else in float32."""
    source = resolve(model)
    spec = read_config(source, EngineConfig())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Target(Decoder.load(spec, source.tensors(), device=device, dtype=dtype))
