"""The steps an executor replays: one graph for each kind of step and each bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.attention.prefill_attention import prefill_attention_config
from drift_sdk._kernels.commit.simulated_commit import SimulatedRounds
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.embedding import embed_norm
from drift_sdk._kernels.sampling.sample_buffers import SampleBuffers
from drift_sdk._kernels.sampling.token_counts import count_tokens
from drift_sdk._kernels.slots.gather_rows import gather_rows
from drift_sdk._kernels.slots.input_ring import advance, enter
from drift_sdk.execution.device.device import Device, Replay
from drift_sdk.execution.device.ring import Ring
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.decode import DecodeForward, Rows, attention_groups, aux_buffers
from drift_sdk.execution.forward.draft_kv_cache import DraftKVCache
from drift_sdk.execution.forward.kv_cache import PagedKVCache
from drift_sdk.execution.forward.prefill import PrefillForward
from drift_sdk.execution.graph.buckets import EXACT_TILE_ROWS, GraphBuckets
from drift_sdk.execution.rounds.drafter import RoundDrafter
from drift_sdk.execution.rounds.eagle import EagleRounds
from drift_sdk.execution.rounds.ngram import NGramRounds
from drift_sdk.execution.rounds.round import RoundSteps
from drift_sdk.execution.rounds.sample_commit import SampleCommit
from drift_sdk.execution.stages import StageMarks
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.speculation import NGram
from drift_sdk.steps import ExecutorLimits

__all__ = ["CapturedGraphs", "FitBlocks"]

PREFILL_HIDDEN, PREFILL_AUX_HIDDEN = "prefill_hidden", "prefill_aux_hidden"

FitBlocks = Callable[[int], int]
"""How many KV blocks there is room for beside so many graphs, once everything else has its memory."""
Report = Callable[[str, float], None]
Step = Callable[[], None]


class CapturedGraphs:
    """All graphs of an executor, captured when made, largest first. Before that the largest steps are run
    once, so that the KV cache can be given what is left of the memory.

    update: makes updates and nothing else. decode[B, K]: a round of B slots with K drafts each; draft[B, K]
    and verify[B, K]: its halves, if there is a drafter and K is not 0. prefill[N]: chunks of N tokens.
    head[B]: samples behind the last rows of B finished prompts, from `prefill_hidden`. follow[N]: what a
    drafter takes in of a prefill step, behind its head.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        limits: ExecutorLimits,
        layout: GraphBuckets,
        table: SlotTable,
        ring: Ring,
        tuned: TunedTable,
        *,
        draft: DraftDecoder | NGram | None,
        fit_blocks: FitBlocks,
        report: Report,
        acceptance_trace: Sequence[int] | None,
        stages: StageMarks,
    ) -> None:
        self._device, self._decoder, self._table, self._ring = device, decoder, table, ring
        self._layout, self._tuned, self._stages = layout, tuned, stages
        torch_device = device.torch_device
        self._simulated: SimulatedRounds | None = None
        if acceptance_trace is not None:
            self._simulated = SimulatedRounds(
                trace=torch.tensor(acceptance_trace, dtype=torch.int32, device=torch_device),
                num_rounds=torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=torch_device),
            )
        self._workspace = Workspace(torch_device)
        self._cache = PagedKVCache(decoder, limits)
        self._caches: list[PagedKVCache | DraftKVCache] = [self._cache]
        self._inbox = torch.full((layout.payload_words,), -1, dtype=torch.int32, device=torch_device)
        self._samples = SampleBuffers.allocate(layout.max_rows, limits.vocab_size, torch_device)
        most = layout.prefill[-1]
        shape = (most, decoder.config.hidden_size)
        self.prefill_hidden = self._workspace.take(PREFILL_HIDDEN, shape, decoder.dtype)
        # Who needs most takes first: partial sums of all steps lie in one piece of memory.
        self._exact: AttentionGroups | None = None
        if layout.is_exact:
            num_tiles = most // EXACT_TILE_ROWS
            self._exact = attention_groups(
                decoder, limits, self._workspace, num_sequences=num_tiles, num_rows=EXACT_TILE_ROWS
            )
        self._attention = attention_groups(
            decoder,
            limits,
            self._workspace,
            num_sequences=layout.decode[-1],
            num_rows=layout.max_rows_per_slot,
        )

        self._drafter = self._open_drafter(draft, limits)
        self.prefill: dict[int, Replay] = {}
        self.draft_extend: dict[int, Replay] = {}
        self.decode: dict[tuple[int, int], Replay] = {}
        self.draft: dict[tuple[int, int], Replay] = {}
        self.verify: dict[tuple[int, int], Replay] = {}
        self.head: dict[int, Replay] = {}
        self._replays: list[Replay] = []
        num_prefills = len(layout.prefill) * (1 if draft is None else 2)
        num_rounds = len(layout.drafts) + 2 * (len(layout.drafts) - 1)
        self._num_steps = num_prefills + len(layout.decode) * (1 + num_rounds) + 1
        self._report = report
        self._warm_up()
        num_blocks = fit_blocks(self._num_steps)
        with device.work():
            for cache in self._caches:
                cache.allocate(num_blocks)
        for size in reversed(layout.prefill):
            self.prefill[size] = self._capture(self._prefill_step(size))
            if self._drafter is not None:
                self.draft_extend[size] = self._capture(self._draft_extend_step(size, self._drafter))
        for num_slots in reversed(layout.decode):
            for num_drafts in reversed(layout.drafts):
                self._capture_round(num_slots, num_drafts)
        for num_slots in reversed(layout.decode):
            self.head[num_slots] = self._capture(self._head_step(num_slots))
        self.update = self._capture(self._update_step)
        with device.work():
            ring.reset()

    def close(self) -> None:
        for replay in self._replays:
            replay.close()

    def _warm_up(self) -> None:
        """Run the largest step of each kind: later ones need no memory that these have not taken."""
        layout = self._layout
        self._report("warm up", 0.0)
        steps = [self._prefill_step(layout.prefill[-1])]
        if self._drafter is not None:
            steps.append(self._draft_extend_step(layout.prefill[-1], self._drafter))
        steps.append(self._round_steps(layout.decode[-1], layout.drafts[-1]).whole)
        steps.append(self._head_step(layout.decode[-1]))
        for step in steps:
            self._device.warm_up(step)

    def _capture(self, step: Step) -> Replay:
        self._report("capture graphs", len(self._replays) / self._num_steps)
        self._replays.append(self._stages.capture(self._device, step))
        return self._replays[-1]

    def _enter(self, num_words: int) -> None:
        ring = self._ring
        inbox = self._inbox[:num_words]
        enter(
            ring.input, ring.next_index, ring.current, inbox, self._table.words, max_updates=ring.max_updates
        )

    def _advance(self) -> None:
        advance(self._ring.next_index, len(self._ring.input))

    def _update_step(self) -> None:
        self._enter(0)
        self._advance()

    def _capture_round(self, num_slots: int, num_drafts: int) -> None:
        steps = self._round_steps(num_slots, num_drafts)
        self.decode[num_slots, num_drafts] = self._capture(steps.whole)
        if self._drafter is not None and num_drafts > 0:
            self.draft[num_slots, num_drafts] = self._capture(steps.draft)
            self.verify[num_slots, num_drafts] = self._capture(steps.verify)

    def _round_steps(self, num_slots: int, num_drafts: int) -> RoundSteps:
        rows_per_slot = num_drafts + 1
        rows = Rows.take(self._workspace, num_slots * rows_per_slot)
        slots, max_drafts = self._inbox[: 2 * num_slots].view(2, num_slots)
        return RoundSteps(
            num_drafts=num_drafts,
            enter=self._enter,
            slots=slots,
            max_drafts=max_drafts,
            state=self._table.state,
            ring=self._ring,
            rows=rows,
            forward=self._decode_forward(rows, self._attention, "hidden", rows_per_slot),
            head=self._token_head(rows, rows_per_slot),
            drafter=self._drafter,
            stages=self._stages,
        )

    def _head_step(self, num_slots: int) -> Step:
        """Payload: slots, then the row of each one's last prompt token in the prefill step."""
        rows = Rows.take(self._workspace, num_slots)
        slots, sources = self._inbox[: 2 * num_slots].view(2, num_slots)
        shape = (num_slots, self._decoder.config.hidden_size)
        hidden = self._workspace.take("hidden", shape, self._decoder.dtype)
        normed = self._workspace.take("normed", shape, self._decoder.dtype)
        head = self._token_head(rows, 1)
        weights, eps = self._decoder.weights, self._decoder.config.rms_norm_eps

        def step() -> None:
            self._enter(2 * num_slots)
            gather_rows(slots, sources, self._table.state, rows.slot, rows.token, rows.position)
            embed_norm(sources, rows.slot, self.prefill_hidden, weights.final_norm, hidden, normed, eps=eps)
            head.run(normed)

        return step

    def _prefill_step(self, num_rows: int) -> Step:
        layout, table = self._layout, self._table
        token, slot, position = self._inbox[: 3 * num_rows].view(3, num_rows)
        rows = Rows(slot=slot, token=token, position=position)
        forward: DecodeForward | PrefillForward
        if self._exact is not None:
            forward = self._decode_forward(rows, self._exact, PREFILL_HIDDEN, EXACT_TILE_ROWS)
        else:
            num_tiles = layout.num_tiles(num_rows)
            tiles = self._inbox[3 * num_rows : layout.prefill_words(num_rows)].view(num_tiles, 4)
            attention = prefill_attention_config(self._decoder.config.head_dim, self._decoder.dtype)
            forward = PrefillForward(
                self._decoder,
                self._cache,
                table.block_table,
                rows,
                tiles,
                self._workspace,
                attention,
                self._aux_layers,
            )

        def step() -> None:
            self._enter(layout.prefill_words(num_rows))
            count_tokens(slot, token, position, table.columns)
            forward.run()
            self._advance()

        return step

    def _draft_extend_step(self, num_rows: int, drafter: RoundDrafter) -> Step:
        """What the drafter takes in of a prefill step, once the tokens behind its rows are known."""
        layout = self._layout
        token, slot, position, next_token = self._inbox[: 4 * num_rows].view(4, num_rows)
        hits = self._inbox[4 * num_rows : layout.follow_words(num_rows)]
        rows = Rows(slot=slot, token=token, position=position)
        size, dtype = self._decoder.config.hidden_size, self._decoder.dtype
        aux_hidden = aux_buffers(self._workspace, PREFILL_AUX_HIDDEN, self._aux_layers, num_rows, size, dtype)

        def step() -> None:
            self._enter(layout.follow_words(num_rows))
            drafter.follow_prefill(
                rows,
                next_token=next_token,
                hits=hits,
                last_token=self._table.state.last_token,
                aux_hidden=[aux_hidden[aux_layer] for aux_layer in self._aux_layers],
                hidden=self.prefill_hidden[:num_rows],
            )
            self._advance()

        return step

    @property
    def _aux_layers(self) -> Sequence[int]:
        return self._drafter.aux_layers if self._drafter is not None else ()

    def _open_drafter(
        self, draft: DraftDecoder | NGram | None, limits: ExecutorLimits
    ) -> RoundDrafter | None:
        if draft is None:
            return None

        table, layout = self._table, self._layout
        if isinstance(draft, NGram):
            return NGramRounds(
                table.history, self._workspace, min_length=draft.min_length, max_length=draft.max_length
            )

        rounds = EagleRounds(
            draft,
            self._decoder,
            limits,
            table.block_table,
            table.columns,
            self._workspace,
            self._tuned,
            max_num_slots=layout.decode[-1],
            max_draft_tokens=layout.drafts[-1],
            max_prefill_rows=layout.prefill[-1],
            stages=self._stages,
        )
        self._caches.append(rounds.cache)
        return rounds

    def _decode_forward(
        self, rows: Rows, attention: AttentionGroups, hidden: str, rows_per_sequence: int
    ) -> DecodeForward:
        return DecodeForward(
            self._decoder,
            self._cache,
            self._table.block_table,
            rows,
            self._workspace,
            self._tuned,
            attention,
            hidden=hidden,
            aux_hidden=PREFILL_AUX_HIDDEN if hidden == PREFILL_HIDDEN else "captured",
            rows_per_sequence=rows_per_sequence,
            aux_layers=self._aux_layers,
        )

    def _token_head(self, rows: Rows, rows_per_slot: int) -> SampleCommit:
        head: Tensor = self._decoder.weights.head
        return SampleCommit(
            head,
            rows,
            self._table,
            self._ring,
            self._samples,
            self._workspace,
            self._tuned,
            rows_per_slot=rows_per_slot,
            simulated=self._simulated,
            stages=self._stages,
        )
