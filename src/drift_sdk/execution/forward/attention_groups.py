"""Paged attention of a step's sequences, a group of them at a time, in scratch memory of bounded size."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.decode import (
    AttentionConfig,
    AttentionScratch,
    attention_config,
    paged_attention,
)
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import AttentionPlan, BlockTable, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.model_resources import ModelResources

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
        blocks: BlockTable | None = None,
        max_scratch_bytes: int | None = None,
    ) -> None:
        """blocks: in which shared prefixes are looked for; None: keys are read for each sequence.
        max_scratch_bytes: the bound; None: `scratch_bytes` of the device."""
        self._blocks, self._group = blocks, shape.group
        num_partitions = {
            window: Partitions.of_window(window).room(shape.max_num_keys, window, num_rows)
            for window in shape.windows
        }
        num_bytes = sequence_bytes(shape, num_rows)
        most = scratch_bytes(device) if max_scratch_bytes is None else max_scratch_bytes
        self.group_size: int = max(1, min(num_sequences, most // num_bytes))

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
        self.scratches: dict[int, list[AttentionScratch]] = {
            window: [scratch(window) for _ in range(num_groups)] for window in windows
        }

    @classmethod
    def of_model(
        cls,
        model: ModelResources,
        workspace: Workspace,
        block_table: Tensor | None,
        *,
        num_sequences: int,
        num_rows: int,
    ) -> AttentionGroups:
        """The attention of a model.

        block_table [S, max_blocks] int32: of slots whose shared prefixes are read once, or None.
        """
        spec = model.decoder.spec
        attention = spec.attention
        shape = AttentionShape(
            num_kv_heads=attention.num_kv_heads,
            group=attention.group,
            head_dim=attention.head_dim,
            max_num_keys=model.limits.max_model_len + 1,
            windows=tuple(dict.fromkeys(window or 0 for window in spec.windows)),
        )
        return cls(
            workspace,
            model.decoder.device,
            shape,
            num_sequences=num_sequences,
            num_rows=num_rows,
            blocks=None if block_table is None else BlockTable(block_table, model.limits.block_size),
        )

    @property
    def shares_prefixes(self) -> bool:
        """True if keys that lie in the same blocks are read once for several sequences."""
        return self._blocks is not None

    def plan(self, rows: PlannedRows) -> None:
        """Distribute the keys of rows over programs; once a step, before any layer calls `attend`. What
        `attend_trees` attends needs a plan without shared prefixes."""
        for window in self.scratches:
            for scratch, part in self._groups(rows, window):
                plan_attention(rows.of_rows(part), scratch.plan, self._blocks, self._group)

    def attend(self, layer: LayerAttention, rows: PlannedRows, *, beside_chunks: bool = False) -> None:
        """Attend the rows that `plan` was last called with; see `paged_attention`.

        Raises ValueError for more sequences than the object was made for.
        """
        for scratch, part in self._groups(rows, layer.window):
            paged_attention(
                layer.of_rows(part),
                rows.of_rows(part),
                scratch,
                _config(layer, scratch),
                beside_chunks=beside_chunks and part.start == 0,
            )

    def attend_trees(self, layer: LayerAttention, rows: PlannedRows, paths: TreePaths) -> None:
        """`attend` for rows that are nodes of trees; see `tree_attention`."""
        nodes_per_tree = rows.rows_per_sequence
        for scratch, part in self._groups(rows, layer.window):
            trees = paths.of_trees(
                part.start // nodes_per_tree, part.stop // nodes_per_tree, rows.num_sequences
            )
            tree_attention(layer.of_rows(part), rows.of_rows(part), trees, scratch, _config(layer, scratch))

    def _groups(self, rows: PlannedRows, window: int) -> list[tuple[AttentionScratch, slice]]:
        """The scratch memory and the rows of each group, for layers with this window."""
        scratches, num_rows = self.scratches[window], rows.slot.shape[0]
        size = self.group_size * rows.rows_per_sequence
        firsts = range(0, num_rows, size)
        if len(firsts) > len(scratches):
            most = self.group_size * len(scratches)
            raise ValueError(f"{rows.num_sequences} sequences: expected at most {most}")

        return [
            (scratch, slice(first, min(first + size, num_rows)))
            for scratch, first in zip(scratches, firsts, strict=False)
        ]


def _config(layer: LayerAttention, scratch: AttentionScratch) -> AttentionConfig:
    return attention_config(layer.head_dim, layer.kv.keys.dtype, scratch.plan.partitions.tile)


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
