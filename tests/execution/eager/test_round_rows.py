"""Rows of decode rounds: places of nodes, acceptance and rewinding over many random trees, and limits."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import accepted_path, random_tokens, random_tree

from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.eager.rounds import SlotRows, draft_limit, place_rows, rewind
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape
from drift_sdk.steps import DecodeRow, ExecutorLimits, SlotOutput, SlotSampling
from drift_sdk.trees import MAX_TREE_DRAFTS, MAX_TREE_ROWS, Draft

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 8, 40, 8
LIMITS = ExecutorLimits(
    max_num_seqs=NUM_SLOTS, max_model_len=96, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=50
)


def make_slot(length: int, block_ids: list[int], max_length: int = 1000) -> Slot:
    sampling = SlotSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop_token_ids=(),
        num_prompt_tokens=1,
        max_length=max_length,
    )
    slot = Slot(sampling)
    slot.length, slot.last_token, slot.block_table = length, 3, block_ids
    return slot


def make_round(rng: random.Random) -> list[SlotRows]:
    """Slots with random lengths, blocks and trees."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    size = NUM_BLOCKS // NUM_SLOTS
    slots = [
        make_slot(rng.randint(1, 20), blocks[index * size : (index + 1) * size]) for index in range(NUM_SLOTS)
    ]
    most = rng.choice([3, 7, 15, MAX_TREE_ROWS // NUM_SLOTS - 1])
    trees = [random_tree(rng, most) for _ in slots]
    drafts = [Draft(tree, random_tokens(rng, tree, LIMITS.vocab_size)) for tree in trees]
    return place_rows(slots, drafts, LIMITS)


class ChosenTokens(EagerExecutor):
    """An executor whose target chooses given tokens: the token after a row is the row's only number in
    `hidden`."""

    def __init__(self) -> None:
        pass

    def _sample_tokens(self, hidden: torch.Tensor, slots: list[Slot]) -> list[SlotOutput]:
        tokens = [int(token) for token in hidden[:, 0]]
        return [
            SlotOutput(token_ids=(token,), finish=slot.append(token))
            for slot, token in zip(slots, tokens, strict=True)
        ]


def test_accepted_paths_and_packed_rows_of_10000_trees() -> None:
    """Against all paths of each tree, one by one."""
    rng, executor = random.Random(1), ChosenTokens()
    cache = KVCache(
        [KVShape(1, 1, 1)], NUM_BLOCKS + MAX_TREE_ROWS // BLOCK_SIZE, BLOCK_SIZE, torch.float64, "cpu"
    )
    keys, values = cache.tensors
    num_slots = keys.shape[1]
    values.zero_()
    lengths = [0] * 20
    for _ in range(10_000 // NUM_SLOTS):
        slot_rows = make_round(rng)
        chosen = [rng.randrange(LIMITS.vocab_size) for each in slot_rows for _ in each.kv_slots]
        for each in slot_rows:
            tree = each.draft.tree
            for node in range(tree.num_nodes):
                if not tree.is_leaf(node) and rng.random() < 0.8:
                    child = rng.choice(list(tree.children(node)))
                    chosen[each.first_row + node] = each.draft.token_ids[child - 1]
        keys[0, :, 0, 0] = torch.arange(num_slots, dtype=torch.float64)
        outputs, paths = executor._verify(slot_rows, torch.tensor(chosen)[:, None])
        rewind(slot_rows, paths, cache)
        kept = keys[0, :, 0, 0].tolist()
        for each, output, path in zip(slot_rows, outputs, paths, strict=True):
            own = chosen[each.first_row :][: each.draft.tree.num_nodes]
            expected = accepted_path(each.draft.tree.parents, each.draft.token_ids, own)
            assert list(path) == expected
            assert output.token_ids == tuple(own[node] for node in expected)
            assert output.num_accepted == len(expected) - 1
            positions = range(each.start, each.start + len(path))
            assert [kept[each.slot.kv_slot(position, BLOCK_SIZE)] for position in positions] == [
                each.kv_slots[node] for node in path
            ]
            lengths[len(path)] += 1
    assert min(lengths[1:8]) > 100, lengths


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_round_have_places_of_their_own(seed: int) -> None:
    slot_rows = make_round(random.Random(seed))
    places = [place for each in slot_rows for place in each.kv_slots]
    assert len(set(places)) == len(places)
    assert max(places) < NUM_BLOCKS * BLOCK_SIZE + MAX_TREE_ROWS
    for each in slot_rows:
        for depth, node in enumerate(each.draft.tree.first_path):
            assert each.kv_slots[node] == each.slot.kv_slot(each.start + depth, BLOCK_SIZE)


@pytest.mark.parametrize("shift", [-1, 1])
def test_all_rows_are_read_before_any_is_written(shift: int) -> None:
    slot = make_slot(10, [3, 1, 2])
    (rows,) = place_rows([slot], [Draft.chain([1, 2, 3, 4])], LIMITS)
    cache = KVCache([KVShape(1, 2, 2)] * 2, NUM_BLOCKS, BLOCK_SIZE, torch.float32, "cpu")
    keys, values = cache.tensors
    keys.normal_(), values.normal_()
    places = torch.tensor(rows.kv_slots)
    expected = keys[:, places.roll(shift)].clone()
    moved = rows._replace(kv_slots=places.roll(shift).tolist())
    rewind([moved], [(0, 1, 2, 3, 4)], cache)
    assert torch.equal(keys[:, places], expected)


def test_limits_of_a_draft() -> None:
    """A chain is limited by the room of its sequence, a tree only in its depth."""
    slot = make_slot(10, [0, 1], max_length=14)
    assert draft_limit(DecodeRow(slot=0, num_draft_tokens=5), slot)[:2] == (5, 3)
    assert draft_limit(DecodeRow(slot=0, num_draft_tokens=2, max_depth=8), slot) == (2, 2, False)
    row = DecodeRow(slot=0, num_draft_tokens=MAX_TREE_DRAFTS, max_depth=8)
    assert draft_limit(row, slot) == (63, 3, False)
    full = make_slot(13, [0, 1], max_length=14)
    assert draft_limit(DecodeRow(slot=0, num_draft_tokens=9, max_depth=8), full) == (0, 0, False)
    assert DecodeRow(slot=0, num_draft_tokens=9, max_depth=8).max_emitted_tokens == 9
    assert DecodeRow(slot=0, num_draft_tokens=3, max_depth=8).max_emitted_tokens == 4
    assert DecodeRow(slot=0, num_draft_tokens=9).max_emitted_tokens == 10
