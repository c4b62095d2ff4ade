"""The target model and what its forward passes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.first_runs import is_first_run
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.execution.forward.repeated_layers import (
    LayerTensors,
    RepeatedLayers,
    layout,
    places,
    tensors_of,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import LayerWeights
from drift_sdk.steps import ExecutorLimits

__all__ = ["ModelResources"]


class ExpertTensors(Protocol):
    """The experts of a forward pass, which have tensors of their own for each layer."""

    def tensors_of_layer(self, index: int) -> list[Tensor]: ...


class ModelResources(Struct, frozen=True, kw_only=True):
    """The target model of a graph executor.

    decoder: configuration and weights.
    cache:   keys and values of all sequences.
    tuned:   launch configurations of the matrix products.
    limits:  most sequences, tokens and blocks.
    exchange: with the other GPUs of a tensor-parallel model; None: the decoder is the whole model.
    kinds:   of the layers, as numbers, by the aux_layers of `run_layers`; filled by it.
    weights: tensors of the layers but for those of the cache, by index; likewise.
    """

    decoder: Decoder
    cache: PagedKVCache
    tuned: TunedTable
    limits: ExecutorLimits
    exchange: Exchange | None = None
    kinds: dict[tuple[int, ...], list[int]] = {}
    weights: dict[int, LayerTensors] = {}

    def run_layers(
        self,
        compute: Callable[[int, LayerWeights], None],
        repeated: RepeatedLayers,
        aux_layers: Sequence[int] = (),
        experts: ExpertTensors | None = None,
    ) -> None:
        """Call compute(index, layer) for the layers in order, or make the launches that it would make.

        In a first run only for those that `chosen_layers` returns. repeated: of the forward pass. aux_layers:
        boundaries whose stream is kept; a layer that ends at one runs another kernel. experts: of the pass.
        """
        layers, key = self.decoder.weights.layers, tuple(aux_layers)
        if key not in self.kinds:
            found = [self._kind(index, key) for index in range(len(layers))]
            self.kinds[key] = [found.index(kind) for kind in found]
        own = [self._own(index, kind) for index, kind in enumerate(self.kinds[key])]
        if experts is not None:
            own = [each.with_tensors(experts.tensors_of_layer(index)) for index, each in enumerate(own)]

        def compute_layer(index: int) -> None:
            compute(index, layers[index])

        if is_first_run():
            repeated.run_first(own, chosen_layers([each.kind for each in own]), compute_layer)
        else:
            repeated.run(own, compute_layer)

    def _kind(self, index: int, aux_layers: tuple[int, ...]) -> object:
        config, layers = self.decoder.config, self.decoder.weights.layers
        place = index + 1 in aux_layers, index + 1 == len(layers)
        return place, config.windows[index], config.layer_ropes[index], layout(layers[index])

    def _own(self, index: int, kind: int) -> LayerTensors:
        """The tensors of a layer: weights, keys and values, and the norm of the next layer's input."""
        if index not in self.weights:
            weights = self.decoder.weights
            following = weights.layers[index + 1 : index + 2]
            norm = following[0].input_norm if following else weights.final_norm
            tensors = [norm, *tensors_of(weights.layers[index])]
            self.weights[index] = LayerTensors((layout(norm), places(tensors)), tensors)
        kv, kept = self.cache.own(index), self.weights[index]
        return LayerTensors((kind, kv.kind, kept.kind), [*kept.tensors, *kv.tensors])


def chosen_layers(kinds: Sequence[object]) -> list[int]:
    """Indices of layers, in order, so that each kind comes after all kinds that it follows in the model, and
    the first layer's kind first.

    Of each kind the last one is among them. Of a kind of three or more, whose launches are compared, so are
    the last two and the last ones of even and of odd index. Launches of these differ if layers use two
    buffers in turn.
    """
    chosen = set[int]()
    for kind in dict.fromkeys(kinds):
        same = [index for index, each in enumerate(kinds) if each == kind]
        chosen.add(same[-1])
        if len(same) > 2:
            chosen |= {same[-2], *{index % 2: index for index in same}.values()}
    pairs = [*pairwise([None, *kinds])]  # of each layer the kind before it and its own
    while True:
        order = sorted(chosen)
        found = {*pairwise([None, *[kinds[index] for index in order]])}
        missing = [index for index, pair in enumerate(pairs) if pair not in found]
        if not missing:
            return order

        chosen |= {max(missing[0] - 1, 0), missing[0]}
