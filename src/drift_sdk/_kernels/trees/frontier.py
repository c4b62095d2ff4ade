"""The rows that a draft computes at one depth of trees, and what they were made of."""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES

__all__ = ["PADDED_PATH", "Frontier", "extend_path"]

PADDED_PATH = next_power_of_2(PATH_ENTRIES)


class Frontier(Struct, frozen=True):
    """F rows of each of B trees, which a draft computes at once.

    slot (-1: no row), token, and position (of the token) [B * F] int32. kv_slot [B * F] int64: cache slots of
    the rows' keys and values. source [B * F] int32: the row before,
    of the frontier one depth less, whose output is a row's feature. node [B * F] int32: what the growth of
    dynamic trees has to remember. path [B * F, PATH_ENTRIES] int32: by depth, the numbers of the nodes that a
    row sees among those that the draft computes, the root being 0; then -1.
    """

    slot: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor
    source: Tensor
    node: Tensor
    path: Tensor

    def check(self, num_trees: int) -> int:
        """F. Raises ValueError for another shape or type."""
        (num_rows,) = self.slot.shape
        for name in ("slot", "token", "position", "source", "node"):
            check_tensor(name, getattr(self, name), (num_rows,), torch.int32)
        check_tensor("kv_slot", self.kv_slot, (num_rows,), torch.int64)
        check_tensor("path", self.path, (num_rows, PATH_ENTRIES), torch.int32)
        if num_rows % num_trees:
            raise ValueError(f"frontier: {num_rows} rows: expected a multiple of {num_trees}")

        return num_rows // num_trees


@device_function
def extend_path(
    source_path_ptr,  # the row of `Frontier.path` of the row before
    own_path_ptr,  # the row's own, written
    own_node,  # the row's number among the nodes that the draft computes
    is_stored,
    depth,
    NUM_PATH_ENTRIES: tl.constexpr,
    PADDED_PATH: tl.constexpr,
):
    """Write the path of a row that is `depth` deep: that of the row before, and the row itself. The path of a
    root is entry 0 alone, and is not read."""
    entry = tl.arange(0, PADDED_PATH)
    is_before = entry < tl.where(is_stored & (depth > 1), depth, 0)
    before = tl.load(source_path_ptr + entry, mask=is_before, other=0)
    path = tl.where(entry < depth, before, tl.where(entry == depth, own_node, -1))
    tl.store(own_path_ptr + entry, path, mask=entry < tl.where(is_stored, NUM_PATH_ENTRIES, 0))
