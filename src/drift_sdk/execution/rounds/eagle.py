"""An EAGLE-3 draft on the device: chains of drafted tokens, within the graphs that verify them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.attention.prefill_attention import prefill_attention, prefill_attention_config
from drift_sdk._kernels.common.launch_order import note_library_kernel
from drift_sdk._kernels.draft.draft_choose import choose_drafts, num_draft_chunks
from drift_sdk._kernels.draft.draft_rows import chunk_rows, round_rows
from drift_sdk._kernels.draft.draft_state import keep_last_rows
from drift_sdk._kernels.draft.draft_tiles import draft_tiles, num_draft_tiles
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.embedding import embed_norm
from drift_sdk._kernels.layers.residual_norm import add_norm
from drift_sdk._kernels.slots.slot_columns import SlotColumns
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.decode import Rows
from drift_sdk.execution.forward.draft import Attend, DraftForward
from drift_sdk.execution.forward.draft_kv_cache import DraftKVCache
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["EagleRounds"]


class EagleRounds:
    """What `EagleDrafter` does, for slots and rows that only the device knows.

    A round of B slots with K drafts each has T = K + 1 rows a slot: row b * T its newest token, the others
    the drafts behind it, as far as the slot has use for them. `aux_layers`: as of DraftDecoder.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        target: Decoder,
        limits: ExecutorLimits,
        block_table: Tensor,
        columns: SlotColumns,
        workspace: Workspace,
        tuned: TunedTable,
        *,
        max_num_slots: int,
        max_draft_tokens: int,
        max_prefill_rows: int,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """block_table [S, max_blocks] int32. max_num_slots, max_draft_tokens: of a round. max_prefill_rows:
        of a prefill step."""
        config = draft.config
        self.aux_layers: Sequence[int] = draft.aux_layers
        self.cache = DraftKVCache(draft, limits, limits.max_num_seqs)
        self._draft, self._target, self._block_table = draft, target, block_table
        self._columns, self._workspace, self._stages = columns, workspace, stages
        self._max_num_slots, self._max_draft_tokens = max_num_slots, max_draft_tokens
        self._target_ids = draft.target_ids.to(torch.int32)
        self._forward = DraftForward(draft, self.cache, block_table, workspace, tuned, stages)
        self._attention = AttentionGroups(
            workspace,
            draft.device,
            num_sequences=max_num_slots,
            num_rows=max_draft_tokens + 1,
            num_kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            max_num_keys=self.cache.num_places,
        )
        self._prefill = prefill_attention_config(config.head_dim, draft.dtype)
        most = max(max_num_slots * (max_draft_tokens + 1), max_prefill_rows + limits.max_num_seqs)
        for name, size in (("draft_inputs", 2 * config.hidden_size), ("draft_hidden", config.hidden_size)):
            workspace.take(name, (most, size), draft.dtype)

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        """Write the drafted tokens to rows.token: of row b * T + j, j from 1, unless its slot is -1."""
        num_rows_each = self._rows_per_slot(rows, num_slots, num_draft_tokens)
        if num_draft_tokens == 0:
            return

        weights, forward = self._draft.weights, self._forward
        drafted = self._rows(num_slots)
        hidden, normed = forward.hidden(num_slots), forward.normed(num_slots)
        drafted.slot.copy_(rows.slot.view(num_slots, num_rows_each)[:, 1])
        note_library_kernel(drafted.slot)
        eps = self._draft.config.rms_norm_eps
        with self._stages("draft_lm_head"):
            embed_norm(
                drafted.slot, drafted.slot, self.cache.outputs, weights.final_norm, hidden, normed, eps=eps
            )
            if self._draft.config.is_output_normed:
                normed.copy_(hidden)
        shape = (num_slots, num_draft_chunks(weights.head.shape[0]))
        chunks = (
            self._workspace.take("draft_chunk_value", shape, torch.float32),
            self._workspace.take("draft_chunk_token", shape, torch.int32),
        )
        for depth in range(1, num_draft_tokens + 1):
            with self._stages("draft_lm_head"):
                choose_drafts(
                    forward.multiply(normed, weights.head),
                    self._target_ids,
                    rows.slot,
                    rows.token,
                    rows.position,
                    self._columns.temperature,
                    self._columns.seed,
                    chunks,
                    (drafted.slot, drafted.token, drafted.position),
                    depth=depth,
                )
            if depth < num_draft_tokens:
                # The next row pairs what the draft itself made with the token it chose.
                with self._stages("draft_attention"):
                    attend = self._few_rows(drafted, 1)
                forward.run(drafted, forward.output(num_slots), attend, is_fused=False)

    def draft_extend(
        self,
        rows: Rows,
        *,
        num_slots: int,
        num_draft_tokens: int,
        aux_hidden: Sequence[Tensor],
        hidden: Tensor,
        chosen: Tensor,
        emitted: Tensor,
    ) -> None:
        """Take in the rows of a round that turned out true: of slot b the first emitted[b].

        captured: [R, target_hidden] at each boundary; hidden likewise after the last layer, none normalised.
        chosen [R], emitted [B] int32: the token behind each row; how many each slot emitted, 0 for padding.
        """
        num_rows_each = self._rows_per_slot(rows, num_slots, num_draft_tokens)
        true = self._rows(rows.slot.shape[0])
        round_rows(rows.slot, rows.position, chosen, emitted, (true.slot, true.token, true.position))
        attend = self._few_rows(true, num_rows_each)
        self._forward.run(true, self._fuse(aux_hidden, hidden), attend, is_fused=True)
        keep_last_rows(true.slot, self._forward.output(rows.slot.shape[0]), self.cache.outputs)

    def follow_prefill(
        self,
        rows: Rows,
        *,
        next_token: Tensor,
        hits: Tensor,
        last_token: Tensor,
        aux_hidden: Sequence[Tensor],
        hidden: Tensor,
    ) -> None:
        """Take in the rows [N] of a prefill step, a slot's together, slot -1 for padding.

        next_token [N] int32: what follows each row; -1: the sampled token, the slot's last_token [S].
        hits [C] int32, C at least the number of chunks: the first row of each chunk whose predecessor no
        step has computed, because it came from the prefix cache; -1: none.
        captured, hidden [N, target_hidden]: as of `draft_extend`.
        """
        num_rows, num_hits = rows.slot.shape[0], hits.shape[0]
        true = self._rows(num_rows + num_hits)
        out = (true.slot, true.token, true.position)
        chunk_rows(rows.slot, rows.token, rows.position, next_token, hits, last_token, out)
        attend = self._many_rows(true, num_hits)
        self._forward.run(true, self._fuse(aux_hidden, hidden), attend, is_fused=True)
        output = self._forward.output(num_rows + num_hits)
        keep_last_rows(true.slot[:num_rows], output[:num_rows], self.cache.outputs)

    def _rows_per_slot(self, rows: Rows, num_slots: int, num_draft_tokens: int) -> int:
        num_rows = rows.slot.shape[0]
        is_known = num_slots <= self._max_num_slots and num_draft_tokens <= self._max_draft_tokens
        if not is_known or num_rows != num_slots * (num_draft_tokens + 1):
            raise ValueError(
                f"{num_rows} rows of {num_slots} slots with {num_draft_tokens} drafts each: expected all "
                f"rows of at most {self._max_num_slots} slots with at most {self._max_draft_tokens}"
            )

        return num_draft_tokens + 1

    def _rows(self, num_rows: int) -> Rows:
        def take(name: str) -> Tensor:
            return self._workspace.take(f"draft_row_{name}", (num_rows,), torch.int32)

        return Rows(slot=take("slot"), token=take("token"), position=take("position"))

    def _fuse(self, aux_hidden: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Features of rows [R, target_hidden], as `draft_inputs` takes them; DraftDecoder.fuse in kernels."""
        draft, weights, num_rows = self._draft, self._draft.weights, hidden.shape[0]
        eps, width = draft.config.rms_norm_eps, draft.config.target_hidden_size
        shape = (num_rows, width * max(len(self.aux_layers), 1))
        features = self._workspace.take("draft_features", shape, draft.dtype)
        if weights.fc is None:
            final_norm, target_eps = self._target.weights.final_norm, self._target.config.rms_norm_eps
            add_norm(hidden, None, final_norm, features, eps=target_eps)
            return features

        if weights.feature_norms:
            for index, (tensor, norm) in enumerate(zip(aux_hidden, weights.feature_norms, strict=True)):
                part = features[:, index * width : (index + 1) * width]
                add_norm(tensor, None, norm, part, eps=eps)
        else:
            torch.cat(tuple(aux_hidden), dim=1, out=features)
            note_library_kernel(features)
        if weights.input_norm is not None:
            add_norm(features, None, weights.input_norm, features, eps=eps)

        return self._forward.multiply(features, weights.fc)

    def _few_rows(self, rows: Rows, rows_per_slot: int) -> Attend:
        self._attention.plan(rows.slot, rows.position, rows_per_slot)

        def attend(query: Tensor, keys: Tensor, values: Tensor, attended: Tensor) -> None:
            self._attention.attend(
                query,
                keys,
                values,
                self._block_table,
                rows.slot,
                rows.position,
                attended,
                rows_per_slot,
                first_key=DRAFT_KV_OFFSET,
            )

        return attend

    def _many_rows(self, rows: Rows, num_hits: int) -> Attend:
        tile_rows = self._prefill.tile_rows
        num_tiles = num_draft_tiles(rows.slot.shape[0] - num_hits, num_hits, tile_rows)
        tiles = self._workspace.take("draft_tiles", (num_tiles, 4), torch.int32)
        draft_tiles(rows.slot, rows.position, tiles, num_single=num_hits, tile_rows=tile_rows)

        def attend(query: Tensor, keys: Tensor, values: Tensor, attended: Tensor) -> None:
            prefill_attention(
                query,
                keys,
                values,
                self._block_table,
                tiles,
                attended.flatten(1),
                self._prefill,
                first_key=DRAFT_KV_OFFSET,
            )

        return attend
