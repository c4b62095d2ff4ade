"""The keys behind the prefixes of trees, as attention takes them."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["TreePaths"]


class TreePaths(Struct, frozen=True):
    """The keys behind the prefixes of B trees: what `tree_attention` has to know of their rows.

    root_position [B * n] int32: entry b * n is the position of tree b's root; n >= 1.
    kv_slot [B * N] int64: cache slots of the nodes of each tree, the root being node 0.
    path [R, PATH_ENTRIES] int32: for each row, by depth from the root on, the nodes that it sees; then -1.
    """

    root_position: Tensor
    kv_slot: Tensor
    path: Tensor

    def of_trees(self, first: int, end: int, num_trees: int) -> TreePaths:
        """Those of trees first ... end - 1, of `num_trees`."""

        def part(tensor: Tensor) -> Tensor:
            size = tensor.shape[0] // num_trees
            return tensor[first * size : end * size]

        return TreePaths(part(self.root_position), part(self.kv_slot), part(self.path))

    def check(self, num_trees: int, nodes_per_tree: int) -> None:
        """Raise ValueError for tensors of another shape, type or layout."""
        for name, tensor, dtype in (
            ("root_position", self.root_position, torch.int32),
            ("kv_slot", self.kv_slot, torch.int64),
        ):
            size = max(tensor.shape[0] // num_trees, 1)
            check_tensor(name, tensor, (num_trees * size,), dtype)
        check_tensor("path", self.path, (num_trees * nodes_per_tree, PATH_ENTRIES), torch.int32)
