"""The keys behind the prefixes of trees, as attention takes them."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

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
