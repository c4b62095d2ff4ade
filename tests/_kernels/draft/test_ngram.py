"""Prompt look-up on the device, against `NGramHistory` on the host."""

from __future__ import annotations

import random

import pytest
import torch
from references.draft import append_history_reference

from drift_sdk._kernels.draft.ngrams import SEARCH_TOKENS, append_history, num_searchers, propose_ngrams
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.ngram_history import NGramHistory
from drift_sdk.execution.rounds.drafters import ComputedChunks, NGramRoundDrafter, VerifiedRows

pytestmark = pytest.mark.kernel

Slot = tuple[list[int], int]
"""The tokens of a slot, and how many it may draft."""


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def histories(slots: list[Slot | None], num_columns: int, device: str) -> torch.Tensor:
    """The histories [S, num_columns]: slot i of `slots` is in row len(slots) - i, without its newest token.
    All other entries are the same token."""
    history = torch.full((len(slots) + 1, num_columns), 1, dtype=torch.int32)
    for index, slot in enumerate(slots):
        if slot is not None:
            history[len(slots) - index, : len(slot[0]) - 1] = int32(slot[0][:-1], "cpu")

    return history.to(device)


def round_rows(slots: list[Slot | None], num_draft_tokens: int, device: str) -> Rows:
    """The rows at the start of a round: padding has no tokens, and a row beyond what its slot may draft no
    slot."""
    row_slot, token, position = [], [], []
    for index, slot in enumerate(slots):
        tokens, most = slot or ([], 0)
        rows = range(num_draft_tokens + 1)
        row_slot += [len(slots) - index if slot and row <= most else -1 for row in rows]
        token += [tokens[-1] if slot and row == 0 else -1 for row in rows]
        position += [len(tokens) - 1 + row if slot else 1 << 30 for row in rows]

    return Rows(slot=int32(row_slot, device), token=int32(token, device), position=int32(position, device))


def drafts_of_index(tokens: list[int], lengths: tuple[int, int], most: int) -> list[int]:
    """The tokens that `NGramHistory` proposes behind these."""
    ngrams = NGramHistory(*lengths)
    ngrams.extend(tokens)
    return ngrams.propose(most)


def check(
    slots: list[Slot | None], lengths: tuple[int, int], num_draft_tokens: int, device: str, num_columns: int
) -> Rows:
    """Check that the proposals are those of `NGramHistory`, in every row. Returns the rows."""
    rows = round_rows(slots, num_draft_tokens, device)
    before = round_rows(slots, num_draft_tokens, "cpu")
    rounds = NGramRoundDrafter(
        histories(slots, num_columns, device),
        Workspace(torch.device(device)),
        min_length=lengths[0],
        max_length=lengths[1],
    )
    rounds.propose(rows, num_slots=len(slots), num_draft_tokens=num_draft_tokens)
    expected_token, expected_slot = before.token.clone(), before.slot.clone()
    for index, slot in enumerate(slots):
        if slot is None:
            continue

        drafts = drafts_of_index(slot[0], lengths, min(num_draft_tokens, slot[1]))
        first = index * (num_draft_tokens + 1) + 1
        expected_token[first : first + len(drafts)] = int32(drafts, "cpu")
        expected_slot[first + len(drafts) : first + num_draft_tokens] = -1

    assert torch.equal(rows.token.cpu(), expected_token)
    assert torch.equal(rows.slot.cpu(), expected_slot)
    assert torch.equal(rows.position.cpu(), before.position)
    return rows


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4), (2, 4), (3, 3), (4, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 16])
def test_proposals_from_random_histories(
    lengths: tuple[int, int], num_draft_tokens: int, device: str
) -> None:
    rng = random.Random(f"{lengths} {num_draft_tokens}")
    slots: list[Slot | None] = []
    for number in range(200 if device == "cuda" else 24):
        length = rng.choice([rng.randint(1, 5), rng.randint(1, 40), rng.randint(1, 600)])
        alphabet = rng.choice([1, 2, 3, 40])
        tokens = [rng.randrange(alphabet) for _ in range(length)]
        most = rng.choice([num_draft_tokens, rng.randint(0, num_draft_tokens), 99])
        slots.append(None if number % 7 == 3 else (tokens, most))

    check(slots, lengths, num_draft_tokens, device, 601)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_longest_run_is_found_across_searchers(extra: int, device: str) -> None:
    """Runs begin or end where a searcher's block does. The longest run is chosen, then the latest."""
    rng = random.Random(extra)
    num_columns = 9 * SEARCH_TOKENS if device == "cpu" else 32_769
    assert num_searchers(num_columns) > 1
    tail = [7, 8, 9, 10]
    slots: list[Slot | None] = []
    ends = (
        4,
        SEARCH_TOKENS,
        SEARCH_TOKENS + 2,
        3 * SEARCH_TOKENS + 1,
        4 * SEARCH_TOKENS + 3,
        num_columns - 20,
    )
    for end in ends:
        tokens = [rng.randrange(20, 25) for _ in range(num_columns - 1 - extra)]
        tokens[end - 4 : end] = tail
        for shorter in (5 * SEARCH_TOKENS, num_columns - 50):
            tokens[shorter - 3 : shorter] = tail[1:]
        tokens[-4:] = tail
        slots.append((tokens, 99))

    rows = check(slots, (2, 4), 3, device, num_columns)
    drafts = rows.token.view(len(ends), 4)[:, 1:].tolist()
    for (tokens, _), end, draft in zip(slots, ends, drafts, strict=True):
        assert draft == tokens[end : end + 3]


def test_proposals_of_short_overlapping_and_missing_runs(device: str) -> None:
    slots: list[Slot | None] = [
        ([5], 4),  # shorter than any run
        ([5, 5], 4),  # the run is the history's beginning
        ([5, 6, 5, 6], 4),  # fewer tokens follow than might be drafted
        ([6, 6, 6, 6, 6], 4),  # a run that overlaps the end
        ([5, 6, 7, 8], 4),  # no run
        ([1, 2, 3, 1, 2], 0),  # nothing may be drafted
        None,
    ]
    rows = check(slots, (1, 3), 4, device, 6)
    assert rows.token.view(7, 5)[:, 1:].tolist() == [
        [-1, -1, -1, -1],
        [5, -1, -1, -1],
        [5, 6, -1, -1],
        [6, -1, -1, -1],
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
    ]
    check([([1, 1, 1], 4)], (3, 5), 4, device, 4)
    check([([], 4) if slot is None else slot for slot in slots[:2]], (2, 9), 1, device, 3)
    check([None, None], (1, 2), 2, device, 4)


def test_history_follows_prompts_and_rounds(device: str) -> None:
    """Prompts come in chunks, then each round's tokens; slots are reused. Proposals are those of the
    index."""
    rng = random.Random(2)
    num_slots, num_draft_tokens, num_columns = 3, 3, 130
    history = torch.full((num_slots, num_columns), -9, dtype=torch.int32, device=device)
    rounds = NGramRoundDrafter(history, Workspace(torch.device(device)), min_length=1, max_length=3)
    lengths, nothing = (1, 3), torch.empty(0)
    tokens: list[list[int]] = [[], [], []]
    for step in range(12):
        if step in (0, 6):
            tokens[1:] = [[], []]
            for _ in range(2):
                prefill_rows = []
                for slot in (2, 1):
                    chunk = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
                    prefill_rows += [(slot, token, len(tokens[slot]) + n) for n, token in enumerate(chunk)]
                    prefill_rows.append((-1, 77, 1 << 30))
                    tokens[slot] += chunk
                slot, token, position = (int32(column, device) for column in zip(*prefill_rows, strict=True))
                chunks = ComputedChunks(
                    rows=Rows(slot=slot, token=token, position=position),
                    hidden=HiddenStates(nothing, (), {}),
                    next_token=token,
                    hits=token,
                    last_token=token,
                )
                rounds.draft_extend_prefill(chunks)
            # Sampled behind the prompts.
            tokens[1].append(2)
            tokens[2].append(1)

        bucket: list[Slot | None] = [(tokens[2], 3), None, (tokens[1], 2)]
        rows = round_rows(bucket, num_draft_tokens, device)
        live = int32([slot if slot else -1 for slot in (2, 0, 1) for _ in range(4)], device)
        rows = Rows(slot=torch.where(rows.slot < 0, -1, live), token=rows.token, position=rows.position)
        rounds.propose(rows, num_slots=3, num_draft_tokens=num_draft_tokens)
        for place, slot in ((0, 2), (2, 1)):
            drafts = drafts_of_index(tokens[slot], lengths, 2 if slot == 1 else 3)
            proposed = rows.token[4 * place + 1 : 4 * place + 4].tolist()
            assert proposed == drafts + [-1] * (3 - len(drafts))

        emitted = [0, 0, 0]
        for place, slot in ((0, 2), (2, 1)):
            drafts = [token for token in rows.token[4 * place + 1 : 4 * place + 4].tolist() if token >= 0]
            num_right = rng.randint(0, len(drafts))
            emitted[place] = num_right + 1
            tokens[slot] += [*drafts[:num_right], rng.randrange(3)]
        expected = history.cpu().clone()
        hidden, emitted_of_slots = HiddenStates(nothing, (), {}), int32(emitted, device)
        rounds.draft_extend(
            VerifiedRows(rows=rows, hidden=hidden, chosen=rows.token, emitted=emitted_of_slots)
        )
        for slot in (1, 2):
            expected[slot, : len(tokens[slot]) - 1] = int32(tokens[slot][:-1], "cpu")
        assert torch.equal(history.cpu(), expected)


def test_append_history_to_a_view_of_an_arena(device: str) -> None:
    arena = torch.full((500,), 3, dtype=torch.int32, device=device)
    history = arena[50:170].view(3, 40)
    row_slot, position = int32([2, 0, -1], device), int32([39, 1, 7], device)
    append_history(row_slot, position, int32([11, 12, 13], device), history)
    assert (arena != 3).nonzero().flatten().tolist() == [51, 169]
    assert (arena[51], arena[169]) == (12, 11)


@pytest.mark.parametrize("num_emitted", [None, [2, 0, 3]])
def test_append_history_equals_reference(num_emitted: list[int] | None, device: str) -> None:
    row_slot = int32([1, 1, -1, 0, 0, 0, 2, 2, 2], device)
    position, token = int32([4, 5, 6, 0, 1, 2, 7, 8, 9], device), int32(list(range(10, 19)), device)
    emitted = None if num_emitted is None else int32(num_emitted, device)
    history = torch.full((3, 10), -9, dtype=torch.int32, device=device)
    expected = history.clone()
    append_history(row_slot, position, token, history, emitted=emitted)
    append_history_reference(row_slot, position, token, expected, emitted=emitted)
    assert torch.equal(history, expected)
    assert int((history != -9).sum()) == (8 if num_emitted is None else 5)


def test_ngram_kernels_name_wrong_arguments(device: str) -> None:
    row = int32([0, -1, 0, -1], device)
    history = int32([[1, 2, 3]], device)
    found = torch.zeros(2, 1, dtype=torch.int64, device=device)
    sizes = {"rows_per_slot": 2, "min_length": 1, "max_length": 2}
    with pytest.raises(ValueError, match=r"row_slot: 4 rows: expected a multiple of 3"):
        propose_ngrams(row, row, row, history, found, **sizes | {"rows_per_slot": 3})
    with pytest.raises(ValueError, match=r"history: \[1, 3\] torch.int64: expected \[1, 3\] torch.int32"):
        propose_ngrams(row, row, row, history.long(), found, **sizes)
    with pytest.raises(ValueError, match=r"found: \[1, 1\] .*: expected \[2, 1\]"):
        propose_ngrams(row, row, row, history, found[:1], **sizes)
    with pytest.raises(ValueError, match=r"row_position: \[3\] .*: expected \[4\]"):
        append_history(row, row[:3], row, history)
    with pytest.raises(ValueError, match=r"row_slot: 4 rows: expected a multiple of emitted's 3"):
        append_history(row, row, row, history, emitted=row[:3])
