"""Attention of rounds that verify over a part of the KV cache, and of those that choose this part."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.retrieval.block_shares import block_shares
from drift_sdk._kernels.retrieval.select_blocks import select_blocks
from drift_sdk._kernels.retrieval.view import Retrieval, view_blocks
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.kv_cache import LayerKV
from drift_sdk.models.decoder import Decoder
from drift_sdk.partial_verification import ViewLayout

__all__ = ["RefreshAttention", "ViewAttention", "Views"]


class Views(Struct, frozen=True, kw_only=True):
    """The views of all slots. tables [L, S, layout.num_blocks] int32: block tables of each layer, which each
    partial round makes for its slots."""

    layout: ViewLayout
    retrieval: Retrieval
    tables: Tensor

    @classmethod
    def allocate(cls, layout: ViewLayout, decoder: Decoder, table: SlotTable) -> Views:
        """The state of a table's slots, for a model."""
        num_layers, num_slots = decoder.config.num_layers, table.block_table.shape[0]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=decoder.device)

        return cls(
            layout=layout,
            retrieval=Retrieval(
                dropped=table.dropped,
                pending=table.pending,
                pending_token=zeros(num_slots, layout.refresh_tokens),
                selected=zeros(num_layers, num_slots, layout.num_retrieved),
            ),
            tables=zeros(num_layers, num_slots, layout.num_blocks),
        )


class ViewAttention:
    """Attention of `rows_per_sequence` rows of each sequence to the keys of its views."""

    def __init__(
        self,
        groups: AttentionGroups,
        views: Views,
        block_table: Tensor,
        workspace: Workspace,
        *,
        num_sequences: int,
        rows_per_sequence: int,
    ) -> None:
        self._groups, self._views, self._block_table = groups, views, block_table
        self._rows_per_sequence = rows_per_sequence
        self._position = workspace.take("view_positions", (num_sequences * rows_per_sequence,), torch.int32)

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        view_blocks(
            row_slot,
            row_position,
            self._block_table,
            self._views.retrieval,
            self._views.tables,
            self._position,
            self._views.layout,
            rows_per_sequence=self._rows_per_sequence,
        )
        self._groups.plan(row_slot, self._position, self._rows_per_sequence)

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
            self._views.tables[kv.index],
            row_slot,
            self._position,
            out,
            self._rows_per_sequence,
            window=window,
            scale=scale,
            sinks=sinks,
        )


class RefreshAttention:
    """Attention of a refresh's rows to all keys of their sequences. In each layer it also chooses the blocks
    of views, from the queries of the round's rows.

    A sequence has `num_tiles` tiles of `rows_per_tile` rows each; the last of them are those of the round.
    """

    def __init__(
        self,
        groups: AttentionGroups,
        views: Views,
        round_slot: Tensor,
        round_position: Tensor,
        workspace: Workspace,
        *,
        num_sequences: int,
        rows_per_tile: int,
        num_kv_heads: int,
        group: int,
        max_blocks: int,
    ) -> None:
        """groups: for tiles as sequences. round_slot, round_position [B * T]: of the round's rows. group:
        query heads that share a KV head. max_blocks: of a block table.

        Takes more parameters than other constructors: sizes of its scratch memory.
        """
        self._groups, self._views, self._rows_per_tile = groups, views, rows_per_tile
        self._round_slot, self._round_position = round_slot, round_position
        self._num_sequences = num_sequences
        shape = (num_sequences, num_kv_heads, max_blocks)
        num_query_rows = len(round_slot) // num_sequences * group
        self._sums = workspace.take("block_sums", (*shape, num_query_rows), torch.float32)
        self._shares = workspace.take("block_shares", shape, torch.float32)

    def plan(self, row_slot: Tensor, row_position: Tensor) -> None:
        self._groups.plan(row_slot, row_position, self._rows_per_tile)

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
            self._rows_per_tile,
            window=window,
            scale=scale,
            sinks=sinks,
        )
        block_shares(
            query,
            kv.keys,
            block_table,
            self._round_slot,
            self._round_position,
            self._sums,
            self._shares,
            num_sequences=self._num_sequences,
            scale=scale,
        )
        select_blocks(
            self._shares,
            self._round_slot,
            self._round_position,
            self._views.retrieval.selected[kv.index],
            self._views.layout,
        )
