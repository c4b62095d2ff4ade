"""Inputs of layers that depend on a row's token alone, in kernels."""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.layers.layer_inputs import gate_input, make_inputs
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.products import Product, Products
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layer_inputs import InputWeights, LayerInputWeights, embedding_factor
from drift_sdk.quantised.weight import dense
from drift_sdk.spec.model import LayerInputs


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
