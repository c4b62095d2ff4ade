"""The residual stream of a forward pass: the embedding, what the layers add, and the norms between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from drift_sdk._kernels.exchange.add_norm_across import add_norm_across
from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.layers.embedding import embed_norm
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk._kernels.layers.rms_norm import NormKind
from drift_sdk.execution.forward.step_buffers import HiddenStates
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.quantised.weight import dense

__all__ = ["ResidualStream", "norm_kind"]


def norm_kind(config: DecoderConfig) -> NormKind:
    """The kind of all norms of a model."""
    if config.has_wide_norms:
        return "wide"

    return "offset" if config.has_offset_norms else "rounded"


class ResidualStream:
    """Kernels that write the residual stream of R rows and its normalised rows.

    hidden_states: the stream after the layers added so far, and copies at the layers that the drafter reads.
    normed [R, hidden]: the stream, normalised as the next product needs it: with the norm of the next part of
    a layer, or after the last layer with the final norm, divided by the model's divisor of logits.
    """

    def __init__(self, decoder: Decoder, hidden_states: HiddenStates, normed: Tensor) -> None:
        self._weights, self._config = decoder.weights, decoder.config
        self._embedding_multiplier = decoder.embedding_multiplier
        self._norm_kind = norm_kind(decoder.config)
        self.hidden_states = hidden_states
        self.normed = normed

    def embed(self, token: Tensor, slot: Tensor) -> None:
        """Start with the embeddings of tokens [R] int32; rows of slot -1 are zeros. slot [R] int32."""
        hidden_states = self.hidden_states
        embed_norm(
            token,
            slot,
            dense(self._weights.embedding),
            self._weights.layers[0].input_norm,
            hidden_states.final,
            self.normed,
            eps=self._config.rms_norm_eps,
            multiplier=self._embedding_multiplier,
            norm_kind=self._norm_kind,
        )
        if 0 in hidden_states.by_layer:
            hidden_states.by_layer[0].copy_(hidden_states.final)

    def gather(self, source: Tensor, row: Tensor, slot: Tensor) -> None:
        """Take rows [R] int32 of another pass's stream `source` [N, hidden] after its last layer."""
        embed_norm(
            row,
            slot,
            source,
            self._weights.final_norm,
            self.hidden_states.final,
            self.normed,
            eps=self._config.rms_norm_eps,
            normed_multiplier=1.0 / self._config.logits_divisor,
            norm_kind=self._norm_kind,
        )

    def add_attention(self, index: int, output: Tensor | PeerSums, bias: Tensor | None = None) -> None:
        """Add the output of attention in layer `index`, as `add_norm` or `add_norm_across` takes it."""
        layer = self._weights.layers[index]
        self._add(output, layer.mlp_norm, bias=bias, delta_norm=layer.attention_post_norm)

    def add_mlp(self, index: int, output: Tensor | PeerSums, bias: Tensor | None = None) -> None:
        """Add the output of the MLP in layer `index`, as `add_norm` or `add_norm_across` takes it."""
        layers = self._weights.layers
        is_last = index + 1 == len(layers)
        self._add(
            output,
            self._weights.final_norm if is_last else layers[index + 1].input_norm,
            bias=bias,
            aux_hidden=self.hidden_states.by_layer.get(index + 1),
            delta_norm=layers[index].mlp_post_norm,
            normed_multiplier=1.0 / self._config.logits_divisor if is_last else 1.0,
        )

    def _add(
        self,
        delta: Tensor | PeerSums,
        weight: Tensor,
        *,
        bias: Tensor | None,
        delta_norm: Tensor | None,
        aux_hidden: Tensor | None = None,
        normed_multiplier: float = 1.0,
    ) -> None:
        hidden, config = self.hidden_states.final, self._config
        add: Callable[..., None] = add_norm_across if isinstance(delta, PeerSums) else add_norm
        add(
            hidden,
            delta,
            weight,
            self.normed,
            eps=config.rms_norm_eps,
            bias=bias,
            aux_hidden=aux_hidden,
            delta_norm=delta_norm,
            delta_multiplier=config.residual_multiplier,
            normed_multiplier=normed_multiplier,
            norm_kind=self._norm_kind,
        )
