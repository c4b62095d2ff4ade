"""Attention of a step's rows, for rows that are decoded or verified and for rows of prompts. Both sum in the
same order, so a row's bits do not depend on which of them it goes through."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from drift_sdk._kernels.attention.attention_plan import Partitions
from drift_sdk._kernels.attention.exact_prefill_attention import ExactPrefillConfig, exact_prefill_attention
from drift_sdk._kernels.trees.tree_paths import TreePaths
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.kv_cache import LayerKV

__all__ = ["ChunkAttention", "MixedAttention", "RowAttention", "SequenceAttention", "TreeAttention"]


class RowAttention(Protocol):
    """Attention of a step's rows to the keys that they see."""

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        """Prepare for rows [R]; once a step, before any layer calls `attend`."""

    def attend(
        self,
        query: Tensor,
        kv: LayerKV,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Fill out [R, num_heads, head_dim] for the rows of `plan`; see `paged_attention`."""


class SequenceAttention:
    """Attention of `rows_per_sequence` rows of each sequence, to be decoded or verified."""

    def __init__(self, groups: AttentionGroups, rows_per_sequence: int) -> None:
        self._groups, self._rows_per_sequence = groups, rows_per_sequence

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        self._groups.plan(row_slot, row_position, self._rows_per_sequence)

    def attend(
        self,
        query: Tensor,
        kv: LayerKV,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._groups.attend(
            query,
            kv.keys,
            kv.values,
            block_table,
            row_slot,
            row_position,
            out,
            self._rows_per_sequence,
            key_scale=kv.key_scale,
            value_scale=kv.value_scale,
            window=window,
            scale=scale,
            sinks=sinks,
        )


class TreeAttention:
    """Attention of `nodes_per_tree` nodes of each tree, to be verified."""

    def __init__(self, groups: AttentionGroups, nodes_per_tree: int, paths: TreePaths) -> None:
        self._groups, self._nodes_per_tree, self._paths = groups, nodes_per_tree, paths

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        self._groups.plan(row_slot, row_position, self._nodes_per_tree)

    def attend(
        self,
        query: Tensor,
        kv: LayerKV,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._groups.attend_trees(
            query,
            kv.keys,
            kv.values,
            block_table,
            row_slot,
            row_position,
            self._paths,
            out,
            self._nodes_per_tree,
            key_scale=kv.key_scale,
            value_scale=kv.value_scale,
            window=window,
            scale=scale,
            sinks=sinks,
        )


class ChunkAttention:
    """Attention of chunks of prompts, cut into `tiles` [num_tiles, 4] (see `prefill_tiles`)."""

    def __init__(self, tiles: Tensor, config: ExactPrefillConfig) -> None:
        self._tiles, self._config = tiles, config

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        """Nothing: the tiles come from the host."""

    def attend(
        self,
        query: Tensor,
        kv: LayerKV,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        exact_prefill_attention(
            query,
            kv.keys,
            kv.values,
            block_table,
            self._tiles,
            out,
            self._config,
            Partitions.of_window(window),
            key_scale=kv.key_scale,
            value_scale=kv.value_scale,
            window=window,
            scale=scale,
            sinks=sinks,
        )


class MixedAttention:
    """Attention of `num_chunk_rows` rows of prompts, followed by the newest row of each of some sequences."""

    def __init__(self, chunks: ChunkAttention, sequences: SequenceAttention, num_chunk_rows: int) -> None:
        self._chunks, self._sequences, self._num_chunk_rows = chunks, sequences, num_chunk_rows

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        first = self._num_chunk_rows
        self._sequences.plan(row_slot[first:], row_position[first:])

    def attend(
        self,
        query: Tensor,
        kv: LayerKV,
        block_table: Tensor,
        row_slot: Tensor,
        row_position: Tensor,
        out: Tensor,
        *,
        window: int = 0,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        first = self._num_chunk_rows
        chunks, sequences = slice(first), slice(first, None)
        for attention, rows in ((self._sequences, sequences), (self._chunks, chunks)):
            attention.attend(
                query[rows],
                kv,
                block_table,
                row_slot[rows],
                row_position[rows],
                out[rows],
                window=window,
                scale=scale,
                sinks=sinks,
            )
