"""Choices that follow drafts of trees as far as a trace says, to measure rounds at any acceptance.

Round r of a slot accepts as many drafts as `SimulatedRounds` gives, or as the path has. The path leads from
the root to the last child of each node, so that as many rows as possible have to be moved. The tokens chosen
behind its nodes become the drafts of their children; behind its last node, none of them. THE TOKENS EMITTED
ARE NOT THE MODEL'S.

Grid: (trees,). A program owns the rows of its tree. Bytes: 16 a row.

Programmatic dependent launch: the kernel waits for its producers before its first read and, being short, lets
its dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.commit.simulated_commit import SimulatedRounds
from drift_sdk._kernels.common.arguments import check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["simulate_choices"]


@kernel
def _simulate_choices(
    row_slot_ptr,  # [R] int32
    row_parent_ptr,  # [R] int32
    row_token_ptr,  # [R] int32
    chosen_ptr,  # [R] int32, read and written
    trace_ptr,  # [n] int32
    num_rounds_ptr,  # [S] int32, counted up
    trace_length,  # n
    trace_stride,
    NUM_NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    NUM_PATH_ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    first_row = tl.program_id(0) * NUM_NODES
    slot = tl.load(row_slot_ptr + first_row)
    if slot >= 0:
        node = tl.arange(0, PADDED_NODES)
        is_draft = (node > 0) & (node < NUM_NODES)
        is_draft &= tl.load(row_slot_ptr + first_row + node, mask=is_draft, other=-1) >= 0
        parent = tl.load(row_parent_ptr + first_row + node, mask=is_draft, other=-1)
        token = tl.load(row_token_ptr + first_row + node, mask=is_draft, other=-1)
        num_rounds = tl.load(num_rounds_ptr + slot)
        tl.store(num_rounds_ptr + slot, num_rounds + 1)
        num_right = tl.load(trace_ptr + (num_rounds + slot * trace_stride) % trace_length) - 1
        current = slot * 0
        is_walking = slot >= 0
        for depth in range(NUM_PATH_ENTRIES):
            if is_walking:
                is_child = is_draft & (parent == current)
                child = tl.max(tl.where(is_child, node, -1), 0)
                draft = tl.sum(tl.where(is_child & (node == child), token, 0), 0)
                chosen = tl.load(chosen_ptr + first_row + current)
                # A token that no child has: one of as many as there are children, and one more.
                is_taken = tl.sum((is_child & (token == chosen)).to(tl.int32), 0) > 0
                for other in range(NUM_NODES):
                    if is_taken:
                        chosen = other + slot * 0
                        is_taken = tl.sum((is_child & (token == chosen)).to(tl.int32), 0) > 0
                is_right = (child >= 0) & (depth < num_right)
                tl.store(chosen_ptr + first_row + current, tl.where(is_right, draft, chosen))
                current = child
                is_walking = is_right


def simulate_choices(
    row_slot: Tensor,
    row_parent: Tensor,
    row_token: Tensor,
    chosen: Tensor,
    rounds: SimulatedRounds,
    *,
    nodes_per_tree: int,
) -> None:
    """Overwrite what was chosen behind the nodes of B trees of T nodes, and count the rounds of their slots.

    row_slot, row_parent, row_token [B * T]: as of `tree_accept`. chosen [B * T], all int32. Raises ValueError
    for another shape or type.
    """
    (num_rows,) = row_slot.shape
    if num_rows % nodes_per_tree:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {nodes_per_tree}")

    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_parent=row_parent, row_token=row_token)
    check_tensor("chosen", chosen, (num_rows,), torch.int32)
    check_tensor("trace", rounds.trace, rounds.trace.shape, torch.int32)
    check_tensor("num_rounds", rounds.num_rounds, rounds.num_rounds.shape, torch.int32)
    _simulate_choices[(num_rows // nodes_per_tree,)](
        row_slot,
        row_parent,
        row_token,
        chosen,
        rounds.trace,
        rounds.num_rounds,
        rounds.trace.shape[0],
        rounds.stride,
        NUM_NODES=nodes_per_tree,
        PADDED_NODES=next_power_of_2(nodes_per_tree),
        NUM_PATH_ENTRIES=PATH_ENTRIES,
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )
