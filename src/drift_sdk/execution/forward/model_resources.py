"""The target model and what its forward passes need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise

import torch
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.first_runs import is_first_run
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import LayerWeights
from drift_sdk.steps import ExecutorLimits

__all__ = ["ModelResources"]


class ModelResources(Struct, frozen=True, kw_only=True):
    """The target model of a graph executor.

    decoder: configuration and weights.
    cache:   keys and values of all sequences.
    tuned:   launch configurations of the matrix products.
    limits:  most sequences, tokens and blocks.
    exchange: with the other GPUs of a tensor-parallel model; None: the decoder is the whole model.
    chosen:  indices of the layers of a first run, by the aux_layers of `layers`; filled by it.
    """

    decoder: Decoder
    cache: PagedKVCache
    tuned: TunedTable
    limits: ExecutorLimits
    exchange: Exchange | None = None
    chosen: dict[tuple[int, ...], tuple[int, ...]] = {}

    def layers(self, aux_layers: Sequence[int] = ()) -> Iterator[tuple[int, LayerWeights]]:
        """Yield the layers to compute, with their indices: all in order; in a first run only those without
        which a kind of layer, or a kind that follows another one, would be missing.

        aux_layers: boundaries whose stream is kept; a layer that ends at one runs another kernel.
        """
        layers = self.decoder.weights.layers
        if not is_first_run():
            yield from enumerate(layers)
            return

        key = tuple(aux_layers)
        if key not in self.chosen:
            self.chosen[key] = self._choose_layers(key)
        for index in self.chosen[key]:
            yield index, layers[index]

    def _choose_layers(self, aux_layers: tuple[int, ...]) -> tuple[int, ...]:
        """Indices of the layers of a first run, in order."""
        config, layers = self.decoder.config, self.decoder.weights.layers

        def kind(index: int) -> object:
            place = index + 1 in aux_layers, index + 1 == len(layers)
            return place, config.windows[index], config.layer_ropes[index], layout(layers[index])

        kinds = list(map(kind, range(len(layers))))
        chosen, seen = {0}, set[tuple[object, object]]()
        for index, pair in enumerate(pairwise(kinds), 1):
            if pair not in seen:
                seen.add(pair)
                chosen |= {index - 1, index}
        return tuple(sorted(chosen))


def layout(value: object) -> object:
    """Shapes, types and strides of the tensors in a dataclass or Struct of weights, as a value to compare.

    Objects of other classes count as different from each other, unless they are equal.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.data_ptr() % 16

    names: tuple[str, ...] = ()
    if is_dataclass(value):
        names = tuple(field.name for field in fields(value))
    elif isinstance(value, Struct):
        names = value.__struct_fields__
    if names:
        return type(value), tuple(layout(getattr(value, name)) for name in names)

    if isinstance(value, tuple | list):
        return tuple(map(layout, value))

    return value if value is None or isinstance(value, str | int | float | torch.dtype) else id(value)
