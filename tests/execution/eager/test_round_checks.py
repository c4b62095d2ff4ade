"""Checks of rounds: each rule, broken by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drift_sdk.execution.eager.rounds import RoundChecks, SlotRows, attention_batch, error_of_tree, place_rows
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import KVShape
from drift_sdk.steps import VIOLATIONS, ExecutorLimits, SlotOutput, SlotSampling
from drift_sdk.trees import Draft, DraftLimit, TokenTree

LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=64, num_blocks=8, block_size=4, vocab_size=50)
LIMIT = DraftLimit(7, 3, is_chain=False)
# The root's children are 1 and 2; those of 1 are 3 and 4; those of 2 are 5 and 6; 7 follows 3.
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 2, 3))
TOKENS = [10, 11, 12, 13, 14, 15, 16]
SAMPLING = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=1,
    max_length=60,
)


class Round:
    """A slot of 6 tokens whose path 0, 2, 6 was accepted, and all that is checked of it."""

    def __init__(self) -> None:
        self.checks = RoundChecks(LIMITS)
        self.slot = Slot(SAMPLING)
        self.slot.length, self.slot.last_token, self.slot.block_table = 6, 3, [5, 1, 7]
        self.rows: SlotRows = place_rows([self.slot], [Draft(TREE, TOKENS)], LIMITS)[0]
        self.cache = KVCache(
            [KVShape(1, 2, 2)] * 2, LIMITS.num_blocks + 2, LIMITS.block_size, torch.float32, "cpu"
        )
        for tensor in self.cache.tensors:
            tensor.normal_()
        self.batch = attention_batch([self.rows], self.cache)
        self.hidden = torch.zeros(TREE.num_nodes, 4)
        self.path = (0, 2, 6)
        self.output = SlotOutput(token_ids=(11, 15, 40), num_drafted=7, num_accepted=2, accepted_nodes=(2, 6))
        self.slot.length = 9
        for depth, node in enumerate(self.path):
            for tensor in self.cache.tensors:
                tensor[:, self.slot.kv_slot(5 + depth, 4)] = tensor[:, self.rows.kv_slots[node]]

    def reasons(self) -> list[str]:
        violations = {}
        self.checks.check_forward([self.rows], self.batch, self.hidden, violations)
        self.checks.check_commit([self.rows], [self.output], [self.path], self.cache, violations)
        return [violation.reason for violation in violations.values()]

    def change_output(self, **changes: object) -> None:
        fields = {name: getattr(self.output, name) for name in SlotOutput.__struct_fields__}
        self.output = SlotOutput(**(fields | changes))


def see_a_sibling(found: Round) -> None:
    found.batch.visible[0][4, 5 + 3] = True


def miss_an_ancestor(found: Round) -> None:
    found.batch.visible[0][7, 5 + 1] = False


def change_kv(found: Round) -> None:
    found.cache.layer(1)[1][found.slot.kv_slot(6, 4)] += 1


FAULTS: dict[str, tuple[str, Callable[[Round], object]]] = {
    "a sibling is seen": ("mask", see_a_sibling),
    "an ancestor is not seen": ("mask", miss_an_ancestor),
    "a row is NaN": ("non_finite", lambda found: found.hidden[6].fill_(torch.nan)),
    "a token that was not drafted": ("acceptance", lambda found: found.change_output(token_ids=(11, 14, 40))),
    "a path with a gap": ("acceptance", lambda found: setattr(found, "path", (0, 1, 6))),
    "a path of another length": ("acceptance", lambda found: setattr(found, "path", (0, 2))),
    "more accepted than drafted": ("acceptance", lambda found: found.change_output(num_accepted=8)),
    "one accepted too many": ("acceptance", lambda found: found.change_output(num_accepted=3)),
    "another length": ("length", lambda found: setattr(found.slot, "length", 10)),
    "a row of the cache": ("kv", change_kv),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_rule_is_found(fault: str) -> None:
    reason, breaks = FAULTS[fault]
    found = Round()
    breaks(found)
    assert found.reasons() == [reason]
    assert reason in VIOLATIONS


def test_child_that_was_not_accepted_is_found() -> None:
    found = Round()
    found.path = (0,)
    found.change_output(token_ids=(11,), num_accepted=0, accepted_nodes=())
    found.slot.length = 7
    assert found.reasons() == ["acceptance"]


def test_right_round_passes_and_rejected_rows_become_nan() -> None:
    found = Round()
    assert found.reasons() == []
    kept = {found.slot.kv_slot(position, 4) for position in (5, 6, 7)}
    keys, values = found.cache.tensors
    for kv_slot in range(keys.shape[1]):
        is_rejected = kv_slot in set(found.rows.kv_slots) - kept
        assert keys[:, kv_slot].isnan().all() == is_rejected
        assert values[:, kv_slot].isnan().all() == is_rejected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depths", (0, 1, 1, 2, 2, 2, 2, 2)),
        ("ancestor_bits", (1, 3, 5, 11, 19, 37, 69, 131)),
        ("first_child", (1, 3, 6, 7, -1, -1, -1, -1)),
        ("next_sibling", (-1, 2, -1, 4, -1, -1, -1, -1)),
        ("next_sibling", (-1, 2, 1, 4, -1, 6, -1, -1)),  # a circle
        ("parents", (-1, 0, 0, 1, 1, 2, 2, 7)),
    ],
)
def test_wrong_structure_is_found(field: str, value: tuple[int, ...]) -> None:
    tree = TokenTree(TREE.parents)
    assert error_of_tree(tree, LIMIT) is None
    setattr(tree, field, value)
    assert error_of_tree(tree, LIMIT) is not None


def test_limits_of_a_tree_are_checked() -> None:
    assert error_of_tree(TREE, LIMIT._replace(depth=2)) == "a path of more than 2 tokens"
    assert error_of_tree(TREE, LIMIT._replace(is_chain=True)) == "a tree instead of a chain"
    assert error_of_tree(TokenTree.chain(3), LIMIT._replace(is_chain=True)) is None


@pytest.mark.parametrize("table", [[5], [5, 5, 1], [5, 8, 1], [5, -1, 1]])
def test_wrong_block_table_is_found(table: list[int]) -> None:
    found = Round()
    assert found.checks.check_table(found.slot, LIMIT) is None
    found.slot.block_table = table
    violation = found.checks.check_table(found.slot, LIMIT)
    assert violation is not None and (violation.reason, violation.is_fatal) == ("block_table", True)


def test_blocks_behind_those_in_use_are_not_checked() -> None:
    """After rows that emitted little, the table still lists blocks that the scheduler has freed."""
    found = Round()
    found.slot.block_table = [5, 1, 7, 5]
    assert found.checks.check_table(found.slot, LIMIT) is None
