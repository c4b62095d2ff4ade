"""The forward pass of a model on the graph executor: a loop over mixers and channels."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.exchange.peer_memory import PeerSums
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention import AttentionForward
from drift_sdk.execution.forward.experts import ExpertForward
from drift_sdk.execution.forward.gated_delta import GatedDeltaForward, RecurrentRows
from drift_sdk.execution.forward.mlp import MlpForward
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.execution.forward.products import ExactProducts, LibraryProducts, Products
from drift_sdk.execution.forward.residual_stream import ResidualStream
from drift_sdk.execution.forward.row_attention import RowAttention
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import HiddenStates, LayerBuffers
from drift_sdk.models.channels.experts import ExpertWeights
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.models.mixers.gated_delta import GatedDeltaWeights
from drift_sdk.models.weights import MixerWeights
from drift_sdk.spec.model import Attention, Experts, Mixer

__all__ = ["ForwardPass", "exact_pass", "fast_pass"]


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
        self._recurrent: GatedDeltaForward | None = None
        if model.states is not None:
            assert recurrent is not None, "a step that recurrent layers do not have"
            self._recurrent = GatedDeltaForward(model.states, rows, recurrent, workspace, products)
        self._mlp = MlpForward(self.normed, workspace, products)
        self._experts = {
            spec: ExpertForward.take(model, spec, rows.slot, self.normed, workspace, is_decoding=is_decoding)
            for spec in dict.fromkeys(layer.channel for layer in model.decoder.spec.layers)
            if isinstance(spec, Experts)
        }

    def share_drafts(self, parent: Tensor | None = None) -> None:
        """Replace the rows, which were drafted, by those of the first GPU, if there are several.

        parent [R] int32: of rows that are nodes of trees, whose positions follow from it.
        """
        if self._exchange is not None:
            rows = self._rows
            self._exchange.share_drafts((rows.slot, rows.token, rows.position if parent is None else parent))

    def run(self) -> None:
        """Record the kernels of all layers."""
        rows, stream, decoder = self._rows, self._stream, self._decoder
        if self._exchange is not None:
            self._exchange.begin()
        stream.embed(rows.token, rows.slot)
        self._attention.plan()
        if self._recurrent is not None:
            self._recurrent.begin()
        layers = zip(decoder.spec.layers, decoder.weights.layers, strict=True)
        for index, (layer, weights) in enumerate(layers):
            stream.add_mixer(index, *self._mix(weights.mixer, layer.mixer, index))
            if isinstance(weights.channel, ExpertWeights):
                assert isinstance(layer.channel, Experts)
                stream.add_channel(index, self._experts[layer.channel].run(weights.channel, index))
            else:
                assert not isinstance(layer.channel, Experts)
                stream.add_channel(index, *self._mlp.run(weights.channel, layer.channel, index))
        if self._recurrent is not None:
            self._recurrent.end()

    def _mix(
        self, weights: MixerWeights, mixer: Mixer, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output of the mixer of layer `index` for the normalised stream."""
        if isinstance(mixer, Attention):
            assert isinstance(weights, AttentionWeights)
            return self._attending.run(self.normed, weights, mixer, index)

        assert isinstance(weights, GatedDeltaWeights) and self._recurrent is not None
        return self._recurrent.run(self.normed, weights, mixer, index)


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
