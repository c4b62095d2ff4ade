from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from references.experts import choose_experts_reference, list_rows_reference
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows
from drift_sdk.spec.model import Router

pytestmark = pytest.mark.kernel

SOFTMAX = Router(kind="softmax", is_normalised=True)
SIGMOID = Router(kind="sigmoid", is_normalised=True, scale=2.5)
PLAIN_SIGMOID = Router(kind="sigmoid", is_normalised=False)


def empty_rows(num_rows: int, num_experts: int, num_active: int, device: str) -> ExpertRows:
    """Poisoned: integers are -9, weights NaN."""

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=device)

    return ExpertRows.take(take, num_rows, num_experts, num_active)


def some_slots(num_rows: int, device: str) -> torch.Tensor:
    """Slots of rows, of which every third is a padding row."""
    slot = torch.arange(num_rows, dtype=torch.int32)
    return torch.where(slot % 3 == 2, -1, slot).to(device)


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active", "num_slices", "has_bias"),
    [
        (1, 128, 4, 1, True),
        (7, 32, 4, 2, True),
        (5, 8, 2, 1, False),
        (3, 5, 5, 3, False),
        (4, 128, 8, 1, False),
    ],
)
def test_chosen_experts_equal_the_reference(
    num_rows: int,
    num_experts: int,
    num_active: int,
    num_slices: int,
    has_bias: bool,
    is_normalised: bool,
    device: str,
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(num_slices, num_rows, num_experts, generator=generator).to(device)
    # Few different values, and so many ties.
    logits[:, 0] = (logits[:, 0] * 2).round()
    bias = torch.randn(num_experts, generator=generator).round().to(device) if has_bias else None
    slot = some_slots(num_rows, device)
    rows = empty_rows(num_rows, num_experts, num_active, device)
    router = Router(kind="softmax", is_normalised=is_normalised)
    choose_experts(logits, bias, slot, rows, router, dtype=torch.float32)
    experts, shares = choose_experts_reference(logits, bias, slot, num_active, router, dtype=torch.float32)
    assert torch.equal(rows.experts, experts)
    is_row = slot >= 0
    torch.testing.assert_close(rows.shares[is_row], shares[is_row], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [0, 40, 2050])
@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_joined_expert_is_the_first_of_each_row(router: Router, size: int, device: str) -> None:
    """The others have the bits that they have without it. It weighs 1, or what a gate of this size gives."""
    generator = torch.Generator().manual_seed(5)
    num_rows, num_experts, num_active = 11, 12, 3
    logits = torch.randn(2, num_rows, num_experts, generator=generator).to(device)
    options: dict[str, Any] = {"dtype": torch.bfloat16 if router is SOFTMAX else torch.float32}
    if router is SIGMOID:
        options["correction_bias"] = torch.randn(num_experts, generator=generator).to(device)
    x, weight = (torch.randn(shape, generator=generator).to(device) for shape in ((num_rows, size), (size,)))
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter truncates to bfloat16
    x, weight = x.to(dtype), (weight * max(size, 1) ** -0.5).to(dtype)
    slot = some_slots(num_rows, device)
    alone = empty_rows(num_rows, num_experts, num_active, device)
    choose_experts(logits, None, slot, alone, router, **options)
    rows = empty_rows(num_rows, num_experts + 1, num_active + 1, device)
    gate = (x, weight) if size else None
    choose_experts(logits, None, slot, rows, router, **options, num_joined=1, gate=gate)
    is_row = slot >= 0
    assert torch.equal(rows.experts[:, 1:], alone.experts)
    assert torch.equal(rows.shares[is_row, 1:], alone.shares[is_row])
    assert rows.experts[:, 0].tolist() == [num_experts if is_live else -1 for is_live in is_row.tolist()]
    shares = rows.shares[is_row, 0]
    if size:
        logit = (x.double() @ weight.double())[is_row]
        expected = logit.sigmoid()
        # Both are rounded, by at most half an epsilon of them.
        error = torch.finfo(dtype).eps / 2 * (expected * (1 - expected) * logit.abs() + expected) + 1e-6
        assert ((shares - expected).abs() <= error).all()
        assert torch.equal(shares.to(dtype).float(), shares) and len(shares.unique()) > len(shares) // 2
    else:
        assert shares.tolist() == [1.0] * len(shares)
    list_rows(rows)
    lists = list_rows_reference(rows.experts, num_experts + 1)
    counts, pairs = rows.counts.tolist(), rows.pairs.tolist()
    assert counts == [len(one) for one in lists] and counts[-1] == int(is_row.sum()) > 0
    assert [pairs[expert][:count] for expert, count in enumerate(counts)] == lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("router", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_weights_are_multiplied_by_the_factors_of_experts(
    router: Router, dtype: torch.dtype, device: str
) -> None:
    """The choice does not depend on them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, 33, generator=generator).to(device)
    factors = torch.randn(33, generator=generator).to(device, dtype)
    slot, rows = some_slots(7, device), empty_rows(7, 33, 5, device)
    choose_experts(logits, None, slot, rows, router, dtype=torch.float32, factors=factors)
    options = {"dtype": torch.float32, "factors": factors}
    experts, shares = choose_experts_reference(logits, None, slot, 5, router, **options)
    assert torch.equal(rows.experts, experts)
    torch.testing.assert_close(rows.shares[slot >= 0], shares[slot >= 0], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"factors: \[32\] .*: expected \[33\]"):
        choose_experts(logits, None, slot, rows, router, dtype=torch.float32, factors=factors[1:])


def test_equal_logits_go_to_the_lowest_experts(device: str) -> None:
    logits = torch.zeros(1, 3, 100, device=device)
    logits[0, 1, [70, 5, 99, 33]] = 2.0
    logits[0, 2, [9, 4]] = 1.0
    rows = empty_rows(3, 100, 3, device)
    slot = torch.zeros(3, dtype=torch.int32, device=device)
    choose_experts(logits, None, slot, rows, SOFTMAX, dtype=torch.float32)
    assert rows.experts.tolist() == [[0, 1, 2], [5, 33, 70], [4, 9, 0]]


def test_logits_are_rounded_before_they_are_compared(device: str) -> None:
    """In float16, 1 and 1 + 2 ** -12 are equal, so the lower expert comes first."""
    logits = torch.tensor([[[0.0, 1.0, 1.0 + 2**-12, 0.5]]], device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype, expected in ((torch.float32, [2, 1]), (torch.float16, [1, 2])):
        rows = empty_rows(1, 4, 2, device)
        choose_experts(logits, None, slot, rows, SOFTMAX, dtype=dtype)
        assert rows.experts.tolist() == [expected]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of numpy, in the interpreter
def test_numbers_that_are_not_finite_leave_valid_experts(device: str) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[[nan] * 5, [nan, 1.0, nan, nan, 2.0], [-inf] * 5, [0.0, inf, -inf, inf, 1.0]]])
    rows = empty_rows(4, 5, 3, device)
    slot = torch.zeros(4, dtype=torch.int32, device=device)
    choose_experts(logits.to(device), None, slot, rows, SOFTMAX, dtype=torch.float32)
    assert rows.experts.tolist() == [[0, 1, 2], [4, 1, 0], [0, 1, 2], [1, 3, 4]]
    assert rows.shares[:2].isnan().all()


def grouped(num_groups: int, num_active_groups: int, *, is_normalised: bool = True) -> Router:
    return Router(
        kind="sigmoid",
        is_normalised=is_normalised,
        scale=2.5,
        num_groups=num_groups,
        num_active_groups=num_active_groups,
    )


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active", "num_slices", "router", "has_correction"),
    [
        (1, 160, 8, 1, SIGMOID, True),
        (7, 128, 8, 2, PLAIN_SIGMOID, True),
        (5, 33, 4, 3, SIGMOID, False),
        (3, 5, 5, 1, SIGMOID, True),
        (5, 256, 8, 1, grouped(8, 4), True),
        (4, 256, 8, 2, grouped(8, 1), False),
        (5, 15, 4, 1, grouped(5, 2, is_normalised=False), True),
        (4, 6, 4, 1, grouped(3, 2), True),
        (2, 8, 3, 1, grouped(2, 2), True),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_sigmoid_routers_equal_the_reference(
    num_rows: int,
    num_experts: int,
    num_active: int,
    num_slices: int,
    router: Router,
    has_correction: bool,
    has_bias: bool,
    device: str,
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(num_slices, num_rows, num_experts, generator=generator)
    # Few different values, and so many ties; different ones have sigmoids that are far from each other.
    logits[:, 0] = (logits[:, 0] * 2).round().abs()
    bias = torch.randint(0, 3, (num_experts,), generator=generator).float() if has_bias else None
    correction = torch.randint(-2, 3, (num_experts,), generator=generator) / 4 if has_correction else None
    slot = some_slots(num_rows, "cpu")
    experts, shares = choose_experts_reference(
        logits, bias, slot, num_active, router, dtype=torch.float32, correction_bias=correction
    )
    rows = empty_rows(num_rows, num_experts, num_active, device)
    choose_experts(
        logits.to(device),
        None if bias is None else bias.to(device),
        slot.to(device),
        rows,
        router,
        dtype=torch.float32,
        correction_bias=None if correction is None else correction.to(device),
    )
    assert torch.equal(rows.experts.cpu(), experts)
    is_row = slot >= 0
    torch.testing.assert_close(rows.shares.cpu()[is_row], shares[is_row], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("router_class", [Glm4MoeTopkRouter, DeepseekV3TopkRouter])
@pytest.mark.parametrize(
    ("num_experts", "router"),
    [(160, SIGMOID), (160, PLAIN_SIGMOID), (256, grouped(8, 4)), (15, grouped(3, 2, is_normalised=False))],
)
def test_sigmoid_routers_equal_transformers(
    router_class: type[torch.nn.Module], num_experts: int, router: Router, device: str
) -> None:
    """With corrections that make many scores negative: closed groups are not taken for scores of 0."""
    settings = SimpleNamespace(
        num_experts_per_tok=8,
        num_local_experts=num_experts,
        hidden_size=num_experts,
        routed_scaling_factor=router.scale,
        n_group=router.num_groups,
        topk_group=router.num_active_groups,
        norm_topk_prob=router.is_normalised,
    )
    module = router_class(settings)
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, num_experts, generator=generator)
    correction = torch.randn(num_experts, generator=generator) - 1
    with torch.no_grad():
        module.weight.copy_(torch.eye(num_experts))
        module.e_score_correction_bias.copy_(correction)
        _, shares, experts = module(logits)

    rows = empty_rows(6, num_experts, 8, device)
    slot = torch.zeros(6, dtype=torch.int32, device=device)
    choose_experts(
        logits[None].to(device),
        None,
        slot,
        rows,
        router,
        dtype=torch.float32,
        correction_bias=correction.to(device),
    )
    found = rows.experts.cpu().long()
    keys = (logits.sigmoid() + correction).gather(1, found)
    assert torch.equal(keys, keys.sort(dim=1, descending=True).values)
    expected = torch.zeros(6, num_experts).scatter_(1, experts, shares)
    assert torch.equal(found.sort(dim=1).values, experts.sort(dim=1).values)
    torch.testing.assert_close(rows.shares.cpu(), expected.gather(1, found), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_wide_routers_equal_transformers(scale: float, device: str) -> None:
    """Shares are those of a softmax of all logits, which are not rounded."""
    settings = SimpleNamespace(
        num_experts_per_tok=6,
        num_experts=64,
        hidden_size=64,
        routed_scaling_factor=scale,
        topk_method="greedy",
        n_group=None,
        topk_group=None,
    )
    module = DeepseekV2TopkRouter(settings)
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        module.weight.copy_(torch.eye(64))
        _, shares, experts = module(logits)
    rows, slot = empty_rows(5, 64, 6, device), torch.zeros(5, dtype=torch.int32, device=device)
    router = Router(kind="wide", is_normalised=False, scale=scale)
    choose_experts(logits[None].to(device), None, slot, rows, router, dtype=torch.float32)
    found = rows.experts.cpu().long()
    expected = torch.zeros(5, 64).scatter_(1, experts, shares)
    assert torch.equal(found.sort(dim=1).values, experts.sort(dim=1).values)
    torch.testing.assert_close(rows.shares.cpu(), expected.gather(1, found), rtol=1e-5, atol=1e-7)


def test_correction_is_no_part_of_the_shares(device: str) -> None:
    logits = torch.zeros(1, 1, 4, device=device)
    correction = torch.tensor([0.0, -8.0, 3.0, 0.5], device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    for router, share in ((SIGMOID, 1.25), (PLAIN_SIGMOID, 0.5)):
        rows = empty_rows(1, 4, 2, device)
        choose_experts(logits, None, slot, rows, router, dtype=torch.float32, correction_bias=correction)
        assert rows.experts.tolist() == [[2, 3]]
        assert rows.shares.tolist() == [[share, share]]


def test_equal_scores_go_to_the_lowest_experts_and_groups(device: str) -> None:
    logits = torch.zeros(1, 3, 12, device=device)
    logits[0, 1, [10, 11, 5, 4]] = 2.0
    logits[0, 2, [3, 1]] = 1.0
    slot = torch.zeros(3, dtype=torch.int32, device=device)
    for router, expected in (
        (SIGMOID, [[0, 1, 2], [4, 5, 10], [1, 3, 0]]),
        (grouped(4, 1), [[0, 1, 2], [4, 5, 3], [1, 0, 2]]),
        (grouped(4, 2), [[0, 1, 2], [4, 5, 10], [1, 3, 0]]),
    ):
        rows = empty_rows(3, 12, 3, device)
        choose_experts(logits, None, slot, rows, router, dtype=torch.float32)
        assert rows.experts.tolist() == expected


def test_group_is_scored_by_its_two_largest(device: str) -> None:
    """Neither by the largest one, which is in the first group, nor by all three, which the third has."""
    correction = torch.tensor([9.0, 0, 0, 6, 5, -20, 4, 4, 4], device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    rows = empty_rows(1, 9, 3, device)
    choose_experts(
        torch.zeros(1, 1, 9, device=device),
        None,
        slot,
        rows,
        grouped(3, 1),
        dtype=torch.float32,
        correction_bias=correction,
    )
    assert rows.experts.tolist() == [[3, 4, 5]]


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")  # of numpy
def test_sigmoids_of_numbers_that_are_not_finite_leave_valid_experts(device: str) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[nan] * 6, [nan, 1.0, nan, nan, 2.0, nan], [-inf] * 6, [0.0, inf, -inf, inf, 1.0, nan], [-200.0] * 6]
    )[None].to(device)
    slot = torch.zeros(5, dtype=torch.int32, device=device)
    # Of the groups {0, 1}, {2, 3}, {4, 5} of the second row, each has a NaN, and so the lowest sum.
    grouped_experts = [[0, 1, 2], [1, 0, 2], [0, 1, 2], [1, 3, 0], [0, 1, 2]]
    for router, expected in (
        (SIGMOID, [[0, 1, 2], [4, 1, 0], [0, 1, 2], [1, 3, 4], [0, 1, 2]]),
        (grouped(3, 2), grouped_experts),
    ):
        rows = empty_rows(5, 6, 3, device)
        choose_experts(logits, None, slot, rows, router, dtype=torch.float32)
        assert rows.experts.tolist() == expected
        assert rows.shares[:2].isnan().all()
        assert rows.shares[2].tolist() == rows.shares[4].tolist() == [0.0, 0.0, 0.0]

    correction = torch.tensor([-inf, 0.0, nan, 0.0, inf, 0.0], device=device)
    rows = empty_rows(5, 6, 3, device)
    choose_experts(logits, None, slot, rows, SIGMOID, dtype=torch.float32, correction_bias=correction)
    assert rows.experts.tolist() == [[0, 1, 2], [4, 1, 0], [4, 1, 3], [4, 1, 3], [4, 1, 3]]


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_active"), [(1, 128, 4), (9, 8, 2), (100, 6, 4), (700, 6, 3), (2, 4, 4)]
)
def test_lists_equal_the_reference(num_rows: int, num_experts: int, num_active: int, device: str) -> None:
    """Also for more pairs than a program reads at a time, and with an expert that no row has."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    if num_experts > num_active:
        scores[:, 1] = -1.0
    experts = scores.topk(num_active).indices.to(torch.int32)
    experts[some_slots(num_rows, "cpu") < 0] = -1
    rows = empty_rows(num_rows, num_experts, num_active, device)
    rows.experts.copy_(experts)
    list_rows(rows)
    expected = list_rows_reference(experts, num_experts)
    assert rows.counts.tolist() == [len(pairs) for pairs in expected]
    for found, pairs in zip(rows.pairs.tolist(), expected, strict=True):
        assert found == pairs + [-9] * (num_rows - len(pairs))


def test_errors_name_the_argument(device: str) -> None:
    rows = empty_rows(2, 4, 2, device)
    slot = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"logits: \[1, 2, 5\] torch.float32: expected \[1, 2, 4\]"):
        choose_experts(torch.zeros(1, 2, 5, device=device), None, slot, rows, SOFTMAX, dtype=torch.float32)
    with pytest.raises(ValueError, match="num_active=5: expected 1 to 4"):
        choose_experts(
            torch.zeros(1, 2, 4, device=device),
            None,
            slot,
            empty_rows(2, 4, 5, device),
            SOFTMAX,
            dtype=torch.float32,
        )
    for num_joined, message in ((2, "num_joined=2: expected 0 to 1"), (1, r"expected \[1, 2, 3\]")):
        logits = torch.zeros(1, 2, 2, device=device)
        with pytest.raises(ValueError, match=message):
            choose_experts(logits, None, slot, rows, SOFTMAX, dtype=torch.float32, num_joined=num_joined)
    gate = torch.zeros(2, 5, device=device), torch.zeros(5, device=device)
    for num_joined, message in ((0, "num_joined=0: expected 1"), (1, r"x: \[2, 5\] .*: expected \[2, 4\]")):
        weight = gate[1][: 5 - num_joined].contiguous()
        logits = torch.zeros(1, 2, 4 - num_joined, device=device)
        few = empty_rows(2, 4, 2, device)
        with pytest.raises(ValueError, match=message):
            choose_experts(
                logits,
                None,
                slot,
                few,
                SOFTMAX,
                dtype=torch.float32,
                num_joined=num_joined,
                gate=(gate[0], weight),
            )


def test_errors_name_the_router(device: str) -> None:
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    logits, correction = torch.zeros(1, 1, 8, device=device), torch.zeros(8, device=device)
    rows = empty_rows(1, 8, 3, device)
    for router, message in (
        (grouped(8, 4), "num_groups=8: expected 1 to 4"),
        (grouped(3, 2), "num_groups=3: expected a divisor of 8 experts"),
        (grouped(4, 1), "num_active_groups=1: expected 2 to 4"),
        (grouped(4, 5), "num_active_groups=5: expected 2 to 4"),
        (grouped(1, 2), "num_active_groups=2: expected 1 to 1"),
        (SOFTMAX, "correction_bias: given for softmax"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_experts(logits, None, slot, rows, router, dtype=torch.float32, correction_bias=correction)

    with pytest.raises(ValueError, match=r"correction_bias: \[7\] torch.float32: expected \[8\]"):
        choose_experts(logits, None, slot, rows, SIGMOID, dtype=torch.float32, correction_bias=correction[:7])
    for options in ({"scale": 2.0}, {"num_groups": 2}, {"num_active_groups": 2}):
        with pytest.raises(ValueError, match="expected neither scale nor groups for softmax"):
            Router(kind="softmax", is_normalised=True, **options)
