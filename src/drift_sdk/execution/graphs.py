"""The steps an executor replays: one graph for each kind of step and each bucket of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drift_sdk._kernels.attention_plan import AttentionPlan, Partitions
from drift_sdk._kernels.embedding import embed_norm
from drift_sdk._kernels.paged_attention import AttentionScratch
from drift_sdk._kernels.prefill_attention import prefill_attention_config
from drift_sdk._kernels.sampled_rows import SampleBuffers
from drift_sdk._kernels.staging import advance, enter, gather_rows
from drift_sdk._kernels.token_counts import count_tokens
from drift_sdk._kernels.tuning import TunedTable
from drift_sdk.execution.decode_forward import DecodeForward, Rows
from drift_sdk.execution.device import Device, Replay
from drift_sdk.execution.graph_layout import EXACT_TILE_ROWS, GraphLayout
from drift_sdk.execution.paged_cache import PagedCache
from drift_sdk.execution.prefill_forward import PrefillForward
from drift_sdk.execution.ring import Ring
from drift_sdk.execution.slot_table import SlotTable
from drift_sdk.execution.token_head import TokenHead
from drift_sdk.execution.workspace import Workspace
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["Graphs"]

PREFILL_HIDDEN = "prefill_hidden"

Report = Callable[[str, float], None]
Step = Callable[[], None]


class Graphs:
    """All graphs of an executor, captured when made, largest first.

    update: makes updates and nothing else. decode[B, K]: a round of B slots with K drafts each.
    prefill[N]: chunks of N tokens. head[B]: samples behind the last rows of B finished prompts, from
    `prefill_hidden`.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        limits: ExecutorLimits,
        layout: GraphLayout,
        table: SlotTable,
        ring: Ring,
        tuned: TunedTable,
        *,
        report: Report,
        simulated_length: float | None = None,
    ) -> None:
        self._device, self._decoder, self._table, self._ring = device, decoder, table, ring
        self._layout, self._tuned, self._simulated_length = layout, tuned, simulated_length
        torch_device = device.torch_device
        self._workspace = Workspace(torch_device)
        self._cache = PagedCache(decoder, limits)
        self._inbox = torch.full((layout.payload_words,), -1, dtype=torch.int32, device=torch_device)
        self._samples = SampleBuffers.allocate(layout.max_rows, limits.vocab_size, torch_device)
        self._max_num_keys = limits.max_model_len + 1
        most = layout.prefill[-1]
        shape = (most, decoder.config.hidden_size)
        self.prefill_hidden = self._workspace.take(PREFILL_HIDDEN, shape, decoder.dtype)
        self._attention = self._attention_memory(layout.decode[-1], layout.max_rows_per_slot)
        self._exact: AttentionScratch | None = None
        if layout.is_exact:
            self._exact = self._attention_memory(most // EXACT_TILE_ROWS, EXACT_TILE_ROWS)

        self.prefill: dict[int, Replay] = {}
        self.decode: dict[tuple[int, int], Replay] = {}
        self.head: dict[int, Replay] = {}
        self._replays: list[Replay] = []
        self._num_steps = len(layout.prefill) + len(layout.decode) * (1 + len(layout.drafts)) + 1
        self._report = report
        for size in reversed(layout.prefill):
            self.prefill[size] = self._capture(self._prefill_step(size))
        for num_slots in reversed(layout.decode):
            for num_drafts in reversed(layout.drafts):
                step = self._round_step(num_slots, num_drafts)
                self.decode[num_slots, num_drafts] = self._capture(step)
        for num_slots in reversed(layout.decode):
            self.head[num_slots] = self._capture(self._head_step(num_slots))
        self.update = self._capture(self._update_step)
        with device.work():
            ring.reset()

    def close(self) -> None:
        for replay in self._replays:
            replay.close()

    def _capture(self, step: Step) -> Replay:
        self._report("capture graphs", len(self._replays) / self._num_steps)
        self._replays.append(self._device.capture(step))
        return self._replays[-1]

    def _enter(self, num_words: int) -> None:
        ring = self._ring
        inbox = self._inbox[:num_words]
        enter(ring.input, ring.counter, ring.current, inbox, self._table.words, max_updates=ring.max_updates)

    def _update_step(self) -> None:
        self._enter(0)
        advance(self._ring.counter)

    def _round_step(self, num_slots: int, num_drafts: int) -> Step:
        """Payload: slots, then how many drafts each may have."""
        rows_per_slot = num_drafts + 1
        rows = Rows.take(self._workspace, num_slots * rows_per_slot)
        slots, max_drafts = self._inbox[: 2 * num_slots].view(2, num_slots)
        forward = self._decode_forward(rows, self._attention, "hidden", rows_per_slot)
        head = self._token_head(rows, rows_per_slot)

        def step() -> None:
            self._enter(2 * num_slots)
            gather_rows(slots, max_drafts, self._table.state, rows.slot, rows.token, rows.position)
            forward.run()
            head.run(forward.normed)

        return step

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
                self._decoder, self._cache, table.block_table, rows, tiles, self._workspace, attention
            )

        def step() -> None:
            self._enter(layout.prefill_words(num_rows))
            count_tokens(slot, token, position, table.columns)
            forward.run()
            advance(self._ring.counter)

        return step

    def _attention_memory(self, num_sequences: int, num_rows: int) -> AttentionScratch:
        config = self._decoder.config
        plan = AttentionPlan(num_sequences, self._max_num_keys, Partitions(), self._device.torch_device)
        return AttentionScratch(
            plan,
            num_kv_heads=config.num_kv_heads,
            num_rows=num_rows,
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def _decode_forward(
        self, rows: Rows, attention: AttentionScratch, hidden: str, rows_per_sequence: int
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
            rows_per_sequence=rows_per_sequence,
        )

    def _token_head(self, rows: Rows, rows_per_slot: int) -> TokenHead:
        head: Tensor = self._decoder.weights.head
        return TokenHead(
            head,
            rows,
            self._table,
            self._ring,
            self._samples,
            self._workspace,
            self._tuned,
            rows_per_slot=rows_per_slot,
            simulated_length=self._simulated_length,
        )
