"""References of the kernels of `perf.harness.simulated_acceptance`."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.commit import CommitTensors
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES
from perf.harness.simulated_acceptance import SimulatedRounds
from references.commit import commit_reference


def commit_simulated_reference(tensors: CommitTensors, rounds: SimulatedRounds) -> None:
    """`commit_simulated` in plain torch: tokens and drafts are put so that `commit` accepts as many."""
    row_slot, rows_per_slot, buffers = tensors.row_slot, tensors.rows_per_slot, tensors.buffers
    row_token = tensors.row_token.clone()
    for first in range(0, len(row_slot), rows_per_slot):
        slot = int(row_slot[first])
        if slot < 0 or rows_per_slot == 1:
            continue

        entry = (int(rounds.num_rounds[slot]) + slot * rounds.stride) % len(rounds.trace)
        num_right = int(rounds.trace[entry]) - 1
        rounds.num_rounds[slot] += 1
        for depth in range(rows_per_slot - 1):
            row = first + depth
            if depth >= num_right:
                row_token[row + 1] = -1  # no token that is ever chosen
            elif row_slot[row + 1] >= 0:
                buffers.chosen[row] = row_token[row + 1]

    commit_reference(replace(tensors, row_token=row_token))


def simulate_choices_reference(
    row_slot: Tensor,
    row_parent: Tensor,
    row_token: Tensor,
    chosen: Tensor,
    rounds: SimulatedRounds,
    *,
    nodes_per_tree: int,
) -> None:
    """`simulate_choices` in plain torch, one tree after the other."""
    for first in range(0, len(row_slot), nodes_per_tree):
        slot = int(row_slot[first])
        if slot < 0:
            continue

        place = (int(rounds.num_rounds[slot]) + slot * rounds.stride) % len(rounds.trace)
        rounds.num_rounds[slot] += 1
        nodes = [node for node in range(1, nodes_per_tree) if int(row_slot[first + node]) >= 0]
        current = 0
        for depth in range(PATH_ENTRIES):
            children = [node for node in nodes if int(row_parent[first + node]) == current]
            if not children or depth >= int(rounds.trace[place]) - 1:
                drafts = {int(row_token[first + child]) for child in children}
                if int(chosen[first + current]) in drafts:
                    chosen[first + current] = min({*range(len(drafts) + 1)} - drafts)
                break

            chosen[first + current] = row_token[first + children[-1]]
            current = children[-1]
