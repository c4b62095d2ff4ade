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

    weights: `Speculation.draft_weights` for it; None: the layer is kept as files store it.

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
            self._tensor_bytes(name, shape, itemsize) for name, shape in shapes.items() if EXPERTS not in name
        )
        channel = self._layer.channel
        if isinstance(channel, Experts):
            size, hidden = channel.intermediate_size, spec.hidden_size
            matrices = (size, hidden), (size, hidden), (hidden, size)
            expert = sum(self._matrix_bytes(*shape, itemsize) for shape in matrices)
            weights += self.model.spread_experts(batch) * expert
        head = itemsize * spec.vocab_size * spec.hidden_size
        assert self._layer.kv is not None
        kv = itemsize * batch * mean_context * self._layer.kv.size
        return num_drafts * (weights + head + kv)

    @property
    def _layer(self) -> LayerSpec:
        layer = self.model.spec.mtp
        assert layer is not None
        return layer

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> float:
        """Bytes of a tensor, of which matrices are quantised if the weights of draft or model say so, but for
        those of the heads of latent attention."""
        latent = self.model.spec.names.latent
        if len(shape) != 2 or name.endswith(f"{latent.module}.{latent.up}.weight"):
            return itemsize * math.prod(shape)

        return self._matrix_bytes(shape[0], shape[1], itemsize)

    def _matrix_bytes(self, rows: int, columns: int, itemsize: int) -> float:
        if self.weights is not None:
            return quantised_bytes(rows, columns, self.weights)

        # A model whose weights are quantised when they are loaded does not have its layer so.
        is_stored = self.model.weights == "stored"
        return self.model.matrix_bytes(rows, columns, itemsize) if is_stored else itemsize * rows * columns
