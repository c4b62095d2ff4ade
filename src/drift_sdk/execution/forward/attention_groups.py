"""Paged attention of a step's sequences, a group of them at a time, in scratch memory of bounded size."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import AttentionPlan, Partitions, plan_attention
from drift_sdk._kernels.attention.paged_attention import AttentionScratch, attention_config, paged_attention
from drift_sdk._kernels.trees.tree_attention import tree_attention
from drift_sdk._kernels.trees.tree_paths import TreePaths
from drift_sdk.execution.device.workspace import Workspace

__all__ = ["AttentionGroups", "AttentionShape"]

SCRATCH_SHARE = 64
"""The partial sums take at most 1 / SCRATCH_SHARE of a GPU's memory: 2.2 GiB of an H200's 140 GiB, which is
room for 256 sequences of 131,072 tokens that decode one row each (8 KV heads, groups of 4, heads of 128)."""
CPU_SCRATCH_BYTES = 2**28
"""The most memory that partial sums take on a CPU, where kernels are interpreted."""


class AttentionShape(Struct, frozen=True, kw_only=True):
    """Sizes of a model's attention.

    num_kv_heads, head_dim: of the KV cache. group: query heads for each KV head. max_num_keys: most keys of a
    sequence. windows: how many keys rows see in the layers, each once; 0: all before them.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    max_num_keys: int
    windows: tuple[int, ...] = (0,)


class AttentionGroups:
    """Paged attention for up to `num_sequences` sequences of up to `num_rows` rows each.

    Partial sums of many rows at long contexts would take gigabytes. Where they exceed the bound, the
    sequences are attended in groups, one launch after the other. A sequence's bits do not depend on its
    group. All users of a workspace share the same scratch memory.

    group_size: most sequences of a group. scratches: for each window, the scratch memory of each group; all
    share the partial sums, each has its own plan.
    """

    def __init__(
        self,
        workspace: Workspace,
        device: torch.device,
        shape: AttentionShape,
        *,
        num_sequences: int,
        num_rows: int,
        max_scratch_bytes: int | None = None,
    ) -> None:
        """max_scratch_bytes: the bound; None: `scratch_bytes` of the device."""
        num_partitions = {
            window: Partitions.of_window(window).room(shape.max_num_keys, window, num_rows)
            for window in shape.windows
        }
        num_bytes = sequence_bytes(shape, num_rows)
        most = scratch_bytes(device) if max_scratch_bytes is None else max_scratch_bytes
        self.group_size = max(1, min(num_sequences, most // num_bytes))

        def scratch(window: int) -> AttentionScratch:
            partitions = Partitions.of_window(window)
            plan = AttentionPlan(
                self.group_size, shape.max_num_keys, partitions, device, window=window, num_rows=num_rows
            )
            rows = num_rows * shape.group
            sizes = (self.group_size, shape.num_kv_heads, plan.max_num_partitions, rows)

            def take(name: str, *last: int) -> Tensor:
                return workspace.take(f"attention_{name}", (*sizes, *last), torch.float32)

            return AttentionScratch(plan, take("sums", shape.head_dim), take("maxima"), take("weights"))

        # The window that needs most takes its memory first.
        windows = sorted(num_partitions, key=lambda window: -num_partitions[window])
        num_groups = -(-num_sequences // self.group_size)
        self.scratches = {window: [scratch(window) for _ in range(num_groups)] for window in windows}

    def plan(self, row_slot: Tensor, row_position: Tensor, rows_per_sequence: int) -> None:
        """Distribute the keys of rows [R] over programs; once a step, before any layer calls `attend`."""
        for window in self.scratches:
            for scratch, rows in self._groups(len(row_slot), rows_per_sequence, window):
                plan_attention(row_slot[rows], row_position[rows], scratch.plan, rows_per_sequence)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        rows_per_sequence: int,
        *,
        window: int = 0,
        first_key: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        """Attend the rows that `plan` was last called with, in a layer with one of the windows; see
        `paged_attention` for the other arguments.

        Raises ValueError for more sequences than the object was made for.
        """
        for scratch, rows in self._groups(len(row_slot), rows_per_sequence, window):
            paged_attention(
                query[rows],
                keys,
                values,
                block_table,
                row_slot[rows],
                row_position[rows],
                out[rows],
                scratch,
                attention_config(query.shape[2], query.dtype, scratch.plan.partitions.tile),
                rows_per_sequence,
                first_key=first_key,
                scale=scale,
                sinks=sinks,
                key_scale=key_scale,
                value_scale=value_scale,
            )

    def attend_trees(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        paths: TreePaths,
        out: Tensor,
        nodes_per_tree: int,
        *,
        window: int = 0,
        first_key: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        """`attend` for rows that are nodes of trees; see `tree_attention` for the other arguments."""
        num_trees = len(row_slot) // nodes_per_tree
        for scratch, rows in self._groups(len(row_slot), nodes_per_tree, window):
            tree_attention(
                query[rows],
                keys,
                values,
                block_table,
                row_slot[rows],
                row_position[rows],
                paths.of_trees(rows.start // nodes_per_tree, rows.stop // nodes_per_tree, num_trees),
                out[rows],
                scratch,
                attention_config(query.shape[2], query.dtype, scratch.plan.partitions.tile),
                nodes_per_tree=nodes_per_tree,
                first_key=first_key,
                scale=scale,
                sinks=sinks,
                key_scale=key_scale,
                value_scale=value_scale,
            )

    def _groups(
        self, num_rows: int, rows_per_sequence: int, window: int
    ) -> list[tuple[AttentionScratch, slice]]:
        """The scratch memory and the rows of each group, for layers with this window."""
        scratches = self.scratches[window]
        size = self.group_size * rows_per_sequence
        firsts = range(0, num_rows, size)
        if len(firsts) > len(scratches):
            most = self.group_size * len(scratches)
            raise ValueError(f"{num_rows // rows_per_sequence} sequences: expected at most {most}")

        return [
            (scratch, slice(first, min(first + size, num_rows)))
            for scratch, first in zip(scratches, firsts, strict=False)
        ]


def sequence_bytes(shape: AttentionShape, num_rows: int) -> int:
    """Bytes of the partial sums of a sequence with so many rows."""
    num_partitions = max(
        Partitions.of_window(window).room(shape.max_num_keys, window, num_rows) for window in shape.windows
    )
    num_partials = shape.num_kv_heads * num_partitions * num_rows * shape.group
    return num_partials * (shape.head_dim + 2) * 4


def scratch_bytes(device: torch.device) -> int:
    """The most bytes that partial sums may take on a device."""
    if device.type != "cuda":
        return CPU_SCRATCH_BYTES

    return int(torch.cuda.get_device_properties(device).total_memory) // SCRATCH_SHARE
