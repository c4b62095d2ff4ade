"""The steps an executor replays: one graph for each kind of step and each bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec import Struct
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
from drift_sdk.execution.paged_cache import PagedCache
from drift_sdk.execution.prefill_forward import PrefillForward
from drift_sdk.execution.ring import Ring
from drift_sdk.execution.slot_table import SlotTable
from drift_sdk.execution.token_head import TokenHead
from drift_sdk.execution.workspace import Workspace
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits

__all__ = ["GraphLayout", "Graphs", "buckets"]

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIN_PREFILL_ROWS = 16
EXACT_TILE_ROWS = 8
"""In exact prefill, rows of a chunk that are attended together, as if they were to be verified."""
PREFILL_HIDDEN = "prefill_hidden"

Report = Callable[[str, float], None]


def buckets(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Those of `sizes` below `most`, and `most`."""
    return (*(size for size in sizes if size < most), most)


class GraphLayout(Struct, frozen=True, kw_only=True):
    """Which graphs there are. Rows of decode steps, ascending; tokens of prefill steps, ascending.

    tile_rows: of a tile of prefill attention. max_chunks: most chunks of a prefill step.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    tile_rows: int
    max_chunks: int

    @classmethod
    def of(cls, decoder: Decoder, limits: ExecutorLimits, budget: int, *, is_exact: bool) -> GraphLayout:
        attention = prefill_attention_config(decoder.config.head_dim, decoder.dtype)
        tile_rows = EXACT_TILE_ROWS if is_exact else attention.tile_rows
        powers = [MIN_PREFILL_ROWS << n for n in range(24)]
        # In exact mode each chunk begins a tile of rows of its own.
        most = max(budget, 1) + (min(limits.max_num_seqs, budget) * (tile_rows - 1) if is_exact else 0)
        return cls(
            decode=buckets(DECODE_BUCKETS, limits.max_num_seqs),
            prefill=buckets(powers, -(-most // MIN_PREFILL_ROWS) * MIN_PREFILL_ROWS),
            tile_rows=tile_rows,
            max_chunks=limits.max_num_seqs,
        )

    def num_tiles(self, num_rows: int) -> int:
        return num_rows // self.tile_rows + min(num_rows, self.max_chunks)

    def prefill_words(self, num_rows: int) -> int:
        """Payload: token, slot and position of each row, then the tiles."""
        return 3 * num_rows + 4 * self.num_tiles(num_rows)

    @property
    def payload_words(self) -> int:
        return max(2 * self.decode[-1], self.prefill_words(self.prefill[-1]))


class Graphs:
    """All graphs of an executor, captured when made, largest first.

    update: makes updates and nothing else. decode[B]: a round of B rows. prefill[N]: chunks of N tokens.
    head[B]: samples behind the last rows of finished prompts, from `prefill_hidden`.
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
        is_exact: bool,
        report: Report,
    ) -> None:
        self._device, self._decoder, self._table, self._ring = device, decoder, table, ring
        self._layout, self._tuned, self._is_exact = layout, tuned, is_exact
        config = decoder.config
        torch_device = device.torch_device
        self._workspace = Workspace(torch_device)
        self._cache = PagedCache(decoder, limits)
        self._inbox = torch.full((layout.payload_words,), -1, dtype=torch.int32, device=torch_device)
        self._samples = SampleBuffers.allocate(layout.decode[-1], limits.vocab_size, torch_device)
        self._max_num_keys = limits.max_model_len + 1
        most = layout.prefill[-1]
        shape = (most, config.hidden_size)
        self.prefill_hidden = self._workspace.take(PREFILL_HIDDEN, shape, decoder.dtype)
        self._attention = self._attention_memory(layout.decode[-1], 1)
        self._exact = self._attention_memory(most // EXACT_TILE_ROWS, EXACT_TILE_ROWS) if is_exact else None
        steps: list[tuple[str, int, Callable[[], None]]] = [
            *(("prefill", size, self._prefill_step(size)) for size in reversed(layout.prefill)),
            *(("decode", size, self._decode_step(size)) for size in reversed(layout.decode)),
            *(("head", size, self._head_step(size)) for size in reversed(layout.decode)),
            ("update", 0, self._update_step),
        ]
        self._replays: list[Replay] = []
        self.decode: dict[int, Replay] = {}
        self.prefill: dict[int, Replay] = {}
        self.head: dict[int, Replay] = {}
        for index, (kind, size, step) in enumerate(steps):
            report("capture graphs", index / len(steps))
            replay = device.capture(step)
            self._replays.append(replay)
            if kind == "update":
                self.update = replay
            else:
                getattr(self, kind)[size] = replay
        with device.work():
            ring.reset()

    def close(self) -> None:
        for replay in self._replays:
            replay.close()

    def _rows(self, num_rows: int) -> Rows:
        return Rows.take(self._workspace, num_rows)

    def _enter(self, num_words: int) -> None:
        ring = self._ring
        enter(
            ring.input,
            ring.counter,
            ring.current,
            self._inbox[:num_words],
            self._table.words,
            max_updates=ring.max_updates,
        )

    def _update_step(self) -> None:
        self._enter(0)
        advance(self._ring.counter)

    def _gather(self, slots: Tensor, rows: Rows) -> None:
        state = self._table.state
        gather_rows(slots, state.length, state.last_token, state.finish, rows.slot, rows.token, rows.position)

    def _decode_step(self, num_rows: int) -> Callable[[], None]:
        rows = self._rows(num_rows)
        forward = self._decode_forward(rows, self._attention, "hidden", 1)
        head = self._token_head(rows)

        def step() -> None:
            self._enter(num_rows)
            self._gather(self._inbox[:num_rows], rows)
            forward.run()
            head.run(forward.normed)

        return step

    def _head_step(self, num_rows: int) -> Callable[[], None]:
        rows = self._rows(num_rows)
        shape = (num_rows, self._decoder.config.hidden_size)
        hidden = self._workspace.take("hidden", shape, self._decoder.dtype)
        normed = self._workspace.take("normed", shape, self._decoder.dtype)
        head = self._token_head(rows)
        weights, eps = self._decoder.weights, self._decoder.config.rms_norm_eps
        sources = self._inbox[num_rows : 2 * num_rows]

        def step() -> None:
            self._enter(2 * num_rows)
            self._gather(self._inbox[:num_rows], rows)
            embed_norm(sources, rows.slot, self.prefill_hidden, weights.final_norm, hidden, normed, eps=eps)
            head.run(normed)

        return step

    def _prefill_step(self, num_rows: int) -> Callable[[], None]:
        layout, table = self._layout, self._table
        token, slot, position = self._inbox[: 3 * num_rows].view(3, num_rows)
        rows = Rows(slot=slot, token=token, position=position)
        num_tiles = layout.num_tiles(num_rows)
        tiles = self._inbox[3 * num_rows : 3 * num_rows + 4 * num_tiles].view(num_tiles, 4)
        if self._is_exact:
            assert self._exact is not None
            forward: DecodeForward | PrefillForward = self._decode_forward(
                rows, self._exact, PREFILL_HIDDEN, EXACT_TILE_ROWS
            )
        else:
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

    def _token_head(self, rows: Rows) -> TokenHead:
        head = self._decoder.weights.head
        return TokenHead(head, rows, self._table, self._ring, self._samples, self._workspace, self._tuned)
