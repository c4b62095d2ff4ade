"""Routing in CUDA C++: that of the reference, with ties and NaN; the same bits for any rows. Needs a GPU, but
for the choice by sigmoids and a cluster of one CTA, whose threads are emulated without one."""

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
@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 300])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_joined_expert_changes_no_other(kind: RouterKind, num_rows: int) -> None:
    """All rows have it first, with the weight 1."""
    router, (num_experts, num_active, inner) = Router(kind=kind), (64, 4, 2048)
    correction = drawn(num_experts).float() / 4 if kind == "sigmoid" else None
    x, weight = drawn(num_rows, inner) / 8, drawn(num_experts, inner)
    slot = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    slot[3::4] = -1
    alone = poisoned_rows(num_rows, num_experts, num_active)
    cuda_route(x, weight, None, slot, alone, router, correction)
    rows = poisoned_rows(num_rows, num_experts + 1, num_active + 1)
    cuda_route(x, weight, None, slot, rows, router, correction, 1)
    live = slot >= 0
    assert torch.equal(rows.experts[:, 1:], alone.experts)
    assert torch.equal(rows.shares[live, 1:], alone.shares[live])
    assert torch.equal(rows.experts[:, 0], torch.where(live, num_experts, -1))
    assert rows.shares[live, 0].tolist() == [1.0] * int(live.sum())
    lists = list_rows_reference(rows.experts, num_experts + 1)
    counts, pairs = rows.counts.tolist(), rows.pairs.tolist()
    assert counts == [len(one) for one in lists]
    assert [pairs[expert][:count] for expert, count in enumerate(counts)] == lists


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


CLUSTER = """
#undef __shared__
#define __shared__ static
typedef unsigned short u16;
typedef long long i64;
constexpr int WARPS = 8, THREADS = 256;
inline float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
inline float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }
inline u32 cluster_rank() { return 0; }
inline void arrive_in_cluster() {}
inline void wait_for_cluster() { __syncthreads(); }
inline void store_to_rank(float* place, u32, float value) { *place = value; }
"""
ROUTE = """
extern "C" __global__ void route(const u16* x, const u16* weight, const float* correction,
                                 const int* row_slot, int* experts, float* shares, int* pairs,
                                 int* counts, int num_rows) {
  route_rows<INNER, 16, ACTIVE, JOINED, TILES, SIGMOID, true, LISTED>(
      {x, weight, nullptr, correction, row_slot, experts, shares, pairs, counts, 1.f, num_rows});
}
"""


@pytest.mark.skipif(not has_host_compiler(), reason="needs a compiler for the host")
@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("num_rows", "num_joined"), slow_rows_after(2, [(13, 1), (21, 1), (1, 1), (13, 0), (21, 0)])
)
def test_emulated_cluster_equals_the_reference(
    num_rows: int, num_joined: int, kind: RouterKind, tmp_path: Path
) -> None:
    """With an expert that all rows have in front of the chosen ones, and without; 21 rows have no lists."""
    source = resources.files("drift_sdk._kernels").joinpath("experts/route_rows.cu").read_text("utf-8")
    program = source[source.index("constexpr int CTA_EXPERTS") : source.index('extern "C"')]
    (tmp_path / "route.cu").write_text(CHOICE + CLUSTER + program + ROUTE)
    num_experts, num_active, inner, generator = 16, 3, 72, torch.Generator().manual_seed(num_rows)
    x, weight = (
        torch.randint(-2, 3, (rows, inner), generator=generator).to(BF16) / 4
        for rows in (num_rows, num_experts)
    )
    correction = torch.randint(-2, 3, (num_experts,), generator=generator) / 4
    slot = torch.arange(num_rows, dtype=torch.int32)
    slot[3::4] = -1
    shape = num_rows, num_active + num_joined
    experts, shares = torch.full(shape, -9).int(), torch.full(shape, torch.nan)
    pairs = torch.full((num_experts + num_joined, num_rows), -9).int()
    counts = torch.full((num_experts + num_joined,), -9).int()
    has_lists, is_sigmoid = num_rows <= 16, kind == "sigmoid"
    macros = {"INNER": inner, "ACTIVE": num_active, "JOINED": num_joined, "TILES": 1 if num_rows <= 8 else 2}
    macros |= {"SIGMOID": int(is_sigmoid), "LISTED": int(has_lists)}
    grid = -(-num_rows // (8 * macros["TILES"])), 1
    tensors = (x, weight, correction, slot, experts, shares, pairs, counts, num_rows)
    launch_emulated(tmp_path, (str(tmp_path / "route.cu"),), "route", macros, grid, 256, tensors)
    expected, expected_shares = choose_experts_reference(
        (x.float() @ weight.float().T)[None],
        None,
        slot,
        num_active,
        Router(kind=kind, is_normalised=True),
        dtype=torch.float32 if is_sigmoid else BF16,
        correction_bias=correction if is_sigmoid else None,
    )
    live = slot >= 0
    assert torch.equal(experts[:, num_joined:], expected)
    torch.testing.assert_close(shares[live, num_joined:], expected_shares[live], rtol=1e-5, atol=0)
    if num_joined:
        assert experts[:, 0].tolist() == [num_experts if one else -1 for one in live.tolist()]
        assert shares[live, 0].tolist() == [1.0] * int(live.sum())
    if not has_lists:
        assert counts.tolist() == [-9] * (num_experts + num_joined)
        return

    lists = list_rows_reference(experts, num_experts + num_joined)
    assert counts.tolist() == [len(one) for one in lists]
    assert [pairs[expert, :count].tolist() for expert, count in enumerate(counts.tolist())] == lists
