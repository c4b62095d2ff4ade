"""The tokens that a draft proposes, against the reference."""

from __future__ import annotations

import pytest
import torch
from references.draft import choose_drafts_reference, keep_best_clusters_reference

from drift_sdk._kernels.draft.draft_choose import choose_drafts, keep_best_clusters, num_draft_chunks

pytestmark = pytest.mark.kernel

# By slot.
TEMPERATURES = [0.0, 0.7, 1e-38, 1.0, 3.0]
SEEDS = [1, 2**40 + 3, -5, 7, 0]
ROWS = 3


class Case:
    """Five slots in mixed order and padding, three rows each."""

    def __init__(self, device: str, vocab_size: int, num_slices: int | None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(vocab_size + seed)
        self.device, self.slots = device, [3, -1, 0, 4, 2, 1]
        ids = torch.randperm(2 * vocab_size, generator=generator)[:vocab_size].sort().values
        self.target_ids = ids.int().to(device)
        num_slots = len(self.slots)
        shape = (num_slots, vocab_size) if num_slices is None else (num_slices, num_slots, vocab_size)
        self.logits = 2 * torch.randn(shape, generator=generator).to(device)
        self.temperature = torch.tensor(TEMPERATURES, device=device)
        self.seed = torch.tensor(SEEDS, device=device)
        self.row_slot = self.ints([slot for slot in self.slots for _ in range(ROWS)])
        self.row_token = self.ints([-7] * (num_slots * ROWS))
        self.row_position = self.ints([10 * slot + row for slot in range(num_slots) for row in range(ROWS)])

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run(self, depth: int) -> tuple[list[int], list[int], list[int]]:
        """Choose drafts. Returns slots, tokens and positions of the rows that the draft computes next."""
        num_slots, shape = len(self.slots), (len(self.slots), num_draft_chunks(len(self.target_ids)))
        chunks = (
            torch.full(shape, torch.nan, device=self.device),
            torch.full(shape, -9, dtype=torch.int32, device=self.device),
        )
        out = tuple(self.ints([-9] * num_slots) for _ in range(3))
        choose_drafts(
            self.logits,
            self.target_ids,
            self.row_slot,
            self.row_token,
            self.row_position,
            self.temperature,
            self.seed,
            chunks,
            out,
            depth=depth,
        )
        slot, token, position = (column.tolist() for column in out)
        return slot, token, position

    def expected(self, depth: int) -> list[int]:
        """The reference's tokens; -1 for padding."""
        logits = self.logits.sum(0) if self.logits.dim() == 3 else self.logits
        slots = torch.tensor(self.slots, device=self.device).clamp(min=0)
        tokens = choose_drafts_reference(
            logits,
            self.target_ids,
            self.row_position.view(-1, ROWS)[:, depth],
            self.temperature[slots],
            self.seed[slots],
        )
        return [-1 if slot < 0 else token for slot, token in zip(self.slots, tokens.tolist(), strict=True)]


@pytest.mark.parametrize("num_slices", [None, 1, 2])
@pytest.mark.parametrize("vocab_size", [5, 96, 1024, 2500])
def test_several_depths_at_once_equal_one_after_the_other(
    vocab_size: int, num_slices: int | None, device: str
) -> None:
    case = Case(device, vocab_size, num_slices)
    both, parts = Case(device, vocab_size, num_slices), [case.logits, case.logits.roll(1, -1)]
    both.logits = torch.stack(parts, dim=-2).flatten(-3, -2).contiguous()
    num_tokens = both.logits.shape[-2]
    shape = num_tokens, num_draft_chunks(vocab_size)
    choose_drafts(
        both.logits,
        both.target_ids,
        both.row_slot,
        both.row_token,
        both.row_position,
        both.temperature,
        both.seed,
        (torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)),
        tuple(both.ints([-9] * num_tokens) for _ in range(3)),
        depth=1,
        num_depths=2,
    )
    for depth, logits in enumerate(parts, 1):
        case.logits = logits.contiguous()
        case.run(depth)
    assert torch.equal(both.row_token, case.row_token)
    assert len(both.row_token.unique()) > 3


@pytest.mark.parametrize("num_slices", [None, 1, 2])
@pytest.mark.parametrize("vocab_size", [5, 96, 1024, 2500])
def test_choose_drafts_equals_reference(vocab_size: int, num_slices: int | None, device: str) -> None:
    case = Case(device, vocab_size, num_slices)
    slot, token, position = case.run(1)
    assert token == case.expected(1)
    assert slot == case.slots
    assert [p for p, s in zip(position, slot, strict=True) if s >= 0] == [1, 21, 31, 41, 51]
    assert case.row_token.view(-1, ROWS)[:, 1].tolist() == [-7 if chosen < 0 else chosen for chosen in token]
    assert case.row_token.view(-1, ROWS)[:, ::2].eq(-7).all()


def test_draft_noise_depends_on_the_position(device: str) -> None:
    case = Case(device, 2500, None)
    first = case.run(1)[1]
    assert case.run(2)[1] == case.expected(2)
    assert case.run(2)[1] != first
    case.row_position += 1000
    assert case.run(1)[1] == case.expected(1) != first


def test_choose_drafts_does_not_write_rows_without_slot(device: str) -> None:
    case = Case(device, 96, None)
    case.row_slot[0 * ROWS + 2] = -1  # slot 3 may have one draft
    case.row_slot[2 * ROWS + 1 : 3 * ROWS] = -1  # slot 0 none
    slot, token, _ = case.run(1)
    assert slot == [-1, -1, -1, 4, 2, 1]
    assert token[0] == case.expected(1)[0] and token[2] == -1
    assert case.row_token[2 * ROWS + 1] == -7
    assert case.run(2)[1][0] == -1


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_draft_ties_go_to_the_lowest_id_and_nan_gives_a_valid_one(device: str) -> None:
    case = Case(device, 2500, None)
    case.logits[2] = 0.0
    case.logits[2, [900, 1100, 2499]] = 5.0
    case.logits[4] = torch.nan
    _, token, _ = case.run(1)
    assert token[2] == case.target_ids[900]
    assert token[4] in case.target_ids.tolist()


def test_choose_drafts_names_wrong_arguments(device: str) -> None:
    case = Case(device, 96, None)
    for depth in (0, 3):
        with pytest.raises(ValueError, match=f"depth={depth}: expected 1 to 2 of 18 rows of 6 slots"):
            case.run(depth)

    case.target_ids = case.target_ids[1:]
    with pytest.raises(ValueError, match=r"target_ids: \[95\] .*: expected \[96\]"):
        case.run(1)


@pytest.mark.parametrize("num_slices", [None, 1, 3])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_clusters", "num_best"),
    [(1, 5, 5, 1), (3, 96, 12, 12), (4, 1024, 64, 7), (2, 2500, 100, 32), (0, 96, 12, 3)],
)
def test_tokens_outside_of_the_best_clusters_are_left_out(
    num_rows: int, vocab_size: int, num_clusters: int, num_best: int, num_slices: int | None, device: str
) -> None:
    """Scores are small integers, so that many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (num_rows, num_clusters) if num_slices is None else (num_slices, num_rows, num_clusters)
    scores = torch.randint(-4, 5, shape, generator=generator).float()
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    clusters = torch.randperm(vocab_size, generator=generator).int() % num_clusters
    whole = scores if num_slices is None else scores.sum(0)
    expected = keep_best_clusters_reference(logits, whole, clusters, num_best)
    is_best = torch.full((num_rows, num_clusters), -7, dtype=torch.int32, device=device)
    found = logits.to(device)
    keep_best_clusters(found, scores.to(device), clusters.to(device), is_best, num_best=num_best)
    assert torch.equal(found.cpu(), expected)
    assert (is_best.sum(1) == num_best).all()


def test_the_number_of_clusters_is_checked(device: str) -> None:
    logits, scores = torch.zeros(2, 8, device=device), torch.zeros(2, 4, device=device)
    clusters, is_best = (torch.zeros(*size, dtype=torch.int32, device=device) for size in ((8,), (2, 4)))
    for number in (0, 5):
        with pytest.raises(ValueError, match=f"num_best={number}: expected 1 to 4"):
            keep_best_clusters(logits, scores, clusters, is_best, num_best=number)
