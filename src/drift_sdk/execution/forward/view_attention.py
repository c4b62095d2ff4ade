"""Attention of rounds that verify over a part of the KV cache, and of those that choose this part."""

from __future__ import annotations

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk._kernels.views import Retrieval, block_shares, select_blocks, view_blocks
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
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
        num_layers, num_slots = decoder.spec.num_layers, table.block_table.shape[0]

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
    """Attention of rows, equally many of each sequence, to the keys of its views.

    Raises ValueError for groups that look for shared prefixes: sequences that share blocks have views of
    their own.
    """

    def __init__(
        self,
        groups: AttentionGroups,
        rows: PlannedRows,
        views: Views,
        block_table: Tensor,
        workspace: Workspace,
    ) -> None:
        if groups.shares_prefixes:
            raise ValueError("groups: expected some that look for no shared prefixes")

        self._groups, self._rows, self._views, self._block_table = groups, rows, views, block_table
        position = workspace.take("view_positions", (rows.slot.shape[0],), torch.int32)
        self._view_rows = replace(rows, position=position)

    def plan(self) -> None:
        view_blocks(
            self._rows.slot,
            self._rows.position,
            self._block_table,
            self._views.retrieval,
            self._views.tables,
            self._view_rows.position,
            self._views.layout,
            rows_per_sequence=self._rows.rows_per_sequence,
        )
        self._groups.plan(self._view_rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend(replace(layer, block_table=self._views.tables[layer.index]), self._view_rows)


class RefreshAttention:
    """Attention of a refresh's rows to all keys of their sequences. In each layer it also chooses the blocks
    of views, from the queries of the round's rows, which are the last of each sequence."""

    def __init__(
        self,
        groups: AttentionGroups,
        rows: PlannedRows,
        round_rows: PlannedRows,
        views: Views,
        decoder: Decoder,
        max_blocks: int,
        workspace: Workspace,
    ) -> None:
        """rows: those of tiles as sequences, see `ViewLayout.refresh_tiles`. max_blocks: of a block table."""
        self._groups, self._rows, self._round_rows, self._views = groups, rows, round_rows, views
        attention = decoder.spec.attention
        shape = (round_rows.num_sequences, attention.num_kv_heads, max_blocks)
        num_query_rows = round_rows.rows_per_sequence * attention.group
        self._sums = workspace.take("block_sums", (*shape, num_query_rows), torch.float32)
        self._shares = workspace.take("block_shares", shape, torch.float32)

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend(layer, self._rows)
        rows, views = self._round_rows, self._views
        block_shares(
            layer.query,
            layer.kv.keys,
            layer.block_table,
            rows.slot,
            rows.position,
            self._sums,
            self._shares,
            num_sequences=rows.num_sequences,
            scale=layer.scale,
        )
        selected = views.retrieval.selected[layer.index]
        select_blocks(self._shares, rows.slot, rows.position, selected, views.layout)
