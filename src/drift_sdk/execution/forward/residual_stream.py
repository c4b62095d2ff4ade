"""The residual stream of a forward pass: the embedding, what the layers add, and the norms between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from drift_sdk._kernels.exchange.add_norm_across import add_norm_across
from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk._kernels.layers.norm import add_norm, embed_norm
from drift_sdk.execution.forward.step_buffers import HiddenStates
from drift_sdk.models.decoder import Decoder
from drift_sdk.quantised.weight import dense
from drift_sdk.spec.model import LayerSpec, Norm

__all__ = ["ResidualStream"]


class ResidualStream:
    """Kernels that write the residual stream of R rows and its normalised rows.

    hidden_states: the stream after what was added so far, and copies at the layers that the drafter reads.
    normed [R, hidden]: the stream, normalised as the next product needs it: with the norm of the next mixer
    or channel, or after the last layer with the final norm, divided by the model's divisor of logits.
    """

    def __init__(self, decoder: Decoder, hidden_states: HiddenStates, normed: Tensor) -> None:
        self._weights, self._spec = decoder.weights, decoder.spec
        self._embedding_multiplier = decoder.embedding_multiplier
        self.hidden_states = hidden_states
        self.normed = normed

    def embed(self, token: Tensor, slot: Tensor) -> None:
        """Start with the embeddings of tokens [R] int32; rows of slot -1 are zeros. slot [R] int32."""
        hidden_states, norm = self.hidden_states, self._spec.layers[0].norm
        embedding_norm = self._spec.embedding_norm
        embed_norm(
            token,
            slot,
            dense(self._weights.embedding),
            self._weights.layers[0].mixer_norm,
            hidden_states.final,
            self.normed,
            eps=norm.eps,
            multiplier=self._embedding_multiplier,
            norm_kind=norm.kind,
            embedding_eps=None if embedding_norm is None else embedding_norm.eps,
        )
        if 0 in hidden_states.by_layer:
            hidden_states.by_layer[0].copy_(hidden_states.final)

    def gather(self, source: Tensor, row: Tensor, slot: Tensor) -> None:
        """Take rows [R] int32 of another pass's stream `source` [N, hidden] after its last layer."""
        norm = self._spec.final_norm
        embed_norm(
            row,
            slot,
            source,
            self._weights.final_norm,
            self.hidden_states.final,
            self.normed,
            eps=norm.eps,
            normed_multiplier=1.0 / self._spec.logits_divisor,
            norm_kind=norm.kind,
        )

    def add_mixer(self, index: int, output: Tensor | PeerSums, bias: Tensor | None = None) -> None:
        """Add the output of the mixer of layer `index`, as `add_norm` or `add_norm_across` takes it."""
        weights, layer = self._weights.layers[index], self._spec.layers[index]
        self._add(layer, output, bias, weights.mixer_post_norm, weights.channel_norm, layer.norm)

    def add_channel(self, index: int, output: Tensor | PeerSums, bias: Tensor | None = None) -> None:
        """Add the output of the channel of layer `index`, as `add_norm` or `add_norm_across` takes it."""
        spec, weights = self._spec, self._weights
        is_last = index + 1 == spec.num_layers
        self._add(
            spec.layers[index],
            output,
            bias,
            weights.layers[index].channel_post_norm,
            weights.final_norm if is_last else weights.layers[index + 1].mixer_norm,
            spec.final_norm if is_last else spec.layers[index + 1].norm,
            aux_hidden=self.hidden_states.by_layer.get(index + 1),
            normed_multiplier=1.0 / spec.logits_divisor if is_last else 1.0,
        )

    def _add(
        self,
        layer: LayerSpec,
        delta: Tensor | PeerSums,
        bias: Tensor | None,
        delta_norm: Tensor | None,
        weight: Tensor,
        norm: Norm,
        *,
        aux_hidden: Tensor | None = None,
        normed_multiplier: float = 1.0,
    ) -> None:
        """weight, norm: of the rows that are read next."""
        post_norm, hidden = layer.post_norm, self.hidden_states.final
        add: Callable[..., None] = add_norm_across if isinstance(delta, PeerSums) else add_norm
        # One launch has one kind of norm.
        is_split = post_norm is not None and post_norm.kind != norm.kind
        first = post_norm if is_split and post_norm is not None else norm
        add(
            hidden,
            delta,
            weight,
            self.normed,
            eps=first.eps,
            bias=bias,
            aux_hidden=aux_hidden,
            delta_norm=delta_norm,
            delta_eps=None if post_norm is None else post_norm.eps,
            delta_multiplier=layer.multiplier,
            normed_multiplier=normed_multiplier,
            norm_kind=first.kind,
        )
        if is_split:
            add_norm(
                hidden,
                None,
                weight,
                self.normed,
                eps=norm.eps,
                normed_multiplier=normed_multiplier,
                norm_kind=norm.kind,
            )
