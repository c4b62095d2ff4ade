"""Chains as trees without branches, for rounds that are checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafter import RoundDrafter, VerifiedRows
from drift_sdk.execution.rounds.tree_plan import TreePlan

__all__ = ["ChainTreeDrafter"]


class ChainTreeDrafter:
    """A `TreeDrafter` whose trees are the chains of a `RoundDrafter`."""

    first_draft_slot = 0

    def __init__(self, drafter: RoundDrafter, plans: Mapping[int, TreePlan]) -> None:
        self.plans = plans
        self._drafter = drafter

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        num_trees, num_nodes = rows.limits.shape[0], plan.num_nodes
        node = torch.arange(num_nodes, dtype=torch.int32, device=rows.slot.device)
        most = torch.minimum(rows.limits[:, :1], rows.limits[:, 1:2])
        columns = [each.view(num_trees, num_nodes) for each in (rows.slot, rows.parent, rows.position)]
        values = (
            rows.root_slot[:, None].where(node <= most, -1),
            node - 1,
            rows.root_position[:, None] + node,
        )
        for column, value in zip(columns, values, strict=True):
            column[:, 1:].copy_(value.expand(num_trees, num_nodes)[:, 1:])
            note_library_kernel(column)
        drafted = Rows(slot=rows.slot, token=rows.token, position=rows.position)
        self._drafter.propose(drafted, num_slots=num_trees, num_draft_tokens=plan.num_drafts)

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        self._drafter.draft_extend(verified)
