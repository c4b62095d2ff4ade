"""The experts of a layer, for the rows of a prefill or decode pass."""

from __future__ import annotations

import torch
from msgspec import structs
from torch import Tensor

from drift_sdk._kernels.experts.cuda_products import (
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    has_cuda_product,
)
from drift_sdk._kernels.experts.cuda_routing import cuda_route, has_cuda_route
from drift_sdk._kernels.experts.expert_gemm import expert_multiply
from drift_sdk._kernels.experts.expert_tiles import ExpertMatrix, expert_gemm_config
from drift_sdk._kernels.experts.gated_expert_gemm import ClampedActivation, gated_expert_multiply
from drift_sdk._kernels.experts.packed_products import packed_expert_multiply, packed_gated_expert_multiply
from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows
from drift_sdk._kernels.gemm.gemm import multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.kernel_weights import KernelExperts
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.models.experts import ExpertMatrices, ExpertWeights, QuantisedMatrices
from drift_sdk.models.experts_config import ExpertsConfig
from drift_sdk.quantised.weight import dense

__all__ = ["ExpertForward", "take_counts"]

MANY_ROWS_PER_EXPERT = 16
"""The most rows of an expert, on average, for which prefill passes use the kernels of few rows. It is 16
with 512 rows of gpt-oss-120b, for which these are faster on an H200."""


class ExpertForward:
    """Kernels that compute the experts of R rows. A row gets the bits that it gets alone.

    Decode passes, and all passes with the bits of decoding, use the kernels that are fastest for few rows of
    an expert. So do prefill passes of few rows; those of more use others, of other bits.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        tuned: TunedTable,
        row_slot: Tensor,
        normed: Tensor,
        workspace: Workspace,
        *,
        num_layers: int,
        max_scale: int | None,
    ) -> None:
        """row_slot [R] int32, -1 for a padding row. normed [R, hidden]: the rows that `run` reads.
        max_scale: the largest scale of MXFP4 weights, for kernels of few rows; None: kernels of many."""
        num_rows, hidden_size = normed.shape
        self._config, self._tuned, self._row_slot, self._normed = config, tuned, row_slot, normed
        self._workspace, self._max_scale = workspace, max_scale
        self._rows = ExpertRows.take(workspace.take, num_rows, config.num_experts, config.num_active)
        self._counts = take_counts(workspace, num_layers, config.num_experts)
        self._gated_gemm = expert_gemm_config(self._rows, normed.dtype, is_gated=True)
        self._down_gemm = expert_gemm_config(self._rows, normed.dtype, is_gated=False)
        gate = config.clamped_gate
        self._activation = None if gate is None else ClampedActivation(gate.alpha, gate.limit)
        num_pairs = num_rows * config.num_active
        self._activated = workspace.take(
            "expert_activated", (num_pairs, config.intermediate_size), normed.dtype
        )
        self._partials = workspace.take(
            "expert_partials", (config.num_active, num_rows, hidden_size), torch.float32
        )

    @classmethod
    def take(
        cls,
        model: ModelResources,
        row_slot: Tensor,
        normed: Tensor,
        workspace: Workspace,
        *,
        is_decoding: bool,
    ) -> ExpertForward | None:
        """The experts of a model; None if it has none. The other arguments as in `__init__`."""
        config = model.decoder.config.experts
        if config is None:
            return None

        has_few_rows = normed.shape[0] * config.num_active <= MANY_ROWS_PER_EXPERT * config.num_experts
        return cls(
            config,
            model.tuned,
            row_slot,
            normed,
            workspace,
            num_layers=model.decoder.config.num_layers,
            max_scale=model.decoder.max_expert_scale if is_decoding or has_few_rows else None,
        )

    def run(self, weights: ExpertWeights, index: int) -> Tensor:
        """Record the kernels of layer `index`.

        Returns partial sums [num_active, R, hidden] float32, valid until the next layer: the shares of a
        row's experts in its output, in order. Those of padding rows are undefined.
        """
        rows = structs.replace(self._rows, counts=self._counts[index])
        self._route(weights, rows)
        self._multiply_gated(weights, rows)
        self._multiply_down(weights, rows)
        return self._partials

    def _multiply_gated(self, weights: ExpertWeights, rows: ExpertRows) -> None:
        normed, activated, activation = self._normed, self._activated, self._activation
        if isinstance(weights.gate_up, KernelExperts):
            packed_gated_expert_multiply(normed, weights.gate_up.packed, rows, activated)
            return

        gate_up = _matrix(weights.gate_up, weights.gate_up_bias)
        if activation is not None and self._has_cuda_product(gate_up):
            cuda_gated_expert_multiply(normed, gate_up, rows, activated, activation)
        else:
            gated_expert_multiply(normed, gate_up, rows, activated, self._gated_gemm, activation)

    def _multiply_down(self, weights: ExpertWeights, rows: ExpertRows) -> None:
        activated, partials = self._activated, self._partials
        if isinstance(weights.down, KernelExperts):
            packed_expert_multiply(activated, weights.down.packed, rows, partials)
            return

        down = _matrix(weights.down, weights.down_bias)
        if self._has_cuda_product(down):
            cuda_expert_multiply(activated, down, rows, partials)
        else:
            expert_multiply(activated, down, rows, partials, self._down_gemm)

    def _has_cuda_product(self, matrix: ExpertMatrix) -> bool:
        return self._max_scale is not None and has_cuda_product(matrix, self._normed.dtype, self._max_scale)

    def _route(self, weights: ExpertWeights, rows: ExpertRows) -> None:
        """Fill `rows`: the experts of each row, their shares, and the rows of each expert."""
        normed, router = self._normed, weights.router
        is_normalised = self._config.is_normalised
        if self._max_scale is not None and has_cuda_route(router, rows.num_active):
            bias = weights.router_bias
            cuda_route(normed, router, bias, self._row_slot, rows, is_normalised=is_normalised)
            return

        config = self._tuned.gemm(*router.shape).config(normed.shape[0])
        shape = (config.num_partials, normed.shape[0], router.shape[0])
        logits = self._workspace.take("expert_logits", shape, torch.float32)
        multiply(normed, router, logits, config)
        choose_experts(
            logits,
            weights.router_bias,
            self._row_slot,
            rows,
            is_normalised=is_normalised,
            dtype=normed.dtype,
        )
        list_rows(rows)


def take_counts(workspace: Workspace, num_layers: int, num_experts: int) -> Tensor:
    """The number of rows of each expert in each layer of the latest pass, [num_layers, E] int32. Those of
    layers without experts are undefined."""
    return workspace.take("expert_counts", (num_layers, num_experts), torch.int32)


def _matrix(matrices: ExpertMatrices, bias: Tensor | None) -> ExpertMatrix:
    """The matrices as the kernels take them."""
    if isinstance(matrices, QuantisedMatrices):
        return ExpertMatrix(matrices.blocks.flatten(2), matrices.scales, bias)

    return ExpertMatrix(dense(matrices), None, bias)
