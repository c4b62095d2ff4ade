from __future__ import annotations

import pytest
import torch
from references.experts import choose_experts_reference, list_rows_reference

from drift_sdk._kernels.experts.routing import ExpertRows, choose_experts, list_rows

pytestmark = pytest.mark.kernel


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
    choose_experts(logits, bias, slot, rows, is_normalised=is_normalised, dtype=torch.float32)
    experts, shares = choose_experts_reference(
        logits, bias, slot, num_active, is_normalised=is_normalised, dtype=torch.float32
    )
    assert torch.equal(rows.experts, experts)
    is_row = slot >= 0
    torch.testing.assert_close(rows.shares[is_row], shares[is_row], rtol=1e-5, atol=1e-7)


def test_equal_logits_go_to_the_lowest_experts(device: str) -> None:
    logits = torch.zeros(1, 3, 100, device=device)
    logits[0, 1, [70, 5, 99, 33]] = 2.0
    logits[0, 2, [9, 4]] = 1.0
    rows = empty_rows(3, 100, 3, device)
    slot = torch.zeros(3, dtype=torch.int32, device=device)
    choose_experts(logits, None, slot, rows, is_normalised=True, dtype=torch.float32)
    assert rows.experts.tolist() == [[0, 1, 2], [5, 33, 70], [4, 9, 0]]


def test_logits_are_rounded_before_they_are_compared(device: str) -> None:
    """In float16, 1 and 1 + 2 ** -12 are equal, so the lower expert comes first."""
    logits = torch.tensor([[[0.0, 1.0, 1.0 + 2**-12, 0.5]]], device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype, expected in ((torch.float32, [2, 1]), (torch.float16, [1, 2])):
        rows = empty_rows(1, 4, 2, device)
        choose_experts(logits, None, slot, rows, is_normalised=True, dtype=dtype)
        assert rows.experts.tolist() == [expected]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of numpy, in the interpreter
def test_numbers_that_are_not_finite_leave_valid_experts(device: str) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[[nan] * 5, [nan, 1.0, nan, nan, 2.0], [-inf] * 5, [0.0, inf, -inf, inf, 1.0]]])
    rows = empty_rows(4, 5, 3, device)
    slot = torch.zeros(4, dtype=torch.int32, device=device)
    choose_experts(logits.to(device), None, slot, rows, is_normalised=True, dtype=torch.float32)
    assert rows.experts.tolist() == [[0, 1, 2], [4, 1, 0], [0, 1, 2], [1, 3, 4]]
    assert rows.shares[:2].isnan().all()


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
        choose_experts(
            torch.zeros(1, 2, 5, device=device), None, slot, rows, is_normalised=True, dtype=torch.float32
        )
    with pytest.raises(ValueError, match="num_active=5: expected 1 to 4"):
        choose_experts(
            torch.zeros(1, 2, 4, device=device),
            None,
            slot,
            empty_rows(2, 4, 5, device),
            is_normalised=True,
            dtype=torch.float32,
        )
