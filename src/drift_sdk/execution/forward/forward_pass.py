"""The forward pass of a model on the graph executor: a loop over mixers and channels.

The residual stream of a forward pass: the embedding, what the layers add, and the norms between them; the
inputs of layers that depend on a row's token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import structs
from torch import Tensor

from drift_sdk._kernels.exchange import PeerSums, add_norm_across
from drift_sdk._kernels.layers.layer_inputs import gate_input, make_inputs
from drift_sdk._kernels.layers.norm import add_norm, embed_norm
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.attention import AttentionForward, RowAttention
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.channels import ExpertForward, MlpForward, ParallelForward
from drift_sdk.execution.forward.gated_delta import GatedDeltaForward, RecurrentRows
from drift_sdk.execution.forward.latent_attention import LatentForward
from drift_sdk.execution.forward.products import ExactProducts, LibraryProducts, Product, Products
from drift_sdk.execution.forward.rows import HiddenStates, LayerBuffers, Rows
from drift_sdk.models.channels import ExpertWeights, MlpWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layer_inputs import InputWeights, LayerInputWeights, embedding_factor
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.models.weights import ChannelWeights, MixerWeights
from drift_sdk.quantised.weight import dense
from drift_sdk.spec.model import (
    Attention,
    Channel,
    Experts,
    LatentAttention,
    LayerInputs,
    LayerSpec,
    Mixer,
    Norm,
    ParallelExperts,
)


class LayerInputForward:
    """Kernels that make the inputs of all layers for R rows, and take them in a layer."""

    def __init__(
        self,
        spec: LayerInputs,
        weights: LayerInputWeights,
        decoder: Decoder,
        rows: Rows,
        stream: Tensor,
        workspace: Workspace,
        products: Products,
    ) -> None:
        """stream [R, hidden]: the residual stream."""
        self._spec, self._weights, self._rows = spec, weights, rows
        self._stream, self._products = stream, products
        num_rows, dtype = rows.slot.shape[0], decoder.dtype
        shape = num_rows, decoder.spec.num_layers, spec.size
        self._inputs = workspace.take("layer_inputs", shape, dtype)
        self._gated = workspace.take("gated_input", (num_rows, spec.size), dtype)

    def make(self) -> None:
        """Record the kernels that make the inputs, of the stream before the first layer."""
        spec, weights, rows = self._spec, self._weights, self._rows
        product, _ = self._products.multiply(self._stream, weights.projection, None)
        make_inputs(
            product,
            rows.token,
            rows.slot,
            dense(weights.embedding),
            weights.norm,
            self._inputs,
            eps=spec.norm.eps,
            embedding_factor=embedding_factor(spec, self._inputs.dtype),
            product_factor=self._stream.shape[1] ** -0.5,
            norm_kind=spec.norm.kind,
        )

    def run(self, weights: InputWeights, index: int) -> Product:
        """What layer `index` makes of its input and the stream, before its norm."""
        gate, _ = self._products.multiply(self._stream, weights.gate, None)
        gate_input(gate, self._inputs[:, index], self._gated, self._spec.activation)
        return self._products.multiply(self._gated, weights.projection, None)


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
        layer, weights = self._spec.layers[index], self._weights.layers[index]
        if weights.input is None:
            self._end_layer(index, layer, output, bias, weights.channel_post_norm)
        else:  # the layer goes on with the stream itself
            self._add(layer, output, bias, weights.channel_post_norm, weights.channel_norm, layer.norm)

    def add_input(self, index: int, output: Tensor, bias: Tensor | None = None) -> None:
        """Add what layer `index` makes of its input, as `add_norm` takes it."""
        inputs, own = self._spec.layer_inputs, self._weights.layers[index].input
        assert inputs is not None and own is not None
        layer = structs.replace(self._spec.layers[index], post_norm=inputs.norm, multiplier=1.0)
        self._end_layer(index, layer, output, bias, own.norm)

    def _end_layer(
        self,
        index: int,
        layer: LayerSpec,
        output: Tensor | PeerSums,
        bias: Tensor | None,
        delta_norm: Tensor | None,
    ) -> None:
        """Add the last output of layer `index`, of which `layer` says how."""
        spec, weights = self._spec, self._weights
        is_last = index + 1 == spec.num_layers
        self._add(
            layer,
            output,
            bias,
            delta_norm,
            weights.final_norm if is_last else weights.layers[index + 1].mixer_norm,
            spec.final_norm if is_last else spec.layers[index + 1].norm,
            aux_hidden=self.hidden_states.by_layer.get(index + 1),
            factor=weights.layers[index].factor,
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
        factor: Tensor | None = None,
        normed_multiplier: float = 1.0,
    ) -> None:
        """weight, norm: of the rows that are read next. factor: see `add_norm`."""
        post_norm, hidden = layer.post_norm, self.hidden_states.final
        add: Callable[..., None] = partial(add_norm, factor=factor)
        if isinstance(delta, PeerSums):
            assert factor is None, "a model that GPUs do not divide"
            add = add_norm_across
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


class ForwardPass:
    """Computes rows through all layers: rows that are decoded or verified, or rows of prompts.

    cache: where the rows' keys and values are stored. hidden_states: of the rows, filled by `run`.
    normed [R, hidden]: the normalised residual stream after the last layer, filled by `run`.
    """

    def __init__(
        self,
        model: ModelResources,
        rows: Rows,
        block_table: Tensor,
        workspace: Workspace,
        attention: RowAttention,
        hidden_states: HiddenStates,
        products: Products,
        recurrent: RecurrentRows | None,
        *,
        is_decoding: bool,
    ) -> None:
        """block_table [S, max_blocks] int32. attention, hidden_states: of the rows in `rows`. recurrent: of a
        model with recurrent layers. is_decoding: experts are computed by the kernels of few rows."""
        self.cache, self._exchange = model.cache, model.exchange
        self._decoder, self._rows, self._attention = model.decoder, rows, attention
        self.hidden_states = hidden_states
        self.normed = LayerBuffers.take(workspace, model.decoder, rows.slot.shape[0]).normed
        self._stream = ResidualStream(model.decoder, hidden_states, self.normed)
        self._attending = AttentionForward(model, rows, block_table, workspace, attention, products)
        self._latent: LatentForward | None = None
        if model.decoder.spec.has_latents:
            self._latent = LatentForward(model, rows, block_table, workspace, attention, products)
        self._recurrent: GatedDeltaForward | None = None
        if model.states is not None:
            assert recurrent is not None, "a step that recurrent layers do not have"
            self._recurrent = GatedDeltaForward(model.states, rows, recurrent, workspace, products)
        self._mlp = MlpForward(self.normed, model.decoder.spec.mlp_size, workspace, products)
        inputs, given = model.decoder.spec.layer_inputs, model.decoder.weights.layer_inputs
        self._inputs: LayerInputForward | None = None
        if inputs is not None and given is not None:
            self._inputs = LayerInputForward(
                inputs, given, model.decoder, rows, hidden_states.final, workspace, products
            )
        channels = tuple(dict.fromkeys(layer.channel for layer in model.decoder.spec.layers))
        self._experts = {
            spec: ExpertForward.take(model, spec, rows.slot, self.normed, workspace, is_decoding=is_decoding)
            for spec in channels
            if isinstance(spec, Experts)
        }
        stream = hidden_states.final
        self._parallel = {
            spec: ParallelForward(
                model, spec, rows.slot, stream, self._mlp, workspace, is_decoding=is_decoding
            )
            for spec in channels
            if isinstance(spec, ParallelExperts)
        }

    def share_drafts(self, parent: Tensor | None = None) -> None:
        """Replace the rows, which were drafted, by those of the first GPU, if there are several.

        parent [R] int32: of rows that are nodes of trees, whose positions follow from it.
        """
        if self._exchange is not None:
            rows = self._rows
            self._exchange.share_drafts((rows.slot, rows.token, rows.position if parent is None else parent))

    def run(self, num_layers: int | None = None) -> None:
        """Record the kernels that begin the stream with the embeddings of the rows' tokens, and kernels of
        the first `num_layers` layers; None: of all layers."""
        if self._exchange is not None:
            self._exchange.begin()
        self._stream.embed(self._rows.token, self._rows.slot)
        if self._inputs is not None:
            self._inputs.make()
        self._attention.plan()
        self.run_layers(num_layers)

    def run_layers(self, num_layers: int | None = None) -> None:
        """Record the kernels of layers, for a stream that has begun and attention that is planned."""
        stream, decoder = self._stream, self._decoder
        if self._recurrent is not None:
            self._recurrent.begin()
        layers = zip(decoder.spec.layers[:num_layers], decoder.weights.layers[:num_layers], strict=True)
        for index, (layer, weights) in enumerate(layers):
            stream.add_mixer(index, *self._mix(weights.mixer, layer.mixer, index))
            stream.add_channel(index, *self._channel(weights.channel, layer.channel, index))
            if self._inputs is not None and weights.input is not None:
                stream.add_input(index, *self._inputs.run(weights.input, index))
        if self._recurrent is not None:
            self._recurrent.end()

    def _mix(
        self, weights: MixerWeights, mixer: Mixer, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output of the mixer of layer `index` for the normalised stream."""
        if isinstance(mixer, Attention):
            assert isinstance(weights, AttentionWeights)
            return self._attending.run(self.normed, weights, mixer, index)

        if isinstance(mixer, LatentAttention):
            assert isinstance(weights, LatentWeights) and self._latent is not None
            return self._latent.run(self.normed, weights, mixer, index)

        assert isinstance(weights, GatedDeltaWeights) and self._recurrent is not None
        return self._recurrent.run(self.normed, weights, mixer, index)

    def _channel(
        self, weights: ChannelWeights, channel: Channel, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output of the channel of layer `index` for the normalised stream, and its bias."""
        if isinstance(channel, ParallelExperts):
            assert isinstance(weights, ParallelWeights)
            return self._parallel[channel].run(weights, index), None

        if isinstance(channel, Experts):
            assert isinstance(weights, ExpertWeights)
            return self._experts[channel].run(weights, index), None

        assert isinstance(weights, MlpWeights)
        return self._mlp.run(weights, channel, index)


def exact_pass(
    model: ModelResources,
    rows: Rows,
    block_table: Tensor,
    workspace: Workspace,
    attention: RowAttention,
    hidden_states: HiddenStates,
    recurrent: RecurrentRows | None = None,
) -> ForwardPass:
    """A pass in which a row gets the bits that it gets alone: products use the one reduction tree of each
    weight, and attention has partitions at fixed positions."""
    products = ExactProducts(model.tuned, model.exchange, workspace, rows.slot.shape[0])
    return ForwardPass(
        model, rows, block_table, workspace, attention, hidden_states, products, recurrent, is_decoding=True
    )


def fast_pass(
    model: ModelResources,
    rows: Rows,
    block_table: Tensor,
    workspace: Workspace,
    attention: RowAttention,
    hidden_states: HiddenStates,
    recurrent: RecurrentRows | None = None,
) -> ForwardPass:
    """A pass over chunks of prompts, fast and not exact: cuBLAS chooses its kernels by the number of rows, so
    a row's bits may depend on it."""
    products = LibraryProducts(workspace, rows.slot.shape[0])
    return ForwardPass(
        model, rows, block_table, workspace, attention, hidden_states, products, recurrent, is_decoding=False
    )
