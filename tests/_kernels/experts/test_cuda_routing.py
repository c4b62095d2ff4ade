"""Routing in CUDA C++: that of the reference, with ties and NaN; the same bits for any rows. Needs a GPU, but
for the choice by sigmoids, whose threads are emulated without one."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from emulated_cuda import has_host_compiler, launch_emulated
from references.experts import choose_experts_reference, list_rows_reference
from slow_cases import slow_rows_after

from drift_sdk._kernels.experts.cuda_experts import cuda_route, has_cuda_route
from drift_sdk._kernels.experts.routing import ExpertRows
from drift_sdk.spec.model import Router, RouterKind

needs_gpu = pytest.mark.gpu

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


@needs_gpu
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
    cuda_route(x, weight, bias, slot, rows, router)
    logits = (x.float() @ weight.float().T)[None]
    experts, shares = choose_experts_reference(logits, bias, slot, num_active, router, dtype=BF16)
    assert torch.equal(rows.experts, experts)
    live = slot >= 0
    torch.testing.assert_close(rows.shares[live], shares[live], rtol=1e-5, atol=1e-6, equal_nan=True)
    lists = list_rows_reference(experts, num_experts)
    counts, pairs = rows.counts.tolist(), rows.pairs.tolist()
    assert counts == [len(one) for one in lists]
    assert [pairs[expert][:count] for expert, count in enumerate(counts)] == lists


@needs_gpu
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("shape", [(64, 4, 2048), (128, 8, 72), (16, 1, 72)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 300])
def test_rows_of_sigmoids_equal_the_reference(
    num_rows: int, shape: tuple[int, int, int], is_normalised: bool
) -> None:
    """GLM-4.7-Flash's router, and others. Corrections change the choice and not the shares."""
    num_experts, num_active, inner = shape
    x, weight = drawn(num_rows, inner) / 8, drawn(num_experts, inner)
    if num_rows > 4:
        x[4] = torch.nan
    correction = drawn(num_experts).float() / 4
    slot = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    slot[3::4] = -1
    rows = poisoned_rows(num_rows, num_experts, num_active)
    router = Router(kind="sigmoid", is_normalised=is_normalised, scale=1.8)
    assert has_cuda_route(weight, num_active, router)
    cuda_route(x, weight, None, slot, rows, router, correction)
    logits = (x.float() @ weight.float().T)[None]
    experts, shares = choose_experts_reference(
        logits, None, slot, num_active, router, dtype=torch.float32, correction_bias=correction
    )
    live = slot >= 0
    assert torch.equal(rows.experts, experts)
    torch.testing.assert_close(rows.shares[live], shares[live], rtol=1e-5, atol=1e-6, equal_nan=True)
    lists = list_rows_reference(experts, num_experts)
    assert rows.counts.tolist() == [len(one) for one in lists]
    assert len(set(experts[live].flatten().tolist())) >= num_active + (num_rows > 1)


@needs_gpu
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_row_has_the_bits_that_it_has_alone(kind: RouterKind) -> None:
    router = Router(kind=kind)
    correction = drawn(128).float() / 8 if kind == "sigmoid" else None
    num_experts, num_active, inner = 128, 4, 2880
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(40, inner, generator=generator, device=DEVICE).to(BF16)
    weight = torch.randn(num_experts, inner, generator=generator, device=DEVICE).to(BF16) * inner**-0.5

    def route(rows: int, first: int = 0) -> ExpertRows:
        found = poisoned_rows(rows, num_experts, num_active)
        slot = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        cuda_route(x[first : first + rows], weight, None, slot, found, router, correction)
        return found

    together = route(40)
    for num_rows, first in ((1, 7), (1, 39), (8, 16), (16, 20)):
        found = route(num_rows, first)
        assert torch.equal(found.experts, together.experts[first : first + num_rows])
        assert torch.equal(found.shares, together.shares[first : first + num_rows])


@needs_gpu
def test_router_that_the_program_does_not_know_is_named() -> None:
    weight = drawn(128, 64)
    softmax = Router(kind="softmax", is_normalised=True)
    assert has_cuda_route(weight, 4, softmax)
    for other in (drawn(24, 64), drawn(256, 64), drawn(128, 68), weight.float()):
        assert not has_cuda_route(other, 4, softmax)
    assert not has_cuda_route(weight, 17, softmax)
    assert has_cuda_route(weight, 4, Router(kind="sigmoid"))
    groups = Router(kind="sigmoid", num_groups=8, num_active_groups=4)
    for router in (groups, Router(kind="wide")):
        assert not has_cuda_route(weight, 4, router)


CHOICE = """
typedef unsigned int u32;
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
template <typename Better> u32 reduced(u32 value, Better is_better) {
  emulated::show(static_cast<std::uint64_t>(value));
  for (int lane = 0; lane < 32; lane++) {
    const u32 other = static_cast<u32>(emulated::shown(lane)[0]);
    if (is_better(other, value)) value = other;
  }
  return value;
}
inline u32 __reduce_max_sync(u32, u32 value) { return reduced(value, [](u32 a, u32 b) { return a > b; }); }
inline u32 __reduce_min_sync(u32, u32 value) { return reduced(value, [](u32 a, u32 b) { return a < b; }); }
"""
CHOOSE = """
extern "C" __global__ void choose(const float* logits, const float* correction, float* values, int* experts) {
  const int lane = threadIdx.x, row = blockIdx.x;
  float found[ACTIVE];
  int chosen[ACTIVE];
  choose_by_sigmoids<EXPERTS>(logits + row * EXPERTS, correction, lane, found, chosen);
  for (int r = 0; r < ACTIVE; r++)
    if (lane == r) values[row * ACTIVE + r] = found[r], experts[row * ACTIVE + r] = chosen[r];
}
"""


@pytest.mark.skipif(not has_host_compiler(), reason="needs a compiler for the host")
@pytest.mark.parametrize(("num_experts", "num_active"), slow_rows_after(1, [(16, 3), (64, 4), (128, 8)]))
def test_choice_by_sigmoids_equals_the_reference(num_experts: int, num_active: int, tmp_path: Path) -> None:
    """With equal scores, corrections that turn the order round, and logits that are infinite or NaN."""
    source = resources.files("drift_sdk._kernels").joinpath("experts/route_rows.cu").read_text("utf-8")
    choice = source[source.index("constexpr float LOWEST") : source.index("// What routing takes.")]
    (tmp_path / "choice.cu").write_text(CHOICE + choice + CHOOSE)
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randint(-12, 13, (40, num_experts), generator=generator) / 4
    logits[3], logits[4, ::2] = torch.nan, torch.nan
    logits[5, :7], logits[6, :7], logits[7, 1::2] = torch.inf, -torch.inf, -torch.nan
    correction = torch.randint(-2, 3, (num_experts,), generator=generator) / 2
    values, experts = torch.full((40, num_active), torch.nan), torch.full((40, num_active), -9).int()
    files = (str(tmp_path / "choice.cu"),)
    macros = {"EXPERTS": num_experts, "ACTIVE": num_active}
    launch_emulated(tmp_path, files, "choose", macros, (40, 1), 32, (logits, correction, values, experts))
    router = Router(kind="sigmoid", is_normalised=False)
    expected, shares = choose_experts_reference(
        logits[None],
        None,
        torch.zeros(40).int(),
        num_active,
        router,
        dtype=torch.float32,
        correction_bias=correction,
    )
    assert torch.equal(experts, expected)
    torch.testing.assert_close(values, shares, rtol=1e-6, atol=0, equal_nan=True)
    without = torch.topk(logits.sigmoid(), num_active).indices
    assert (without != experts).any(1).sum() > 20
