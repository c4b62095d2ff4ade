"""The drafter of the graph executor that decodes with a small model, within the graphs that verify drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.attention.prefill import prefill_attention_config
from drift_sdk._kernels.draft.draft_choose import choose_drafts, num_draft_chunks
from drift_sdk._kernels.draft.draft_rows import (
    chunk_rows,
    draft_tiles,
    keep_last_rows,
    num_draft_tiles,
    round_rows,
)
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.forward.attention import AttentionGroups, FastChunkAttention, SequenceAttention
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.forward_pass import ForwardPass, ResidualStream, exact_pass, fast_pass
from drift_sdk.execution.forward.products import multiply_head
from drift_sdk.execution.forward.rows import HiddenStates, LayerBuffers, Rows
from drift_sdk.execution.rounds.drafter import ComputedChunks, RoundSizes, VerifiedRows
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.decoder import Decoder


class ModelRoundDrafter:
    """A `RoundDrafter` that computes what `ModelDrafter` does, for slots and rows known only to the device.

    kv_cache: the small model's keys and values, in the target's blocks.
    """

    aux_layers: Sequence[int] = ()
    is_ngram: Tensor | None = None

    def __init__(
        self,
        draft: Decoder,
        target: ModelResources,
        table: SlotTable,
        workspace: Workspace,
        sizes: RoundSizes,
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """sizes: of the largest round and the largest prefill step."""
        limits, spec = target.limits, draft.spec
        self.kv_cache = PagedKVCache(draft, limits)
        self._model = ModelResources(decoder=draft, cache=self.kv_cache, tuned=target.tuned, limits=limits)
        self._table, self._workspace, self._stages = table, workspace, stages
        self._attention = AttentionGroups.of_model(
            self._model,
            workspace,
            table.block_table,
            num_sequences=sizes.max_num_slots,
            num_rows=sizes.max_draft_tokens + 1,
        )
        self._prefill = prefill_attention_config(spec.max_head_dim, draft.dtype)
        # A prefill step has one more row for each chunk that begins a sequence or follows a prefix hit.
        most = max(
            sizes.max_num_slots * (sizes.max_draft_tokens + 1), sizes.max_prefill_rows + limits.max_num_seqs
        )
        self._hidden = HiddenStates.take(workspace, "draft_model", draft, most, ())
        shape = (limits.max_num_seqs, spec.hidden_size)
        self._outputs = torch.empty(shape, dtype=draft.dtype, device=draft.device)  # of newest tokens
        self._token_ids = torch.arange(spec.vocab_size, dtype=torch.int32, device=draft.device)

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        drafted = self._take_rows(num_slots)
        drafted.slot.copy_(rows.slot.view(num_slots, num_draft_tokens + 1)[:, 1])
        note_library_kernel(drafted.slot)
        hidden = self._hidden.first(num_slots)
        normed = LayerBuffers.take(self._workspace, self._model.decoder, num_slots).normed
        with self._stages("draft_lm_head"):
            stream = ResidualStream(self._model.decoder, hidden, normed)
            stream.gather(self._outputs, drafted.slot, drafted.slot)
        for depth in range(1, num_draft_tokens + 1):
            with self._stages("draft_lm_head"):
                self._choose(normed, rows, drafted, depth)
            if depth < num_draft_tokens:
                with self._stages("draft_model"):
                    forward = self._few_rows(drafted, hidden, 1)
                    forward.run()
                normed = forward.normed

    def draft_extend(self, verified: VerifiedRows) -> None:
        # The rows of emitted tokens: those of the round, one position further.
        rows, num_rows = verified.rows, verified.chosen.shape[0]
        new = self._take_rows(num_rows)
        out = (new.slot, new.token, new.position)
        round_rows(rows.slot, rows.position, verified.chosen, verified.emitted, out)
        states = self._hidden.first(num_rows)
        self._few_rows(new, states, verified.num_draft_tokens + 1).run()
        keep_last_rows(new.slot, states.final, self._outputs)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows, hits = chunks.rows, chunks.hits
        num_rows, num_hits = rows.slot.shape[0], hits.shape[0]
        new = self._take_rows(num_rows + num_hits)
        out = (new.slot, new.token, new.position)
        after = (chunks.next_token, hits, chunks.last_token)
        chunk_rows(rows.slot, rows.token, rows.position, *after, out)
        tile_rows = self._prefill.tile_rows
        num_tiles = num_draft_tiles(num_rows, num_hits, tile_rows)
        tiles = self._workspace.take("draft_model_tiles", (num_tiles, 4), torch.int32)
        draft_tiles(new.slot, new.position, tiles, num_single=num_hits, tile_rows=tile_rows)
        states, block_table = self._hidden.first(num_rows + num_hits), self._table.block_table
        attention = FastChunkAttention(tiles, self._prefill)
        fast_pass(self._model, new, block_table, self._workspace, attention, states).run()
        keep_last_rows(new.slot[:num_rows], states.final[:num_rows], self._outputs)

    def _choose(self, normed: Tensor, rows: Rows, drafted: Rows, depth: int) -> None:
        """Choose the drafts of a depth from the normalised outputs [B, H] for the tokens before them."""
        draft, columns = self._model.decoder, self._table.columns
        num_slots, vocab_size = normed.shape[0], draft.spec.vocab_size
        logits = self._workspace.take("draft_model_logits", (1, num_slots, vocab_size), torch.float32)
        multiply_head(normed, draft.weights.head, logits[0], self._model.tuned, draft.spec.logits_cap)
        num_chunks = num_draft_chunks(vocab_size)
        chunks = (
            self._workspace.take("draft_model_chunk_value", (num_slots, num_chunks), torch.float32),
            self._workspace.take("draft_model_chunk_token", (num_slots, num_chunks), torch.int32),
        )
        choose_drafts(
            logits,
            self._token_ids,
            rows.slot,
            rows.token,
            rows.position,
            columns.temperature,
            columns.seed,
            chunks,
            (drafted.slot, drafted.token, drafted.position),
            depth=depth,
        )

    def _few_rows(self, rows: Rows, hidden: HiddenStates, rows_per_slot: int) -> ForwardPass:
        """The forward pass of `rows_per_slot` rows of each slot."""
        attention = SequenceAttention(self._attention, rows.planned(rows_per_slot))
        return exact_pass(self._model, rows, self._table.block_table, self._workspace, attention, hidden)

    def _take_rows(self, num_rows: int) -> Rows:
        """Uninitialised rows of the small model."""

        def take(name: str) -> Tensor:
            return self._workspace.take(f"draft_model_row_{name}", (num_rows,), torch.int32)

        return Rows(slot=take("slot"), token=take("token"), position=take("position"))
