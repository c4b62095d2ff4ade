"""The interface of drafters that grow trees inside the graphs of rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.rounds.drafter import VerifiedRows
from drift_sdk.execution.rounds.tree_plan import TreePlan

__all__ = ["TreeDrafter"]


class TreeDrafter(Protocol):
    """A drafter of trees. Every method records kernels that read all they need from the device.

    A round of B trees with K drafts each has T = K + 1 rows a tree: row b * T holds the newest token of its
    slot, the rows after it hold the other nodes, a parent before its children. A row without a node has slot
    -1.

    plans: by K, of the rounds that draft trees.
    """

    plans: Mapping[int, TreePlan]

    @property
    def first_draft_slot(self) -> int:
        """The first cache slot of the draft behind its blocks, for nodes of trees."""

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        """Write the nodes of trees to slot, token and parent of rows, which hold the roots."""

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        """Update the drafter's state by the tokens that a round emitted. path [B, PATH_ENTRIES] int32: the
        nodes that tokens were emitted behind, then -1."""
