"""The target model and what its forward passes need."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.execution.forward.recurrent_states import RecurrentStates
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["ModelResources"]


class ModelResources(Struct, frozen=True, kw_only=True):
    """The target model of a graph executor.

    decoder: configuration and weights.
    cache:   keys and values of all sequences.
    tuned:   launch configurations of the matrix products.
    limits:  most sequences, tokens and blocks.
    states:  of recurrent layers; None: the model has none.
    exchange: with the other GPUs of a tensor-parallel model; None: the decoder is the whole model.
    """

    decoder: Decoder
    cache: PagedKVCache
    tuned: TunedTable
    limits: ExecutorLimits
    states: RecurrentStates | None = None
    exchange: Exchange | None = None
