"""Checks of a round of trees: nothing is found in a right round, and each fault by its own check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drift_sdk._kernels.trees.tree_checks import (
    check_acceptance,
    check_cache,
    check_drafts,
    check_hidden,
    check_paths,
    report_flags,
)
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES, RootTensors, tree_rows
from drift_sdk.execution.rounds.round import violation_of
from drift_sdk.quantised.formats import E4M3

pytestmark = pytest.mark.kernel

NUM_NODES, BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 6, 4, 12, 50
PARENTS = [-1, 0, 0, 1, 1, 4]
LENGTH = 7


class Round:
    """Two trees, the second without a root: the first accepts nodes 1 and 4, and ends behind node 4."""

    def __init__(self, device: str, kv_dtype: torch.dtype = torch.float32) -> None:
        def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.table = ints(3, 7, 5, 1, 9, 2).view(2, 3)
        self.rows = RootTensors(
            slot=ints(*[0] * NUM_NODES, *[-1] * NUM_NODES),
            token=ints(*[10, 11, 12, 13, 14, 15] * 2),
            position=torch.zeros(2 * NUM_NODES, dtype=torch.int32, device=device),
            parent=ints(*PARENTS * 2),
            root_slot=ints(0, -1),
            root_position=ints(LENGTH - 1, 0),
            limits=ints(5, 4, 0, 5, 4, 0).view(2, 3),
            draft_kv_slot=ints(0, 0, dtype=torch.int64),
        )
        self.rows.position[0] = LENGTH - 1
        self.length = ints(LENGTH, 30)
        self.kv_slot = torch.zeros(2 * NUM_NODES, dtype=torch.int64, device=device)
        self.path = torch.full((2 * NUM_NODES, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
        self.chosen = ints(11, 14, 0, 0, 33, 0, *[0] * NUM_NODES)
        self.accepted = torch.full((2, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
        self.accepted[0, :3] = ints(0, 1, 4)
        self.emitted = ints(3, 0)
        self.ends = (ints(LENGTH + 3, 30), ints(33, 0), ints(0, 0))
        self.hidden = torch.ones(2 * NUM_NODES, 24, device=device)
        shape = (2, NUM_BLOCKS + 3, 2, BLOCK_SIZE, 6)
        self.keys, self.values = (torch.randn(shape).to(device, kv_dtype) for _ in range(2))
        self.flags = ints(-1, -1)

    def run(self, plant: Callable[[Round, str], None]) -> list[str | None]:
        """The reasons of the trees' violations; `plant` is called before each check with its name."""
        rows, flags = self.rows, self.flags
        plant(self, "drafts")
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE}
        check_drafts(rows, self.table, flags, **sizes)
        bits = torch.zeros_like(self.kv_slot)
        tree_rows(
            rows.slot,
            rows.parent,
            self.length,
            self.table,
            (rows.position, bits, self.kv_slot, self.path),
            nodes_per_tree=NUM_NODES,
            block_size=BLOCK_SIZE,
            first_tree_slot=NUM_BLOCKS * BLOCK_SIZE,
        )
        plant(self, "paths")
        check_paths(rows, self.path, self.length, flags)
        plant(self, "hidden")
        check_hidden(rows, self.hidden, flags)
        plant(self, "acceptance")
        check_acceptance(rows, self.chosen, self.accepted, self.emitted, self.ends, flags)
        block_of = [(int(slot) // BLOCK_SIZE, int(slot) % BLOCK_SIZE) for slot in self.kv_slot[:NUM_NODES]]
        if int(rows.slot[0]) >= 0:
            for depth, node in enumerate((0, 1, 4)):
                position = LENGTH - 1 + depth
                to = int(self.table[0, position // BLOCK_SIZE]), position % BLOCK_SIZE
                for cache in (self.keys, self.values):
                    cache[:, to[0], :, to[1]] = cache[:, block_of[node][0], :, block_of[node][1]]
        plant(self, "cache")
        check_cache(self.keys, self.values, self.table, rows, self.kv_slot, self.accepted, flags)
        ring = torch.zeros(3, 9, dtype=torch.int32)
        if self.keys.is_cuda:
            ring = ring.pin_memory()
        report_flags(flags, ring, torch.ones(1, dtype=torch.int32).to(self.keys.device), first_word=5)
        if self.keys.is_cuda:
            torch.cuda.synchronize()
        assert ring[1, 5:7].tolist() == flags.tolist()
        found = [violation_of(flag) for flag in flags.tolist()]
        return [None if each is None else each.reason for each in found]


def nothing(checked: Round, before: str) -> None:
    pass


@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3], ids=str)
def test_right_round_passes_and_rejected_rows_are_overwritten(kv_dtype: torch.dtype, device: str) -> None:
    checked = Round(device, kv_dtype)
    before = checked.keys.clone()
    assert checked.run(nothing) == [None, None]
    places = [(int(slot) // BLOCK_SIZE, int(slot) % BLOCK_SIZE) for slot in checked.kv_slot[:NUM_NODES]]
    kept = {places[node] for node in (0, 1)} | {(5, 0)}
    for node in range(NUM_NODES):
        block, place = places[node]
        is_nan = bool(checked.keys[:, block, :, place].float().isnan().all())
        assert is_nan == (places[node] not in kept), node
    assert torch.equal(checked.keys[:, 3], before[:, 3])  # the prefix


def test_a_row_of_e4m3_that_was_not_moved_is_found(device: str) -> None:
    def plant(checked: Round, before: str) -> None:
        if before == "cache":
            checked.values.view(torch.uint8)[1, 5, 1, 0, 5] ^= 1

    assert Round(device, E4M3).run(plant) == ["kv", None]


FAULTS: dict[str, tuple[str, str, Callable[[Round], Any]]] = {
    "token": ("drafts", "draft_tokens", lambda r: r.rows.token[3].fill_(VOCAB_SIZE)),
    "too many drafts": ("drafts", "draft_tokens", lambda r: r.rows.limits[0, 0].fill_(4)),
    "parent": ("drafts", "draft_tree", lambda r: r.rows.parent[2].fill_(4)),
    "too deep": ("drafts", "draft_tree", lambda r: r.rows.limits[0, 1].fill_(2)),
    "not a chain": ("drafts", "draft_tree", lambda r: r.rows.limits[0, 2].fill_(1)),
    "block twice": ("drafts", "block_table", lambda r: r.table[0, 2].fill_(3)),
    "no such block": ("drafts", "block_table", lambda r: r.table[0, 1].fill_(NUM_BLOCKS)),
    "ancestor": ("paths", "mask", lambda r: r.path[5, 1].fill_(2)),
    "path cut": ("paths", "mask", lambda r: r.path[4, 2].fill_(-1)),
    "hidden": ("hidden", "non_finite", lambda r: r.hidden[2, 5].fill_(torch.nan)),
    "wrong child": ("acceptance", "acceptance", lambda r: r.accepted[0, 1].fill_(2)),
    "missed child": ("acceptance", "acceptance", lambda r: r.chosen[4].fill_(15)),
    "length": ("acceptance", "length", lambda r: r.ends[0][0].fill_(LENGTH + 2)),
    "not moved": ("cache", "kv", lambda r: r.values[1, 5, 1, 0].add_(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_by_its_check(fault: str, device: str) -> None:
    place, reason, plant = FAULTS[fault]
    checked = Round(device)

    def planted(found: Round, before: str) -> None:
        if before == place:
            plant(found)
        elif before == "acceptance" and int(found.rows.slot[1]) < 0:
            # Drafts were dropped: only the root is left.
            found.accepted[0, 1:] = -1
            found.emitted[0], found.ends[0][0], found.ends[1][0] = 1, LENGTH + 1, 11

    assert checked.run(planted) == [reason, None]
    violation = violation_of(int(checked.flags[0]))
    assert violation is not None and violation.is_fatal == (not reason.startswith("draft"))
    if reason.startswith("draft"):
        assert checked.rows.slot[:NUM_NODES].tolist() == [0, -1, -1, -1, -1, -1]
    elif reason == "block_table":
        assert checked.rows.slot[:NUM_NODES].tolist() == [-1] * NUM_NODES
