"""Attention of a step's rows, for rows that are decoded or verified and for rows of prompts. Both sum in the
same order, so a row's bits do not depend on which of them it goes through."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk._kernels.attention.prefill import PrefillAttentionConfig, has_cuda_prefill, prefill_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk.execution.forward.attention_groups import AttentionGroups

__all__ = [
    "ChunkAttention",
    "FastChunkAttention",
    "MixedAttention",
    "RowAttention",
    "SequenceAttention",
    "TreeAttention",
]


class RowAttention(Protocol):
    """Attention of a step's rows to the keys that they see."""

    def plan(self) -> None:
        """Prepare for the rows; once a step, before any layer calls `attend`."""

    def attend(self, layer: LayerAttention) -> None:
        """Fill `layer.out` for all rows."""


class SequenceAttention:
    """Attention of some rows of each sequence, to be decoded or verified."""

    def __init__(self, groups: AttentionGroups, rows: PlannedRows) -> None:
        self._groups, self._rows = groups, rows

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention, *, beside_chunks: bool = False) -> None:
        self._groups.attend(layer, self._rows, beside_chunks=beside_chunks)


class TreeAttention:
    """Attention of some nodes of each tree, to be verified or drafted further."""

    def __init__(self, groups: AttentionGroups, rows: PlannedRows, paths: TreePaths) -> None:
        self._groups, self._rows, self._paths = groups, rows, paths

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend_trees(layer, self._rows, self._paths)


class ChunkAttention:
    """Attention of chunks of prompts, cut into `tiles` [num_tiles, 4] (see `prefill_tiles`)."""

    def __init__(self, tiles: Tensor, config: ExactPrefillConfig) -> None:
        self._tiles, self._config = tiles, config

    def plan(self) -> None:
        """Nothing: the tiles come from the host."""

    def attend(self, layer: LayerAttention) -> None:
        exact_prefill_attention(layer, self._tiles, self._config, Partitions.of_window(layer.window))

    def permits_early_start(self, layer: LayerAttention) -> bool:
        """Return True if the launch after `attend` may start while the kernel of `attend` still runs."""
        return has_cuda_prefill(layer, self._config.tile_rows, Partitions.of_window(layer.window))


class FastChunkAttention:
    """Attention of chunks of prompts, cut into `tiles` [num_tiles, 4], with other bits than decoding."""

    def __init__(self, tiles: Tensor, config: PrefillAttentionConfig) -> None:
        self._tiles, self._config = tiles, config

    def plan(self) -> None:
        """Nothing: the tiles come from the host."""

    def attend(self, layer: LayerAttention) -> None:
        prefill_attention(layer, self._tiles, self._config)


class MixedAttention:
    """Attention of `num_chunk_rows` rows of prompts, followed by rows of sequences."""

    def __init__(self, chunks: ChunkAttention, sequences: SequenceAttention, num_chunk_rows: int) -> None:
        self._chunks, self._sequences, self._num_chunk_rows = chunks, sequences, num_chunk_rows

    def plan(self) -> None:
        self._sequences.plan()

    def attend(self, layer: LayerAttention) -> None:
        """The launch for chunks has to come directly before the one for sequences, which may start beside it:
        that one reads queries and keys before it waits."""
        chunk_layer = layer.of_rows(slice(self._num_chunk_rows))
        self._chunks.attend(chunk_layer)
        self._sequences.attend(
            layer.of_rows(slice(self._num_chunk_rows, None)),
            beside_chunks=self._chunks.permits_early_start(chunk_layer),
        )
