"""The MLP and the mixture of experts in plain torch: weights, routing of rows to experts, and forward passes.

A row's output of experts is summed in float32: of the shared expert first, then of its own experts in the
order of their scores, largest first. So it does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drift_sdk.loading.stored_formats import BLOCK_BYTES, dequantise_mxfp4
from drift_sdk.models.allocation import Allocation
from drift_sdk.models.layers import linear, normalise, rms_norm
from drift_sdk.quantised.formats import MXFP4_BLOCK, stack_rows
from drift_sdk.quantised.weight import Matrix, QuantisedWeight
from drift_sdk.spec.model import (
    Activation,
    ClampedGate,
    ExpertNames,
    Experts,
    Mlp,
    MlpNames,
    Names,
    ParallelExperts,
    Router,
)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Gate and up projections are one matrix. Matrices may be quantised.

    gate_up: [2 * intermediate, hidden]. down: [hidden, intermediate]. Biases: [rows of their matrix].
    """

    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None


def allocate_mlp(spec: Mlp, names: MlpNames, layer: str, hidden: int, allocation: Allocation) -> MlpWeights:
    """layer: prefix of the layer's tensors."""
    prefix, size = f"{layer}.{names.module}", spec.intermediate_size
    rows = {names.gate: size, names.up: size} if names.fused is None else {names.fused: 2 * size}
    biases = {f"{prefix}.{name}.bias": size for name, size in rows.items()}
    down = f"{prefix}.{names.down}"
    return MlpWeights(
        gate_up=allocation.projection(
            {f"{prefix}.{name}.weight": size for name, size in rows.items()}, hidden
        ),
        gate_up_bias=allocation.stacked(biases) if spec.has_bias else None,
        down=allocation.matrix(f"{down}.weight", hidden, size),
        down_bias=allocation.tensor(f"{down}.bias", hidden) if spec.has_bias else None,
    )


def apply_mlp(x: torch.Tensor, weights: MlpWeights, spec: Mlp) -> torch.Tensor:
    """The output [N, hidden] for x [N, hidden]."""
    gate, up = linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return linear(activate(gate, spec.activation).mul_(up), weights.down, weights.down_bias)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of x, of each number by itself."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


@dataclass(frozen=True, slots=True)
class QuantisedMatrices:
    """A matrix of each expert in MXFP4, see loading/stored_formats.py.

    blocks: [num_experts, out, in / 32, 16] uint8. scales: [num_experts, out, in / 32] uint8.
    """

    blocks: torch.Tensor
    scales: torch.Tensor


ExpertMatrices = torch.Tensor | QuantisedMatrices | tuple[Matrix, ...] | QuantisedWeight
"""A matrix of each expert: [num_experts, out, in], the same in MXFP4, or one by one, quantised otherwise; or
the rows of all experts as one quantised weight, which kernels take."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer and their router.

    num_joined:    1 if the shared expert is one of the experts, the last one, which all rows have; else 0.
    router:        [num_experts, hidden].
    gate_up:       [num_experts + num_joined, 2 * intermediate, hidden].
    down:          [num_experts + num_joined, hidden, intermediate].
    Biases:        [num_experts], and [num_experts, rows of their matrix].
    correction:    [num_experts] float32, of a sigmoid router.
    shared:        the shared expert, if it is not joined.
    shared_gate:   [1, hidden], of the shared expert.
    input_factors, expert_factors: [hidden] and [num_experts], of a router with a norm.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    gate_up: ExpertMatrices
    gate_up_bias: torch.Tensor | None
    down: ExpertMatrices
    down_bias: torch.Tensor | None
    correction: torch.Tensor | None = None
    shared: MlpWeights | None = None
    shared_gate: torch.Tensor | None = None
    input_factors: torch.Tensor | None = None
    expert_factors: torch.Tensor | None = None
    num_joined: int = 0


def allocate_experts(
    spec: Experts, names: ExpertNames, layer: str, hidden: int, allocation: Allocation
) -> ExpertWeights:
    """layer: prefix of the layer's tensors."""
    prefix, num_experts, size = names.prefix(layer), spec.num_experts, spec.intermediate_size
    experts, router = f"{prefix}.{names.experts}", f"{prefix}.{names.router}"

    def bias(name: str, *shape: int) -> torch.Tensor | None:
        return allocation.tensor(name, *shape) if spec.has_bias else None

    correction = None
    if spec.router.kind == "sigmoid":
        correction = allocation.tensor(f"{prefix}.{names.correction}", num_experts, dtype=torch.float32)
    gate_up, down, shared = _allocate_with_shared(spec, names, prefix, hidden, allocation)
    gate = None
    if spec.has_shared_gate:
        gate = allocation.tensor(f"{prefix}.{names.shared_gate}.weight", 1, hidden)
    has_factors = spec.router.input_norm is not None

    def factors(name: str, number: int) -> torch.Tensor | None:
        return allocation.tensor(f"{prefix}.{name}", number) if has_factors else None

    return ExpertWeights(
        router=allocation.tensor(f"{router}.weight", num_experts, hidden),
        router_bias=bias(f"{router}.bias", num_experts),
        gate_up=gate_up,
        gate_up_bias=bias(f"{experts}.{names.gate_up}_bias", num_experts, 2 * size),
        down=down,
        down_bias=bias(f"{experts}.{names.down}_bias", num_experts, hidden),
        correction=correction,
        shared=shared,
        shared_gate=gate,
        input_factors=factors(names.input_factors, hidden),
        expert_factors=factors(names.expert_factors, num_experts),
        num_joined=int(spec.shared is not None and shared is None),
    )


def _allocate_with_shared(
    spec: Experts, names: ExpertNames, prefix: str, hidden: int, allocation: Allocation
) -> tuple[ExpertMatrices, ExpertMatrices, MlpWeights | None]:
    """The gate and up, and the down projections, and the shared expert if it is not the last one of them.
    prefix: of tensors of the experts and of the shared one."""
    experts = f"{prefix}.{names.experts}"
    if spec.shared is None:
        return *_allocate_matrices(spec, names, experts, hidden, allocation), None

    shared = allocate_mlp(spec.shared, names.shared, prefix, hidden, allocation)
    is_joinable = bool(spec.num_joinable) and names.shared.fused is None
    is_dense = isinstance(shared.gate_up, torch.Tensor) and isinstance(shared.down, torch.Tensor)
    num_more = int(is_joinable and is_dense)
    gate_up, down = _allocate_matrices(spec, names, experts, hidden, allocation, num_more)
    if is_joinable and isinstance(gate_up, tuple) and isinstance(down, tuple):
        return (*gate_up, shared.gate_up), (*down, shared.down), None

    if not num_more or not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return gate_up, down, shared

    # In the place of its own memory.
    own, size = names.shared, spec.intermediate_size
    parts = {own.gate: gate_up[-1, :size], own.up: gate_up[-1, size:], own.down: down[-1]}
    allocation.places |= {f"{prefix}.{own.module}.{name}.weight": place for name, place in parts.items()}
    return gate_up, down, None


def _allocate_matrices(
    spec: Experts,
    names: ExpertNames,
    prefix: str,
    hidden: int,
    allocation: Allocation,
    num_more: int = 0,
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """The gate and up, and the down projections. prefix: of the experts' tensors. num_more: further
    matrices behind the experts', if these are dense."""
    num_experts, size = spec.num_experts, spec.intermediate_size
    if names.layout == "mxfp4":

        def quantised(name: str, rows: int, columns: int) -> QuantisedMatrices:
            shape = num_experts, rows, columns // MXFP4_BLOCK
            blocks = allocation.tensor(f"{prefix}.{name}_blocks", *shape, BLOCK_BYTES, dtype=torch.uint8)
            scales = allocation.tensor(f"{prefix}.{name}_scales", *shape, dtype=torch.uint8)
            return QuantisedMatrices(blocks, scales)

        return quantised(names.gate_up, 2 * size, hidden), quantised(names.down, hidden, size)

    if names.layout == "each":
        return _allocate_each(spec, names, prefix, hidden, allocation, num_more)

    gate_up, down = (
        allocation.empty(num_experts + num_more, 2 * size, hidden),
        allocation.empty(num_experts + num_more, hidden, size),
    )
    for name, matrices in ((names.gate_up, gate_up[:num_experts]), (names.down, down[:num_experts])):
        is_transposed = names.layout == "transposed"
        allocation.places[f"{prefix}.{name}"] = matrices.transpose(1, 2) if is_transposed else matrices
    return gate_up, down


def _allocate_each(
    spec: Experts, names: ExpertNames, prefix: str, hidden: int, allocation: Allocation, num_more: int
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """The matrices of experts with a tensor each in files, one by one if some are quantised, which are
    without `num_more`."""
    num_experts, size = spec.num_experts, spec.intermediate_size
    stored = [
        [f"{prefix}.{expert}.{name}.weight" for name in (names.gate, names.up, names.down)]
        for expert in range(num_experts)
    ]
    found = {name: allocation.quantised(name) for each in stored for name in each}
    if any(weight is not None for weight in found.values()):
        shapes = (size, hidden), (size, hidden), (hidden, size)
        matrices: list[list[Matrix]] = [
            [found[name] or allocation.tensor(name, *shape) for name, shape in zip(each, shapes, strict=True)]
            for each in stored
        ]
        return tuple(stack_rows(each[:2]) for each in matrices), tuple(each[2] for each in matrices)

    gate_up, down = (
        allocation.empty(num_experts + num_more, 2 * size, hidden),
        allocation.empty(num_experts + num_more, hidden, size),
    )
    for expert, each in enumerate(stored):
        parts = gate_up[expert, :size], gate_up[expert, size:], down[expert]
        allocation.places.update(zip(each, parts, strict=True))
    return gate_up, down


def apply_experts(
    x: torch.Tensor, weights: ExpertWeights, spec: Experts, routed: torch.Tensor | None = None
) -> torch.Tensor:
    """The output [N, hidden] of the experts that the router chooses for each row of x [N, hidden].

    routed: [N, hidden], the router's input; None: x.
    """
    experts, shares = route(x if routed is None else routed, weights, spec)
    if weights.num_joined:
        gate = torch.ones_like(shares[:, :1])
        if weights.shared_gate is not None:
            gate = torch.sigmoid(linear(x, weights.shared_gate)).to(torch.float32)
        experts = torch.cat((torch.full_like(experts[:, :1], spec.num_experts), experts), dim=1)
        shares = torch.cat((gate, shares), dim=1)
    outputs = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in experts.unique().tolist():
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        gate_up = _multiply(x[rows], weights.gate_up, weights.gate_up_bias, expert)
        activated = gated(gate_up, spec.clamped_gate, spec.activation)
        outputs[rows, ranks] = _multiply(activated, weights.down, weights.down_bias, expert)

    weighted = outputs.to(torch.float32) * shares[:, :, None]
    total = weighted[:, 0]
    if spec.shared is not None and weights.shared is not None:
        shared = apply_mlp(x, weights.shared, spec.shared)
        if weights.shared_gate is not None:
            shared = shared * torch.sigmoid(linear(x, weights.shared_gate))
        total = shared.to(torch.float32) + total
    for rank in range(1, experts.shape[1]):
        total = total + weighted[:, rank]

    return total.to(x.dtype)


def route(x: torch.Tensor, weights: ExpertWeights, spec: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row of x [N, hidden] and their weights, [N, num_active] int64 and float32, in the
    order of choice."""
    router = spec.router
    if router.input_norm is not None and weights.input_factors is not None:
        normed = rms_norm(x, weights.input_factors, router.input_norm.eps)
        x = normed * x.shape[1] ** -0.5
    if router.kind == "softmax":
        logits = linear(x, weights.router, weights.router_bias)
        experts, shares = choose_experts(logits, spec.num_active, is_normalised=router.is_normalised)
        return experts, shares if weights.expert_factors is None else shares * weights.expert_factors[experts]

    logits = linear(x.to(torch.float32), weights.router.to(torch.float32))
    scores = logits.softmax(-1) if router.kind == "wide" else logits.sigmoid()
    return choose_by_score(scores, weights.correction, spec.num_active, router)


def choose_experts(
    logits: torch.Tensor, num_active: int, *, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row and their weights, [N, num_active] int64 and float32, largest logit first.

    logits: [N, num_experts]. Of equal logits, that of the lower expert comes first.
    is_normalised: as in Router.
    """
    wide = logits.to(torch.float32)
    # A stable sort, because topk may put equal logits in any order.
    ranked, order = wide.sort(dim=-1, descending=True, stable=True)
    experts = order[:, :num_active]
    if is_normalised:
        return experts, ranked[:, :num_active].softmax(dim=-1)

    return experts, wide.softmax(dim=-1).gather(1, experts)


def choose_by_score(
    scores: torch.Tensor, correction: torch.Tensor | None, num_active: int, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest scores plus correction [num_experts], and their weights, as `route`
    returns them. scores: [N, num_experts] float32. correction: None: of zeros."""
    keys = scores if correction is None else scores + correction
    if router.num_groups > 1:
        groups = keys.unflatten(1, (router.num_groups, -1))
        num_summed = 1 if router.kind == "wide" else min(2, groups.shape[2])
        sums = groups.topk(num_summed, dim=-1).values.sum(dim=-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_active_groups]
        is_active = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, value=True)
        keys = groups.masked_fill(~is_active[:, :, None], float("-inf")).flatten(1)
    experts = keys.sort(dim=-1, descending=True, stable=True).indices[:, :num_active]
    shares = scores.gather(1, experts)
    if router.is_normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, shares * router.scale


def gated(
    gate_up: torch.Tensor, clamped_gate: ClampedGate | None, activation: Activation = "silu"
) -> torch.Tensor:
    """The activation [N, intermediate] of gate and up projections [N, 2 * intermediate]."""
    if clamped_gate is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, activation).mul_(up)

    limit = clamped_gate.limit
    wide = gate_up.to(torch.float32)
    gate, up = wide[:, 0::2].clamp(max=limit), wide[:, 1::2].clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(clamped_gate.alpha * gate))).to(gate_up.dtype)


def _multiply(
    x: torch.Tensor, matrices: ExpertMatrices, biases: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """The product [M, out] of x [M, in] with one expert's transposed matrix, plus its bias."""
    if isinstance(matrices, QuantisedMatrices):
        matrix: Matrix = dequantise_mxfp4(matrices.blocks[expert], matrices.scales[expert], x.dtype)
    elif isinstance(matrices, QuantisedWeight):
        raise NotImplementedError("experts that are one weight are multiplied by kernels")
    else:
        matrix = matrices[expert]

    return linear(x, matrix, None if biases is None else biases[expert])


@dataclass(frozen=True, slots=True)
class ParallelWeights:
    """Norms [hidden]: of the MLP's output, and of the experts' input and output."""

    mlp: MlpWeights
    mlp_post_norm: torch.Tensor
    experts: ExpertWeights
    norm: torch.Tensor
    post_norm: torch.Tensor


def allocate_parallel(
    spec: ParallelExperts, names: Names, layer: str, hidden: int, allocation: Allocation
) -> ParallelWeights:
    """layer: prefix of the layer's tensors."""

    def norm(name: str) -> torch.Tensor:
        return allocation.tensor(f"{layer}.{name}.weight", hidden)

    return ParallelWeights(
        mlp=allocate_mlp(spec.mlp, names.mlp, layer, hidden, allocation),
        mlp_post_norm=norm(names.experts.mlp_post_norm),
        experts=allocate_experts(spec.experts, names.experts, layer, hidden, allocation),
        norm=norm(names.experts.norm),
        post_norm=norm(names.experts.post_norm),
    )


def apply_parallel(
    x: torch.Tensor, stream: torch.Tensor, weights: ParallelWeights, spec: ParallelExperts
) -> torch.Tensor:
    """The output [N, hidden] for x [N, hidden], the normalised stream, and the stream [N, hidden]."""
    dense = normalise(apply_mlp(x, weights.mlp, spec.mlp), weights.mlp_post_norm, spec.norm)
    normed = normalise(stream, weights.norm, spec.norm)
    chosen = apply_experts(normed, weights.experts, spec.experts, routed=stream)
    return dense + normalise(chosen, weights.post_norm, spec.norm)
