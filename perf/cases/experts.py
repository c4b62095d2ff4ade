"""Cases of experts: routing, the lists of their rows, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from drift_sdk._kernels.experts.cuda_experts import (
    AnyTiles,
    cuda_expert_multiply,
    cuda_gated_expert_multiply,
    cuda_tiles,
    has_cuda_product,
)
from drift_sdk._kernels.experts.expert_gemm import (
    ClampedActivation,
    ExpertGemmConfig,
    ExpertMatrix,
    expert_gemm_config,
    expert_multiply,
    gated_expert_multiply,
)
from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.spec.model import Experts, Router
from perf.cases.case import Case, Prepared
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import MXFP4_BYTES, Model

__all__ = [
    "DOWN",
    "GATE_UP",
    "expert_cases",
    "matrix_shape",
    "prepare_product",
    "product_bytes",
    "routed",
]

SOFTMAX = Router(kind="softmax", is_normalised=True)
NUM_ROUTES = 12
"""Different choices of experts in a step. Most of their weights are in no cache, as those of other layers."""
SCALES = range(116, 124)
"""Of MXFP4 weights: powers of two around 1/64."""
GATE_UP, DOWN = "gate_up of experts", "down of experts"


def expert_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield cases of routing, of row lists and of both products, for experts chosen at random; in bfloat16 or
    MXFP4. None for a model without experts.

    A product's bytes are those of the experts that the rows have, on average. The table has no influence.
    """
    experts = model.spec.experts
    if experts is None:
        return

    for num_rows in row_counts:
        pairs = num_rows * experts.num_active
        for kernel, prepare, num_bytes in (
            ("choose experts", prepare_choice, num_rows * experts.num_experts * 4),
            ("list rows", prepare_lists, pairs * 8),
        ):
            yield Case(
                kernel=kernel,
                shape=f"{experts.num_active} of {experts.num_experts}",
                num_rows=num_rows,
                num_bytes=num_bytes,
                num_flops=0.0,
                prepare=partial(prepare, experts, num_rows, device),
            )
    for kernel in (GATE_UP, DOWN):
        columns, inner = matrix_shape(model, kernel)
        for num_rows in row_counts:
            yield Case(
                kernel=kernel,
                shape=f"{experts.num_experts}x{columns}x{inner}",
                num_rows=num_rows,
                num_bytes=product_bytes(model, kernel, num_rows),
                num_flops=2 * num_rows * experts.num_active * columns * inner,
                prepare=partial(prepare_product, model, kernel, num_rows, device),
            )


def matrix_shape(model: Model, kernel: str) -> tuple[int, int]:
    """Return rows and columns of an expert's matrix."""
    experts, hidden = model.spec.experts, model.spec.hidden_size
    assert experts is not None
    if kernel == GATE_UP:
        return 2 * experts.intermediate_size, hidden

    return hidden, experts.intermediate_size


def product_bytes(model: Model, kernel: str, num_rows: int) -> float:
    """Return the bytes of the matrices of the experts that `num_rows` rows have on average."""
    columns, inner = matrix_shape(model, kernel)
    itemsize = MXFP4_BYTES if model.has_mxfp4_experts else ITEMSIZE
    return model.spread_experts(num_rows) * columns * inner * itemsize


def routed(
    experts: Experts, num_rows: int, device: str, number: int | None = None
) -> list[tuple[ExpertRows, Tensor, Tensor]]:
    """Return `number` choices of experts for `num_rows` rows: the lists, and the logits and slots.

    number: None: NUM_ROUTES.
    """

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = []
    for _ in range(number or NUM_ROUTES):
        rows = ExpertRows.take(take, num_rows, experts.num_experts, experts.num_active)
        logits = torch.randn(1, num_rows, experts.num_experts, device=device)
        slot = torch.zeros(num_rows, dtype=torch.int32, device=device)
        choose(rows, logits, slot)
        list_rows(rows)
        made.append((rows, logits, slot))
    return made


def choose(rows: ExpertRows, logits: Tensor, slot: Tensor) -> None:
    choose_experts(logits, None, slot, rows, SOFTMAX, dtype=torch.bfloat16)


def prepare_choice(experts: Experts, num_rows: int, device: str) -> Prepared:
    """Make the inputs of `choose_experts`."""
    made = routed(experts, num_rows, device)

    def step() -> None:
        for rows, logits, slot in made:
            choose(rows, logits, slot)

    return Prepared(step, len(made), tuple(rows.shares for rows, _, _ in made))


def prepare_lists(experts: Experts, num_rows: int, device: str) -> Prepared:
    """Make the inputs of `list_rows`."""
    made = routed(experts, num_rows, device)

    def step() -> None:
        for rows, _, _ in made:
            list_rows(rows)

    # The counts, viewed as float32 to be filled with NaN: the bits of counts are those of finite numbers.
    return Prepared(step, len(made), tuple(rows.counts.view(torch.float32) for rows, _, _ in made))


def prepare_product(
    model: Model,
    kernel: str,
    num_rows: int,
    device: str,
    tiles: ExpertGemmConfig | AnyTiles | None = None,
    *,
    num_routes: int | None = None,
) -> Prepared:
    """Make the inputs of a product: random rows and matrices, and several choices of experts.

    tiles: of a kernel of Triton or of CUDA C++; None: those that the engine takes for decoding.
    num_routes: choices of experts; None: NUM_ROUTES.
    """
    experts = model.spec.experts
    assert experts is not None
    made = routed(experts, num_rows, device, num_routes)
    columns, inner = matrix_shape(model, kernel)
    matrix = random_matrix(model, kernel, device)
    if tiles is None:
        tiles = default_tiles(made[0][0], matrix, is_gated=kernel == GATE_UP)
    num_pairs = num_rows * experts.num_active
    if kernel == GATE_UP:
        x = torch.randn(num_rows, inner, device=device).to(torch.bfloat16)
        out = torch.empty(num_pairs, columns // 2, dtype=torch.bfloat16, device=device)
        gate = experts.clamped_gate
        clamped = None if gate is None else ClampedActivation(gate.alpha, gate.limit)

        def call(rows: ExpertRows) -> None:
            if isinstance(tiles, AnyTiles) and clamped is not None:
                cuda_gated_expert_multiply(x, matrix, rows, out, clamped, tiles)
            elif isinstance(tiles, ExpertGemmConfig):
                gated_expert_multiply(x, matrix, rows, out, tiles, clamped or experts.activation)
    else:
        x = torch.randn(num_pairs, inner, device=device).to(torch.bfloat16)
        out = torch.empty(experts.num_active, num_rows, columns, device=device)

        def call(rows: ExpertRows) -> None:
            if isinstance(tiles, AnyTiles):
                cuda_expert_multiply(x, matrix, rows, out, tiles)
            else:
                expert_multiply(x, matrix, rows, out, tiles)

    def step() -> None:
        for rows, _, _ in made:
            call(rows)

    return Prepared(step, len(made), (out,))


def default_tiles(rows: ExpertRows, matrix: ExpertMatrix, *, is_gated: bool) -> ExpertGemmConfig | AnyTiles:
    """Return the tiles that the engine takes for decoding these rows."""
    if has_cuda_product(matrix, torch.bfloat16, SCALES.stop):
        return cuda_tiles(rows, matrix)

    return expert_gemm_config(rows, torch.bfloat16, is_gated=is_gated)


def random_matrix(model: Model, kernel: str, device: str) -> ExpertMatrix:
    """Return matrices [E, columns, inner] of random numbers, in MXFP4 if the model's are."""
    experts = model.spec.experts
    assert experts is not None
    columns, inner = matrix_shape(model, kernel)
    shape = experts.num_experts, columns, inner
    if not model.has_mxfp4_experts:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, inner**-0.5)
        return ExpertMatrix(values, None, None)

    codes = torch.randint(0, 256, (*shape[:2], inner // 2), dtype=torch.uint8, device=device)
    scale_shape = (*shape[:2], inner // 32)
    scales = torch.randint(SCALES.start, SCALES.stop, scale_shape, dtype=torch.uint8, device=device)
    bias = torch.zeros(shape[:2], dtype=torch.bfloat16, device=device)
    return ExpertMatrix(codes, scales, bias if experts.has_bias else None)
