"""The draft that a measured model has in its own files: a layer that predicts one more token (MTP)."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from drift_sdk.models.allocation import quantised_bytes
from drift_sdk.models.mtp import mtp_shapes
from drift_sdk.spec.model import Experts, LayerSpec
from perf.harness.shapes import EXPERTS, Model

__all__ = ["MTP", "MtpDraft"]

MTP = "mtp"


class MtpDraft(Struct, frozen=True, kw_only=True):
    """The MTP layer of a model.

    weights: `Speculation.draft_weights` for it; None: the layer is stored as the model's weights are.

    Raises ValueError for a model without such a layer.
    """

    model: Model
    weights: Literal["fp8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.model.spec.mtp is None:
            raise ValueError(f"model={self.model.name!r}: expected one with an MTP layer")

    @property
    def path(self) -> str:
        """`Speculation.draft` for it."""
        return MTP

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's: the layer, the target's head and the
        layer's KV for each drafted token. Of experts those that a row of each sequence has are read."""
        spec = self.model.spec
        shapes = mtp_shapes(spec)
        weights = sum(
            self._tensor_bytes(shape, itemsize) for name, shape in shapes.items() if EXPERTS not in name
        )
        channel = self._layer.channel
        if isinstance(channel, Experts):
            numbers = sum(math.prod(shape) for name, shape in shapes.items() if EXPERTS in name)
            weights += self.model.spread_experts(batch) * itemsize * numbers / channel.num_experts
        head = itemsize * spec.vocab_size * spec.hidden_size
        assert self._layer.kv is not None
        kv = itemsize * batch * mean_context * self._layer.kv.size
        return num_drafts * (weights + head + kv)

    @property
    def _layer(self) -> LayerSpec:
        layer = self.model.spec.mtp
        assert layer is not None
        return layer

    def _tensor_bytes(self, shape: tuple[int, ...], itemsize: int) -> float:
        """Bytes of a tensor, of which matrices are quantised if the weights of draft or model say so."""
        if len(shape) != 2:
            return itemsize * math.prod(shape)

        if self.weights is None:
            return self.model.matrix_bytes(shape[0], shape[1], itemsize)

        return quantised_bytes(shape[0], shape[1], self.weights)
