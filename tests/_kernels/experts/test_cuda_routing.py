"""Routing in CUDA C++: that of the reference, with ties and NaN; the same bits for any rows. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from references.experts import choose_experts_reference, list_rows_reference

from drift_sdk._kernels.experts.cuda_experts import cuda_route, has_cuda_route
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk.spec.model import Router

pytestmark = pytest.mark.gpu

BF16, DEVICE = torch.bfloat16, "cuda"
# Experts, experts of a row, inner dimension.
SHAPES = ((128, 4, 2880), (32, 4, 2880), (128, 8, 2048), (16, 1, 72))


def poisoned_rows(num_rows: int, num_experts: int, num_active: int) -> ExpertRows:
    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=DEVICE)

    return ExpertRows.take(take, num_rows, num_experts, num_active)


def drawn(*shape: int) -> torch.Tensor:
    """Small integers, whose sums are exact in any order, and often equal."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(DEVICE, BF16)


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 9, 16, 17, 300])
def test_rows_equal_the_reference(num_rows: int, shape: tuple[int, int, int], is_normalised: bool) -> None:
    num_experts, num_active, inner = shape
    x, weight, bias = drawn(num_rows, inner), drawn(num_experts, inner), drawn(num_experts)
    if num_rows > 4:
        x[4] = torch.nan
    slot = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    slot[3::4] = -1
    rows = poisoned_rows(num_rows, num_experts, num_active)
    router = Router(kind="softmax", is_normalised=is_normalised)
    assert has_cuda_route(weight, num_active, router)
    cuda_route(x, weight, bias, slot, rows, is_normalised=is_normalised)
    logits = (x.float() @ weight.float().T)[None]
    experts, shares = choose_experts_reference(logits, bias, slot, num_active, router, dtype=BF16)
    assert torch.equal(rows.experts, experts)
    live = slot >= 0
    torch.testing.assert_close(rows.shares[live], shares[live], rtol=1e-5, atol=1e-6, equal_nan=True)
    lists = list_rows_reference(experts, num_experts)
    counts, pairs = rows.counts.tolist(), rows.pairs.tolist()
    assert counts == [len(one) for one in lists]
    assert [pairs[expert][:count] for expert, count in enumerate(counts)] == lists


def test_row_has_the_bits_that_it_has_alone() -> None:
    num_experts, num_active, inner = 128, 4, 2880
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(40, inner, generator=generator, device=DEVICE).to(BF16)
    weight = torch.randn(num_experts, inner, generator=generator, device=DEVICE).to(BF16) * inner**-0.5

    def route(rows: int, first: int = 0) -> ExpertRows:
        found = poisoned_rows(rows, num_experts, num_active)
        slot = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        cuda_route(x[first : first + rows], weight, None, slot, found, is_normalised=True)
        return found

    together = route(40)
    for num_rows, first in ((1, 7), (1, 39), (8, 16), (16, 20)):
        found = route(num_rows, first)
        assert torch.equal(found.experts, together.experts[first : first + num_rows])
        assert torch.equal(found.shares, together.shares[first : first + num_rows])


def test_router_that_the_program_does_not_know_is_named() -> None:
    weight = drawn(128, 64)
    softmax = Router(kind="softmax", is_normalised=True)
    assert has_cuda_route(weight, 4, softmax)
    for other in (drawn(24, 64), drawn(256, 64), drawn(128, 68), weight.float()):
        assert not has_cuda_route(other, 4, softmax)
    assert not has_cuda_route(weight, 17, softmax)
    assert not has_cuda_route(weight, 4, Router(kind="sigmoid", is_normalised=True))
