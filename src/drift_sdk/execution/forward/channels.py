"""The channels of a forward pass: the MLP or the experts of a layer, for the rows of a step."""

from __future__ import annotations

import torch
from msgspec import structs
from torch import Tensor

from drift_sdk._kernels.exchange import PeerSums
from drift_sdk._kernels.experts.cuda_experts import (
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    cuda_route,
    has_cuda_product,
    has_cuda_route,
)
from drift_sdk._kernels.experts.expert_gemm import (
    ClampedActivation,
    ExpertMatrix,
    expert_gemm_config,
    expert_multiply,
    gated_expert_multiply,
)
from drift_sdk._kernels.experts.packed_products import packed_expert_multiply, packed_gated_expert_multiply
from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows
from drift_sdk._kernels.gemm.gemm import multiply
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.gates import gate_rows
from drift_sdk._kernels.layers.norm import add_norm, add_normed
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.kernel_weights import KernelExperts
from drift_sdk.execution.forward.products import ExactProducts, Products
from drift_sdk.models.channels import (
    ExpertMatrices,
    ExpertWeights,
    MlpWeights,
    ParallelWeights,
    QuantisedMatrices,
)
from drift_sdk.quantised.weight import dense
from drift_sdk.spec.model import Activation, Experts, Mlp, ParallelExperts


class MlpForward:
    """Kernels that compute the MLP of R rows in a layer."""

    def __init__(self, normed: Tensor, widest: int, workspace: Workspace, products: Products) -> None:
        """normed [R, hidden]: the rows that `run` reads. widest: the most columns of an MLP; 0: there is
        none."""
        if widest:  # taken at its largest: narrower requests are views of this
            workspace.take("activated", (normed.shape[0], widest), normed.dtype)
        self._normed, self._workspace, self._products = normed, workspace, products

    def run(self, weights: MlpWeights, spec: Mlp, index: int) -> tuple[Tensor | PeerSums, Tensor | None]:
        """The output in layer `index`, as `Products` return it."""
        activated = take_activated(self._workspace, self._normed, spec)
        products = self._products
        products.activate(self._normed, weights.gate_up, weights.gate_up_bias, spec.activation, activated)
        return products.multiply_down(activated, weights.down, weights.down_bias, 2 * index + 1)


def take_activated(workspace: Workspace, normed: Tensor, spec: Mlp) -> Tensor:
    """A buffer [R, intermediate] for the gated activation of rows [R, hidden]."""
    return workspace.take("activated", (normed.shape[0], spec.intermediate_size), normed.dtype)


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
        spec: Experts,
        tuned: TunedTable,
        row_slot: Tensor,
        normed: Tensor,
        workspace: Workspace,
        *,
        counts: Tensor,
        max_scale: int | None,
        routed: Tensor | None = None,
        joins_sigmoids: bool = False,
    ) -> None:
        """row_slot [R] int32, -1 for a padding row. normed [R, hidden]: the rows that `run` reads. counts:
        see `take_counts`.
        max_scale: the largest scale of MXFP4 weights, for kernels of few rows; None: kernels of many.
        routed [R, hidden]: the router's input; None: `normed`. joins_sigmoids: kernels of few rows route by
        sigmoids in one launch too."""
        num_rows = normed.shape[0]
        self._spec, self._tuned, self._row_slot, self._normed = spec, tuned, row_slot, normed
        self._routed = normed if routed is None else routed
        self._workspace, self._max_scale, self._joins_sigmoids = workspace, max_scale, joins_sigmoids
        self._products = ExactProducts(tuned, None, workspace, num_rows)
        self._counts = counts
        self._take(spec.num_joinable, 0)  # the most
        gate = spec.clamped_gate
        self._activation: ClampedActivation | Activation = spec.activation
        if gate is not None:
            self._activation = ClampedActivation(gate.alpha, gate.limit)

    @classmethod
    def take(
        cls,
        model: ModelResources,
        spec: Experts,
        row_slot: Tensor,
        normed: Tensor,
        workspace: Workspace,
        *,
        is_decoding: bool,
        routed: Tensor | None = None,
    ) -> ExpertForward:
        """Experts of a model. The other arguments as in `__init__`."""
        is_of_few = is_decoding or has_few_rows(normed.shape[0], spec)
        return cls(
            spec,
            model.tuned,
            row_slot,
            normed,
            workspace,
            counts=take_counts(workspace, model.decoder.spec.num_layers, spec),
            max_scale=model.decoder.max_expert_scale if is_of_few else None,
            routed=routed,
            joins_sigmoids=model.decoder.spec.has_latents,
        )

    def run(self, weights: ExpertWeights, index: int) -> Tensor:
        """Record the kernels of layer `index`.

        Returns partial sums [P, R, hidden] float32, valid until the next layer: those of the shared expert,
        then the shares of a row's experts in its output, in order. Those of padding rows are undefined.
        """
        shared, spec = weights.shared, self._spec
        rows, activated = self._take(weights.num_joined, index)
        num_shared = 0 if shared is None else self._products.num_partials(shared.down)
        shape = num_shared + rows.num_active, *self._normed.shape
        partials = self._workspace.take("expert_partials", shape, torch.float32)
        if shared is not None and spec.shared is not None:
            # In front: the number of its partial sums depends on that of the rows, and a sum of them in front
            # has the same bits as one that was added before.
            self._run_shared(shared, spec.shared, weights.shared_gate, partials[:num_shared])
        self._route(weights, rows)
        self._multiply_gated(weights, rows, activated)
        self._multiply_down(weights, rows, activated, partials[num_shared:])
        return partials

    def _take(self, num_joined: int, index: int) -> tuple[ExpertRows, Tensor]:
        """The rows of experts in layer `index`, and a buffer [pairs, intermediate] for their activation."""
        spec, workspace, (num_rows, _) = self._spec, self._workspace, self._normed.shape
        sizes = spec.num_experts + num_joined, spec.num_active + num_joined
        rows = ExpertRows.take(workspace.take, num_rows, *sizes)
        shape = num_rows * rows.num_active, spec.intermediate_size
        activated = workspace.take("expert_activated", shape, self._normed.dtype)
        return structs.replace(rows, counts=self._counts[index, : rows.num_experts]), activated

    def _run_shared(self, weights: MlpWeights, spec: Mlp, gate: Tensor | None, partials: Tensor) -> None:
        activated = take_activated(self._workspace, self._normed, spec)
        products, normed = self._products, self._normed
        products.activate(normed, weights.gate_up, weights.gate_up_bias, spec.activation, activated)
        if gate is not None:
            gate_rows(normed, gate.view(-1), activated)
        products.multiply_into(activated, weights.down, partials)

    def _multiply_gated(self, weights: ExpertWeights, rows: ExpertRows, activated: Tensor) -> None:
        normed, activation = self._normed, self._activation
        if isinstance(weights.gate_up, KernelExperts):
            assert activation == "silu", "others are arranged as numbers"
            packed_gated_expert_multiply(normed, weights.gate_up.packed, rows, activated)
            return

        gate_up = _matrix(weights.gate_up, weights.gate_up_bias)
        if isinstance(activation, ClampedActivation) and self._has_cuda_product(gate_up):
            cuda_gated_expert_multiply(normed, gate_up, rows, activated, activation)
        else:
            config = expert_gemm_config(rows, normed.dtype, is_gated=True)
            gated_expert_multiply(normed, gate_up, rows, activated, config, activation)

    def _multiply_down(
        self, weights: ExpertWeights, rows: ExpertRows, activated: Tensor, partials: Tensor
    ) -> None:
        if isinstance(weights.down, KernelExperts):
            packed_expert_multiply(activated, weights.down.packed, rows, partials)
            return

        down = _matrix(weights.down, weights.down_bias)
        if self._has_cuda_product(down):
            cuda_expert_multiply(activated, down, rows, partials)
        else:
            config = expert_gemm_config(rows, activated.dtype, is_gated=False)
            expert_multiply(activated, down, rows, partials, config)

    def _has_cuda_product(self, matrix: ExpertMatrix) -> bool:
        return self._max_scale is not None and has_cuda_product(matrix, self._normed.dtype, self._max_scale)

    def _route(self, weights: ExpertWeights, rows: ExpertRows) -> None:
        """Fill `rows`: the experts of each row, their shares, and the rows of each expert."""
        routed, weight, router = self._routed, weights.router, self._spec.router
        is_in_one = router.kind == "softmax" or (self._joins_sigmoids and weights.router_bias is None)
        is_for_few = self._max_scale is not None and weights.expert_factors is None and is_in_one
        num_joined, gate = weights.num_joined, None
        if num_joined and weights.shared_gate is not None:
            gate = self._normed, weights.shared_gate.view(-1)
        if is_for_few and gate is None and has_cuda_route(weight, self._spec.num_active, router):
            bias, correction = weights.router_bias, weights.correction
            cuda_route(routed, weight, bias, self._row_slot, rows, router, correction, num_joined)
            return

        config = self._tuned.gemm(*weight.shape).config(routed.shape[0])
        shape = (config.num_partials, routed.shape[0], weight.shape[0])
        logits = self._workspace.take("expert_logits", shape, torch.float32)
        multiply(routed, weight, logits, config)
        choose_experts(
            logits,
            weights.router_bias,
            self._row_slot,
            rows,
            router,
            dtype=routed.dtype if router.kind == "softmax" else torch.float32,
            correction_bias=weights.correction,
            factors=weights.expert_factors,
            num_joined=num_joined,
            gate=gate,
        )
        list_rows(rows)


class ParallelForward:
    """Kernels that compute an MLP and experts of R rows, each with norms of its own."""

    def __init__(
        self,
        model: ModelResources,
        spec: ParallelExperts,
        row_slot: Tensor,
        stream: Tensor,
        mlp: MlpForward,
        workspace: Workspace,
        *,
        is_decoding: bool,
    ) -> None:
        """row_slot [R] int32, -1 for a padding row. stream [R, hidden]: the residual stream, of which experts
        and router read other norms than `mlp`."""

        def take(name: str) -> Tensor:
            return workspace.take(name, tuple(stream.shape), stream.dtype)

        self._spec, self._stream, self._mlp = spec, stream, mlp
        self._normed, self._routed, self._out = take("expert_input"), take("router_input"), take("joined")
        self._experts = ExpertForward.take(
            model,
            spec.experts,
            row_slot,
            self._normed,
            workspace,
            is_decoding=is_decoding,
            routed=self._routed,
        )

    def run(self, weights: ParallelWeights, index: int) -> Tensor:
        """Record the kernels of layer `index`. Returns its output [R, hidden], valid until the next layer;
        that of padding rows is undefined."""
        spec, norm, router = self._spec, self._spec.norm, self._spec.experts.router
        dense, bias = self._mlp.run(weights.mlp, spec.mlp, index)
        assert isinstance(dense, Tensor), "a model that GPUs do not divide"
        # Only kernels that use no other partial sums lie between the MLP's and their use.
        add_norm(self._stream, None, weights.norm, self._normed, eps=norm.eps, norm_kind=norm.kind)
        assert router.input_norm is not None and weights.experts.input_factors is not None
        add_norm(
            self._stream,
            None,
            weights.experts.input_factors,
            self._routed,
            eps=router.input_norm.eps,
            normed_multiplier=self._stream.shape[1] ** -0.5,
        )
        chosen = self._experts.run(weights.experts, index)
        add_normed(
            dense,
            chosen,
            weights.mlp_post_norm,
            weights.post_norm,
            self._out,
            eps=norm.eps,
            bias=bias,
            norm_kind=norm.kind,
        )
        return self._out


def has_few_rows(num_rows: int, spec: Experts) -> bool:
    """Whether the kernels of few rows of an expert are the faster ones for a pass of prompts."""
    return num_rows * spec.num_active <= MANY_ROWS_PER_EXPERT * spec.num_experts


def take_counts(workspace: Workspace, num_layers: int, spec: Experts, name: str = "expert_counts") -> Tensor:
    """The number of rows of each expert in each layer of the latest pass, [num_layers, E or more] int32.
    Numbers of layers without experts, and behind a layer's experts, are undefined. name: of the buffer."""
    num_columns = spec.num_experts
    if spec.num_joinable:  # layers begin at multiples of 16 bytes where they did without a joined expert
        num_columns = -(-(num_columns + 1) // 4) * 4
    return workspace.take(name, (num_layers, num_columns), torch.int32)


def _matrix(matrices: ExpertMatrices, bias: Tensor | None) -> ExpertMatrix:
    """The matrices as the kernels take them."""
    if isinstance(matrices, QuantisedMatrices):
        return ExpertMatrix(matrices.blocks.flatten(2), matrices.scales, bias)

    return ExpertMatrix(dense(matrices), None, bias)
